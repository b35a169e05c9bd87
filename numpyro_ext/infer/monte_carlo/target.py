"""A NumPyro model as a density of one vector: draws from its prior, its log prior, log likelihoods of observations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro import handlers

from ...compilation.content import array_key
from ...structure import ModelStructureError
from ...structure.model.running.execution import ModelCall, check_key
from ...structure.model.running.inspection import inspect_sites
from ...structure.model.running.pandas_arguments import run_or_with_arrays
from ...structure.model.running.plain_sites import PlainSites
from ...structure.program.program import make_program
from ..front.running.progress import warn
from .coordinates import Coordinates, check_sites, coordinates

_UNOBSERVED, _OBSERVED = "_unobserved", "_observed"
"""Endings of the names of the sites that NumPyro makes for ``obs_mask``."""
_PROBES = 2


class Densities(NamedTuple):
    """Log densities of one vector."""

    log_prior: dict[str, Array]
    """By latent site, of its unconstrained value."""
    log_likelihood: dict[str, Array]
    """By observed site, each observation for itself."""


class Joint(NamedTuple):
    """Log density of one vector, and what is needed to compute it by NumPyro alone."""

    log_density: Array
    """Log density of prior and likelihood together, in the coordinates of the vector."""
    log_jacobian: Array
    """Log determinant of the derivative of the values of sites by the vector."""
    values: dict[str, Array]
    """Values of the latent sites."""
    left_out: dict[str, Array]
    """Values of the missing observations, which are not sampled."""


class Target:
    """The posterior of a model on arguments as one vector, in :func:`coordinates` without location and scale.

    Arrays among the arguments are inputs of the compiled programs where the model can be traced without their values,
    so that other data of the same shapes compile nothing.

    :param model: a NumPyro model.
    :param rng_key: for the traces that tell its sites.
    :param args: arguments of the model.
    :param kwargs: keyword arguments.
    :param hyper_values: values of latent and param sites that are given.
    :raises ModelStructureError: if it has sites that cannot be sampled: which, and what to do.
    """

    def __init__(
        self,
        model: Callable[..., object],
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        hyper_values: Mapping[str, object],
    ) -> None:
        check_key(rng_key)
        self._key, self._given = rng_key, {name: jnp.asarray(value) for name, value in hyper_values.items()}
        call = ModelCall(model, tuple(args), dict(kwargs), rng_key)
        call, sites = run_or_with_arrays(call, lambda call: inspect_sites(call, self._given))
        self.model, self.args, self.kwargs = model, call.args, call.kwargs
        missing = {n: n.removesuffix(_UNOBSERVED) + _OBSERVED for n in sites if n.endswith(_UNOBSERVED)}
        self.left_out = tuple(name for name, partner in missing.items() if partner in sites)
        latent = {n: s for n, s in sites.items() if s.kind == "latent" and n not in (*self._given, *self.left_out)}
        check_sites(sites, latent, self._given)
        self.sites = latent
        self.dims = {name: site.dims for name, site in sites.items() if site.dims}
        self.real_sites = (*latent, *(n for n, s in sites.items() if s.kind == "deterministic"))
        self.observed = {n: s for n, s in sites.items() if s.kind == "observed"}
        example = {n: s.transform.inv(s.init) for n, s in latent.items()}
        flat, self._unravel = ravel_pytree(example)
        self.size, self.dtype = int(flat.size), flat.dtype
        self._steps = frozenset(self._in_scans())
        self._split_arguments()
        self.fingerprint = self._find_fingerprint()

    @property
    def rng_key(self) -> Array:
        """Random key of the traces."""
        return self._key

    @property
    def given(self) -> dict[str, Array]:
        """Values of the latent and ``param`` sites that are given."""
        return self._given

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the latent sites."""
        return {name: tuple(site.shape) for name, site in self.sites.items()}

    # Arguments

    def _split_arguments(self) -> None:
        """Find the arrays that the model can be traced without: ``data``; the others are a part of the programs."""
        self._structure: Any
        leaves, self._structure = jax.tree.flatten((self.args, self.kwargs))
        arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
        free = [i for i in arrays if self._runs_without(leaves, [i])]
        self._free = free if len(free) < 2 or self._runs_without(leaves, free) else []
        self._static = [None if i in self._free else leaf for i, leaf in enumerate(leaves)]
        if not self._free:
            self._check_that_it_runs()
        self.data = [jnp.asarray(leaves[i]) for i in self._free]

    def _runs_without(self, leaves: list[Any], free: list[int]) -> bool:
        self._free, self._static = free, [None if i in free else leaf for i, leaf in enumerate(leaves)]
        data = [jax.ShapeDtypeStruct(np.shape(leaves[i]), jax.dtypes.canonicalize_dtype(leaves[i].dtype)) for i in free]
        try:
            jax.eval_shape(self.densities, jax.ShapeDtypeStruct((self.size,), self.dtype), data)
        except Exception:  # whatever a model does with values that it is not given
            return False
        return True

    def _find_fingerprint(self) -> tuple[object, ...]:
        """Fingerprint of the model's computation now; globals that it reads may be others when it runs again."""
        at_fixed_key = copy.copy(self)
        at_fixed_key._key = jax.random.key(0)

        def everything(vector: Array, data: list[Array]) -> object:
            return at_fixed_key.densities(vector, data), at_fixed_key.constrained(vector, data)

        vector = jax.ShapeDtypeStruct((self.size,), self.dtype)
        program, _ = make_program(everything, vector, self.data, keep_literals=True)
        return program.fingerprint(), tuple(map(array_key, program.data))

    def _check_that_it_runs(self) -> None:
        """Densities may not exist where the model runs: NumPyro broadcasts a mask when it computes them."""
        try:
            jax.eval_shape(self.densities, jax.ShapeDtypeStruct((self.size,), self.dtype), [])
        except (TypeError, ValueError) as error:
            raise ModelStructureError(
                f"the log density of the model cannot be computed on these arguments: {error} Check the shapes of data "
                "and masks."
            ) from error

    def with_arguments(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Target:
        """The model on other arguments: without another look at it, where only ``data`` of equal shapes differ.

        For arguments with which the prior is the same one.
        """
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        if structure == self._structure:
            arrays = [leaves[i] for i in self._free]
            rest = [None if i in self._free else leaf for i, leaf in enumerate(leaves)]
            is_alike = all(
                isinstance(new, jax.Array | np.ndarray) and (new.shape, jnp.result_type(new)) == (old.shape, old.dtype)
                for new, old in zip(arrays, self.data, strict=True)
            ) and all(_equal(new, old) for new, old in zip(rest, self._static, strict=True))
            if is_alike:
                found = copy.copy(self)
                found.args, found.kwargs, found.data = tuple(args), dict(kwargs), [jnp.asarray(leaf) for leaf in arrays]
                return found
        return Target(self.model, self._key, args, kwargs, self._given)

    def places_of(self, leaves: Collection[object]) -> list[int] | None:
        """Places in :attr:`data` of these arrays among the arguments; ``None`` if one of them is not there."""
        all_leaves = jax.tree.leaves((self.args, self.kwargs))
        there = {id(all_leaves[leaf]): number for number, leaf in enumerate(self._free)}
        found = [there.get(id(leaf)) for leaf in leaves]
        return None if None in found else [number for number in found if number is not None]

    def inspected(self) -> Target:
        """The same, after a look at the model."""
        return Target(self.model, self._key, self.args, self.kwargs, self._given)

    def _call(self, data: list[Array]) -> tuple[tuple[object, ...], dict[str, object]]:
        leaves = list(self._static)
        for place, leaf in zip(self._free, data, strict=True):
            leaves[place] = leaf
        return jax.tree.unflatten(self._structure, leaves)

    def shares_programs_with(self, other: Target) -> bool:
        """True if programs of the one, given the data of the other, are those of the other."""
        return (
            self.model is other.model
            and self.fingerprint == other.fingerprint
            and bool(self._structure == other._structure)
            and self._given.keys() == other._given.keys()
            and all(_equal(value, other._given[name]) for name, value in self._given.items())
            and self._free == other._free
            and all(_equal(a, b) for a, b in zip(self._static, other._static, strict=True))
            and self.dtype == other.dtype
            and list(self.shapes.items()) == list(other.shapes.items())
        )

    # The model

    def _trace(self, data: list[Array], key: Array, values: Mapping[str, Array] | None) -> dict[str, Any]:
        model = handlers.substitute(PlainSites(self.model), data=self._given)
        if values is not None:
            model = handlers.substitute(model, substitute_fn=partial(self._constrained, values))
        args, kwargs = self._call(data)
        return handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)

    def draw_prior(self, key: Array, data: list[Array]) -> Array:
        """One draw from the prior, shape ``(size,)``."""
        trace = self._trace(data, key, None)
        return self._ravel({n: self._coordinates(trace[n]).transform.inv(trace[n]["value"]) for n in self.sites})

    def densities(self, vector: Array, data: list[Array]) -> Densities:
        """Log prior and log likelihoods of one vector."""
        values = self._unravel(vector)
        return self._densities_of(self._trace(data, self._key, values), values)

    def _densities_of(self, trace: Mapping[str, Any], values: Mapping[str, Array]) -> Densities:
        prior, likelihood = {}, {}
        for name in self.sites:
            site, value = trace[name], values[name]
            transform, standard = self._coordinates(site)
            if standard is None:
                jacobian = transform.log_abs_det_jacobian(value, site["value"])
                prior[name] = jnp.sum(_log_prob(site)) + jnp.sum(jacobian)
            else:
                prior[name] = jnp.sum(standard.log_prob(value))
        for name in self.observed:
            found = _log_prob(trace[name])
            likelihood[name] = found if trace[name]["scale"] is None else trace[name]["scale"] * found
        return Densities(prior, likelihood)

    def joint(self, vector: Array, data: list[Array]) -> Joint:
        """Log density of one vector with the values of its sites."""
        unconstrained = self._unravel(vector)
        trace = self._trace(data, self._key, unconstrained)
        values, zero = {name: trace[name]["value"] for name in self.sites}, jnp.zeros((), self.dtype)
        jacobians = (
            self._coordinates(trace[name]).transform.log_abs_det_jacobian(unconstrained[name], value)
            for name, value in values.items()
        )
        return Joint(
            sum((jnp.sum(term) for term in jax.tree.leaves(self._densities_of(trace, unconstrained))), zero),
            sum((jnp.sum(jacobian) for jacobian in jacobians), zero),
            values,
            {name: trace[name]["value"] for name in self.left_out},
        )

    def log_prior(self, vector: Array, data: list[Array]) -> Array:
        """Log density of the prior of one vector; minus infinity where it is not a number."""
        return _finite(sum(self.densities(vector, data).log_prior.values(), jnp.zeros((), self.dtype)))

    def log_likelihood(self, vector: Array, data: list[Array]) -> Array:
        """Log likelihood of one vector; minus infinity where it is not a number."""
        terms = self.densities(vector, data).log_likelihood.values()
        return _finite(sum((jnp.sum(term) for term in terms), jnp.zeros((), self.dtype)))

    def priors(self, vector: Array, data: list[Array]) -> dict[str, tuple[Array, Array]]:
        """By latent site, its log prior and its value: alike for all vectors exactly if priors are."""
        values = self.constrained(vector, data)
        return {name: (found, values[name]) for name, found in self.densities(vector, data).log_prior.items()}

    def constrained(self, vector: Array, data: list[Array]) -> dict[str, Array]:
        """All sites but the observed ones at one vector, deterministic ones included."""
        trace = self._trace(data, self._key, self._unravel(vector))
        names = [n for n, s in trace.items() if s["type"] == "deterministic" or (n in self.sites)]
        return {n: trace[n]["value"] for n in names} | {
            n: v for n, v in self._given.items() if n in trace and not trace[n].get("is_observed")
        }

    @cached_property
    def is_gaussian(self) -> bool:
        """True if the elements of the vector are independent and standard Gaussian under the prior."""
        found: list[bool] = []

        def look(data: list[Array]) -> None:
            trace = self._trace(data, self._key, None)
            found.extend(self._coordinates(trace[name]).is_gaussian for name in self.sites)

        jax.eval_shape(look, self.data)
        return all(found)

    def has_prior_of(self, other: Target) -> bool:
        """True if priors of latent sites are surely those of the other: one program, in which no data enter them."""
        return (
            self.shares_programs_with(other)
            and [np.shape(data) for data in self.data] == [np.shape(data) for data in other.data]
            and not self._prior_knows_data
        )

    @cached_property
    def _prior_knows_data(self) -> bool:
        return self.prior_knows(range(len(self.data)))

    def prior_knows(self, numbers: Collection[int]) -> bool:
        """True if priors of latent sites may depend on the values of some of the data, by the program.

        :param numbers: of these.
        """
        vector = jax.ShapeDtypeStruct((self.size,), self.dtype)
        jaxpr = jax.make_jaxpr(self.priors)(vector, self.data).jaxpr
        told = {id(var) for number, var in enumerate(jaxpr.invars[1:]) if number in numbers}
        for equation in jaxpr.eqns:
            if any(id(var) in told for var in equation.invars):
                told |= {id(var) for var in equation.outvars}
        return any(id(var) in told for var in jaxpr.outvars)

    def _in_scans(self) -> list[str]:
        """Latent sites in the body of a scan."""
        found: list[str] = []

        def look() -> None:
            model = handlers.seed(handlers.substitute(PlainSites(self.model), data=self._given), self._key)
            trace = handlers.trace(model).get_trace(*self.args, **self.kwargs)
            found.extend(name for name in self.sites if trace[name].get("_control_flow_done"))

        jax.eval_shape(look)
        return found

    def _coordinates(self, site: Mapping[str, object]) -> Coordinates:
        return coordinates(site["fn"], is_step=site["name"] in self._steps)

    def _constrained(self, values: Mapping[str, Array], site: Mapping[str, Any]) -> object:
        if site["type"] != "sample" or site["is_observed"] or site["name"] not in values:
            return None
        return self._coordinates(site).transform(values[site["name"]])

    def _ravel(self, values: Mapping[str, Array]) -> Array:
        return ravel_pytree(dict(values))[0].astype(self.dtype)

    # What may have gone wrong

    def check_left_out(self, vector: Array) -> None:
        """Warn where observations depend on missing values that are not sampled."""
        if not self.left_out:
            return
        values = self._unravel(vector)
        found = []
        for number in range(_PROBES):
            trace = self._trace(self.data, jax.random.fold_in(self._key, number), values)
            found.append([np.asarray(_log_prob(trace[name])) for name in self.observed])
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*found, strict=True)):
            warn(f"Observations depend on the missing values of {', '.join(self.left_out)}, which are not sampled.")


def _log_prob(site: Mapping[str, Any]) -> Array:
    return site["fn"].log_prob(site["value"])


def _finite(value: Any) -> Array:
    """Not a number as minus infinity: a place that is not visited."""
    return jnp.where(jnp.isnan(value), -jnp.inf, value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, jax.Array | np.ndarray) or isinstance(other, jax.Array | np.ndarray):
        return np.shape(one) == np.shape(other) and bool(np.array_equal(one, other))
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError):  # containers that compare element by element, as those of pandas
        return False
