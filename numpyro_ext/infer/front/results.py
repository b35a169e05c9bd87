"""Reports of an engine about a run: plain containers, and values in words."""

from __future__ import annotations

from itertools import islice
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions.transforms import IndependentTransform
from scipy.special import ndtri

from ...compilation.pytree import PyTree
from ...display import MOST_ROWS, Table, as_html, as_text, number
from .display import ending, evidence

OfHyperparameters = Literal["none", "optimum", "integrated"]


class LogEvidence(float):
    """A float that also says what it is: a lower bound of the log evidence or an approximation of it, and whether the
    hyperparameters are at their optimum or integrated over.

    Only evidences of integrated models may be compared with those of other models: the best hyperparameters of a model
    with many fit too well.

    **Example:**

    >>> from numpyro_ext.infer.front.results import LogEvidence
    >>> value = LogEvidence(-162.9, is_lower_bound=False, hyperparameters="optimum")
    >>> value + 1.0, value.is_lower_bound, value.hyperparameters
    (-161.9, False, 'optimum')
    >>> value
    LogEvidence(-162.90 at the best hyperparameters)

    :param float value: the log evidence.
    :param bool is_lower_bound: true if the value cannot exceed the exact one.
    :param str hyperparameters: ``"none"`` if there are none, or they were given; ``"optimum"``: the value is the log
        evidence at the best of them; ``"integrated"``: it is the log evidence of the whole model.
    :param float standard_error: of a value that is estimated by chance; ``None`` for those that are computed.
    :param str method: what hyperparameters were integrated over, in words, such as ``"a lattice of 7 points"``.
    :param tuple flat_sites: latent sites whose prior has no integral. The evidence then has an arbitrary constant, and
        may only be compared between models with the same flat sites.
    """

    is_lower_bound: bool
    hyperparameters: OfHyperparameters
    standard_error: float | None
    method: str
    flat_sites: tuple[str, ...]

    def __new__(
        cls,
        value: float,
        is_lower_bound: bool = False,
        hyperparameters: OfHyperparameters = "none",
        standard_error: float | None = None,
        method: str = "",
        flat_sites: tuple[str, ...] = (),
    ) -> LogEvidence:
        out = super().__new__(cls, value)
        out.is_lower_bound = is_lower_bound
        out.hyperparameters = hyperparameters
        out.standard_error = standard_error
        out.method = method
        out.flat_sites = flat_sites
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        kind = self.is_lower_bound, self.hyperparameters, self.standard_error, self.method, self.flat_sites
        return LogEvidence, (float(self), *kind)

    def __repr__(self) -> str:
        return f"LogEvidence({evidence(self)})"

    def __str__(self) -> str:
        return float.__repr__(self)  # where it is printed among other numbers


