"""The search for the parameters of a forest: of a large one on a sample of its trees first, and in fresh units.

L-BFGS needs coordinates in which the evidence curves alike. Standard errors at the start are not those at the end: of
probabilities that go to zero they grow a hundredfold. So the search over many parameters begins anew in the standard
errors of where it has come to, and has ended where no derivative per standard error of that very place is left. Trees
are independent given the parameters, so a sample of them knows the parameters to a few standard errors of all, and most
of the way costs as much as in a small picture.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...front.results import HyperDiagnostics
from ...front.running.climbs import Climb
from ...front.running.learning import Learned, learn
from ...front.running.progress import progress_bar
from ...hyper.search import SearchState
from ...hyper.space import UnconstrainedSpace
from .programs import Searched, TreePrograms
from .propagation import Sample

LARGEST_CURVATURE = 20
"""Parameters whose curvature is computed where the search ends."""
_FIRST_PARTS, _GROWTH = 8, 4
"""Parts of a forest that are the first sample, and how many times as large the next one is."""
_FIRST_STEPS = 8
"""Steps after which the first units are replaced."""


class TreeSearch:
    """A search for the parameters of one model.

    :param TreePrograms programs: of its structure.
    :param Searched at: the data and where to start; units are found.
    :param UnconstrainedSpace space: of the parameters.
    :param state: of the sites, where the first fit starts.
    :param int max_steps: accepted steps of a search at most.
    :param bool progress_bar: whether to draw one.
    """

    def __init__(
        self,
        programs: TreePrograms,
        at: Searched,
        space: UnconstrainedSpace,
        state: object,
        *,
        max_steps: int,
        progress_bar: bool,
    ) -> None:
        self.programs, self.at, self.space, self.state = programs, at, space, state
        self.max_steps, self.progress_bar = max_steps, progress_bar
        self.with_curvature = space.size <= LARGEST_CURVATURE

    def run(self, rng_key: Array, *, is_resumed: bool = False) -> Learned | None:
        """Search, and return its end in the coordinates of ``self.at``; ``None`` where the evidence is not finite.

        :param rng_key: for the directions in which saddles are left.
        :param bool is_resumed: whether the start is an end of such a search: then there is no sample.
        """
        number = self.programs.num_parts
        if number == 1 or self.with_curvature:
            self.at = self.at._replace(units=self._units(self.at))
            return self._learn(rng_key, self.max_steps)
        size, first_steps = (number, self.max_steps) if is_resumed else (min(_FIRST_PARTS, number), _FIRST_STEPS)
        while True:
            self.at = self.at._replace(sample=self._sample(size))
            found = self._search(rng_key, min(first_steps, self.max_steps), self.max_steps)
            if found is None or size == number:
                return found
            if found.is_interrupted:
                break
            size, first_steps = min(_GROWTH * size, number), self.max_steps
        self.at = self.at._replace(sample=self._sample(number))
        whole = self._search(rng_key, 0, 0)  # one evaluation
        return None if whole is None else whole._replace(messages=found.messages, is_interrupted=True)

    def _search(self, rng_key: Array, first_steps: int, num_steps: int) -> Learned | None:
        """In fresh units again and again, until the derivatives are small in those of the very place.

        :param int first_steps: accepted steps in the first units, at most.
        :param int num_steps: altogether.
        """
        self.at = self.at._replace(units=self._units(self.at))
        found = self._learn(rng_key, first_steps)
        done: list[HyperDiagnostics] = []
        while found is not None:
            done.append(found.diagnostics)
            left = num_steps - sum(part.num_iterations for part in done)
            old, best = self.at, found.search.best
            self.at = old._replace(origin=old.origin + old.units * found.search.values)
            self.at = self.at._replace(units=self._units(self.at))
            best = best._replace(gradient=best.gradient * self.at.units / old.units)
            largest = float(jnp.max(jnp.abs(best.gradient)))
            converged = done[-1].converged and largest <= self.programs.options.hyper_tol
            if converged or left <= 0 or done[-1].num_iterations == 0 or found.is_interrupted:
                diagnostics = HyperDiagnostics(
                    converged=converged,
                    num_iterations=num_steps - left,
                    num_evaluations=sum(part.num_evaluations for part in done),
                    objective_trace=np.concatenate([part.objective_trace for part in done]),
                    max_gradient=largest,
                )
                search = found.search._replace(values=jnp.zeros_like(self.at.origin), best=best)
                return found._replace(search=search, diagnostics=diagnostics)
            found = self._learn(rng_key, left)
        return None

    def _sample(self, num_parts: int) -> Sample:
        share = num_parts / self.programs.num_parts
        return Sample(jnp.asarray(num_parts, jnp.int32), jnp.asarray(share, self.at.origin.dtype))

    def _units(self, at: Searched) -> Array:
        """Units of the coordinates where they are finite; for a sample they are measured on the first one."""
        some = None if at.sample is None else self._sample(min(_FIRST_PARTS, self.programs.num_parts))
        units = self.programs.units(at, self.state, some)
        return units if bool(jnp.all(jnp.isfinite(units))) else at.units

    def _learn(self, rng_key: Array, max_steps: int) -> Learned | None:
        programs, at = self.programs, self.at

        def begin(x: Array, state: object) -> SearchState:
            return programs.init_search(at, self.with_curvature, x, self.state if state is None else state)

        climb = Climb(
            begin=begin,
            advance=partial(programs.search, at),
            space=self.space,
            origin=at.origin,
            units=at.units,
            tol=programs.options.hyper_tol,
            max_steps=max_steps,
            with_curvature=self.with_curvature,
        )
        label = "EP" if at.sample is None or at.sample.share == 1.0 else f"EP, {at.sample.share:.2%} of the trees"
        with progress_bar(None, label, unit="steps", enabled=self.progress_bar) as bar:
            return learn(climb, [jnp.zeros_like(at.origin)], rng_key, bar=bar)
