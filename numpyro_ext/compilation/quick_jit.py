"""Compilation in less time, for programs whose compilation takes longer than what they compute."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# The generator of code for fused operations that XLA has beside its older one takes most of the time of small programs,
# for code that is no faster. Code in many parts, to be compiled side by side, takes a tenth longer, on two cores too.
_SIMPLE: dict[str, bool | int] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 1,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# The newer one takes sums by index in half the time.
_OF_SUMS: dict[str, bool | int] = {"xla_backend_optimization_level": 1}
# Three times as fast again, for code that takes three times as long.
_PLAIN = _SIMPLE | {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_LEAN = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def quick_jit(
    function: Callable[_Arguments, _Result],
    *,
    is_small: bool = False,
    is_lean: bool = False,
    adds_much: bool = False,
    **options: Any,
) -> Callable[_Arguments, _Result]:
    """``jax.jit`` that spends less time on optimisation, on CPUs; elsewhere it is ``jax.jit`` itself.

    What it returns cannot be called within another ``jit``, like all functions with options for the compiler.

    :param function: to be compiled.
    :param bool is_small: whether its arrays are so small, or its calls so few, that the time to run it does not matter.
    :param bool is_lean: whether to compute one thing after the other, for functions that see all observations at once:
        by default whatever is ready is started, so that large intermediate arrays which could share their memory exist
        together.
    :param bool adds_much: whether much of the time goes into sums by index (``x.at[...].add``).
    :param options: for ``jax.jit``.

    >>> quick_jit(lambda x: x + 1.0, is_small=True)(1.0).item()
    2.0
    """
    if jax.default_backend() != "cpu":
        return jax.jit(function, **options)
    chosen = (_PLAIN if is_small else _OF_SUMS if adds_much else _SIMPLE) | (_LEAN if is_lean else {})
    known = _known(tuple((_PLAIN | _LEAN).items()))  # asked once for all
    return jax.jit(function, compiler_options={name: chosen[name] for name in chosen if name in known}, **options)


def holds_little(tree: object, most_numbers: int = 100_000) -> bool:
    """True if the arrays of a tree are so small that a single pass over them takes next to no time.

    :param tree: of arrays, or of their shapes.
    :param int most_numbers: that they may hold.

    >>> holds_little({"a": jax.ShapeDtypeStruct((2, 3), float), "b": 1.0}), holds_little([jax.numpy.ones(3)], 2)
    (True, False)
    """
    return sum(math.prod(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(tree)) <= most_numbers


@functools.cache
def _known(options: tuple[tuple[str, object], ...]) -> frozenset[str]:
    """Names of those options of the compiler that this version of XLA has: later ones drop some."""
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError:
        return frozenset().union(*(_known((option,)) for option in options)) if len(options) > 1 else frozenset()
    return frozenset(name for name, _ in options)
