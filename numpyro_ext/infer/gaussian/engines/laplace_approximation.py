"""Laplace's method as an inference engine for NumPyro models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

from ....structure import LatentGaussianReading, ModelStructureError
from ....structure.latent_gaussian.costs import COSTS
from ....structure.latent_gaussian.read import SMOOTH_LATENT_GAUSSIAN, with_largest_rest
from ....structure.model.search import Form
from ...front.options import check_one_of
from ...front.state import Fit
from ..algorithms.algorithm import Algorithm
from ..algorithms.values import Laplace
from ..engine import Engine, GaussianOptions
from ..fitting.kinks import explain_kinks

FieldSpace = Literal["auto", "direct", "iterative"]

_LARGEST_RESTS: dict[FieldSpace, float] = {"auto": COSTS.large_rest, "direct": math.inf, "iterative": 0.0}
"""Unknowns that a factorisation may leave for a dense matrix."""


class LaplaceOptions(GaussianOptions, total=False):
    """The keyword arguments of :class:`LaplaceApproximation`, for the constructors of its subclasses."""

    space: FieldSpace


class LaplaceApproximation(Engine):
    """Laplace's method for latent Gaussian models: the Gaussian at the mode, with the curvature there.

    Accepts the models of :class:`~numpyro_ext.infer.ep.EP` whose likelihoods are twice differentiable. It is cheaper
    than EP and less accurate where posteriors are skewed. Models with a kink in a factor (rectified-linear Poisson,
    Laplace likelihoods) are refused at :meth:`run`: the curvature at the mode says nothing about the posterior there.
    Logistic and soft Laplace priors of coefficients are integrated over; coefficients with Laplace, Student-t, Cauchy
    and asymmetric Laplace priors are set to a point, and listed as such.

    **Example:**

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import LaplaceApproximation

    >>> def model(y=None):
    ...     level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    ...     with numpyro.plate("observations", 4):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    >>> laplace = LaplaceApproximation(model)
    >>> laplace.run(jax.random.key(0), jnp.array([3, 5, 2, 4]))
    >>> print(f"{laplace.posterior['level'].mean:.3f}")
    1.231

    :param model: a NumPyro model.
    :param str space: how linear systems of the field are solved. ``"direct"`` factorises. ``"iterative"`` is for
        crossed effects of many levels, with log-concave likelihoods: conjugate gradients find the mode and draws to
        eight digits, and 32 fixed random probes estimate the log evidence, its gradient and variances. What that leaves
        open is a standard error in ``diagnostics.messages``. ``"auto"`` iterates where a factorisation would leave a
        dense matrix of more than 6,000 unknowns.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``num_steps``, ``tol``, ``field``,
        ``hyper_values``, ``init_values``, ``num_restarts``, ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and
        ``progress_bar``.
    """

    forms = (SMOOTH_LATENT_GAUSSIAN,)

    def __init__(
        self, model: Callable[..., object], *, space: FieldSpace = "auto", **options: Unpack[GaussianOptions]
    ) -> None:
        super().__init__(model, **options)
        check_one_of(FieldSpace, space=space)
        self.space: FieldSpace = space

    @property
    def _forms(self) -> Sequence[Form[Any]]:
        return tuple(with_largest_rest(form, _LARGEST_RESTS[self.space]) for form in self.forms)

    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        for name, potential in zip(reading.factor_names, reading.abstract_form.potentials, strict=True):
            if reading.has_estimates and not potential.is_log_concave:
                raise ModelStructureError(
                    f"The factors of site {name!r} ({type(potential).__name__}) are not log-concave, so that the "
                    "precision of the field may be indefinite on the way to the mode, which conjugate gradients do not "
                    "notice. Give a log-concave likelihood, or factorise (space='direct') if memory allows.",
                    site=name,
                )
            if not potential.is_smooth:
                raise ModelStructureError(
                    f"Laplace's method needs the curvature of every factor, and the factor of site {name!r} "
                    f"({type(potential).__name__}) has a kink, where there is none. Use EP, which integrates over it.",
                    site=name,
                )
            if name in reading.field and not potential.is_log_concave:
                raise ModelStructureError(
                    f"The prior of site {name!r} ({type(potential).__name__}) is not log-concave, so that the "
                    "posterior may have several modes, of which Laplace's method sees one. Use EP or "
                    "VariationalGaussian.",
                    site=name,
                )
        return Laplace()

    def _explain(self, reading: LatentGaussianReading, found: Fit, algorithm: Algorithm) -> list[str]:
        kinks = [] if found.diagnostics.converged else explain_kinks(reading, found.hyper)
        return super()._explain(reading, found, algorithm) + kinks
