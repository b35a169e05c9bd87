"""Posterior of someone new, given the parameters that all share: mode and curvature of her latent numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.handlers import seed, substitute, trace

from ...display import Shown
from .local_sites import InBatch
from .program import Program, Setting, logits_of, of_each

__all__ = ["Person", "PersonalPosterior"]

MOST_STEPS = 100
MOST_NUMBERS = 64
"""Latent numbers of a person, each of which is a forward pass per step."""


class Mode(NamedTuple):
    """Gaussian approximation at the mode."""

    mean: Array
    precision: Array
    log_evidence: Array
    num_steps: Array
    converged: Array


@dataclass(frozen=True, eq=False, repr=False)
class Person(Shown):
    """Someone new: the Gaussian posterior of her latent numbers, and what she does next."""

    mean: np.ndarray
    """Mode of the latent numbers, shape ``(K,)``."""
    covariance: np.ndarray
    """Inverse of the Gauss-Newton curvature there, shape ``(K, K)``."""
    log_evidence: float
    """Laplace's approximation of the log probability of the history."""
    converged: bool
    """True if the search for the mode ended at a zero of the gradient."""
    num_dropped: int
    """Events that were left out because the fit has not seen their items."""
    predict: Callable[[Array], Array]
    """Log probabilities of the next item at values of the latent numbers, from shape ``(draws, K)``."""

    def next_probabilities(self, num_draws: int = 64, rng_key: Array | None = None) -> np.ndarray:
        """Probabilities of all items to be next, averaged over draws of the latent numbers.

        :param int num_draws: number of draws.
        :param rng_key: for these.
        :return: shape ``(items,)``.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        draws = jax.random.multivariate_normal(key, self.mean, self.covariance, (num_draws,), method="cholesky")
        averaged: np.ndarray = np.exp(np.asarray(self.predict(draws))).mean(0)
        return averaged

    def _shown(self) -> list[str]:
        lines = [f"Person: {len(self.mean)} latent numbers, log evidence {self.log_evidence:.3f}"]
        lines += [] if self.converged else ["the search for the mode has not converged"]
        return lines + ([f"{self.num_dropped} events of unknown items left out"] if self.num_dropped else [])


class PersonalPosterior:
    """Search for the modes of new people.

    :param program: of the fit, with one standard normal latent site in the plate.
    :param params: fitted values of the parameters.
    """

    def __init__(self, program: Program, params: dict[str, Array], setting: Setting) -> None:
        self.program, self.params, self.setting = program, params, setting
        site = self._latent_site()
        self.name, self.shape = site["name"], jnp.shape(site["value"])[1:]
        self.find = jax.jit(jax.vmap(self._mode, in_axes=(0, 0)))
        self.predict = jax.jit(jax.vmap(self._next, in_axes=(0, None, None)))

    def _trace(self, values: dict[str, Array], items: Array, mask: Array) -> Any:
        users, setting = jnp.zeros(1, int), self.setting
        kwargs = {**setting.arrays, **setting.options}
        batch = InBatch(None, self.program.plate, users, {})
        with trace() as sites, seed(rng_seed=0), substitute(data={**self.params, **values}), batch:
            self.program.model(users, items[None], mask[None], of_each(setting.carry, 1), **kwargs)
        return sites

    def _latent_site(self) -> Any:
        model = {name for name, site in self._trace({}, jnp.zeros(1, int), jnp.ones(1, bool)).items()}
        own = [name for name in self.program.sites.axes if name in model]
        if own:
            raise ValueError(
                f"ChunkedFit.fold_in: {own[0]!r} is a free parameter of each user, of which nothing is known for "
                'someone new. Give it a prior, as collaborative_rnn(personal="low-rank") does.'
            )
        sites = self._trace({}, jnp.zeros(1, int), jnp.ones(1, bool)).values()
        latent = [site for site in sites if site["type"] == "sample" and not site["is_observed"]]
        if len(latent) != 1 or not any(frame.name == self.program.plate for frame in latent[0]["cond_indep_stack"]):
            raise ValueError(
                f"ChunkedFit.fold_in: needs one latent site in the plate {self.program.plate!r}; the model has "
                f"{[site['name'] for site in latent]}."
            )
        site, probe = latent[0], jnp.linspace(-1.0, 2.0, jnp.size(latent[0]["value"])).reshape(latent[0]["value"].shape)
        standard = -0.5 * (probe**2 + jnp.log(2 * jnp.pi)).sum()
        if not np.allclose(site["fn"].log_prob(probe).sum(), standard, rtol=1e-4) or probe.size > MOST_NUMBERS:
            raise ValueError(
                f"ChunkedFit.fold_in: the site {site['name']!r} must be standard normal, of {MOST_NUMBERS} numbers at "
                "most. Write sums and scales of it in the model."
            )
        return site

    def _logits(self, numbers: Array, items: Array, mask: Array) -> Array:
        """Logits of each event, shape ``(steps, items)``."""
        sites = self._trace({self.name: numbers.reshape(1, *self.shape)}, items, mask)
        return logits_of(sites, len(items))[0]

    def _next(self, numbers: Array, items: Array, length: Array) -> Array:
        mask = jnp.arange(len(items)) <= length
        return jax.nn.log_softmax(self._logits(numbers, items, mask)[length])

    def _mode(self, items: Array, length: Array) -> Mode:
        """Damped Newton steps, of Gauss-Newton where the density is not concave; each raises the density."""
        mask = jnp.arange(len(items)) < length
        size = int(np.prod(self.shape))

        def logits(numbers: Array) -> tuple[Array, Array]:
            found = self._logits(numbers, items, mask)
            return found, found

        def density(numbers: Array) -> Array:
            logs = jax.nn.log_softmax(logits(numbers)[0])
            own = jnp.take_along_axis(logs, items[:, None], 1)[:, 0]
            return jnp.where(mask, own, 0.0).sum() - 0.5 * (numbers**2).sum()

        def slopes(numbers: Array) -> tuple[Array, Array, Array]:
            """Gradient, Gauss-Newton curvature, which is positive by construction, and the curvature of the step."""
            tangents, at = jax.jacfwd(logits, has_aux=True)(numbers)
            shares = jnp.where(mask[:, None], jax.nn.softmax(at), 0.0)
            centred = tangents - jnp.einsum("ti,tik->tk", jax.nn.softmax(at), tangents)[:, None]
            own = jnp.take_along_axis(centred, items[:, None, None], 1)[:, 0]
            gradient = jnp.where(mask[:, None], own, 0.0).sum(0) - numbers
            precision = jnp.eye(size) + jnp.einsum("ti,tik,til->kl", shares, centred, centred)
            exact = -jax.hessian(density)(numbers)
            is_concave = jnp.isfinite(jnp.linalg.cholesky(exact)).all()
            return gradient, precision, jnp.where(is_concave, exact, precision)

        tolerance = jnp.finfo(jnp.zeros(()).dtype).eps ** 0.4

        def distance(gradient: Array, precision: Array) -> Array:
            """Length of a Gauss-Newton step, in posterior standard deviations."""
            found: Array = jnp.sqrt(jnp.vdot(gradient, jnp.linalg.solve(precision, gradient)))
            return found

        def unfinished(state: Any) -> Array:
            *_, gradient, precision, _, _, number = state
            goes_on: Array = (number < MOST_STEPS) & ~(distance(gradient, precision) <= tolerance)
            return goes_on

        def step(state: Any) -> Any:
            numbers, value, gradient, _, metric, damping, number = state
            trial = numbers + jnp.linalg.solve(metric + damping * jnp.diag(jnp.diag(metric)), gradient)
            new = density(trial)
            # near the mode differences are rounding
            taken = new >= value - tolerance**2 * (1.0 + jnp.abs(value))
            numbers, value = jnp.where(taken, trial, numbers), jnp.where(taken, new, value)
            return numbers, value, *slopes(numbers), jnp.where(taken, damping / 4, 4 * damping + 0.1), number + 1

        start = jnp.zeros(size)
        initial = (start, density(start), *slopes(start), jnp.zeros(()), jnp.array(0))
        numbers, value, gradient, precision, _, _, number = lax.while_loop(unfinished, step, initial)
        evidence = value - 0.5 * jnp.linalg.slogdet(precision)[1]
        return Mode(numbers, precision, evidence, number, distance(gradient, precision) <= tolerance)

    def people(self, histories: list[np.ndarray], dropped: list[int]) -> list[Person]:
        """Posteriors of people, side by side.

        :param histories: items of each, all known.
        :param dropped: number of events of each that are left out.
        """
        # to few shapes; one cell more for what comes next
        longest = 2 ** int(max(len(history) for history in histories)).bit_length()
        items = np.zeros((len(histories), longest), np.int32)
        for row, history in zip(items, histories, strict=True):
            row[: len(history)] = history
        lengths = np.array([len(history) for history in histories])
        modes = jax.tree.map(np.asarray, self.find(items, lengths))
        found = []
        for k, gone in enumerate(dropped):

            def predict(draws: Array, k: int = k) -> Array:
                logs: Array = self.predict(draws, items[k], lengths[k])
                return logs

            covariance = np.linalg.inv(modes.precision[k])
            evidence, converged = float(modes.log_evidence[k]), bool(modes.converged[k])
            found.append(Person(modes.mean[k], covariance, evidence, converged, gone, predict))
        return found
