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

from ..local_sites import InBatch, personal_site
from ..program import Program
from ..scoring import logits_of, of_each
from ..setting import Setting
from .bending import weighted_bending
from .person import Person, inverse_curvature

MOST_STEPS = 100
GAUSS_NEWTON_STEPS = 5
"""Steps after which those of Newton are taken, as Gauss-Newton can be slow."""
FIRST_RADIUS = 2.0
"""Radius of the first step, in posterior standard deviations."""
_HALVINGS = 30
_PROBES = 5
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
    axes: Array
    """Axes of the Hessian in the Gauss-Newton metric, in columns."""
    bends: Array
    """Minus the second derivative along each, ascending."""

    @property
    def slopes(self) -> Array:
        """First derivative along each axis."""
        return self.axes.T @ self.at.gradient

    @property
    def distance(self) -> Array:
        """Length of the Newton step, in posterior standard deviations; infinite where the density is not concave."""
        squares = self.slopes**2 / self.bends
        return jnp.where(self.bends[0] > 0, jnp.sqrt(squares.sum()), jnp.inf)

    def step(self, radius: Array) -> Array:
        """Step along the axes to the maximum of the quadratic density within a radius."""
        slopes, bends = self.slopes, self.bends
        least = jnp.maximum(-bends[0], 0.0) + jnp.finfo(bends.dtype).eps * jnp.abs(bends).max()

        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) / 2
            is_long = jnp.linalg.norm(slopes / (bends + middle)) > radius
            return jnp.where(is_long, middle, low), jnp.where(is_long, high, middle)

        far = least + jnp.linalg.norm(slopes) / radius
        _, damping = lax.fori_loop(0, _HALVINGS, halve, (least, far))
        is_inside = (bends[0] > 0) & (jnp.linalg.norm(slopes / bends) <= radius)
        along = slopes / (bends + jnp.where(is_inside, 0.0, damping))
        # at a saddle nothing may lead off it but the axis itself
        rest = jnp.sqrt(jnp.maximum(radius**2 - (along**2).sum(), 0.0))
        return along.at[0].add(jnp.where(bends[0] > 0, 0.0, jnp.where(slopes[0] < 0, -rest, rest)))


