"""Integrated nested Laplace approximation as an inference engine for NumPyro models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from ...potentials.vector_rows import VectorRows
from ...structure import ModelStructureError
from ..front.draws import draw_inside_support, with_hyper
from ..front.progress import warn
from ..front.results import Diagnostics, LogEvidence
from ..front.sites import PosteriorSites, missing_sites
from ..front.state import EngineState
from ..hyper.design import LARGEST_DIMENSION, PROBE, Design, central_composite, explore_lattice, stretch
from ..hyper.space import UnconstrainedSpace
from .engine import EngineOptions
from .laplace_approximation import LaplaceApproximation
from .mixture_marginals import MarginalMixture
from .mixture_posteriors import HyperPosterior, MixturePosterior
from .prediction import by_site, check_same_unknowns
from .programs import Algorithm, PointFit
from .simplified_laplace import gaussian_marginals, simplified_laplace_marginals

__all__ = ["INLA"]

Marginal = Literal["simplified-laplace", "gaussian"]
DesignName = Literal["auto", "lattice", "central-composite"]

_LARGEST_LATTICE_DIMENSION = 2
_POINTS_PER_CALL = 8
_DRAWS_PER_CALL = 32
# A point of the design so far above the mode says that there is another mode.
_LARGEST_RISE = 0.1


class INLA(LaplaceApproximation):
    """Integrated nested Laplace approximation (Rue, Martino and Chopin 2009): Laplace's method for the field, and
    integration over up to six hyperparameters by a deterministic design.

    Accepts the models of :class:`~numpyro_ext.infer.gaussian.laplace_approximation.LaplaceApproximation` in which every
    hyperparameter has a prior. The posterior of the hyperparameters is the Laplace evidence times their prior, in the
    unconstrained space. Its mode is found first. Up to two hyperparameters are then integrated over a lattice in the
    eigenbasis of the curvature there, three to six by a central composite design: 15 to 45 points, exact where the
    log density is quadratic on each side of the mode. The posterior of each quantity is a mixture over the points.

    ``posterior`` holds these mixtures, ``hyper`` the posteriors of the hyperparameters, ``log_evidence`` is the
    integral over both, and :meth:`get_samples` draws both. With ``marginal="simplified-laplace"`` the components of
    the mixtures are skew normals with the mean and skewness of the simplified Laplace approximation; draws have
    Gaussian components in either case. ``guide``, ``params`` and ``psis_diagnostic`` are those of the mode.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import INLA

        >>> def model(y=None):
        ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        ...     with numpyro.plate("groups", 6):
        ...         effect = numpyro.sample("effect", dist.Normal(1.0, scale))
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=y)

        >>> inla = INLA(model)
        >>> inla.run(jax.random.key(0), jnp.array([3, 0, 8, 2, 1, 5]))
        >>> print(f"{inla.posterior['effect'].mean[2]:.2f} +- {inla.posterior['effect'].sd[2]:.2f}")
        1.69 +- 0.41
        >>> print(f"{inla.hyper['scale'].mean:.2f} +- {inla.hyper['scale'].sd:.2f}")
        0.71 +- 0.39

    :param model: a NumPyro model.
    :param str marginal: ``"simplified-laplace"`` or ``"gaussian"``: what the components of the marginals are.
    :param str design: ``"auto"`` (as above), or ``"lattice"`` or ``"central-composite"`` for any number of
        hyperparameters. A lattice integrates to three digits, with about 11, 110 and 900 points for one, two and three
        of them. A central composite design leaves errors of hundredths in the log evidence and in the field's moments
        (in standard deviations), and of a tenth in the standard deviations of skewed hyperparameters.
    :param float grid_step: of the lattice, in posterior standard deviations.
    :param float log_density_drop: the lattice ends where the log density has fallen by this much.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``num_steps``, ``tol``, ``field``,
        ``hyper_values``, ``init_values``, ``num_restarts``, ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and
        ``progress_bar``.
    :raises ValueError: if an option is unknown or out of range.
    """

    integrates_hyper: ClassVar[bool] = True

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        marginal: Marginal = "simplified-laplace",
        design: DesignName = "auto",
        grid_step: float = 0.75,
        log_density_drop: float = 10.0,
        **options: Unpack[EngineOptions],
    ) -> None:
        if marginal not in get_args(Marginal):
            raise ValueError(f"marginal must be one of {', '.join(map(repr, get_args(Marginal)))}, got {marginal!r}.")
        if design not in get_args(DesignName):
            raise ValueError(f"design must be one of {', '.join(map(repr, get_args(DesignName)))}, got {design!r}.")
        for name, value in (("grid_step", grid_step), ("log_density_drop", log_density_drop)):
            if not value > 0.0:
                raise ValueError(f"{name} must be positive, got {value!r}.")
        super().__init__(model, **options)
        self.marginal = marginal
        self.design = design
        self.grid_step = grid_step
        self.log_density_drop = log_density_drop

    def algorithm(self, reading: Any) -> Algorithm:
        for name, site in reading.hyper.items():
            if site.is_param and name not in self.hyper_values:
                raise ModelStructureError(
                    f"INLA integrates over hyperparameters, and {name!r} is a param site, which has no prior. Make it "
                    "a sample site, or give its value in hyper_values."
                )
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        if space.size > LARGEST_DIMENSION:
            sizes = ", ".join(f"{name!r} ({math.prod(space.shapes[name])})" for name in space.names)
            raise ModelStructureError(
                f"INLA integrates over up to {LARGEST_DIMENSION} hyperparameters, and this model has {space.size}: "
                f"{sizes}. Give values to some of them in hyper_values, or maximise over them (LaplaceApproximation)."
            )
        for name, potential in zip(reading.factor_names, reading.abstract_form.potentials, strict=True):
            if self.marginal == "simplified-laplace" and isinstance(potential, VectorRows):
                raise ModelStructureError(
                    f"The simplified Laplace marginals need factors of one predictor each, and those of site {name!r} "
                    f"({type(potential.base).__name__}) have several. Use INLA(model, marginal='gaussian').",
                    site=name,
                )
        return super().algorithm(reading)

    def run(self, rng_key: Array, *args: Any, init_state: EngineState | None = None, **kwargs: Any) -> None:
        """Read the model on these arguments, find the mode of its hyperparameters, and integrate over them.

        :param rng_key: random number generator key, for the check of the reading, the restarts and the draws.
        :param args: arguments of the model.
        :param EngineState init_state: ``last_state`` of an earlier run, where the search for the mode goes on.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the model is not of the form, a hyperparameter has no prior, or there are more
            than six.
        :raises ValueError: if the evidence is not finite; the message names the likely cause.
        :raises RuntimeError: if the density of the hyperparameters does not fall in every direction from its mode.
        """
        super().run(rng_key, *args, init_state=init_state, **kwargs)
        try:
            messages = self._exploration.messages
        except RuntimeError:
            self._forget()
            raise
        if messages:
            warn(f"{type(self).__name__}: " + " ".join(messages))

    @cached_property
    def _exploration(self) -> _Exploration:
        run = self._finished()
        size, mode = run.space.size, np.asarray(run.fit.last_state.values)
        factor = np.zeros((0, 0))
        if size:
            if run.fit.covariance is None or not run.fit.has_curvature:
                raise RuntimeError(
                    "INLA explores the hyperparameters from their posterior mode, and at the point found the density "
                    "does not curve downwards in every direction. Give tighter priors, other init_values or more "
                    "max_hyper_steps, or give values to the hyperparameters without information (hyper_values)."
                )
            eigenvalues, vectors = np.linalg.eigh(run.fit.covariance)
            factor = vectors * np.sqrt(eigenvalues)
        marginals_fn = gaussian_marginals if self.marginal == "gaussian" else simplified_laplace_marginals
        parts: list[PointFit] = []

        def evaluate(points: np.ndarray) -> np.ndarray:
            values = mode + points @ factor.T
            for start in range(0, len(values), _POINTS_PER_CALL):
                part = values[start : start + _POINTS_PER_CALL]
                # The last batch is filled with repetitions, so that one program serves all.
                padded = np.concatenate([part, np.repeat(part[-1:], self._batch(size) - len(part), axis=0)])
                fits = run.programs.fits(
                    run.reading.data,
                    run.space.fixed,
                    jnp.asarray(padded, run.fit.last_state.values.dtype),
                    run.fit.last_state.state,
                    marginals_fn=marginals_fn,
                )
                fits = jax.tree.map(np.asarray, fits)
                parts.append(jax.tree.map(itemgetter(slice(len(part))), fits))
            objective = np.concatenate([part.objective for part in parts])[-len(values) :]
            return np.where(np.isfinite(objective), objective, -np.inf)

        ended = True
        if size == 0:
            evaluate(np.zeros((1, 0)))
            design, chosen = Design(np.zeros((1, 0)), np.zeros(1)), np.zeros(1, int)
        elif self.design == "lattice" or (self.design == "auto" and size <= _LARGEST_LATTICE_DIMENSION):
            design, chosen, ended = explore_lattice(evaluate, size, self.grid_step, self.log_density_drop)
        else:
            axes = PROBE * np.eye(size)
            probes = evaluate(np.concatenate([np.zeros((1, size)), axes, -axes]))
            design = stretch(central_composite(size), (probes[0] - probes[1:]).reshape(2, size))
            inside = np.flatnonzero(np.isfinite(evaluate(design.points)))
            design = Design(design.points[inside], design.log_volumes[inside])
            chosen = len(probes) + inside
        fits = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        messages = self._judge_points(fits.objective, fits.converged[chosen], ended)
        fits = jax.tree.map(lambda leaf: leaf[chosen], fits)
        log_volume = np.linalg.slogdet(factor)[1] if size else 0.0
        log_masses = fits.objective + design.log_volumes + log_volume
        log_evidence = float(logsumexp(log_masses))
        weights = np.exp(log_masses - log_evidence)
        # Rounding must not be visible where probabilities are asked to sum to one.
        weights = weights / weights.sum()
        return _Exploration(mode + design.points @ factor.T, weights, fits, log_evidence, messages)

    @staticmethod
    def _batch(size: int) -> int:
        return _POINTS_PER_CALL if size else 1

    @staticmethod
    def _judge_points(objective: np.ndarray, converged: np.ndarray, ended: bool) -> tuple[str, ...]:
        messages = []
        failed = int(np.sum(~np.isfinite(objective)))
        if failed:
            messages.append(
                f"At {failed} of {objective.size} points of the hyperparameters the evidence is not finite."
            )
        if not converged.all():
            messages.append(f"At {int(np.sum(~converged))} of {converged.size} points the field did not converge.")
        rise = float(np.max(objective, initial=-np.inf, where=np.isfinite(objective)) - objective[0])
        if rise > _LARGEST_RISE:
            messages.append(
                f"A point of the design has a log density {rise:.2g} above that of the mode: the search ended too "
                "early, or there are several modes. Use num_restarts or other init_values."
            )
        if not ended:
            messages.append(
                "The density of the hyperparameters does not fall off, so the lattice was cut. Give tighter priors."
            )
        return tuple(messages)

    # Results

    @property
    def log_evidence(self) -> LogEvidence:
        """Log evidence of the model, integrated over field and hyperparameters."""
        return LogEvidence(self._exploration.log_evidence, self.is_lower_bound)

    @property
    def diagnostics(self) -> Diagnostics:
        """How the search for the mode ended, with what was found in the exploration among the messages."""
        found = self._finished().fit.diagnostics
        return found._replace(messages=found.messages + self._exploration.messages)

    @cached_property
    def hyper(self) -> dict[str, HyperPosterior]:  # type: ignore[override]
        """The posterior of each hyperparameter."""
        run, found = self._finished(), self._exploration
        values = jax.vmap(run.space.unpack)(jnp.asarray(found.points))
        free = jax.vmap(run.space.unpack_unconstrained)(jnp.asarray(found.points))
        out = {}
        for name, mode in run.fit.hyper.items():
            transform = run.space.sites[name].transform
            is_fixed = name in run.space.fixed
            inner = jnp.broadcast_to(transform.inv(mode), (len(found.weights), *jnp.shape(transform.inv(mode))))
            out[name] = HyperPosterior(
                name, np.asarray(values[name]), np.asarray(inner if is_fixed else free[name]), found.weights, mode,
                transform, is_fixed,
            )  # fmt: skip
        return out

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Posterior marginals by name, for every field site and every deterministic site affine in the field."""
        run, found = self._finished(), self._exploration
        reading, programs = run.reading, run.programs

        def site(name: str) -> MixturePosterior:
            moments = found.fits.marginals[name]
            mixture = MarginalMixture(found.weights, *(np.asarray(moment) for moment in moments))

            def covariance() -> Array:
                centred = jnp.asarray(mixture.means - mixture.mean_and_variance()[0])
                total = (centred.T * found.weights) @ centred
                for weight, inputs in zip(found.weights, self._inputs(), strict=True):
                    total = total + weight * programs.covariance(*inputs, name=name)
                return total

            def sample(rng_key: Array, num_samples: int) -> Array:
                return self._draw_over_points(
                    rng_key,
                    num_samples,
                    lambda inputs, key: programs.draw_site(*inputs, key, name=name, num_samples=_DRAWS_PER_CALL),
                )

            return MixturePosterior(name, tuple(reading.site_shapes[name]), mixture, covariance, sample)

        return PosteriorSites({name: site(name) for name in reading.affine_sites}, missing_sites(reading))

    def _inputs(self) -> Iterator[tuple[Any, dict[str, Array], Any]]:
        """The first arguments of every program, point by point."""
        run, found = self._finished(), self._exploration
        for k, point in enumerate(found.points):
            hyper = run.space.unpack(jnp.asarray(point, run.fit.last_state.values.dtype))
            yield run.reading.data, hyper, jax.tree.map(lambda leaf, k=k: jnp.asarray(leaf[k]), found.fits.state)

    def _draw_over_points(self, rng_key: Array, num_samples: int, draw: Callable[..., Any]) -> Any:
        """Draws from the mixture; ``draw`` makes ``_DRAWS_PER_CALL`` of them from a point's inputs and a key."""
        found = self._exploration
        choice_key, draw_key, order_key = random.split(rng_key, 3)
        choice = random.choice(choice_key, len(found.weights), (num_samples,), p=jnp.asarray(found.weights))
        counts = np.bincount(np.asarray(choice), minlength=len(found.weights))
        parts: list[Any] = []
        for count, inputs in zip(counts, self._inputs(), strict=True):
            for start in range(0, int(count), _DRAWS_PER_CALL):
                number = min(_DRAWS_PER_CALL, int(count) - start)
                drawn = draw(inputs, random.fold_in(draw_key, len(parts)))
                parts.append(jax.tree.map(lambda leaf, number=number: np.asarray(leaf[:number]), drawn))
        order = np.asarray(random.permutation(order_key, num_samples))
        return jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)[order]), *parts)

    def _draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        run = self._finished()

        def one_point(inputs: tuple, key: Array) -> tuple[dict[str, Array], Array]:
            return run.programs.draws(*inputs, key, num_samples=_DRAWS_PER_CALL)

        def draw(key: Array) -> tuple[dict[str, Array], Array]:
            return self._draw_over_points(key, self.num_samples, one_point)

        sites, log_density = draw_inside_support(draw, rng_key)
        return with_hyper(sites, run.space.fixed, run.reading.factor_names, self.num_samples), log_density

    def get_samples(self, group_by_chain: bool = False, seed: int | None = None) -> dict[str, Array]:
        """Independent draws from the posterior, every latent and deterministic site by name.

        Hyperparameters are drawn from the points of the design by their weights, and the field from its Gaussian there.

        :param bool group_by_chain: whether to put a chain dimension of size one in front.
        :param int seed: draw anew from this seed (as ArviZ may ask); the default are the draws that belong to the run.
        :return: arrays of shape ``(num_samples, ...)``, or ``(1, num_samples, ...)``.
        """
        return super().get_samples(group_by_chain, seed)

    def log_predictive(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Log predictive density of observations that the fit has not seen, averaged over the hyperparameters.

        See :meth:`Engine.log_predictive`. The components are Gaussian.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where nothing was scored.
        :raises ValueError: if the field of the model on these arguments is another one.
        """
        run, found = self._finished(), self._exploration
        new = None
        if args or kwargs:
            new = self._read(run.rng_key, args, kwargs, check=False)
            check_same_unknowns(run.reading, new, run.fit.hyper)
        parts = []
        for inputs in self._inputs():
            form = () if new is None else (new.form(inputs[1], new.data),)
            values, observed = run.programs.log_predictive(*inputs, *form)
            parts.append(values)
        total = logsumexp(jnp.stack(parts), axis=0, b=jnp.asarray(found.weights)[:, None])
        return by_site(run.reading, total, ~observed) if new is None else by_site(new, total, observed)


class _Exploration(NamedTuple):
    points: np.ndarray
    """Unconstrained hyperparameters, shape ``(K, d)``."""
    weights: np.ndarray
    """Posterior masses, shape ``(K,)``, summing to one."""
    fits: PointFit
    """Fits of the field, with a leading axis of ``K``."""
    log_evidence: float
    messages: tuple[str, ...]
