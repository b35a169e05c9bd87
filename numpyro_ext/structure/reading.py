"""What the reader found in a model, as pure functions of hyperparameters and data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..linalg.design import DenseDesign, Design, SparseRows
from ..linalg.prior import CovariancePrior, PrecisionPrior
from .affine_rows import AffineRows
from .blocks import find_blocks
from .conflict import Conflict
from .degrees import Degree, Degrees
from .errors import ModelStructureError
from .factors import FactorPlan, plan_factor
from .latent_gaussian import AffineMap, Blocks, LatentGaussian
from .program import Program, make_program
from .tracing import ModelTrace, SiteInfo, trace_with_innovations

__all__ = ["HyperSite", "LatentGaussianReading"]


class HyperSite(NamedTuple):
    """A latent or ``param`` site outside the field, to be maximised over or given."""

    shape: tuple[int, ...]
    transform: Any
    """NumPyro transform from unconstrained values."""
    is_param: bool
    """True for ``numpyro.param``: no prior."""
    init: Any
    """Starting value, constrained."""


class LatentGaussianReading:
    """A model read as a latent Gaussian form, with a given split into field and hyperparameters.

    Made by :func:`~numpyro_ext.structure.read_latent_gaussian`. All its methods that take ``hyper`` (constrained
    values by site name) are pure in ``hyper`` and ``data`` and can be passed through ``jit``, ``vmap`` and ``grad``.

    :ivar field: latent sites of the Gaussian field, in the order of the model.
    :ivar hyper: all other latent and ``param`` sites.
    :ivar predictive: latent sites that nothing depends on (missing observations): left out, as they integrate to one.
    :ivar factor_names: observed sites, one per family of factors of the form.
    :ivar factor_shapes: shapes of the observations of each family.
    :ivar rows_per_observation: how many rows of the form each observation of a family has.
    :ivar affine_sites: field and deterministic sites that are affine in the field.
    :ivar data: the arrays that the model closed over, explicit so that forms of equal structure can be batched.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        sites: Mapping[str, SiteInfo],
        field: Sequence[str],
        rng_key: Array,
    ):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.sites = dict(sites)
        self.field = tuple(n for n in sites if n in field)
        free = [s for s in sites.values() if s.kind in ("latent", "param") and s.name not in self.field]
        sizes = {n: int(np.prod(sites[n].shape)) for n in self.field}
        innovations = {n: jnp.zeros((sizes[n],)) for n in self.field}
        given = {s.name: s.init for s in free}
        function = trace_with_innovations(model, args, kwargs, self.field, rng_key)
        try:
            self._program, self._trace = make_program(function, innovations, given)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise ModelStructureError(
                "the model needs the values of traced arrays (it indexes a NumPy array with one, or branches on one), "
                "so NumPyro cannot compile it either. Pass the data as jax arrays, and use jnp.where for branches. "
                f"JAX says: {str(error).splitlines()[0]}"
            ) from error
        self._trace = _in_model_order(self._trace, sites)
        structure = jax.tree.structure((innovations, given))
        inputs, self._given = jax.tree.unflatten(structure, self._program.inputs)
        self._field = {n: (inputs[n], sizes[n]) for n in self.field}
        self.data = self._program.data
        degrees = classify_trace(self._program, {n: inputs[n] for n in self.field}, self._trace)
        self.predictive = _predictive_sites(self._program, self._trace, self._given, free)
        self.hyper = {
            s.name: HyperSite(s.shape, s.transform, s.kind == "param", s.init)
            for s in free
            if s.name not in self.predictive
        }
        self._plan(degrees)
        self._check_disconnected(degrees)

    def _plan(self, degrees: Degrees) -> None:
        probe = self._env({n: h.init for n, h in self.hyper.items()}, None)
        self.plans: list[FactorPlan] = []
        self._constant_factors: list[str] = []
        self._prior_factors: list[str] = []
        for name, traced in self._trace.factors.items():
            if name in self.predictive:
                continue
            if degrees.of(traced.log_prob) != Degree.CONSTANT:
                self.plans.append(plan_factor(self._program, degrees, name, traced, probe))
            elif name in self.hyper:
                self._prior_factors.append(name)
            else:
                self._constant_factors.append(name)
        self.factor_names = tuple(p.name for p in self.plans)
        self.factor_shapes = tuple(p.shape for p in self.plans)
        self.rows_per_observation = tuple(p.rows_per_observation for p in self.plans)
        parts = [part for plan in self.plans for part in plan.parts]
        self._rows = AffineRows(self._program, self._field, parts)
        values = {n: a for n, a in self._trace.values.items() if n not in self.predictive}
        self.site_shapes = {n: self._program.shape(a) for n, a in values.items()}
        self.site_shapes |= {n: h.shape for n, h in self.hyper.items() if h.is_param}
        self.affine_sites = tuple(n for n, a in values.items() if n in self.field or degrees.of(a) == Degree.AFFINE)
        self._maps: dict[str, AffineRows] = {}
        self._blocks = find_blocks(
            self._rows.pattern, self._rows.num_rows, self._rows.num_columns, self._coupled_columns()
        )
        self.structure_key = self._structure_key()

    def _check_disconnected(self, degrees: Degrees) -> None:
        if not self.plans:
            raise ModelStructureError(
                f"no observed site depends on the Gaussian sites {list(self.field)}: there is nothing to infer. "
                "Pass the data (obs=...), or check that the predictor uses these sites."
            )

    def _coupled_columns(self) -> list[tuple[int, int, int]]:
        out, start = [], 0
        for name in self.field:
            block = self._trace.priors[name]
            if isinstance(block, CovariancePrior | PrecisionPrior):
                leaf = jax.tree.leaves(block)[0]
                batch, width = self._program.shape(leaf)[:2]
                out.append((start, batch, width))
            start += self._field[name][1]
        return out

    def _structure_key(self) -> tuple[Any, ...]:
        static = hashlib.blake2b(digest_size=16)
        arrays: list[Any] = [self._rows.pattern, *self._blocks, *(rows for _, rows in self._rows.parts)]
        for array in arrays:
            static.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        labels = tuple((p.name, p.label, p.shape) for p in self.plans)
        hyper = tuple((n, h.shape, _transform_key(h.transform), h.is_param) for n, h in self.hyper.items())
        return (self._program.fingerprint(), self.field, hyper, labels, static.hexdigest())

    def _env(self, hyper: Mapping[str, Any], data: Sequence[Any] | None) -> dict[int, Any]:
        env: dict[int, Any] = {}
        for name, atom in self._given.items():
            value = self.sites[name].init if name in self.predictive else hyper[name]
            leaves = jax.tree.leaves(value)
            env.update(zip(jax.tree.leaves(atom), (jnp.asarray(v) for v in leaves), strict=True))
        env.update(zip(self._program.constants, self.data if data is None else data, strict=True))
        for atom in jax.tree.leaves(self._given):
            env[atom] = env[atom].astype(self._program.avals[atom].dtype)
        return env

    def form(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> LatentGaussian:
        """The form at given hyperparameters.

        :param hyper: constrained values of all sites in :attr:`hyper`.
        :param data: arrays to use instead of :attr:`data`.
        :return: the form; its columns are the innovations of the field sites in the order of :attr:`field`.
        """
        env = self._env(hyper, data)
        leaves = {n: jax.tree.flatten(self._trace.priors[n]) for n in self.field}
        prior = tuple(jax.tree.unflatten(d, self._program.evaluate(a, env)) for a, d in leaves.values())
        design, offset = self._rows.design(env)
        built = [plan.build(env) for plan in self.plans]
        sizes = [sum(len(rows) for _, rows in plan.parts) for plan in self.plans]
        sign = jnp.concatenate([jnp.full((n,), b.sign) for n, (b, _) in zip(sizes, built, strict=True)])
        shift = jnp.concatenate([jnp.broadcast_to(b.shift, (n,)) for n, (b, _) in zip(sizes, built, strict=True)])
        if any(b.sign != 1.0 for b, _ in built):
            design = _scale_rows(design, sign)
        return LatentGaussian(
            prior,
            design,
            sign * offset + shift,
            tuple(b.potential for b, _ in built),
            tuple(mask for _, mask in built),
            self._log_constant(env),
            Blocks(*(jnp.asarray(b) for b in self._blocks)),
        )

    @cached_property
    def abstract_form(self) -> LatentGaussian:
        """The form with shapes and dtypes in place of numbers, for questions about its families; costs one trace."""
        return jax.eval_shape(self.form, self.initial_hyper(), self.data)

    def _log_constant(self, env: Mapping[int, Any]) -> Array:
        total = self._sum_factors(self._constant_factors, env)
        for name, traced in self._trace.factors.items():
            if name not in self.predictive:
                total = total + self._program.evaluate([traced.constant], env)[0]
        return total

    def _sum_factors(self, names: Sequence[str], env: Mapping[int, Any]) -> Array:
        total = jnp.zeros((), jnp.result_type(float))
        for name in names:
            traced = self._trace.factors[name]
            log_prob, mask = self._program.evaluate([traced.log_prob, traced.mask], env)
            if traced.scale is not None:
                log_prob = log_prob * self._program.evaluate([traced.scale], env)[0]
            total = total + jnp.sum(jnp.where(mask, log_prob, 0.0))
        return total

    def log_prior(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> Array:
        """Log prior density of the hyperparameter sample sites, in the constrained space (no Jacobian)."""
        return self._sum_factors(self._prior_factors, self._env(hyper, data))

    def maps(
        self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None, names: Sequence[str] | None = None
    ) -> dict[str, AffineMap]:
        """Affine sites as maps of the unknowns: value ``= (design @ e + offset).reshape(site_shapes[name])``."""
        env = self._env(hyper, data)
        return {n: AffineMap(*self._map(n).design(env)) for n in (self.affine_sites if names is None else names)}

    def _map(self, name: str) -> AffineRows:
        if name not in self._maps:
            size = int(np.prod(self.site_shapes[name]))
            self._maps[name] = AffineRows(self._program, self._field, [(self._trace.values[name], np.arange(size))])
        return self._maps[name]

    def values(self, hyper: Mapping[str, Any], e: Array, data: Sequence[Any] | None = None) -> dict[str, Array]:
        """Every latent and deterministic site at the unknowns ``e`` of shape ``(num_columns,)``."""
        env = self._env(hyper, data)
        start = 0
        for atom, size in self._field.values():
            env[atom] = e[start : start + size]
            start += size
        names = [n for n in self._trace.values if n not in self.predictive]
        found = self._program.evaluate([self._trace.values[n] for n in names], env)
        return dict(zip(names, (jnp.asarray(v) for v in found), strict=True))

    def initial_hyper(self) -> dict[str, Any]:
        """Starting values of the hyperparameters: medians or means of their priors, initial values of ``param``."""
        return {n: h.init for n, h in self.hyper.items()}

    def describe(self) -> str:
        """The split and what was recognised, one line each."""
        lines = [f"field: {n} {self.site_shapes[n]} ({self.sites[n].family})" for n in self.field]
        for name, site in self.hyper.items():
            kind = "param" if site.is_param else self.sites[name].family
            lines.append(f"hyperparameter: {name} {site.shape} ({kind})")
        lines += [f"left out (integrates to one): {n}" for n in self.predictive]
        lines += [f"factor: {p.name} {p.shape} ({p.label})" for p in self.plans]
        blocks, width = self._blocks[1].shape
        kind = "dense" if self._rows.is_dense else f"{self._rows.pattern.shape[1]} entries per row"  # type: ignore[union-attr]
        lines.append(f"design: {self._rows.num_rows} x {self._rows.num_columns}, {kind}")
        if blocks > 1:
            lines.append(f"blocks: {blocks} independent, of up to {width} unknowns")
        return "\n".join(lines)


def classify_trace(program: Program, field: Mapping[str, int], trace: ModelTrace) -> Degrees:
    """Degrees of the program, after checking that the field is jointly Gaussian given everything else.

    :raises Conflict: naming the sites of which one must leave the field.
    """
    from .degrees import classify

    degrees = classify(program, field)
    for name in field:
        if degrees.of(trace.locations[name]) == Degree.NONLINEAR:
            sites = degrees.sites_of(trace.locations[name])
            raise Conflict(
                f"the location of site '{name}' is not affine in {sorted(sites)}, so they are not jointly Gaussian. "
                "Choose the field with field=[...], or use NUTS.",
                sites | {name},
            )
        for leaf in jax.tree.leaves(trace.priors[name]):
            if degrees.of(leaf) != Degree.CONSTANT:
                sites = degrees.sites_of(leaf)
                raise Conflict(
                    f"the scale of site '{name}' depends on {sorted(sites)}, so they are not jointly Gaussian. "
                    "Choose the field with field=[...], or use NUTS.",
                    sites | {name},
                )
    return degrees


def _predictive_sites(
    program: Program, trace: ModelTrace, given: Mapping[str, Any], free: Sequence[SiteInfo]
) -> tuple[str, ...]:
    out = []
    for site in free:
        if site.kind != "latent" or site.is_candidate:
            continue
        others = [f for n, f in trace.factors.items() if n != site.name]
        used = program.ancestors(jax.tree.leaves((trace.locations, trace.priors, others)))
        if not used & set(jax.tree.leaves(given[site.name])):
            out.append(site.name)
    return tuple(out)


def _in_model_order(trace: ModelTrace, sites: Mapping[str, SiteInfo]) -> ModelTrace:
    # passing through a trace sorts dictionaries by name
    return ModelTrace(*({n: part[n] for n in sites if n in part} for part in trace))


def _transform_key(transform: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(transform)
    return type(transform).__name__, str(structure), tuple(str(leaf) for leaf in leaves)


def _scale_rows(design: Design, weight: Array) -> Design:
    if isinstance(design, DenseDesign):
        return DenseDesign(weight[:, None] * design.matrix)
    return SparseRows(design.columns, weight[:, None] * design.values, design.num_columns)
