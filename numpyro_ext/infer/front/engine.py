"""The front shared by all engines: options, draws, summaries, ArviZ and files; it knows no form and no algorithm."""

from __future__ import annotations

import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ...linalg.cholesky import LARGEST_DENSE
from ...linalg.operators.operator import LinearOperator
from ...structure.model.search import field_names
from ..hyper.space import UnconstrainedSpace
from .archive import read_archive, write_archive
from .arviz import ArviZInterface
from .draws import with_predictive
from .points import point_sites, warn_of_points
from .progress import warn
from .results import Diagnostics, HyperEstimate, LogEvidence
from .sites import PosteriorSites, SitePosterior
from .state import EngineState, Fit
from .summary import format_summary

__all__ = ["BaseEngine", "check_at_least", "check_positive", "default_tolerance", "hyper_estimates"]


class BaseEngine(ArviZInterface):
    """A model, its options, and the answers that need nothing but the outcome of a run.

    A run is kept as an object with the reading of the model (``reading``), the space of its hyperparameters
    (``space``), the outcome (``fit``, a :class:`~numpyro_ext.infer.front.state.Fit`) and the key (``rng_key``). A
    subclass says how a run is made (``run``), drawn from (:meth:`_draw`) and put together again from a file
    (:meth:`_restore`).

    :param model: a NumPyro model.
    :param field: names of the latent sites to be treated as the field, where two choices are possible.
    :param dict hyper_values: hyperparameters that are given and not learned.
    :param dict init_values: where the search for the others starts (constrained).
    :param int num_samples: draws made for :meth:`get_samples`.
    :param bool progress_bar: whether runs longer than a second show a bar.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        field: Sequence[str] | None,
        hyper_values: Mapping[str, Any] | None,
        init_values: Mapping[str, Any] | None,
        num_samples: int,
        progress_bar: bool,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be a callable with NumPyro primitives, got {type(model).__name__}.")
        check_at_least(1, num_samples=num_samples)
        self.model = model
        self.field = field_names(field)
        self.hyper_values = dict(hyper_values or {})
        self.init_values = dict(init_values or {})
        self.num_samples = num_samples
        self.progress_bar = progress_bar
        self._run: Any = None
        self._last_state: EngineState | None = None

    @property
    def _start_values(self) -> dict[str, Any]:
        """Where a model is read: at the values that are given, whether to start from or to hold."""
        return {**self.init_values, **self.hyper_values}

    @property
    @abstractmethod
    def posterior(self) -> PosteriorSites:
        """Marginals by name."""

    @abstractmethod
    def _draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Draws of all sites but the observed and the left-out ones, and the log density of each."""

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """The outcome of the run as plain containers."""

    @abstractmethod
    def _restore(self, content: dict[str, Any], rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The run from these containers."""

    def _forget(self) -> None:
        """Drop the run and all that was computed from it."""
        self._run = None
        for cls in type(self).__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, cached_property):
                    self.__dict__.pop(name, None)

    def _finished(self) -> Any:
        if self._run is None:
            raise self._not_run()
        return self._run

    def _not_run(self) -> RuntimeError:
        return RuntimeError(f"run(...) should be called first to obtain results from {type(self).__name__}.")

    def _report(self, result: Fit, space: UnconstrainedSpace) -> Fit:
        """Say what a person should know of the outcome of a run, and note in it which sites it set to points."""
        diagnostics = result.diagnostics._replace(points=self._point_sites(space))
        if not diagnostics.converged:
            warn(f"{type(self).__name__} did not converge. " + " ".join(diagnostics.messages))
        warn_of_points(diagnostics, space, type(self).__name__)
        return result._replace(diagnostics=diagnostics)

    def _point_sites(self, space: UnconstrainedSpace) -> tuple[str, ...]:
        """Latent sites without a distribution in the posterior of this engine."""
        return point_sites(space)

    # Results

    @property
    def last_state(self) -> EngineState:
        """The state at the end of the last run, to be given to :meth:`run` as ``init_state``."""
        if self._last_state is None:
            raise self._not_run()
        return self._last_state

    @property
    def is_lower_bound(self) -> bool:
        """Whether the reported log evidence cannot exceed the exact one."""
        return False

    @property
    def log_evidence(self) -> LogEvidence:
        """Log evidence at the reported hyperparameters: a float with the attribute ``is_lower_bound``."""
        return LogEvidence(self._finished().fit.log_evidence, self.is_lower_bound)

    @property
    def diagnostics(self) -> Diagnostics:
        """Convergence, number of steps, objective trace, refused factors and messages of the last run, and which sites
        it set to a point (``points``)."""
        return self._finished().fit.diagnostics

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate]:
        """For each hyperparameter its value and standard error, constrained and unconstrained.

        The errors come from the Hessian of log evidence plus log prior at the optimum, by central differences of its
        gradient in the unconstrained space; those of the constrained values follow by the delta method.
        """
        run = self._finished()
        return hyper_estimates(run.space, run.fit)

    @cached_property
    def _draws(self) -> tuple[dict[str, Array], Array]:
        return self._draw_all(self._finished().rng_key)

    def _draw_all(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        sites, log_density = self._draw(rng_key)
        return with_predictive(self._finished().reading, sites, jax.random.fold_in(rng_key, 3)), log_density

    def get_samples(self, group_by_chain: bool = False, seed: int | None = None) -> dict[str, Array]:
        """Independent draws from the posterior, every latent and deterministic site by name.

        Hyperparameters and ``param`` sites are at their optimum in every draw, so that ``Predictive(model, draws)`` and
        ``log_likelihood(model, draws, ...)`` see the model that was fitted. Draws at which the model has density zero
        are drawn again. Missing values (sites that nothing depends on, such as those that ``obs_mask`` makes) are drawn
        given the others.

        :param bool group_by_chain: whether to put a chain dimension of size one in front.
        :param int seed: draw anew from this seed (as ArviZ may ask); the default are the draws that belong to the run.
        :return: arrays of shape ``(num_samples, ...)``, or ``(1, num_samples, ...)``.
        """
        sites, _ = self._draws if seed is None else self._draw_all(jax.random.key(seed))
        return {name: value[None] if group_by_chain else value for name, value in sites.items()}

    def get_extra_fields(self, group_by_chain: bool = False) -> dict[str, Array]:
        """What else is known of each draw: ``potential_energy``, minus the log density of draw and data.

        :param bool group_by_chain: whether to put a chain dimension of size one in front.
        """
        energy = -self._draws[1]
        return {"potential_energy": energy[None] if group_by_chain else energy}

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        """Print exact marginals of the field, the hyperparameters, the log evidence and how the run ended.

        :param float prob: the probability mass of the central interval.
        :param bool exclude_deterministic: whether to leave out deterministic sites (where there are others).
        """
        run = self._finished()
        names = [n for n in self.posterior if not exclude_deterministic or n in run.reading.field]
        sites = {name: self.posterior[name] for name in names or self.posterior}
        print(format_summary(sites, self.hyper, self.log_evidence, self.diagnostics, prob))

    def describe(self) -> str:
        """How the model was read: the field, the hyperparameters, what each factor was recognised as, the design."""
        return self._finished().reading.describe()

    def information_gain(
        self,
        operator_rows: LinearOperator | ArrayLike,
        noise_variance: ArrayLike | None = None,
        site: str | None = None,
    ) -> Array:
        r"""What each of some further measurements would tell about a site, in nats.

        For a measurement :math:`b^T u + N(0, \sigma^2)` it is :math:`\tfrac12 \log(1 + b^T \operatorname{Cov}(u) b /
        \sigma^2)`, the expected reduction of the entropy of a Gaussian posterior (Seeger and Nickisch 2008). Which
        measurement to take next is that of the largest gain.

        Cost: one product with the covariance of the site per row; sites of more than 2048 elements are judged by
        ``num_samples`` draws, with a relative standard deviation of the variance of ``sqrt(2 / num_samples)``.

        :param operator_rows: one row :math:`b` per measurement: an operator or array of shape ``(r, size)``.
        :param noise_variance: of these measurements, a scalar or of shape ``(r,)``; may be left out where the model has
            Gaussian noise, whose average variance it then is.
        :param str site: what is measured, one of those in ``posterior``; by default the field, if that is one site.
        :return: of shape ``(r,)``.
        :raises ValueError: if the rows do not fit the site, or a noise variance is missing or not positive.
        """
        size = self._measured_size(site)
        rows = operator_rows if isinstance(operator_rows, LinearOperator) else jnp.asarray(operator_rows)
        if len(rows.shape) != 2 or rows.shape[1] != size:
            raise ValueError(f"operator_rows has the shape {tuple(rows.shape)}; it must be (r, {size}).")
        noise = jnp.asarray(self._typical_noise() if noise_variance is None else noise_variance)
        if not bool(jnp.all(noise > 0.0)):
            raise ValueError(f"noise_variance must be positive, got {noise_variance}.")
        return 0.5 * jnp.log1p(self._row_variance(rows, site) / noise)

    def _measured_site(self, site: str | None) -> SitePosterior:
        field = self._finished().reading.field
        if site is None and len(field) > 1:
            raise ValueError(f"Several sites can be measured: give site, one of {', '.join(map(repr, field))}.")
        return self.posterior[field[0] if site is None else site]

    def _measured_size(self, site: str | None) -> int:
        return self._measured_site(site).size

    def _row_variance(self, rows: LinearOperator | Array, site: str | None) -> Array:
        """Posterior variance of each row applied to the site."""
        posterior = self._measured_site(site)
        if posterior.size <= LARGEST_DENSE:
            dense = rows.materialise() if isinstance(rows, LinearOperator) else rows
            covariance = posterior.covariance().reshape(posterior.size, posterior.size)
            return jnp.einsum("ri,ij,rj->r", dense, covariance, dense)
        draws = posterior.sample(self._finished().rng_key, self.num_samples).reshape(self.num_samples, -1)
        centered = draws - posterior.mean.reshape(-1)
        return jnp.mean(jnp.square(jax.lax.map(lambda x: rows @ x, centered)), axis=0)

    def _typical_noise(self) -> ArrayLike:
        raise ValueError("Give the noise_variance of the measurements: the model does not say what it is.")

    # Interoperation

    @property
    def _args(self) -> tuple:
        return self._finished().reading.args

    @property
    def _kwargs(self) -> dict[str, Any]:
        return self._finished().reading.kwargs

    # Persistence

    def save(self, path: str | os.PathLike) -> None:
        """Write the run to a file from which :meth:`load` makes an engine with the same results.

        :param path: of the file.
        :raises TypeError: if an argument of the model is something other than arrays, numbers, strings, linear
            operators, containers and objects of classes with a name in files
            (:func:`~numpyro_ext.linalg.saved_as`).
        """
        run = self._finished()
        content = {
            "engine": type(self).__name__,
            "options": {name: getattr(self, name) for name in self._option_names()},
            "args": run.reading.args,
            "kwargs": dict(run.reading.kwargs),
            "rng_key": run.rng_key,
            "fit": self._content(),
        }
        write_archive(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike, model: Callable[..., Any]) -> Self:
        """An engine with the options and results of a saved run, without running again.

        :param path: of a file written by :meth:`save`.
        :param model: the model, which is not in the file.
        :return: the engine.
        :raises ValueError: if the file is damaged or of another engine, or the model is not the one of the run.
        """
        content = read_archive(path)
        if "engine" not in content:
            raise ValueError(f"{os.fspath(path)!r} is a checkpoint: give it to run(..., checkpoint=...).")
        if content["engine"] != cls.__name__:
            raise ValueError(f"{os.fspath(path)!r} holds a run of {content['engine']}; load it with that class.")
        engine = cls(model, **content["options"])
        engine._run = engine._restore(content["fit"], content["rng_key"], content["args"], content["kwargs"])
        engine._last_state = engine._run.fit.last_state
        return engine

    @classmethod
    def _option_names(cls) -> list[str]:
        """Arguments of the constructor besides the model; each is kept as an attribute of the same name."""
        names: dict[str, None] = {}
        for part in cls.__mro__:
            if "__init__" in vars(part) and part is not object and issubclass(part, BaseEngine):
                names |= dict.fromkeys(inspect.signature(part).parameters)
        return [name for name in names if name not in ("model", "options")]


def hyper_estimates(space: UnconstrainedSpace, fit: Fit) -> dict[str, HyperEstimate]:
    """Value and standard error of each hyperparameter of a fit; no errors where it has no curvature."""
    vector = fit.last_state.values
    errors = space.standard_errors(vector, fit.covariance) if fit.has_curvature and fit.covariance is not None else {}
    unconstrained = space.unpack_unconstrained(vector)
    out = {}
    for name, value in fit.hyper.items():
        is_fixed = name in space.fixed
        free = space.sites[name].transform.inv(value) if is_fixed else unconstrained[name]
        constrained_error, error = errors.get(name, (None, None))
        out[name] = HyperEstimate(value, constrained_error, free, error, is_fixed)
    return out


def check_at_least(least: int, **values: Any) -> None:
    """Refuse options that are not integers of at least ``least``.

    :raises ValueError: naming the option.
    """
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")


def check_positive(**values: float | None) -> None:
    """Refuse tolerances that are neither ``None`` nor positive.

    :raises ValueError: naming the option.
    """
    for name, value in values.items():
        if value is not None and not value > 0.0:
            raise ValueError(f"{name} must be positive, got {value!r}.")


def default_tolerance(given: float | None, double: float, single: float) -> float:
    """A tolerance as it was given, or else its default in the floating dtype at work, float64 or float32."""
    if given is not None:
        return given
    return double if jnp.finfo(jnp.result_type(float)).bits == 64 else single