def is_joint(transform: Any) -> bool:
    """True if elements of the support are functions of several unconstrained elements each, as those of simplices and
    Cholesky factors."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return bool(transform.domain.event_dim or transform.codomain.event_dim)


class HyperEstimate(NamedTuple):
    """One hyperparameter at the maximum of log evidence plus log prior.

    Standard errors are ``None`` where nothing was learned (a fixed value, an interrupted run) or where the curvature
    tells none: at a saddle, or along flat directions that all elements have a part in. Where some elements have none,
    theirs are ``nan``.
    """

    value: Array
    """In the support of the site."""
    standard_error: Array | None
    """Standard error of ``value``, by the delta method: the Jacobian of the transform times the unconstrained
    covariance."""
    unconstrained_value: Array
    """The value before the site's transform; shape of the unconstrained space."""
    unconstrained_standard_error: Array | None
    """Square root of the diagonal of the inverse negative Hessian of log evidence plus log prior."""
    is_fixed: bool = False
    """True if the user gave the value."""
    transform: Any = None
    """Transform from the unconstrained value."""

    def interval(self, prob: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval of each element, of the normal density that the curvature gives the unconstrained value.

        :param float prob: its probability mass.
        :return: lower and upper ends in the shape of the site; ``nan`` where there is no standard error, or where the
            elements are not functions of one unconstrained element each (simplices, Cholesky factors).
        """
        error, shape = self.unconstrained_standard_error, np.shape(self.value)
        if error is None or self.transform is None or is_joint(self.transform):
            return np.full(shape, np.nan), np.full(shape, np.nan)
        reach = float(ndtri(0.5 * (1.0 + prob))) * np.asarray(error)
        ends = [np.asarray(self.transform(self.unconstrained_value + side * reach)) for side in (-1.0, 1.0)]
        return np.minimum(*ends), np.maximum(*ends)

    def shown_errors(self) -> np.ndarray:
        """Standard errors as a table shows them: ``"fixed"`` or ``"none"`` in the place of those that are missing."""
        absent = np.full(np.shape(self.value), "fixed" if self.is_fixed else "none", object)
        if self.standard_error is None:
            return absent
        errors = np.asarray(self.standard_error)
        return np.where(np.isnan(errors), absent, errors)

    def _shown(self) -> list[str | Table]:
        value, errors = np.asarray(self.value), self.shown_errors()
        places = list(islice(np.ndindex(value.shape), MOST_ROWS))
        rows = [
            [str(list(at)) if at else "", number(value[at]), error if isinstance(error, str) else number(error)]
            for at, error in ((at, errors[at]) for at in places)
        ]
        more = [f"and {value.size - MOST_ROWS} more"] if value.size > MOST_ROWS else []
        return [f"HyperEstimate, shape {value.shape}", Table(["", "value", "std.error"], rows), *more]

    def __repr__(self) -> str:
        return as_text(self._shown())

    def _repr_html_(self) -> str:
        return as_html(self._shown())


class HyperDiagnostics(NamedTuple):
    """Course of the search for the hyperparameters."""

    converged: bool
    num_iterations: int
    """Accepted steps of L-BFGS."""
    num_evaluations: int
    """Fits of the field, those of the line search and of the curvature included, those on samples of trees left out."""
    objective_trace: np.ndarray
    """Log evidence plus log prior at every evaluation; ``-inf`` where a trial point was rejected as non-finite."""
    max_gradient: float
    """Largest absolute derivative of the objective at the reported values, unconstrained."""


_OF_SINGLE_PRECISION = (
    "It was computed in single precision, whose rounding may be the cause, as with counts or exposures of a million: "
    "try numpyro.enable_x64() at the start of the program, or units in which predictors are near zero."
)


class Diagnostics(NamedTuple):
    """End of a run."""

    converged: bool
    num_steps: int
    """Steps of the algorithm in the last fit of the field (all of them where nothing else was learned)."""
    objective_trace: np.ndarray
    """The algorithm's objective at each of these steps."""
    max_change: float
    """The largest change in the last step, to be compared with ``tol``."""
    num_skipped: int
    """Factors whose update was refused in the last step."""
    skipped: dict[str, np.ndarray]
    """For each observed site with refused updates, the flat indices of its factors."""
    hyper: HyperDiagnostics | None
    """``None`` where there was nothing to learn."""
    messages: tuple[str, ...]
    """Messages for a reader of the results."""
    points: tuple[str, ...] = ()
    """Latent sites that the run set to a point: one value in all draws, without uncertainty."""
    edges: tuple[str, ...] = ()
    """Hyperparameters at the edge of their support, such as a scale of zero."""
    quadrature_error: float | None = None
    """Change of the log evidence with a finer rule, where integrals are computed by quadrature."""
    evidence_error: float | None = None
    """Standard error of the log evidence by random probes, where it is estimated by these."""

    def __repr__(self) -> str:
        return as_text(["Diagnostics", *ending(self)])

    def _repr_html_(self) -> str:
        return as_html(["Diagnostics", *ending(self)])


def at_values(hyper: dict[str, Array]) -> str:
    """The words " at name = value, ..." for an error message; those of more than four numbers are left out."""
    values = [f"{name} = {np.asarray(value)}" for name, value in hyper.items() if np.size(value) <= 4]
    return f" at {', '.join(values)}" if values else ""


def with_precision(diagnostics: Diagnostics, state: PyTree) -> Diagnostics:
    """The diagnostics of a run, which say what to try where it did not converge in single precision.

    :param Diagnostics diagnostics: of the run.
    :param state: its last one, of which ``values`` have the precision.
    """
    if diagnostics.converged or jnp.result_type(state.values) != jnp.float32:
        return diagnostics
    return diagnostics._replace(messages=(*diagnostics.messages, _OF_SINGLE_PRECISION))
