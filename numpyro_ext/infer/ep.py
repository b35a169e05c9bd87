"""Expectation propagation as an inference engine for NumPyro models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Unpack

from ..potentials import TemperedPotential
from ..potentials.vector_rows import VectorRows
from ..structure import ModelStructureError
from . import expectation_propagation
from .engine import Engine, EngineOptions
from .programs import Algorithm, FitInfo

__all__ = ["EP"]


class EP(Engine):
    r"""Expectation propagation for latent Gaussian models (Minka 2001; Ko 2017, §2.1).

    Accepts models in which, given the hyperparameters, some latent sites are jointly Gaussian (the field) and every
    observation depends on the field through one predictor affine in it: generalised linear and multilevel models,
    Gaussian processes, random walks, with any likelihood of one predictor. Everything else latent, and every ``param``
    site, is a hyperparameter and is set to the maximum of log evidence plus log prior. Other models are refused at
    :meth:`run` with a :class:`~numpyro_ext.structure.ModelStructureError` that says why.

    Each step costs one Cholesky factorisation in the number of observations or of unknowns, whichever is smaller.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP

        >>> def model(x, y=None):
        ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        ...     slope = numpyro.sample("slope", dist.Normal(0.0, scale))
        ...     numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

        >>> x = jnp.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0])
        >>> ep = EP(model)
        >>> ep.run(jax.random.key(0), x, jnp.array([0, 0, 1, 0, 1, 1]))
        >>> bool(ep.posterior["slope"].mean > 0.0), ep.diagnostics.converged
        (True, True)
        >>> ep.get_samples()["slope"].shape
        (1000,)

    :param model: a NumPyro model.
    :param float damping: fraction of the old site that is kept in a step, in ``[0, 1)``.
    :param bool adapt_damping: whether to damp more while the changes grow from step to step.
    :param float power: fraction of a factor that is replaced at a time; below one, fractional EP.
    :param str schedule: ``"parallel"`` (all factors, then one factorisation) or ``"sequential"``.
    :param options: those of :class:`~numpyro_ext.infer.engine.Engine`: ``num_steps``, ``tol``, ``field``,
        ``hyper_values``, ``init_values``, ``num_restarts``, ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and
        ``progress_bar``.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        damping: float = 0.0,
        adapt_damping: bool = True,
        power: float = 1.0,
        schedule: Literal["parallel", "sequential"] = "parallel",
        **options: Unpack[EngineOptions],
    ) -> None:
        if not 0.0 <= damping < 1.0:
            raise ValueError(f"damping is the fraction of the old site that is kept, in [0, 1); got {damping!r}.")
        if not 0.0 < power <= 1.0:
            raise ValueError(f"power must be in (0, 1], got {power!r}.")
        if schedule not in ("parallel", "sequential"):
            raise ValueError(f"schedule must be 'parallel' or 'sequential', got {schedule!r}.")
        super().__init__(model, **options)
        self.damping = damping
        self.adapt_damping = adapt_damping
        self.power = power
        self.schedule = schedule

    def _check_form(self, reading: Any) -> None:
        for name, potential in zip(reading.factor_names, reading.abstract_form.potentials, strict=True):
            base = potential.base if isinstance(potential, TemperedPotential) else potential
            if isinstance(base, VectorRows):
                raise ModelStructureError(
                    f"EP matches moments of one predictor per observation, and site {name!r} has "
                    f"{base.base.dimension} each. Use VariationalGaussian or LaplaceApproximation, or write the site "
                    "as numpyro_ext.distributions.StickBreakingCategorical, whose factors have one predictor."
                )

    def _algorithm(self) -> Algorithm:
        options: dict[str, Any] = {
            "damping": self.damping,
            "adapt_damping": self.adapt_damping,
            "power": self.power,
            "schedule": self.schedule,
        }
        return Algorithm(
            init=expectation_propagation.init,
            solve=partial(_solve, **options),
            log_evidence=partial(expectation_propagation.log_evidence, power=self.power),
            posterior=expectation_propagation.posterior,
            key=("EP", *options.values()),
        )


def _solve(form: Any, state: Any, *, tol: float, **options: Any) -> tuple[Any, FitInfo]:
    state, info = expectation_propagation.solve(form, state, tol=tol, **options)
    return state, FitInfo(
        info.converged, info.num_steps, info.objective_trace, info.max_change, info.skipped, info.objective
    )
