"""Expectation propagation as an inference engine for NumPyro models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, Unpack

from jax import Array
from jax.typing import ArrayLike
from numpyro.infer.autoguide import AutoMultivariateNormal

from ..potentials import TemperedPotential
from ..potentials.vector_rows import VectorRows
from ..structure import ModelStructureError, Reason, read_sparse_linear
from .front.results import HyperEstimate
from .front.sites import PosteriorSites
from .front.state import EngineState
from .gaussian import expectation_propagation
from .gaussian.engine import Engine, EngineOptions
from .gaussian.programs import Algorithm, FitInfo
from .sparse.tree_engine import TreeEP, check_average

__all__ = ["EP"]


class EP(Engine):
    r"""Expectation propagation for latent Gaussian models (Minka 2001; Ko 2017, §2.1).

    Accepts models in which, given the hyperparameters, some latent sites are jointly Gaussian (the field) and every
    observation depends on the field through one predictor affine in it: generalised linear and multilevel models,
    Gaussian processes, random walks, with any likelihood of one predictor. Everything else latent, and every ``param``
    site, is a hyperparameter and is set to the maximum of log evidence plus log prior. Other models are refused at
    :meth:`run` with a :class:`~numpyro_ext.structure.ModelStructureError` that says why.

    Each step costs one Cholesky factorisation in the number of observations or of unknowns, whichever is smaller.

    The posterior is a Gaussian. Where all factors cut the prior from one side, as with classes that can be separated,
    the exact one is skewed, and deviations by EP can be a fifth too small.

    A model without such a field whose latent sites are sparse coefficients
    (:class:`~numpyro_ext.distributions.HiddenMarkovTree`, Laplace, Student-t) behind a linear map with Gaussian noise
    is handed over to :class:`~numpyro_ext.infer.sparse.tree_engine.TreeEP` when it is run: the prior of all
    coefficients is one factor, and for orthonormal transforms the posterior is exact. ``num_shifts`` and
    ``average_over`` make it a mixture over arguments of the model. All answers are then those of that engine, kept in
    :attr:`tree`; of the options it takes those that it has itself.

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
    :param int num_shifts: for images: how many random circular shifts (the argument ``shift``) to average over.
    :param dict average_over: for sparse coefficients: further arguments of the model, each with its values, such as
        ``{"wavelet": ["haar", "db2", "sym4"]}``.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``num_steps``, ``tol``, ``field``,
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
        num_shifts: int | None = None,
        average_over: Mapping[str, Sequence[Any]] | None = None,
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
        self.average_over = check_average(model, num_shifts, average_over)
        self.num_shifts = num_shifts
        self.tree: TreeEP | None = None
        """The engine that the last run was handed over to, if it was."""

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

    # Sparse coefficients

    def run(self, rng_key: Array, *args: Any, init_state: EngineState | None = None, **kwargs: Any) -> None:
        self._forget()
        if self.num_shifts is None and not self.average_over:
            try:
                return super().run(rng_key, *args, init_state=init_state, **kwargs)
            except ModelStructureError as error:
                self._check_coefficients(error, rng_key, args, kwargs)
        tree = self._tree_engine()
        tree.run(rng_key, *args, init_state=init_state, **kwargs)
        self.tree, self._run, self._last_state = tree, tree._run, tree._last_state

    run.__doc__ = Engine.run.__doc__

    def _check_coefficients(self, error: ModelStructureError, rng_key: Array, args: tuple, kwargs: dict) -> None:
        """Raise the error why a model is not latent Gaussian, if it is not sparse linear either."""
        try:
            read_sparse_linear(self.model, args, kwargs, field=self.field, rng_key=rng_key, check=False)
        except ModelStructureError as other:
            is_sparse = error.reason is Reason.NO_FIELD and other.reason is not Reason.NO_FIELD
            raise (other if is_sparse else error)  # noqa: B904

    def _tree_engine(self) -> TreeEP:
        if self.power != 1.0:
            raise ValueError("Fractional EP (power below one) is for latent Gaussian models, not for coefficients.")
        names: tuple[str, ...] = (
            "num_steps",
            "tol",
            "damping",
            "field",
            "hyper_values",
            "init_values",
            "hyper_tol",
            "max_hyper_steps",
        )
        names += ("num_shifts", "average_over", "num_samples", "progress_bar")
        return TreeEP(self.model, **{name: getattr(self, name) for name in names})

    def _forget(self) -> None:
        super()._forget()
        self.tree = None

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Marginals by name, for every field site and every deterministic site affine in the field."""
        return super().posterior if self.tree is None else self.tree.posterior

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate]:
        """For each hyperparameter its value and standard error, constrained and unconstrained."""
        return super().hyper if self.tree is None else self.tree.hyper

    def state_probabilities(self) -> Array:
        """Probability that each coefficient of a sparse linear model is in the high state, of shape ``(n,)``."""
        return self._needs_tree().state_probabilities()

    @property
    def members(self) -> tuple[Any, ...]:
        """Of a mixture over shifts and other arguments: see :attr:`TreeEP.members`."""
        return self._needs_tree().members

    def _needs_tree(self) -> TreeEP:
        self._finished()
        if self.tree is None:
            raise RuntimeError("This model has a Gaussian field; there are no sparse coefficients.")
        return self.tree

    def _needs_field(self, what: str) -> None:
        if self.tree is not None:
            raise RuntimeError(f"{what} needs a Gaussian posterior; that of sparse coefficients is none.")

    def describe(self) -> str:
        """How the model was read."""
        return super().describe() if self.tree is None else self.tree.describe()

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        """Print marginals, the hyperparameters, the log evidence and how the run ended."""
        engine: Any = super() if self.tree is None else self.tree
        engine.print_summary(prob, exclude_deterministic)

    def log_predictive(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        self._needs_field("log_predictive")
        return super().log_predictive(*args, **kwargs)

    log_predictive.__doc__ = Engine.log_predictive.__doc__

    @property
    def guide(self) -> AutoMultivariateNormal:
        """The posterior as a fitted autoguide over all latent sites."""
        self._needs_field("guide")
        return super().guide

    def psis_diagnostic(self, rng_key: Array, num_particles: int = 1000) -> float:
        self._needs_field("psis_diagnostic")
        return super().psis_diagnostic(rng_key, num_particles)

    psis_diagnostic.__doc__ = Engine.psis_diagnostic.__doc__

    def _draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        return super()._draw(rng_key) if self.tree is None else self.tree._draw(rng_key)

    def _typical_noise(self) -> ArrayLike:
        return super()._typical_noise() if self.tree is None else self.tree._typical_noise()

    def _content(self) -> dict[str, Any]:
        return super()._content() if self.tree is None else {"tree": self.tree._content()}

    def _restore(self, content: dict[str, Any], rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> Any:
        if "tree" not in content:
            return super()._restore(content, rng_key, args, kwargs)
        self.tree = self._tree_engine()
        self.tree._run = self.tree._restore(content["tree"], rng_key, args, kwargs)
        return self.tree._run


def _solve(form: Any, state: Any, *, tol: float, **options: Any) -> tuple[Any, FitInfo]:
    state, info = expectation_propagation.solve(form, state, tol=tol, **options)
    return state, FitInfo(
        info.converged, info.num_steps, info.objective_trace, info.max_change, info.skipped, info.objective
    )
