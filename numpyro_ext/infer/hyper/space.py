"""The hyperparameters as one unconstrained vector, and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions.transforms import AffineTransform, ExpTransform, IdentityTransform, SigmoidTransform

from ...compilation.content import Structure
from ...compilation.pytree import PyTree
from ...compilation.quick_jit import quick_jit
from ...compilation.store import shared
from ...compilation.transfer import to_device
from ...structure.errors import ModelStructureError


class UnconstrainedSpace:
    """Packs the free hyperparameters of a model into a vector of real numbers; the fixed ones stay beside it.

    :param sites: for each hyperparameter an object with ``shape``, ``transform`` (unconstrained to constrained),
        ``init`` (constrained) and ``is_param``, in the order of the model.
    :param fixed: constrained values of the hyperparameters that are not learned.
    :param bool is_searched: whether a search takes the vector, so that supports have to stay; samplers move with them.
    :raises ValueError: if a fixed value names no hyperparameter, has another shape, or lies outside the support.
    :raises ModelStructureError: if a free hyperparameter is a tree of arrays, or its support moves in a search.
    """

    _start: Array | None = None
    """Start of a search if no values are given, once it has been asked for."""

    def __init__(
        self, sites: Mapping[str, Any], fixed: Mapping[str, Any] | None = None, *, is_searched: bool = True
    ) -> None:
        fixed = dict(fixed or {})
        self.sites = dict(sites)
        self.fixed = {name: self.check(name, value) for name, value in fixed.items()}
        self.names = tuple(name for name in self.sites if name not in self.fixed)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.slices: dict[str, slice] = {}
        start = 0
        for name in self.names:
            site = self.sites[name]
            self._check_one_array(name, site)
            if is_searched:
                self._check_bounds(name, site)
            self.shapes[name] = tuple(site.transform.inverse_shape(tuple(site.shape)))
            stop = start + math.prod(self.shapes[name])
            self.slices[name] = slice(start, stop)
            start = stop
        self.size = start

    def _check_one_array(self, name: str, site: Any) -> None:
        if site.init is not None and not jax.tree_util.all_leaves([site.init]):
            raise ModelStructureError(
                f"hyperparameter '{name}' is a {type(site.init).__name__} of arrays, and searches move one array for "
                "each site: make a param of each of them.",
                site=name,
            )

    def _check_bounds(self, name: str, site: Any) -> None:
        learned = [other for other in getattr(site, "bounded_by", ()) if other not in self.fixed]
        # A given zero is a factor that holds the bound, whatever it is times.
        if len(learned) > 1 or any(other in site.bounded_alone for other in learned):
            family = getattr(site, "family", "")
            other = learned[0]
            example = {
                "Uniform": f"dist.Uniform(0, {other}), {name} = {other} * share with share from dist.Uniform(0, 1)",
                "Pareto": f"dist.Pareto({other}, a), {name} = {other} * share with share from dist.Pareto(1, a)",
            }.get(family, f"{name} = {other} + excess with excess from a distribution of positive numbers")
            raise ModelStructureError(
                f"the support of hyperparameter '{name}' ({family}) depends on {learned}, and searches need one that "
                f"stays: sample it on a fixed support and move it, as for {example}, or use NUTS.",
                site=name,
            )

    @property
    def structure(self) -> Structure[UnconstrainedSpace]:
        """This space without the values that are fixed and those to start from: what compiled programs keep of it.
        Bounds of transforms may be data, and are compared."""
        out = copy.copy(self)
        out.sites, out.fixed = {name: site._replace(init=None) for name, site in self.sites.items()}, {}
        out._start = None
        return Structure(out)

    @property
    def integrable(self) -> np.ndarray:
        """Coordinates that have a density: those of sample sites. The others are of ``param`` sites."""
        names = [name for name in self.names if not self.sites[name].is_param]
        return np.concatenate([np.zeros(0, int), *(np.arange(self.size)[self.slices[name]] for name in names)])

    def check(self, name: str, value: Any) -> Array:
        """Bring a constrained value given by a user to the dtype and shape of its site.

        :param str name: the hyperparameter.
        :param value: its value, broadcast to the shape of the site.
        :return: the value as an array.
        :raises ValueError: if it does not fit.
        """
        if name not in self.sites:
            raise ValueError(
                f"{name!r} is not a hyperparameter of this model. Hyperparameters: {sorted(self.sites) or 'none'}."
            )
        site = self.sites[name]
        self._check_one_array(name, site)
        given = jnp.asarray(value, jnp.result_type(site.init))
        try:
            checked = jnp.broadcast_to(given, tuple(site.shape))
        except ValueError as error:
            raise ValueError(
                f"The value given for hyperparameter {name!r} has shape {given.shape}, the site {tuple(site.shape)}."
            ) from error
        if not bool(jnp.all(jnp.isfinite(site.transform.inv(checked)))):
            raise ValueError(f"The value given for hyperparameter {name!r} is outside or at the edge of its support.")
        return checked

    def pack(self, values: Mapping[str, Any]) -> Array:
        """Constrained values of the free hyperparameters as an unconstrained vector of shape ``(size,)``."""
        if self._has_long_transforms and not _is_traced(values):
            return shared(_packed, self)({name: jnp.asarray(values[name]) for name in self.names})
        parts = [self.sites[name].transform.inv(jnp.asarray(values[name])) for name in self.names]
        if any(isinstance(part, jax.core.Tracer) for part in parts):
            return jnp.concatenate([jnp.reshape(part, -1) for part in parts])
        # NumPy compiles nothing for the shapes of the parts.
        return to_device(np.concatenate([np.asarray(part).reshape(-1) for part in parts])) if parts else jnp.zeros((0,))

    def initial(self, init_values: Mapping[str, Any] | None = None) -> Array:
        """The vector where a search starts: the given values, elsewhere those that the reading proposes."""
        if not init_values and self._start is not None:  # which several parts of a run ask for
            return self._start
        given = {name: self.check(name, value) for name, value in dict(init_values or {}).items()}
        start = self.pack({name: given.get(name, self.sites[name].init) for name in self.names})
        if not init_values and not isinstance(start, jax.core.Tracer):
            self._start = start
        return start

    def unpack_unconstrained(self, vector: Array) -> dict[str, Any]:
        """The free hyperparameters of a vector, each in its unconstrained shape; of NumPy outside compiled functions,
        which compiles nothing for these shapes."""
        numbers = vector if isinstance(vector, jax.core.Tracer) else np.asarray(vector)
        return {name: numbers[self.slices[name]].reshape(self.shapes[name]) for name in self.names}

    def unpack(self, vector: Array, fixed: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """All hyperparameters, constrained, in the order of the model.

        :param vector: of shape ``(size,)``.
        :param fixed: the fixed ones, if other than at construction (so that they can be arguments of a program).
        :return: a dictionary from site name to value.
        """
        fixed = self.fixed if fixed is None else fixed
        if self._has_long_transforms and not _is_traced(vector):
            known = {**shared(_constrained, self)(vector), **fixed}
            return {name: known[name] for name in self.sites}
        free = self.unpack_unconstrained(vector)
        out = {n: fixed[n] if n in fixed else site.transform(free[n]) for n, site in self.sites.items()}
        return {name: to_device(value) if isinstance(value, np.ndarray) else value for name, value in out.items()}

    @property
    def _has_long_transforms(self) -> bool:
        """True if one program for all transforms takes less time to compile than their operations one by one."""
        return any(not isinstance(self.sites[name].transform, _SHORT_TRANSFORMS) for name in self.names)

    def log_volume(self, vector: Array) -> Array:
        """Log volume of the constrained values of sample sites per unit volume of the vector: adding it to the log
        density of the former gives that of the latter. ``param`` sites have no density.

        :param vector: of shape ``(size,)``.
        :return: a scalar.
        """
        total = jnp.zeros((), vector.dtype)
        for name, value in self.unpack_unconstrained(vector).items():
            transform = self.sites[name].transform
            if self.sites[name].is_param:
                continue
            total += jnp.sum(transform.log_abs_det_jacobian(value, transform(value)))
        return total

    def standard_errors(
        self, vector: Array, covariance: ArrayLike, has_error: ArrayLike
    ) -> dict[str, tuple[Array, Array]]:
        """Standard errors of the free hyperparameters.

        :param vector: the estimate, of shape ``(size,)``.
        :param covariance: of the vector, shape ``(size, size)``.
        :param has_error: elements of the vector that have one, shape ``(size,)``, boolean.
        :return: for each name the errors of the constrained value (delta method) and of the unconstrained one; nan
            where they depend on an element without one.
        """
        found = shared(_standard_errors, self)(vector, jnp.asarray(covariance), jnp.asarray(has_error))
        return {name: found[name] for name in self.names}


_SHORT_TRANSFORMS = IdentityTransform, ExpTransform, SigmoidTransform, AffineTransform


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _packed(space: UnconstrainedSpace) -> Callable[[dict[str, Array]], Array]:
    def pack(values: dict[str, Array]) -> Array:
        return jnp.concatenate([jnp.reshape(space.sites[n].transform.inv(values[n]), -1) for n in space.names])

    return jax.jit(pack)  # also called while others are traced


def _constrained(space: UnconstrainedSpace) -> Callable[[Array], dict[str, Array]]:
    def unpack(vector: Array) -> dict[str, Array]:
        free = space.unpack_unconstrained(vector)
        return {name: space.sites[name].transform(free[name]) for name in space.names}

    return jax.jit(unpack)


def _standard_errors(space: UnconstrainedSpace) -> Callable[..., dict[str, tuple[Array, Array]]]:
    def standard_errors(vector: Array, covariance: Array, has_error: Array) -> dict[str, tuple[Array, Array]]:
        out = {}
        for name, value in space.unpack_unconstrained(vector).items():
            block, known = covariance[space.slices[name], space.slices[name]], has_error[space.slices[name]]
            jacobian = jax.jacobian(space.sites[name].transform)(value)
            jacobian = jacobian.reshape(-1, value.size)
            variance = jnp.einsum("ij,jk,ik->i", jacobian, block, jacobian)
            error = jnp.where(jnp.any((jacobian != 0.0) & ~known, axis=1), jnp.nan, jnp.sqrt(variance))
            own_error = jnp.where(known, jnp.sqrt(jnp.diagonal(block)), jnp.nan)
            out[name] = (error.reshape(tuple(space.sites[name].shape)), own_error.reshape(value.shape))
        return out

    return quick_jit(standard_errors, is_small=True)
