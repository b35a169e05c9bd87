"""Sites in the plain form that a reading takes, however they are written: ``Normal(0, 1)``, ``sample_shape``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import DTypeLike
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.distributions.util import sum_rightmost
from numpyro.primitives import Messenger

from ...errors import ModelStructureError, Reason
from ..equivalent import as_gaussian, with_exact_density
from ..priors import unwrap
from .messages import Message

# distributions that keep what they computed from their parameters
_DERIVED: dict[type, tuple[str, ...]] = {
    dist.LowRankMultivariateNormal: ("loc", "cov_factor", "cov_diag"),
    dist.OrderedLogistic: ("predictor", "cutpoints"),
}


def is_scan(msg: Mapping[str, object]) -> bool:
    """True if a message is ``numpyro.contrib.control_flow.scan``, whose body runs out of sight of other handlers."""
    return msg["type"] == "control_flow" and msg["fn"] is scan_wrapper


def to_real(value: object) -> Any:
    """Numbers in the floating dtype of the reading (that of ``jnp.result_type(float)``); others are left as they are.

    :param value: an array, a number, or a tree of these.
    """

    def convert(leaf: object) -> object:
        if isinstance(leaf, bool | int | float):
            return float(leaf)
        is_number = isinstance(leaf, jax.Array | np.ndarray | np.generic) and _is_real(leaf.dtype)
        return jnp.asarray(leaf, jnp.result_type(float)) if is_number else leaf

    return jax.tree.map(convert, value)


def _is_real(dtype: DTypeLike) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.integer, np.floating))


def _is_floating(value: object) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.bool_), np.floating)


def _widened(value: object) -> Any:
    """Whole numbers of 8 or 16 bits as those that JAX computes with: sums of such wrap around, and what JAX computes of
    them, such as factorials, has few digits."""
    dtype = getattr(value, "dtype", np.dtype(float))
    return jnp.asarray(value, int) if jnp.issubdtype(dtype, np.integer) and dtype.itemsize < 4 else value


def in_working_precision(fn: dist.Distribution) -> dist.Distribution:
    """The same distribution with its real parameters in the floating dtype of the reading.

    Parameters that are whole numbers by their nature, as the total count of a binomial, stay whole numbers, and so do
    points (``Delta``), which a model may use as indices.
    """
    if isinstance(fn, dist.Delta):
        return fn
    changed = {}
    real = [n for n, c in fn.arg_constraints.items() if not _is_discrete(c) or _is_floating(vars(fn).get(n))]
    static = type(fn).gather_pytree_aux_fields()
    for name, value in vars(fn).items():
        if isinstance(value, dist.Distribution):
            new = in_working_precision(value)
        elif name in fn.arg_constraints and name not in static:
            new = to_real(value) if name in real else _widened(value)
        else:
            continue
        if new is not value:
            changed[name] = new
    if not changed:
        return fn
    if type(fn) in _DERIVED:
        return _rebuilt(fn, _DERIVED[type(fn)])
    if type(fn) is dist.MultivariateNormal:
        given = [n for n in ("covariance_matrix", "precision_matrix") if n in vars(fn)]
        return _rebuilt(fn, ("loc", *(given[:1] or ["scale_tril"])))
    out = copy.copy(fn)
    for name, value in changed.items():
        setattr(out, name, value)
    return out


def _rebuilt(fn: dist.Distribution, names: tuple[str, ...]) -> dist.Distribution:
    return type(fn)(**{n: to_real(getattr(fn, n)) for n in names}, validate_args=False)


def _is_discrete(constraint: dist.constraints.Constraint) -> bool:
    try:
        return bool(constraint.is_discrete)
    except NotImplementedError:
        return True


def _as_numpyro(fn: dist.Distribution) -> dist.Distribution:
    """The distribution of a Gaussian process of tinygp, which is no pytree, as one of NumPyro; others as they are."""
    process = getattr(fn, "gp", None)
    if process is None or type(fn).__module__.partition(".")[0] != "tinygp":
        return fn
    return dist.MultivariateNormal(process.loc, covariance_matrix=process.covariance, validate_args=False)


class PlainSites(Messenger):
    """Run a model with plain sites.

    Real parameters of distributions have the floating dtype of the reading, observed values are arrays, and
    ``sample_shape`` is a part of the batch shape of latent sites. That of observed ones is told by their values.
    """

    def process_message(self, msg: Message) -> None:
        if is_scan(msg):
            msg["args"] = (PlainSites(msg["args"][0]), *msg["args"][1:])
        if msg["type"] != "sample" or not isinstance(msg["fn"], dist.Distribution):
            return
        fn = as_gaussian(_as_numpyro(msg["fn"]))
        msg["fn"] = in_working_precision(with_exact_density(fn) if msg["is_observed"] else fn)
        if msg["is_observed"] and msg["value"] is not None:
            msg["value"] = _observed(msg["name"], msg["value"])
        if sample_shape := msg["kwargs"].get("sample_shape"):
            msg["fn"] = (
                _with_shape_of(msg["fn"], msg["value"]) if msg["is_observed"] else msg["fn"].expand_by(sample_shape)
            )
            msg["kwargs"]["sample_shape"] = ()
        if not msg["is_observed"] and isinstance(unwrap(msg["fn"]), dist.Delta):
            _make_deterministic(msg)


def _make_deterministic(msg: Message) -> None:
    """A point is no unknown: its site is the statement that NumPyro's own samplers ask for in its place, and its log
    density, if it has any, a factor of the model."""
    log_density = unwrap(msg["fn"]).log_density
    # Arrays of JAX that a model makes are known in some of its runs and not in others, and its sites should not depend
    # on it: these are factors whatever their values are.
    if isinstance(log_density, jax.Array) or np.any(np.asarray(log_density) != 0.0):
        numpyro.factor(f"{msg['name']}_log_density", _log_density_of_point(msg["fn"]))
    msg["type"], msg["value"] = "deterministic", msg["fn"].mean


def _log_density_of_point(fn: dist.Distribution) -> Array:
    """Log density of a Delta in its wrappers at its own value, without the comparison of the two."""
    if isinstance(fn, dist.Delta):
        return jnp.broadcast_to(fn.log_density, fn.batch_shape)
    inner = _log_density_of_point(fn.base_dist)
    if isinstance(fn, dist.distribution.MaskedDistribution):
        return jnp.where(fn._mask, inner, 0.0)
    if isinstance(fn, dist.distribution.Independent):
        return jnp.asarray(sum_rightmost(inner, fn.reinterpreted_batch_ndims))
    return jnp.broadcast_to(inner, fn.batch_shape)


def _with_shape_of(fn: dist.Distribution, value: Array) -> dist.Distribution:
    """The distribution with the batch shape over which NumPyro sums the density of an observed value.

    It draws values by ``sample_shape`` and ignores it where they are given: a mask around the site, or a parameter, may
    have the shape of the observations already.
    """
    given = np.shape(value)
    return fn.expand(jnp.broadcast_shapes(fn.batch_shape, given[: max(len(given) - fn.event_dim, 0)]))


def _observed(name: str, value: object) -> Array:
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic) and _is_real(value.dtype)
    if is_array or isinstance(value, bool | int | float):
        array = jnp.asarray(value)
        # counts of low precision would lose digits of their factorials
        return array.astype(jnp.result_type(float)) if _is_floating(array) else _widened(array)
    dtype = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    raise ModelStructureError(
        f"observed site '{name}' is given a {type(value).__name__}{dtype}, which NumPyro does not compute with: give "
        "an array of numbers (.to_numpy() of a pandas column, jnp.asarray of a list; categories as codes counted from "
        "zero, as of pandas.factorize).",
        reason=Reason.DATA,
        site=name,
    )
