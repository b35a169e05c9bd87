"""State of the particles, and the answers that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.primitives import Messenger

from ...structure.model.running.inspection import SiteInfo
from ..front.answers.model_draws import predictive_draws
from ..front.answers.sites import PosteriorSites, SitePosterior
from ..front.labels import Labels
from ..front.results import Diagnostics, LogEvidence
from .kernels.path import Particles
from .kernels.steps import Programs, StepInfo
from .more_rows import MoreRows
from .target import Target

MOST_STEPS = 10_000
"""Largest number of steps of a run or an update."""
LEAST_SIZE = 0.05
"""Share of the particles that they are worth at the end of a run."""
_LARGEST_ERROR = 1.0
_FEWEST_PARTICLES = 10
"""Particles by which their own end can be judged."""
_RESAMPLED = 7
"""Folded into the key of a run for its draws."""
_COLUMNS = ("stage", "position", *(name for name in StepInfo._fields if name != "num_alive"))


class SMCState(NamedTuple):
    """State from which a run goes on exactly where it stopped: ``smc.last_state``."""

    particles: Particles
    history: dict[str, np.ndarray]
    """Figures of each step so far, by column."""
    stage: int
    """Number of updates before."""
    digest: str
    """Digest of data, key and options."""

    @property
    def num_steps(self) -> int:
        return len(self.history["stage"])

    @property
    def is_at_end(self) -> bool:
        return float(self.particles.position) >= 1.0


def record(state: SMCState, particles: Particles, info: StepInfo) -> SMCState:
    """The state after one more step."""
    values = {"stage": state.stage, "position": float(particles.position)}
    values |= {name: value.item() for name, value in jax.device_get(info)._asdict().items() if name in _COLUMNS}
    history = {name: np.append(state.history[name], values[name]) for name in _COLUMNS}
    return state._replace(particles=particles, history=history)


def no_history() -> dict[str, np.ndarray]:
    """History of a run that has made no step."""
    whole = ("stage", "num_moves", "num_evaluations")
    return {name: np.zeros(0, int if name in whole else float) for name in _COLUMNS}


class WeightedSite(SitePosterior):
    """The posterior of one site by weighted particles.

    :param str name: of the site.
    :param values: of the particles, shape ``(particles, ...)``.
    :param weights: summing to one, shape ``(particles,)``.
    """

    def __init__(self, name: str, values: np.ndarray, weights: np.ndarray) -> None:
        self.particles, self.weights = values, weights
        flat = values.reshape(len(values), -1)
        centred = flat - weights @ flat
        super().__init__(
            name,
            values.shape[1:],
            mean=lambda: weights @ flat,
            variance=lambda: weights @ np.square(centred),
            covariance=lambda: jnp.asarray((centred.T * weights) @ centred),
            sample=lambda rng_key, num_samples: jax.random.choice(
                rng_key, jnp.asarray(flat), (num_samples,), p=jnp.asarray(weights)
            ),
        )

    def part(self, places: np.ndarray) -> WeightedSite:
        """Some of the elements as a site of their own; see :meth:`SitePosterior.part`."""
        flat = self.particles.reshape(len(self.particles), -1)
        return WeightedSite(self.name, flat[:, np.asarray(places)], self.weights)

    def _quantile(self, q: np.ndarray) -> Array:
        flat = self.particles.reshape(len(self.particles), -1)
        order = np.argsort(flat, axis=0)
        below = np.cumsum(self.weights[order], axis=0)
        columns = []
        for column in range(flat.shape[1]):
            places = np.minimum(np.searchsorted(below[:, column], q.reshape(-1)), len(flat) - 1)
            columns.append(flat[order[places, column], column])
        return jnp.asarray(np.stack(columns, axis=-1) if columns else np.zeros((q.size, 0)))


class SMCRun:
    """The outcome of a run or an update.

    :param Programs programs: of the model.
    :param Target target: the model on its arguments.
    :param SMCState state: at the end.
    :param rng_key: of the run.
    :param int num_samples: draws to make.
    """

    has_warned_of_weights = False
    against_weights: tuple[str, ...] = ()

    def __init__(self, programs: Programs, target: Target, state: SMCState, rng_key: Array, num_samples: int) -> None:
        self.programs, self.target, self.state = programs, target, state
        self.rng_key, self.num_samples = rng_key, num_samples
        self.labels = Labels()

    @property
    def log_evidence(self) -> LogEvidence:
        """With its standard error."""
        errors = self.state.history["log_evidence_error"]
        error = float(errors[-1]) if errors.size else 0.0
        kind: Any = "integrated" if self.state.is_at_end else "none"
        return LogEvidence(float(self.state.particles.log_evidence), False, kind, error)

    @cached_property
    def more_rows(self) -> MoreRows:
        """Arguments of updates in arrays that seldom grow; handed on from run to run."""
        return MoreRows(self.target.model)

    @cached_property
    def weights(self) -> Array:
        log_weights = np.asarray(self.state.particles.log_weights)
        weights = np.exp(log_weights - log_weights.max())
        return jnp.asarray(weights / weights.sum())

    @cached_property
    def effective_sample_size(self) -> float:
        return float(1.0 / np.sum(np.square(np.asarray(self.weights))))

    @cached_property
    def particles(self) -> dict[str, Array]:
        """All sites but the observed ones."""
        return self.programs.constrained(self.state.particles.vectors, self.target.data)

    def samples(self, seed: int | None, num_samples: int | None = None) -> dict[str, Array]:
        """Draws with equal weights."""
        number = self.num_samples if num_samples is None else num_samples
        if seed is None and number == self.num_samples:
            return self._samples[0]
        key = jax.random.fold_in(self.rng_key, _RESAMPLED) if seed is None else jax.random.key(seed)
        return self._draw(key, number)[0]

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Marginals by name, of the weighted particles."""
        weights = np.asarray(self.weights)
        sites = {
            name: WeightedSite(name, np.asarray(values), weights)
            for name, values in self.particles.items()
            if np.issubdtype(values.dtype, np.floating)
        }
        found = PosteriorSites(sites, dict.fromkeys(self.target.observed, "it is observed"))
        return found.with_hyper({}, self.all_labels)

    @cached_property
    def all_labels(self) -> Labels:
        """The labels of a person, and the plates of the model, which name the dimensions of others."""
        return Labels(plates=self.target.dims).updated(self.labels)

    def keep_labels(self, labels: Labels) -> list[str]:
        """Take over what a person calls the places of sites, and return what is to be said of what fits none."""
        shapes = {name: np.shape(values)[1:] for name, values in self.particles.items()}
        shapes |= {name: tuple(site.shape) for name, site in self.target.observed.items()}
        kept, messages = Labels(plates=self.target.dims).updated(labels).fitting(shapes)
        vars(self).pop("all_labels", None)
        self.labels = Labels(kept.coords, kept.dims)
        return messages

    @property
    def observed_values(self) -> dict[str, Any]:
        """The observed values by site."""
        return {name: site.value for name, site in self.observations.items()}

    @cached_property
    def log_densities(self) -> Array:
        """Log densities of the draws."""
        return jnp.add(*self.programs.levels(self._samples[1], self.target.data))

    @cached_property
    def _samples(self) -> tuple[dict[str, Array], Array]:
        return self._draw(jax.random.fold_in(self.rng_key, _RESAMPLED), self.num_samples)

    def _draw(self, key: Array, num_samples: int) -> tuple[dict[str, Array], Array]:
        """Sites and vectors."""
        vectors, log_weights = self.state.particles.vectors, self.state.particles.log_weights
        chosen: Any
        is_even = bool(jnp.all(log_weights == log_weights[0]))
        if is_even and num_samples == len(vectors):
            chosen, sites = slice(None), self.particles
        else:
            uniforms = (jnp.arange(num_samples) + jax.random.uniform(key, (), vectors.dtype)) / num_samples
            places = jnp.searchsorted(jnp.cumsum(self.weights), uniforms)
            chosen = jax.random.permutation(key, jnp.minimum(places, len(vectors) - 1))
            sites = {name: value[chosen] for name, value in self.particles.items()}
        if self.target.left_out:
            latent = {name: sites[name] for name in self.target.sites}
            target, left_out = self.target, list(self.target.left_out)
            sites = sites | predictive_draws(target.model, latent, key, target.args, target.kwargs, left_out)
        return sites, vectors[chosen]

    @cached_property
    def observations(self) -> dict[str, SiteInfo]:
        """The observed sites, as on the arguments of the run."""
        return self.target.inspected().observed

    @cached_property
    def posterior_predictive(self) -> dict[str, Array]:
        """Draws of the observed sites at the arguments of the run, one for each of the draws."""
        latent = {name: self._samples[0][name] for name in self.target.sites}
        model, key = _Unobserved(self.target.model, tuple(self.target.observed)), jax.random.fold_in(self.rng_key, 5)
        found = predictive_draws(model, latent, key, self.target.args, self.target.kwargs)
        return {name: found[name] for name in self.target.observed if name in found}

    @cached_property
    def diagnostics(self) -> Diagnostics:
        history, state = self.state.history, self.state
        messages, is_well = [], state.is_at_end
        if not state.is_at_end:
            position = float(state.particles.position)
            messages.append(
                f"It was stopped at {position:.3g} of the path from prior to posterior; the particles are of the "
                "distribution there. run(..., init_state=smc.last_state) goes on."
            )
        moved = np.flatnonzero(history["num_moves"])
        worst = float(history["correlation"][moved[-1]]) if moved.size else 0.0
        if worst > self.programs.largest_correlation:
            is_well = False
            kernel = self.programs.ladder.movement.kernel
            other = "nuts" if kernel == "hmc" else "hmc"
            messages.append(
                f"After the last {int(history['num_moves'][moved[-1]])} moves a coordinate still has a correlation of "
                f"{worst:.2f} with where it was: {kernel} hardly moves here. Take another kernel ({other!r}), more "
                "num_moves, or coordinates that depend less on each other (numpyro.infer.reparam)."
            )
        if self.effective_sample_size < LEAST_SIZE * len(self.weights):
            is_well = False
            messages.append(f"The particles are worth {self.effective_sample_size:.1f} of {len(self.weights)}.")
        if len(self.weights) < _FEWEST_PARTICLES:
            is_well = False
            messages.append(
                f"{len(self.weights)} particles are too few to judge the end by, or to tell the standard error of "
                "the log evidence: take a hundred and more."
            )
        error = self.log_evidence.standard_error or 0.0
        if error > _LARGEST_ERROR:
            messages.append(
                f"The standard error of the log evidence is {error:.2g}, too large to be relied on itself: take more "
                "particles."
            )
        return Diagnostics(
            converged=is_well,
            num_steps=state.num_steps,
            objective_trace=history["log_evidence"],
            max_change=worst,
            num_skipped=0,
            skipped={},
            hyper=None,
            messages=tuple(messages),
        )

    @property
    def history(self) -> Any:
        """An ``xarray.Dataset``."""
        import xarray

        columns = {name: ("step", values) for name, values in self.state.history.items()}
        return xarray.Dataset(columns, coords={"step": np.arange(1, self.state.num_steps + 1)})


