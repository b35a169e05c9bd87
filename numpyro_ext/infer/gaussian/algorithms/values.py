"""Expectation propagation and Laplace's method as values: the options, with the functions that take them as methods."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from jax import Array
from jax.typing import ArrayLike

from ....potentials.vector_rows import has_vector_factors, in_brief
from ....structure.latent_gaussian import LatentGaussian
from .algorithm import Algorithm, NearForms
from .fit_info import FitInfo
from .modes import laplace
from .modes.mode_derivative import HeldPosterior
from .posterior import GaussianPosterior
from .propagation import block_curvature, expectation_propagation, local_factors
from .propagation.expectation_propagation import Schedule

_Sites = tuple[Array, Array]


@dataclass(frozen=True)
class ExpectationPropagation(Algorithm):
    """Expectation propagation (Minka 2001), the algorithm of :class:`~numpyro_ext.infer.EP`.

    :param float damping: fraction of the old natural parameters that is kept, in ``[0, 1)``.
    :param bool adapt_damping: whether to damp more where successive sweeps undo each other without dying out.
    :param float power: fraction of a factor that is replaced at a time, ``1`` for EP; below one, fractional EP.
    :param str schedule: ``"parallel"`` or ``"sequential"``.
    :raises ValueError: if an option is unknown or out of range.

    >>> ExpectationPropagation(power=0.5)
    ExpectationPropagation(damping=0.0, adapt_damping=True, power=0.5, schedule='parallel')
    """

    damping: float = 0.0
    adapt_damping: bool = True
    power: float = 1.0
    schedule: Schedule = "parallel"

    sums_over_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.damping < 1.0:
            raise ValueError(f"damping is the fraction of the old site that is kept, in [0, 1); got {self.damping!r}.")
        if not 0.0 < self.power <= 1.0:
            raise ValueError(f"power must be in (0, 1], got {self.power!r}.")
        if self.schedule not in ("parallel", "sequential"):
            raise ValueError(f"schedule must be 'parallel' or 'sequential', got {self.schedule!r}.")

    @property
    def is_exact_for_gaussian(self) -> bool:
        return True

    @property
    def has_cavities(self) -> bool:
        return self.power == 1.0

    @property
    def has_local_factors(self) -> bool:
        return True

    def _former_key(self) -> Hashable:
        return "EP", self.damping, self.adapt_damping, self.power, self.schedule

    def init(self, form: LatentGaussian) -> expectation_propagation.State:
        return expectation_propagation.init(form)

    def solve(
        self, form: LatentGaussian, state: expectation_propagation.State, *, num_steps: int, tol: float
    ) -> tuple[expectation_propagation.State, FitInfo]:
        return self._solve(form, state, num_steps, tol)[:2]

    def _solve(
        self,
        form: LatentGaussian,
        state: expectation_propagation.State,
        num_steps: int,
        tol: float,
        floor: ArrayLike | None = None,
    ) -> tuple[expectation_propagation.State, FitInfo, HeldPosterior | None]:
        return expectation_propagation.solve_and_hold(
            form,
            state,
            num_steps=num_steps,
            tol=tol,
            damping=self.damping,
            adapt_damping=self.adapt_damping,
            power=self.power,
            schedule=self.schedule,
            floor=floor,
        )

    def log_evidence(self, form: LatentGaussian, state: expectation_propagation.State) -> Array:
        return expectation_propagation.log_evidence(form, state, power=self.power)

    solved_evidence = log_evidence

    def posterior(self, form: LatentGaussian, state: expectation_propagation.State) -> GaussianPosterior:
        return expectation_propagation.posterior(form, state)

    def solve_and_hold(
        self, form: LatentGaussian, state: expectation_propagation.State, *, num_steps: int, tol: float
    ) -> tuple[expectation_propagation.State, FitInfo, HeldPosterior | None]:
        if not _holds(self, ExpectationPropagation):
            return super().solve_and_hold(form, state, num_steps=num_steps, tol=tol)
        return self._solve(form, state, num_steps, tol)

    def solve_above(
        self,
        form: LatentGaussian,
        state: expectation_propagation.State,
        floor: ArrayLike,
        *,
        num_steps: int,
        tol: float,
    ) -> tuple[expectation_propagation.State, FitInfo, HeldPosterior | None]:
        own = ExpectationPropagation
        if not _holds(self, own) or type(self).solve_and_hold is not own.solve_and_hold:
            return super().solve_above(form, state, floor, num_steps=num_steps, tol=tol)
        return self._solve(form, state, num_steps, tol, floor)

    def held_evidence(
        self, form: LatentGaussian, state: expectation_propagation.State, held: HeldPosterior | None
    ) -> Array:
        if held is None:
            return self.log_evidence(form, state)
        return expectation_propagation.log_evidence(form, state, power=self.power, held=(held, state.marginals))

    def held_posterior(
        self, form: LatentGaussian, state: expectation_propagation.State, held: HeldPosterior | None
    ) -> GaussianPosterior:
        return replace(self.posterior(form, state), held=held)

    def has_long_sweeps(self, form: LatentGaussian) -> bool:
        return has_vector_factors(form.potentials)

    def in_brief(self, form: LatentGaussian) -> LatentGaussian | None:
        brief = in_brief(form.potentials) if _holds(self, ExpectationPropagation) else None
        return None if brief is None else form._replace(potentials=brief)

    def localised(self, form: LatentGaussian, state: expectation_propagation.State) -> NearForms | None:
        return local_factors.localised(form, state, power=self.power)

    def block_curvature(
        self, form_fn: Callable[[Array], LatentGaussian], values: Array, state: expectation_propagation.State
    ) -> tuple[Array, Array] | None:
        is_own = _holds(self, ExpectationPropagation) and self.power == 1.0
        if not is_own or not block_curvature.has_block_curvature(form_fn(values), values.size):
            return None
        return block_curvature.block_curvature(form_fn, values, state)

    def update(self, form: LatentGaussian, precision: Array, shift: Array) -> _Sites:
        return expectation_propagation.update(form, precision, shift, power=self.power)

    def approach(self, form: LatentGaussian, state: expectation_propagation.State) -> expectation_propagation.State:
        return expectation_propagation.approach(form, state, power=self.power)


@dataclass(frozen=True)
class Laplace(Algorithm):
    """Laplace's method, the algorithm of :class:`~numpyro_ext.infer.LaplaceApproximation`; it has no options.

    >>> Laplace() == Laplace()
    True
    """

    sums_over_blocks: ClassVar[bool] = True

    @property
    def is_exact_for_gaussian(self) -> bool:
        return True

    @property
    def is_mode(self) -> bool:
        return True

    def _former_key(self) -> Hashable:
        return ("LaplaceApproximation",)

    def init(self, form: LatentGaussian) -> laplace.State:
        return laplace.init(form)

    def solve(
        self, form: LatentGaussian, state: laplace.State, *, num_steps: int, tol: float
    ) -> tuple[laplace.State, FitInfo]:
        return laplace.solve(form, state, num_steps=num_steps, tol=tol)

    def log_evidence(self, form: LatentGaussian, state: laplace.State) -> Array:
        return laplace.log_evidence(form, state)

    solved_evidence = log_evidence

    def posterior(self, form: LatentGaussian, state: laplace.State) -> GaussianPosterior:
        return laplace.posterior(form, state)

    def solve_and_hold(
        self, form: LatentGaussian, state: laplace.State, *, num_steps: int, tol: float
    ) -> tuple[laplace.State, FitInfo, HeldPosterior | None]:
        if not _holds(self, Laplace):
            return super().solve_and_hold(form, state, num_steps=num_steps, tol=tol)
        return laplace.solve_and_hold(form, state, num_steps=num_steps, tol=tol)

    def held_evidence(self, form: LatentGaussian, state: laplace.State, held: HeldPosterior | None) -> Array:
        return self.log_evidence(form, state) if held is None else laplace.log_evidence(form, state, held=held)

    def held_posterior(
        self, form: LatentGaussian, state: laplace.State, held: HeldPosterior | None
    ) -> GaussianPosterior:
        return replace(self.posterior(form, state), held=held)

    def update(self, form: LatentGaussian, precision: Array, shift: Array) -> _Sites:
        return laplace.update(form, precision, shift)


def _holds(algorithm: Algorithm, own: type[Algorithm]) -> bool:
    """True if this is the method itself, and not a class of users below it that solves in another way."""
    return all(getattr(type(algorithm), name) is getattr(own, name) for name in ("solve", "log_evidence", "posterior"))
