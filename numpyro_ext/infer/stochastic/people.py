"""Posteriors of people given the parameters that all share: the modes of their latent numbers, and evidence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.handlers import seed, substitute, trace

from .local_sites import InBatch, personal_site
from .person import Person, inverse_curvature
from .program import Program
from .scoring import logits_of, of_each
from .setting import Setting

MOST_STEPS = 100
GAUSS_NEWTON_STEPS = 5
"""Steps after which those of Newton are taken where the density is concave, as Gauss-Newton can be slow."""
_DRAWS_AT_ONCE = 16
_MOST_CELLS = 2**20
"""Tangents of probabilities of people whose modes are found side by side, where each waits for the slowest."""


class Given(NamedTuple):
    """All that people share: values of the parameters, and arguments of the model."""

    params: Mapping[str, Array]
    setting: Setting


class Mode(NamedTuple):
    """Gaussian approximation at the mode."""

    mean: Array
    precision: Array
    log_evidence: Array
    num_steps: Array
    converged: Array


class Slopes(NamedTuple):
    """Log density of the events and the latent numbers, with its gradient and Gauss-Newton curvature in these."""

    value: Array
    gradient: Array
    precision: Array


class _Place(NamedTuple):
    """Latent numbers that a search has reached."""

    numbers: Array
    at: Slopes
    metric: Array
    """Curvature by which the next step goes."""
    distance: Array
    """Length of that step, in posterior standard deviations."""


class PersonalPosterior:
    """Gaussian posteriors of people's latent numbers, and the evidence of their events.

    :param program: of the model, with one standard normal latent site in the plate.
    :param given: values of the parameters to look at the model with.
    :param caller: name for messages.
    """

    def __init__(self, program: Program, given: Given, caller: str) -> None:
        self.program = program
        self.name, self.shape = self._latent_site(given, caller)
        self.size = int(np.prod(self.shape))
        self.find = jax.jit(self._find)
        self.look = jax.jit(self._look)

    def _trace(self, given: Given, values: dict[str, Array], items: Array, mask: Array) -> Any:
        users, setting = jnp.zeros(1, int), given.setting
        batch = InBatch(None, self.program.plate, users, {})
        with trace() as sites, seed(rng_seed=0), substitute(data={**given.params, **values}), batch:
            self.program.model(users, items[None], mask[None], of_each(setting.carry, 1), **setting.kwargs)
        return sites

    def _latent_site(self, given: Given, caller: str) -> tuple[str, tuple[int, ...]]:
        """Name of the latent site, and its shape for one person."""
        found: dict[str, tuple[int, ...]] = {}

        @jax.jit
        def excess(given: Given) -> Array:
            """Log density of the site at some numbers, less that of standard normal ones."""
            sites = self._trace(given, {}, jnp.zeros(1, int), jnp.ones(1, bool))
            own = [name for name in self.program.sites.axes if name in sites]
            if own:
                raise ValueError(
                    f"{caller}: {own[0]!r} is a free parameter of each user, of which nothing is known for "
                    'someone new. Give it a prior, as collaborative_rnn(personal="low-rank") does.'
                )
            site = personal_site(sites, self.program.plate, caller)
            shape = jnp.shape(site["value"])
            found[site["name"]] = shape[1:]
            probe = jnp.linspace(-1.0, 2.0, int(np.prod(shape))).reshape(shape)
            log_prob: Array = site["fn"].log_prob(probe).sum()
            return log_prob + 0.5 * (probe**2 + jnp.log(2 * jnp.pi)).sum()

        gap = excess(given)
        [(name, shape)] = found.items()
        if not abs(gap) <= 1e-4 * max(int(np.prod(shape)), 1):
            raise ValueError(
                f"{caller}: the site {name!r} must be standard normal. Write sums and scales of it in the model."
            )
        return name, shape

    def _logits(self, given: Given, numbers: Array, items: Array, mask: Array) -> Array:
        """Logits of each event, shape ``(steps, items)``."""
        sites = self._trace(given, {self.name: numbers.reshape(1, *self.shape)}, items, mask)
        return logits_of(sites, len(items))[0]

    def _look(self, given: Given, draws: Array, items: Array, length: Array) -> tuple[Array, Array]:
        """Log probabilities of the next item, and log density of events and latent numbers, at draws of these."""
        places = jnp.arange(len(items))

        def at(numbers: Array) -> tuple[Array, Array]:
            logs = jax.nn.log_softmax(self._logits(given, numbers, items, places <= length))
            return logs[length], _of_own(logs, items, places < length).sum() - 0.5 * (numbers**2).sum()

        # a batch at a time, as each has probabilities of all items after all events
        return lax.map(at, draws, batch_size=_DRAWS_AT_ONCE)

    def _density(self, numbers: Array, given: Given, items: Array, mask: Array) -> Array:
        logs = jax.nn.log_softmax(self._logits(given, numbers, items, mask))
        return _of_own(logs, items, mask).sum() - 0.5 * (numbers**2).sum()

    def _slopes(self, numbers: Array, given: Given, items: Array, mask: Array) -> Slopes:
        """Log density with its slopes, by a forward pass for each number; the curvature is positive by construction."""

        def along(direction: Array) -> tuple[Array, Array]:
            return jax.jvp(lambda numbers: self._logits(given, numbers, items, mask), (numbers,), (direction,))

        at, tangents = jax.vmap(along, out_axes=(None, 0))(jnp.eye(self.size))
        logs = jax.nn.log_softmax(at)
        means = jnp.einsum("ti,kti->kt", jnp.exp(logs), tangents)
        # one array of all cells and numbers, as passes over such are what takes time
        roots = jnp.exp(jnp.where(mask[:, None], 0.5 * logs, -jnp.inf))
        weighted = (roots * (tangents - means[..., None])).reshape(self.size, -1)
        own = jax.vmap(lambda one, mean: jnp.where(mask, _at_own(one, items) - mean, 0.0).sum())(tangents, means)
        return Slopes(
            _of_own(logs, items, mask).sum() - 0.5 * (numbers**2).sum(),
            own - numbers,
            jnp.eye(self.size) + weighted @ weighted.T,
        )

    def _curvature(self, numbers: Array, precision: Array, given: Given, items: Array, mask: Array) -> Array:
        """Minus the Hessian of the log density where this is concave, and the Gauss-Newton curvature elsewhere."""
        exact = -jax.jacfwd(jax.grad(self._density))(numbers, given, items, mask)
        is_concave = jnp.isfinite(jnp.linalg.cholesky(exact)).all()
        return jnp.where(is_concave, exact, precision)

    def mode(self, given: Given, start: Array, items: Array, length: Array) -> Mode:
        """Gaussian at the mode, by damped steps that raise the density: of Gauss-Newton first, then of Newton.

        :param start: latent numbers to begin at, shape ``(K,)``.
        :param items: of one person, padded, shape ``(steps,)``.
        :param length: number of events.
        """
        mask = jnp.arange(len(items)) < length
        tolerance = jnp.finfo(start.dtype).eps ** 0.4

        def look(numbers: Array, is_newton: bool) -> _Place:
            at = self._slopes(numbers, given, items, mask)
            metric = self._curvature(numbers, at.precision, given, items, mask) if is_newton else at.precision
            return _Place(numbers, at, metric, jnp.sqrt(jnp.vdot(at.gradient, jnp.linalg.solve(metric, at.gradient))))

        def ascended(state: tuple[_Place, Array, Array], most: int, is_newton: bool) -> tuple[_Place, Array, Array]:
            def unfinished(state: tuple[_Place, Array, Array]) -> Array:
                return (state[2] < most) & ~(state[0].distance <= tolerance)

            def step(state: tuple[_Place, Array, Array]) -> tuple[_Place, Array, Array]:
                place, damping, number = state
                damped = place.metric + damping * jnp.diag(jnp.diag(place.metric))
                trial = place.numbers + jnp.linalg.solve(damped, place.at.gradient)
                value = self._density(trial, given, items, mask)
                # near the mode differences are rounding
                taken = value >= place.at.value - tolerance**2 * (1.0 + jnp.abs(place.at.value))
                place = lax.cond(taken, lambda: look(trial, is_newton), lambda: place)
                return place, jnp.where(taken, damping / 4, 4 * damping + 0.1), number + 1

            return lax.while_loop(unfinished, step, state)

        # one loop after the other, as side by side both curvatures would be computed in all steps
        state = (look(start, False), jnp.zeros_like(start[0]), jnp.array(0))
        place, *rest = ascended(state, GAUSS_NEWTON_STEPS, False)
        place = lax.cond(place.distance <= tolerance, lambda: place, lambda: look(place.numbers, True))
        place, _, number = ascended((place, *rest), MOST_STEPS, True)
        return Mode(place.numbers, place.at.precision, _evidence(place.at), number, place.distance <= tolerance)

    def _find(self, given: Given, items: Array, lengths: Array) -> Mode:
        """Modes of people in blocks, which have an axis in front; blocks come one after the other."""

        def of_block(block: tuple[Array, Array]) -> Mode:
            of_one = partial(self.mode, given, jnp.zeros(self.size))
            if len(items[0]) > 1:
                return jax.vmap(of_one)(*block)
            # under vmap a step that is not taken would cost as much as one that is
            return jax.tree.map(lambda x: x[None], of_one(*(part[0] for part in block)))

        found: Mode = lax.map(of_block, (items, lengths))
        return found

    def evidence(self, given: Given, start: Array, items: Array, length: Array) -> tuple[Array, Mode]:
        """Laplace's approximation of the log probability of a person's events, with the whole gradient in ``given``.

        The search is not differentiated. A Newton step from its end moves nothing but has the slope of the mode in the
        parameters, by the implicit function theorem.
        """
        mask, held = jnp.arange(len(items)) < length, lax.stop_gradient(given)
        found = lax.stop_gradient(self.mode(held, lax.stop_gradient(start), items, length))
        metric = lax.stop_gradient(self._curvature(found.mean, found.precision, held, items, mask))
        gradient = jax.grad(self._density)(found.mean, given, items, mask)
        numbers = found.mean + jnp.linalg.solve(metric, gradient)
        return _evidence(self._slopes(numbers, given, items, mask)), found

    def people(
        self, given: Given, histories: list[np.ndarray], dropped: list[int], most_cells: int = _MOST_CELLS
    ) -> list[Person]:
        """Posteriors of people, side by side.

        :param histories: items of each, all known.
        :param dropped: number of events of each that are left out.
        :param most_cells: tangents of probabilities at once.
        """
        # to few shapes; one cell more for what comes next
        longest = 2 ** int(max(len(history) for history in histories)).bit_length()
        tangents = self.size * longest * int(given.setting.constants.options["num_items"])
        block = min(max(most_cells // tangents, 1), len(histories))
        number = -(-len(histories) // block)  # blocks, of which the last is filled up
        items, lengths = np.zeros((number * block, longest), np.int32), np.zeros(number * block, int)
        for k, history in enumerate(histories):
            items[k, : len(history)], lengths[k] = history, len(history)
        modes = self.find(given, items.reshape(number, block, longest), lengths.reshape(number, block))
        modes = jax.tree.map(lambda x: np.asarray(x).reshape(number * block, *x.shape[2:]), modes)
        found = []
        for k, gone in enumerate(dropped):

            def look(draws: Array, k: int = k) -> tuple[Array, Array]:
                return self.look(given, draws, items[k], lengths[k])

            covariance = inverse_curvature(modes.precision[k])
            evidence, converged = float(modes.log_evidence[k]), bool(modes.converged[k])
            found.append(Person(modes.mean[k], covariance, evidence, converged, gone, look))
        return found


def _of_own(values: Array, items: Array, mask: Array) -> Array:
    """Value of each event's own item, zero beyond the end, shape ``(steps,)``."""
    return jnp.where(mask, _at_own(values, items), 0.0)


def _at_own(values: Array, items: Array) -> Array:
    return jnp.take_along_axis(values, items[:, None], 1)[:, 0]


def _evidence(at: Slopes) -> Array:
    return at.value - 0.5 * jnp.linalg.slogdet(at.precision)[1]
