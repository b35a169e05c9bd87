"""Posteriors of people given the parameters that all share: the modes of their latent numbers, and evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.handlers import seed, substitute, trace

from ..local_sites import InBatch, personal_site
from ..program import Program
from ..scoring import logits_of, of_each, seen_in
from ..setting import Setting
from .bending import weighted_bending
from .peaks import Peaks
from .person import Person
from .search import Place, beside, chosen, repeated
from .spread import spread_points

_PROBES = 5
_DRAWS_AT_ONCE = 16
_MOST_SEARCHES = 5
"""Searches for one mode, each with a look at the curvature before."""
_MOST_CELLS = 2**17
"""Probabilities, or tangents of these, of people side by side."""
_MOST_SIDE_BY_SIDE = 64
_PEOPLE_AT_ONCE = 1024
_SHORTEST = 16
"""Events that shorter histories are padded to, as each length is a program."""
_FEW = 64
"""Number of people for whom no program of their own is worth its compilation."""


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


class _Searches(NamedTuple):
    """Searches for the modes of some people, between two looks at their curvatures."""

    who: Array
    """Person in each row."""
    mode: Mode
    """Numbers that each has reached, and the Gaussian where the last look was."""
    is_done: Array
    """True if the last look was at the end."""
    number: Array
    """Looks so far."""


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
    is_stepwise: bool
    """True if events one by one have the logits of all together, and second derivatives that are finite."""

    def __init__(self, program: Program, given: Given, caller: str) -> None:
        self.program = program
        self._look_at_site(given, caller)
        self.find = jax.jit(self._modes, static_argnums=(5, 6))
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

    def look_at_steps(self, given: Given) -> None:
        """Find out if events can be taken one by one, before :meth:`evidence` is asked for."""
        self.is_stepwise = float(jax.jit(self._gap_of_steps)(given)) <= 1e-4

    def _look_at_site(self, given: Given, caller: str) -> None:
        """Find the latent site."""

        @jax.jit
        def gap_of(given: Given) -> Array:
            """Log density of the site at some numbers, less that of standard normal ones."""
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
            return log_prob + 0.5 * (probe**2 + jnp.log(2 * jnp.pi)).sum()

        if not abs(gap_of(given)) <= 1e-4 * max(self.size, 1):
            raise ValueError(
                f"{caller}: the site {self.name!r} must be standard normal. Write sums and scales of it in the model."
            )

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
        sites, _ = self._trace(given, self._values(numbers), items, mask)
        return jnp.where(mask, seen_in(sites).log_prob(items[None])[0], 0.0).sum() - 0.5 * (numbers**2).sum()

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
        """Gaussian at the mode.

        :param start: latent numbers to begin at, shape ``(K,)``.
        :param items: of one person, padded, shape ``(steps,)``.
        :param length: number of events.
        """
        found = self._modes(given, start[None], items[None], length[None], jnp.array(1), 1, 1)
        return jax.tree.map(lambda x: x[0], found)

    def _modes(
        self,
        given: Given,
        starts: Array,
        items: Array,
        lengths: Array,
        number: Array,
        num_lanes: int,
        num_looks: int,
    ) -> Mode:
        """Gaussians at modes, which slopes alone lead to from a look at the Gauss-Newton curvature.

        :param number: of people, from the first.
        :param num_lanes: people whose searches are side by side.
        :param num_looks: people whose curvatures are taken side by side, a divisor of the rows of ``items``.
        """
        masks = jnp.arange(items.shape[1]) < lengths[:, None]
        rows, dtype = jnp.arange(len(items)), starts.dtype
        zero, square = jnp.zeros(len(items), dtype), jnp.zeros((*starts.shape, self.size), dtype)
        places = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(jax.vmap(Place.first), starts, zero, starts, square)
        )

        def look(numbers: Array, who: Array) -> tuple[Place, Array, Array]:
            at = self._slopes(numbers, given, items[who], masks[who])
            return Place.first(numbers, at.value, at.gradient, at.precision), at.precision, _evidence(at)

        def turn(searches: _Searches) -> _Searches:
            # in front those who move, behind them those who are looked at for the last time
            order = jnp.argsort(jnp.where(searches.is_done, 2, searches.mode.converged))
            who, mode, is_done = jax.tree.map(lambda x: x[order], searches[:3])
            num_active, num_moving = (~is_done).sum(), (~is_done & ~mode.converged).sum()
            num_moving = jnp.where(searches.number < _MOST_SEARCHES, num_moving, 0)

            def body(block: Array, found: tuple[Place, Array, Array]) -> tuple[Place, Array, Array]:
                some = block * num_looks + jnp.arange(num_looks)
                new = beside(look, mode.mean[some], who[some])
                return jax.tree.map(lambda x, y: x.at[some].set(y), found, new)

            found, precision, evidence = lax.fori_loop(0, -(-num_active // num_looks), body, (places, square, zero))
            found = repeated(
                lambda place, at: place.stepped(
                    partial(self._density, given=given, items=items[who[at]], mask=masks[who[at]])
                ),
                lambda place: place.is_end,
                found,
                num_moving,
                num_lanes,
            )
            ended = jax.vmap(lambda place: place.distance <= place.tolerance)(found)
            new = Mode(found.numbers, precision, evidence, mode.num_steps + found.num_steps, mode.converged | ended)
            mode = chosen(rows < num_active, new, mode)
            return _Searches(who, mode, rows >= num_moving, searches.number + 1)

        mode = Mode(starts, square, zero, jnp.zeros_like(rows), jnp.zeros(len(items), bool))
        first = _Searches(rows, mode, rows >= number, jnp.array(0))
        last = lax.while_loop(lambda searches: ~searches.is_done.all(), turn, first)
        return jax.tree.map(lambda x: x[jnp.argsort(last.who)], last.mode)

    def evidence(self, given: Given, start: Array, items: Array, length: Array) -> tuple[Array, Mode]:
        """Laplace's approximation of the log probability of a person's events, with the whole gradient in ``given``.

        The search is not differentiated. A Newton step from its end moves nothing but has the slope of the mode in the
        parameters, by the implicit function theorem.
        """
        mask, held = jnp.arange(len(items)) < length, lax.stop_gradient(given)
        found = lax.stop_gradient(self.mode(held, lax.stop_gradient(start), items, length))
        exact = self._curvature(found.mean, found.precision, held, items, mask)
        is_concave = jnp.isfinite(jnp.linalg.cholesky(exact)).all()
        values, vectors = jnp.linalg.eigh(jnp.where(is_concave, exact, found.precision))
        least = jnp.where(is_concave, jnp.finfo(values.dtype).eps * values[-1], 1.0)
        axes = lax.stop_gradient(vectors / jnp.sqrt(jnp.maximum(values, least)))
        step = axes @ (axes.T @ jax.grad(self._density)(found.mean, given, items, mask))
        # where a search has not ended a step may lead anywhere: the evidence is that of its end
        numbers = found.mean + step - lax.stop_gradient(jnp.where(found.converged, 0.0, step))
        return _evidence(self._slopes(numbers, given, items, mask)), found

    def people(
        self,
        given: Given,
        histories: list[np.ndarray],
        dropped: list[int],
        num_starts: int = 1,
        most_cells: int = _MOST_CELLS,
    ) -> list[Person]:
        """Posteriors of people, of whom those of like length are padded alike, and searched for side by side.

        :param histories: items of each, all known.
        :param dropped: number of events of each that are left out.
        :param num_starts: points that searches for the modes of each begin at.
        :param most_cells: probabilities, or tangents of these, at once.
        """
        found: dict[int, Person] = {}
        sizes = np.array([_padded(len(history)) for history in histories])
        at_once = max(_PEOPLE_AT_ONCE // num_starts, 1)
        waiting: list[int] = []
        for size in np.unique(sizes):
            waiting += np.flatnonzero(sizes == size).tolist()
            if len(waiting) >= _FEW or size == sizes.max():
                for start in range(0, len(waiting), at_once):
                    who = waiting[start : start + at_once]
                    rows = self._padded_people(given, [histories[k] for k in who], size, num_starts, most_cells)
                    found |= {k: row(dropped[k]) for k, row in zip(who, rows, strict=True)}
                waiting = []
        return [found[k] for k in range(len(histories))]

    def _padded_people(
        self, given: Given, histories: list[np.ndarray], size: int, num_starts: int, most_cells: int
    ) -> list[Callable[[int], Person]]:
        """Posteriors of some people, given the numbers of events that are left out."""
        number = len(histories) * num_starts
        # for any number of people the same program
        rows = 1 if number == 1 else max(_PEOPLE_AT_ONCE, num_starts)
        items, lengths = np.zeros((rows, size), np.int32), np.zeros(rows, int)
        for k, history in enumerate(histories):
            own = slice(k * num_starts, (k + 1) * num_starts)
            items[own, : len(history)], lengths[own] = history, len(history)
        starts = np.zeros((rows, self.size))
        starts[:number] = np.tile(spread_points(num_starts, self.size), (len(histories), 1))
        cells = size * int(given.setting.constants.options["num_items"])
        lanes, looks = (_power_below(most_cells // one, rows) for one in (cells, self.size * cells))
        found = jax.tree.map(np.asarray, self.find(given, starts, items, lengths, number, lanes, looks))

        def person(k: int, gone: int) -> Person:
            own = slice(k * num_starts, (k + 1) * num_starts)
            ends = jax.tree.map(lambda x: x[own], found)

            def look(draws: Array) -> tuple[Array, Array]:
                return self.look(given, draws, items[own.start], lengths[own.start])

            modes, evidence = Peaks.of(ends.mean, ends.precision, ends.log_evidence, ends.converged)
            return Person(modes.means[0], modes.covariances[0], evidence, bool(ends.converged.any()), gone, look, modes)

        return [partial(person, k) for k in range(len(histories))]


def _padded(length: int) -> int:
    """Cells for a history and what comes next, of few sizes, as each is a program."""
    return int(max(2 ** int(length).bit_length(), _SHORTEST))


def _power_below(number: int, most: int) -> int:
    """Greatest power of two that is neither above a number nor above another or what pays."""
    return int(2 ** (int(min(max(number, 1), most, _MOST_SIDE_BY_SIDE)).bit_length() - 1))


def _of_own(values: Array, items: Array, mask: Array) -> Array:
    """Value of each event's own item, zero beyond the end, shape ``(steps,)``."""
    return jnp.where(mask, _at_own(values, items), 0.0)


def _at_own(values: Array, items: Array) -> Array:
    return jnp.take_along_axis(values, items[:, None], 1)[:, 0]


def _evidence(at: Slopes) -> Array:
    # no less than that of the prior, whatever rounding has made of it
    return at.value - 0.5 * jnp.log(jnp.maximum(jnp.linalg.eigvalsh(at.precision), 1.0)).sum()