class _Unobserved(Messenger):
    """The model with its observed sites drawn."""

    def __init__(self, model: object, observed: tuple[str, ...]) -> None:
        self.observed = observed
        super().__init__(model)

    def process_message(self, msg: dict[str, object]) -> None:
        if msg["type"] == "sample" and msg["name"] in self.observed and not isinstance(msg["fn"], dist.Unit):
            msg["is_observed"], msg["value"] = False, None


def impossible_data(programs: Programs, target: Target, particles: Particles) -> ValueError:
    """The error for data that none of the particles explains, naming the first of them."""
    alive = np.asarray(jnp.isfinite(particles.log_weights))
    target = target.inspected()  # with the values that were observed
    terms: Mapping[str, Array] = programs.log_likelihood(particles.vectors, target.data)
    for name, values in terms.items():
        zero = ~np.isfinite(np.asarray(values))[alive]
        places = np.argwhere(zero.all(0)) if zero.ndim > 1 else np.zeros((int(zero.all()), 0), int)
        if len(places):
            observed = np.asarray(target.observed[name].value)
            place = tuple(int(i) for i in places[0])
            at = f"[{', '.join(map(str, place))}]" if place else ""
            value = f" (value {observed[place]})" if observed.ndim >= len(place) else ""
            return ValueError(
                f"No particle explains the data: the likelihood of site '{name}'{at}{value} is zero or not a number at "
                f"all of {alive.sum()} particles, and of {len(places)} observations there in all. Check the data "
                "against the support of the site, and whether the prior can explain them."
            )
    return ValueError(
        f"No particle explains the data: every one of {alive.sum()} has some observation of likelihood zero, though no "
        "observation rules out all of them. Take more particles, path='data', or a prior nearer to the data."
    )
