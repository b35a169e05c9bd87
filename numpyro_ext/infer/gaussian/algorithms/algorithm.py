"""Base of the algorithms on Gaussian fields, which the programs around them call."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import jax
from jax import Array

from ....compilation.pytree import PyTree
from ....structure.latent_gaussian.form import LatentGaussian
from ...front.options import option_key
from .fit_info import FitInfo

NearForms = Callable[[LatentGaussian], LatentGaussian]
"""Function that gives a form near another one factors that cost little."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """An algorithm on a :class:`~numpyro_ext.structure.LatentGaussian`, a value that is its options.

    A subclass is a frozen dataclass with its options as fields. Its methods are functions of arrays and of these
    fields alone: algorithms of one class with equal fields are equal, and equal ones share compiled programs. Fields
    that are lists, arrays or tables are equal by what they hold.

    >>> from dataclasses import dataclass
    >>> from numpyro_ext.infer import Laplace
    >>> @dataclass(frozen=True)
    ... class Penalised(Laplace):
    ...     penalty: float = 0.0
    ...
    ...     def log_evidence(self, form, state):
    ...         return super().log_evidence(form, state) - self.penalty
    >>> Penalised(1.0) == Penalised(1.0), Penalised(1.0) == Penalised(2.0), Penalised() == Laplace()
    (True, False, False)
    """

    def __new__(cls, *args: object, **kwargs: object) -> Algorithm:
        if cls is not Algorithm:
            return super().__new__(cls)
        _warn_of_functions("Algorithm(init=..., solve=..., ...)")
        return super().__new__(GivenFunctions)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # The decorator writes both where a class has none: it would take 1 for True, and refuse lists and arrays.
        if "__eq__" not in vars(cls):
            cls.__eq__, cls.__hash__ = Algorithm.__eq__, Algorithm.__hash__  # type: ignore[method-assign]

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> Hashable:
        """Class and fields: equal for equal algorithms.

        :raises TypeError: if the algorithm holds something that is no field.
        """
        return type(self), self._options

    @property
    def _options(self) -> tuple[Hashable, ...]:
        names = [field.name for field in fields(self)]
        for name in vars(self):
            if name not in names and not isinstance(getattr(type(self), name, None), cached_property):
                raise TypeError(
                    f"{type(self).__name__} holds {name!r}, which is no field, so that algorithms that differ in it "
                    "would share programs: write @dataclass(frozen=True) above the class, and its options as fields."
                )
        return tuple((field.name, option_key(getattr(self, field.name))) for field in fields(self) if field.compare)

    @property
    def state_key(self) -> Hashable:
        """Name and fields by which files know the states of this algorithm."""
        former = self._former_key()
        if former is not None and type(self).__module__.startswith("numpyro_ext."):
            return former
        return _in_files((type(self), self._options))

    def _former_key(self) -> Hashable | None:
        """Key of states in files of releases that had other names, which subclasses of users do not share."""
        return None

    # The algorithm

    @abstractmethod
    def init(self, form: LatentGaussian) -> Any:
        """State to start from."""

    @abstractmethod
    def solve(self, form: LatentGaussian, state: Any, *, num_steps: int, tol: float) -> tuple[Any, FitInfo]:
        """Go on from a state until it changes by less than ``tol``, for ``num_steps`` at most.

        :return: the last state, and how the fit ended.
        """

    @abstractmethod
    def log_evidence(self, form: LatentGaussian, state: PyTree) -> Array:
        """Log evidence at the end of a fit; its gradient in the form, the state held, is that of the objective."""

    solved_evidence: ClassVar[Callable[..., Array] | None] = None
    """The function ``log_evidence`` whose value :meth:`solve` leaves in its info. A class below that has another one is
    asked for its own."""

    @abstractmethod
    def posterior(self, form: LatentGaussian, state: Any) -> Any:
        """Gaussian approximation of the unknowns."""

    # Further knowledge, which an algorithm may have
    sums_over_blocks: ClassVar[bool] = False
    """True if its log evidence is a sum over independent blocks, which is known by their scores."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the treatment of this model, one line each, for ``describe()``."""
        return ()

    @property
    def is_lower_bound(self) -> bool:
        """True if its log evidence cannot exceed the exact one."""
        return False

    @property
    def is_exact_for_gaussian(self) -> bool:
        """True if it finds the exact evidence and posterior where all factors are Gaussian."""
        return False

    @property
    def is_mode(self) -> bool:
        """True if its means are those of the mode, which third derivatives there may say is no mean."""
        return False

    @property
    def has_cavities(self) -> bool:
        """True if the tilted densities of its sites say how skewed the posterior is."""
        return False

    @property
    def sees_all_modes(self) -> bool:
        """True if its posterior follows factors of several modes, so that these need no warning."""
        return False

    @property
    def has_local_factors(self) -> bool:
        """True if :meth:`localised` may know of any."""
        return False

    def localised(self, form: LatentGaussian, state: PyTree) -> NearForms | None:
        """Function that gives forms near this one, at a fixed point, factors that cost little and have the same first
        and second derivatives, if the algorithm knows of any; see :mod:`.local_factors`."""
        return None

    def numbers_in_evaluation(self, form: LatentGaussian) -> int | None:
        """Numbers that one evaluation of the log evidence passes over, if it does little else; ``None`` where it solves
        for a field. The form has shapes alone."""
        return None

    def has_long_sweeps(self, form: LatentGaussian) -> bool:
        """True if a sweep is so long to compile that it has a program of its own, where that is optimised and the rest
        is not: gradients and marginals take little work, once for each fit. The form has shapes alone."""
        return False

    def in_brief(self, form: LatentGaussian) -> LatentGaussian | None:
        """The form with factors that take less time to compile, if the algorithm knows of any whose fits say where they
        do not serve: by factors that kept their old values, or an objective or a gradient that is no number. The form
        itself is asked there."""
        return None

    @property
    def has_second_derivatives(self) -> bool:
        """True if it knows :meth:`complete_derivatives` and :meth:`missing_derivatives`."""
        return False

    def second_derivatives(
        self, form_fn: Callable[[Array], LatentGaussian], values: Array, state: PyTree, *, is_rough: bool | Array
    ) -> tuple[Array, Array]:
        """Second derivatives of the log evidence by hyperparameters at a fit of the field, as the sum of two arrays of
        shape ``(d, d)``: those with the unknowns known, and what is lost as they are not.

        :param form_fn: form at unconstrained hyperparameters.
        :param values: these, shape ``(d,)``.
        :param state: of the fit there.
        :param is_rough: whether an estimate will do, as a metric for searches; one program serves both.
        :raises NotImplementedError: if the algorithm does not say.
        """
        form = form_fn(values)
        held = self.solve_and_hold(form, state, num_steps=1, tol=1.0)[2]
        complete, slopes = self.complete_derivatives(form_fn, values, state, held)
        return complete, self.missing_derivatives(form, state, held, slopes, is_rough=is_rough)

    def block_curvature(self, form_fn: Any, values: Array, state: PyTree) -> tuple[Array, Array] | None:
        """The two arrays of :meth:`second_derivatives` for small independent blocks, if the algorithm knows them."""
        return None

    def complete_derivatives(
        self, form_fn: Callable[[Array], LatentGaussian], values: Array, state: PyTree, held: Any
    ) -> tuple[Array, Any]:
        """The first of the two arrays of :meth:`second_derivatives`, and what the second is made from.

        :param held: of :meth:`solve_and_hold` there.
        """
        raise NotImplementedError(f"{type(self).__name__} takes differences of gradients for second derivatives.")

    def missing_derivatives(
        self, form: LatentGaussian, state: PyTree, held: Any, slopes: Any, *, is_rough: bool | Array
    ) -> Array:
        """The second of the two arrays, from what the first was made with: a pass over all observations."""
        raise NotImplementedError(f"{type(self).__name__} takes differences of gradients for second derivatives.")

    def update(self, form: LatentGaussian, precision: Array, shift: Array) -> tuple[Array, Array]:
        """Precisions and shifts after one smooth step, whose fixed point is that of the algorithm. Derivatives of a fit
        are those of this fixed point.

        :raises NotImplementedError: if the algorithm does not say.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say of what its sites are a fixed point (Algorithm.update), so that its "
            "fits have no derivative. EP, LaplaceApproximation and VariationalGaussian do."
        )

    def approach(self, form: LatentGaussian, state: Any) -> Any:
        """State nearer to the fixed point, from that of almost the same data, for :meth:`solve` to go on from; the
        same one if the algorithm knows of nothing quicker than its own steps."""
        return state

    def solve_and_hold(self, form: LatentGaussian, state: Any, *, num_steps: int, tol: float) -> Any:
        """:meth:`solve`, and what it has made at its end and others would make again, such as a factorisation."""
        return *self.solve(form, state, num_steps=num_steps, tol=tol), None

    def solve_above(self, form: LatentGaussian, state: Any, floor: Any, *, num_steps: int, tol: float) -> Any:
        """:meth:`solve_and_hold`, which may end early where the log evidence is seen to be below a floor."""
        return self.solve_and_hold(form, state, num_steps=num_steps, tol=tol)

    def held_evidence(self, form: LatentGaussian, state: PyTree, held: Any) -> Array:
        """:meth:`log_evidence` at the end of a fit, with what that holds; of this the gradient takes no account."""
        return self.log_evidence(form, state)

    def held_posterior(self, form: LatentGaussian, state: PyTree, held: Any) -> Any:
        """:meth:`posterior` at the end of a fit, with what that holds."""
        return self.posterior(form, state)

    def fit(self, form: LatentGaussian, state: Any = None, *, num_steps: int, tol: float) -> tuple[Any, FitInfo, Array]:
        """Fit the field of a form: the state, how the fit ended, and the log evidence there.

        :param LatentGaussian form: at given hyperparameters.
        :param state: where to start; by default where the algorithm itself does.
        :param int num_steps: at most.
        :param float tol: at which the algorithm stops.
        """
        state, info = self.solve(form, self.init(form) if state is None else state, num_steps=num_steps, tol=tol)
        known = self.known_evidence(info)
        return state, info, self.log_evidence(form, state) if known is None else known

    def known_evidence(self, info: FitInfo) -> Array | None:
        """Log evidence that :meth:`solve` had at hand, or ``None`` where :meth:`log_evidence` is to be asked."""
        return info.objective if type(self).log_evidence is type(self).solved_evidence else None

    def with_own_options(self) -> Self:
        """The same algorithm, with copies of lists and arrays, which others may change in place."""
        found = copy.copy(self)
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                hash(value)
            except TypeError:
                object.__setattr__(found, field.name, copy.deepcopy(value))
        return found

    def _replace(self, **changes: object) -> GivenFunctions:
        """The algorithm with other functions, as it was written before algorithms had fields."""
        _warn_of_functions("algorithm._replace(...)")
        parts: dict[str, Any] = {name: getattr(self, name) for name in _Functions._fields} | {"key": self.state_key}
        if not self.has_local_factors:
            parts["localised"] = None
        return GivenFunctions(**(parts | changes))


def _in_files(key: object) -> Hashable:
    """A key in text and numbers; functions and objects are known by these in this process alone."""
    if isinstance(key, tuple):
        return tuple(map(_in_files, key))
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, jax.tree_util.PyTreeDef):
        return str(key)
    return key if isinstance(key, bool | int | float | str | bytes | None) else hash(key)


def _warn_of_functions(call: str) -> None:
    warnings.warn(
        f"{call} will go: write a frozen dataclass below Algorithm, or below the class of another algorithm, with "
        "options as fields and functions as methods, as docs/extending/new_engine.py does. An algorithm made of "
        "functions shares compiled programs with no other, so that every run compiles its own.",
        FutureWarning,
        stacklevel=3,
    )


class _Functions(NamedTuple):
    init: Callable[..., Any]
    solve: Callable[..., Any]
    log_evidence: Callable[..., Any]
    posterior: Callable[..., Any]
    key: Hashable
    notes: tuple[str, ...] = ()
    is_lower_bound: bool = False
    is_exact_for_gaussian: bool = False
    is_mode: bool = False
    localised: Callable[..., Any] | None = None
    update: Callable[..., Any] | None = None
    approach: Callable[..., Any] | None = None
    state_key: Hashable = None


class GivenFunctions(Algorithm):
    """An algorithm of functions that are given one by one, equal to itself alone.

    Nothing is known of what these functions depend on. Arguments are the methods and properties of :class:`Algorithm`
    by name, and ``key``, by which files know its states.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, *functions: Any, **named: Any) -> None:
        vars(self)["_functions"] = _Functions(*functions, **named)

    _functions: _Functions

    def __repr__(self) -> str:
        return f"Algorithm(key={self.key!r})"

    @property
    def key(self) -> Hashable:
        """The key that was given, which equal algorithms need not have."""
        return self._functions.key

    @property
    def state_key(self) -> Hashable:
        return self._functions.state_key

    def _replace(self, **changes: Any) -> GivenFunctions:
        _warn_of_functions("algorithm._replace(...)")
        return GivenFunctions(**self._functions._replace(**changes)._asdict())

    def of_engine(self, engine: type, options: tuple[Hashable, ...]) -> GivenFunctions:
        """The same functions, whose states are known by the class of the engine and its options as well."""
        state_key = _in_files((self.key, engine, options))
        return GivenFunctions(**self._functions._replace(state_key=state_key)._asdict())

    def init(self, form: LatentGaussian) -> Any:
        return self._functions.init(form)

    def solve(self, form: LatentGaussian, state: Any, **options: Any) -> tuple[Any, FitInfo]:
        return self._functions.solve(form, state, **options)

    def log_evidence(self, form: LatentGaussian, state: PyTree) -> Array:
        return self._functions.log_evidence(form, state)

    def posterior(self, form: LatentGaussian, state: Any) -> Any:
        return self._functions.posterior(form, state)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._functions.notes

    @property
    def is_lower_bound(self) -> bool:
        return self._functions.is_lower_bound

    @property
    def is_exact_for_gaussian(self) -> bool:
        return self._functions.is_exact_for_gaussian

    @property
    def is_mode(self) -> bool:
        return self._functions.is_mode

    @property
    def has_local_factors(self) -> bool:
        return self._functions.localised is not None

    def localised(self, form: LatentGaussian, state: PyTree) -> NearForms | None:
        return None if self._functions.localised is None else self._functions.localised(form, state)

    def update(self, form: LatentGaussian, precision: Array, shift: Array) -> tuple[Array, Array]:
        return (self._functions.update or super().update)(form, precision, shift)

    def approach(self, form: LatentGaussian, state: Any) -> Any:
        return state if self._functions.approach is None else self._functions.approach(form, state)
