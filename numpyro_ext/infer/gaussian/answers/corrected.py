"""The log evidence and the means of EP, corrected by the cumulants of the tilted densities."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from ....display import as_text
from ....potentials.vector_rows import VectorRows
from ....structure import LatentGaussianReading
from ...front.results import LogEvidence
from ...front.running.progress import warn
from ..algorithms.propagation.cumulants import LARGEST_ROWS, Correction

_LARGEST_CHANGE = 1.0


class Corrected(NamedTuple):
    """Outcome of :meth:`~numpyro_ext.infer.EP.corrected`."""

    log_evidence: LogEvidence
    change: float
    """Change of the log evidence, in nats."""
    mean: dict[str, Array]
    """Corrected means, of the sites in ``engine.posterior``."""
    order: int = 2
    """Order of the expansion: pairs of factors, by their third and fourth cumulants."""

    def __repr__(self) -> str:
        by = f"{self.change:+.3g} by cumulants to order {self.order}"
        return as_text(["Corrected", f"log evidence {self.log_evidence:.6g}, {by}"])


def check_cumulants(reading: LatentGaussianReading) -> None:
    """Refuse models whose factors have no correction.

    :raises ValueError: if one has several predictors, or there are too many of them; the message names the site.
    """
    form = reading.abstract_form
    for name, potential in zip(reading.factor_names, form.potentials, strict=True):
        if isinstance(potential, VectorRows):
            raise ValueError(
                f"The cumulants that correct EP are of factors of one predictor each, and those of site {name!r} have "
                f"{potential.base.dimension}. annealed_importance_sampling(model, ...) finds the log evidence."
            )
    if form.num_rows > LARGEST_ROWS:
        raise ValueError(
            f"The correction of EP needs the correlations of all pairs of its {form.num_rows} predictors; up to "
            f"{LARGEST_ROWS} are held. annealed_importance_sampling(model, ...) does not need them."
        )


def corrected(log_evidence: LogEvidence, weights: np.ndarray, parts: list[Correction]) -> Corrected:
    """One answer from corrections at points of the hyperparameters.

    :param LogEvidence log_evidence: without correction.
    :param weights: posterior masses of the points.
    :param parts: a correction for each.
    :raises FloatingPointError: if one is not finite.
    :warns UserWarning: if it is large, so that further terms are not small.
    """
    changes = np.array([float(part.log_evidence) for part in parts])
    if not np.isfinite(changes).all():
        raise FloatingPointError(
            "The cumulants of the tilted densities are not finite: a factor without third or fourth moments under its "
            "cavity. annealed_importance_sampling(model, ...) finds the log evidence."
        )
    change = float(logsumexp(changes, b=weights))
    masses = weights * np.exp(changes - change)
    mean = {name: jnp.tensordot(masses, jnp.stack([p.mean[name] for p in parts]), 1) for name in parts[0].mean}
    if abs(change) > _LARGEST_CHANGE:
        warn(
            f"The correction of the log evidence by {change:+.2g} is too large for an expansion that ends at second "
            "order: neither value is to be relied on. annealed_importance_sampling(model, ...) finds the log evidence."
        )
    kind, flat = log_evidence.hyperparameters, log_evidence.flat_sites
    value = LogEvidence(log_evidence + change, False, kind, flat_sites=flat)
    return Corrected(value, change, mean)
