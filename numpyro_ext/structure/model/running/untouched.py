"""NumPyro's log density of a model that is called as it is, with nothing of this package between the two."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.typing import DTypeLike
from numpyro import handlers
from numpyro.distributions.constraints import is_dependent
from numpyro.infer.util import compute_log_probs

from ....compilation.quick_jit import holds_little, quick_jit
from ..equivalent import rounding_of_density
from .execution import ModelCall

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.UnexpectedTracerError,
    TypeError,
)


class UntouchedDensities(NamedTuple):
    """Log densities by NumPyro alone, and how far they can be trusted."""

    values: np.ndarray
    """At each point."""
    errors: np.ndarray
    """Bounds on the error of what NumPyro computes with few digits, infinite where it has none."""
    dtype: DTypeLike
    """The least precise floating dtype among distributions and values."""


def untouched_log_densities(
    call: ModelCall, points: Sequence[Mapping[str, object]], left_out: Collection[str]
) -> UntouchedDensities:
    """Log densities of a model at values of its sites, by ``numpyro.infer.util.log_density`` of the function itself.

    :func:`~numpyro.infer.util.log_density` is the sum of what is added here, but for the sites in ``left_out``. The
    only handlers are NumPyro's own: ``seed``, with the key of the call, and what substitutes the values. It is compiled
    as a whole, which takes a tenth of the time that its operations take one by one; a model that needs the values of
    its sites is run as Python.

    :param call: of the model.
    :param points: values of the latent and ``param`` sites at each point, those that are left out included.
    :param left_out: names of the sites whose own density is not counted, as it integrates to one.
    :return: one number for each point, of arrays of shape ``(points,)``.
    """
    dtypes: list[Any] = []

    def density(values: Mapping[str, object]) -> tuple[Array, Array]:
        terms, trace = compute_log_probs(handlers.seed(call.model, call.rng_key), call.args, call.kwargs, dict(values))
        dtypes[:] = [_working_dtype(trace, terms)]
        total = sum((term for name, term in terms.items() if name not in left_out), start=0.0)
        return jnp.asarray(total), _rounding(trace, left_out)

    points = [dict(values) for values in points]
    try:
        # What NumPyro would check of parameters that are traced, it computes and throws away, one program at a time.
        with numpyro.validation_enabled(False):
            closed = jax.make_jaxpr(density)(points[0])
    except _NEEDS_VALUES:
        found = [density(values) for values in points]
    else:
        # The data of a model are arguments of what is compiled: as constants they would take the compiler long.
        compiled = quick_jit(
            lambda data, *leaves: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, data))(*leaves),
            is_small=holds_little((closed.consts, points[0])),
            is_lean=True,
        )
        found = [compiled(closed.consts, *jax.tree.leaves(values)) for values in points]
    densities, errors = np.asarray(found, float).T
    return UntouchedDensities(densities, errors, dtypes[0])


def invalid_parameter(call: ModelCall, values: Mapping[str, object]) -> tuple[str, str] | None:
    """The first observed site with a parameter outside the range that NumPyro states for it, and a sentence on it.

    :param call: of the model.
    :param values: of its latent and ``param`` sites.
    """
    seeded = handlers.seed(call.model, call.rng_key)
    with numpyro.validation_enabled(False):
        trace = handlers.trace(handlers.substitute(seeded, data=dict(values))).get_trace(*call.args, **call.kwargs)
    for name, site in trace.items():
        base: Any = site["fn"] if site.get("is_observed") else None
        while hasattr(base, "base_dist"):
            base = base.base_dist
        for parameter, constraint in getattr(base, "arg_constraints", {}).items():
            value = getattr(base, parameter, None)
            if value is None or is_dependent(constraint):
                continue
            value = jnp.asarray(value)
            # Numbers that are none have other reasons, such as covariates.
            is_outside = np.atleast_1d(np.asarray(~constraint(value) & ~jnp.any(jnp.isnan(value))))
            if is_outside.any():
                number = int(is_outside.sum())
                where = f" in {number} place{'s' * (number > 1)}"
                if is_outside.shape == np.atleast_1d(value).shape:  # not of vectors and matrices as a whole
                    place = tuple(np.argwhere(is_outside)[0].tolist())
                    where += f"; the first is {np.atleast_1d(value)[place]} at index {place}"
                return name, (
                    f"parameter {parameter!r} of site {name!r} ({type(base).__name__}) is out of its range, "
                    f"{constraint},{where}"
                )
    return None


def _working_dtype(trace: Mapping[str, Any], names: Collection[str]) -> object:
    """The least precise dtype among distributions and values: a site of a few digits has no more in its density."""
    leaves = [leaf for name in names for part in ("fn", "value") for leaf in _leaves(trace[name][part])]
    found = [leaf.dtype for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray | np.generic)]
    reals = [dtype for dtype in found if jnp.issubdtype(dtype, np.floating)]
    # JAX computes functions of short integers, such as factorials, in single precision.
    is_short = any(jnp.issubdtype(dtype, np.integer) and dtype.itemsize < 4 for dtype in found)
    return min((jnp.result_type(float), *reals, *[np.dtype(np.float32)] * is_short), key=lambda d: jnp.finfo(d).bits)


def _leaves(tree: object) -> list[object]:
    try:
        return jax.tree.leaves(tree)
    except (TypeError, ValueError):  # of a distribution that cannot be taken apart, as tinygp's
        return []


def _rounding(trace: Mapping[str, Any], left_out: Collection[str]) -> Array:
    total = jnp.zeros(())
    for name, site in trace.items():
        if site["type"] == "sample" and site["is_observed"] and name not in left_out:
            bound = rounding_of_density(site["fn"], site["value"])
            if bound is not None:
                scale = 1.0 if site["scale"] is None else jnp.max(jnp.asarray(site["scale"]))
                shape = np.broadcast_shapes(jnp.shape(bound), site["fn"].shape(), np.shape(site["value"]))
                total = total + scale * jnp.sum(bound) * (math.prod(shape) / max(math.prod(jnp.shape(bound)), 1))
    return total