class PersonalPosterior:
    """Gaussian posteriors of people's latent numbers, and the evidence of their events.

    :param program: of the model, with one standard normal latent site in the plate.
    :param given: values of the parameters to look at the model with.
    :param caller: name for messages.
    """

    name: str
    """Name of the latent site."""
    shape: tuple[int, ...]
    """Shape of the site for one person."""
    size: int

    def __init__(self, program: Program, given: Given, caller: str) -> None:
        self.program = program
        self.is_stepwise = self._look_at_site(given, caller) <= 1e-4
        """True if events one by one have the logits of all together, and second derivatives that are finite."""
        self.find = jax.jit(self._find)
        self.look = jax.jit(self._look)

    def _trace(
        self, given: Given, values: dict[str, Array], items: Array, mask: Array, carry: Any = None
    ) -> tuple[Any, Any]:
        """Sites of one person, and the carry after her events."""
        users, setting = jnp.zeros(1, int), given.setting
        before = of_each(setting.carry if carry is None else carry, 1)
        batch = InBatch(None, self.program.plate, users, {})
        with trace() as sites, seed(rng_seed=0), substitute(data={**given.params, **values}), batch:
            after = self.program.model(users, items[None], mask[None], before, **setting.kwargs)
        return sites, jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype)[0], after, before)

    def _look_at_site(self, given: Given, caller: str) -> float:
        """Find the latent site; returns the difference between events one by one and together."""

        @jax.jit
        def gaps(given: Given) -> tuple[Array, Array]:
            """Log density of the site at some numbers, less that of standard normal ones, and that difference."""
            sites, _ = self._trace(given, {}, jnp.zeros(1, int), jnp.ones(1, bool))
            own = [name for name in self.program.sites.axes if name in sites]
            if own:
                raise ValueError(
                    f"{caller}: {own[0]!r} is a free parameter of each user, of which nothing is known for "
                    'someone new. Give it a prior, as collaborative_rnn(personal="low-rank") does.'
                )
            site = personal_site(sites, self.program.plate, caller)
            shape = jnp.shape(site["value"])
            self.name, self.shape, self.size = site["name"], shape[1:], int(np.prod(shape))
            probe = jnp.linspace(-1.0, 2.0, self.size).reshape(shape)
            log_prob: Array = site["fn"].log_prob(probe).sum()
            return log_prob + 0.5 * (probe**2 + jnp.log(2 * jnp.pi)).sum(), self._gap_of_steps(given)

        gap, gap_of_steps = gaps(given)
        if not abs(gap) <= 1e-4 * max(self.size, 1):
            raise ValueError(
                f"{caller}: the site {self.name!r} must be standard normal. Write sums and scales of it in the model."
            )
        return float(gap_of_steps)

    def _logits(self, given: Given, numbers: Array, items: Array, mask: Array) -> Array:
        """Logits of each event, shape ``(steps, items)``."""
        sites, _ = self._trace(given, self._values(numbers), items, mask)
        return logits_of(sites, len(items))[0]

    def _step(self, given: Given, numbers: Array, carry: Any, item: Array) -> tuple[Any, Array]:
        """Carry after one event, and its logits."""
        sites, after = self._trace(given, self._values(numbers), item[None], jnp.ones(1, bool), carry)
        return after, logits_of(sites, 1)[0, 0]

    def _gap_of_steps(self, given: Given) -> Array:
        """Greatest difference in the logits of a few events, one by one and together.

        It is infinite where second derivatives in the carry are, as in counts that nothing was added to.
        """
        mask = jnp.ones(_PROBES, bool)
        numbers, items = jnp.linspace(-1.0, 2.0, self.size), jnp.arange(_PROBES) % given.setting.kwargs["num_items"]
        alone = lax.scan(lambda carry, item: self._step(given, numbers, carry, item), given.setting.carry, items)[1]
        together = self._logits(given, numbers, items, mask)
        differences = jnp.where(alone == together, 0.0, jnp.abs(alone - together) / (1.0 + jnp.abs(together)))
        is_finite = jnp.isfinite(self._bending(numbers, given, items, mask)).all()
        return jnp.where(is_finite, jnp.max(differences), jnp.inf)

    def _values(self, numbers: Array) -> dict[str, Array]:
        return {self.name: numbers.reshape(1, *self.shape)}

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
        """Minus the Hessian of the log density: the Gauss-Newton curvature less what the bent logits add."""

        if not self.is_stepwise:
            return -jax.jacfwd(jax.grad(self._density))(numbers, given, items, mask)

        return precision - self._bending(numbers, given, items, mask)

    def _bending(self, numbers: Array, given: Given, items: Array, mask: Array) -> Array:
        """Second derivatives of the log density that Gauss-Newton leaves out."""
        probabilities = jax.nn.softmax(self._logits(given, numbers, items, mask))
        seen = jax.nn.one_hot(items, probabilities.shape[1], dtype=probabilities.dtype)
        residuals = jnp.where(mask[:, None], seen - probabilities, 0.0)
        return weighted_bending(partial(self._step, given), given.setting.carry, numbers, items, residuals)

    def mode(self, given: Given, start: Array, items: Array, length: Array) -> Mode:
        """Gaussian at the mode, by steps within a radius in the Gauss-Newton metric: of Gauss-Newton, then of Newton.

        :param start: latent numbers to begin at, shape ``(K,)``.
        :param items: of one person, padded, shape ``(steps,)``.
        :param length: number of events.

        **Source:** Nocedal and Wright (2006), *Numerical optimization*, section 4.1 and algorithm 4.1.
        """
        mask = jnp.arange(len(items)) < length
        tolerance = jnp.finfo(start.dtype).eps ** 0.4

        def look(numbers: Array, number: Array) -> _Place:
            at = self._slopes(numbers, given, items, mask)
            exact = lax.cond(
                number < GAUSS_NEWTON_STEPS,
                lambda: at.precision,
                lambda: self._curvature(numbers, at.precision, given, items, mask),
            )
            values, vectors = jnp.linalg.eigh(at.precision)
            root = vectors / jnp.sqrt(jnp.maximum(values, 1.0))
            bends, axes = jnp.linalg.eigh(root.T @ exact @ root)
            return _Place(numbers, at, root @ axes, bends)

        def unfinished(state: tuple[_Place, Array, Array]) -> Array:
            return (state[2] < MOST_STEPS) & ~(state[0].distance <= tolerance)

        def step(state: tuple[_Place, Array, Array]) -> tuple[_Place, Array, Array]:
            place, radius, number = state
            along = place.step(radius)
            trial = place.numbers + place.axes @ along
            slack = tolerance**2 * (1.0 + jnp.abs(place.at.value))  # near the mode differences are rounding
            gained = self._density(trial, given, items, mask) - place.at.value + slack
            expected = place.slopes @ along - 0.5 * (place.bends * along**2).sum() + slack
            length = jnp.linalg.norm(along)
            is_good, is_poor = gained > 0.75 * expected, ~(gained > 0.25 * expected)
            further = jnp.where(is_good, jnp.maximum(radius, 2 * length), radius)
            is_first = number == 0
            place = lax.cond(is_first | (gained > 0.05 * expected), lambda: look(trial, number), lambda: place)
            return place, jnp.where(is_first, radius, jnp.where(is_poor, length / 4, further)), number + 1

        # the first step goes nowhere, so that looking at a place is compiled once
        nowhere = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(look, start, 0))
        nowhere = nowhere._replace(numbers=start, bends=nowhere.bends - 1.0)
        state = (nowhere, jnp.full_like(nowhere.bends[0], FIRST_RADIUS), jnp.array(0))
        place, _, number = lax.while_loop(unfinished, step, state)
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
        exact = self._curvature(found.mean, found.precision, held, items, mask)
        is_concave = jnp.isfinite(jnp.linalg.cholesky(exact)).all()
        metric = lax.stop_gradient(jnp.where(is_concave, exact, found.precision))
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
