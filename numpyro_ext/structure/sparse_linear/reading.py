"""Models read as sparse linear models: coefficients seen through a linear operator with Gaussian noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.operators.from_functions import adjoint_error
from ...linalg.solvers.posterior_precision import has_diagonal_gram
from ...potentials.trees.forest import Forest
from ...potentials.trees.mixture import TreeParameters
from ..errors import Conflict, ModelStructureError
from ..likelihoods import NORMAL
from ..model.reading import ModelReading
from ..model.running.execution import ModelCall
from ..model.running.inspection import SiteInfo
from ..model.tracing import FactorTrace
from ..program.degrees import Degree, Degrees
from ..program.equations import Atom, Constant
from ..program.program import Program
from ..program.rows.affine_operator import AffineValues, OperatorMap
from .form import SparseLinear
from .priors import SparsePrior, join, join_forests, sparse_prior


class SparseLinearReading(ModelReading):
    """A model read as a sparse linear form, with a given split into coefficients and hyperparameters.

    Made by :func:`~numpyro_ext.structure.read_sparse_linear`. The unknowns ``s`` are the values of the field sites
    less their locations, one site after another. The joint log density is
    ``form(hyper).log_density(s) + log_constant(hyper) + log_prior(hyper)``.

    :ivar factor_names: observed sites whose rows the form has, one after another.
    :ivar rows: for each of them the flat indices of the observations in use.
    :ivar affine_sites: field and deterministic sites that are affine in the coefficients.
    :ivar is_design_fixed: whether operator and offset are the same for all hyperparameters.
    """

    def __init__(self, call: ModelCall, sites: Mapping[str, SiteInfo], field: Iterable[str]):
        super().__init__(call, sites, field, sparse_prior)
        degrees = self._classify("independent given the others", with_sources=False)
        self._priors: dict[str, SparsePrior] = self._trace.priors
        self._check_components()
        self._check_analysis()
        self._sort_factors(degrees)
        for name in self.factor_names:
            self._check_factor(name, self._trace.factors[name], degrees)
        self.rows = tuple(self._observations_in_use(name) for name in self.factor_names)
        self._uniform = self._uniform_scale()
        forests = [jax.tree.map(self._known_value, self._priors[n].forest) for n in self.field]
        self._num_groups = [forest.num_groups for forest in forests]
        self.forest: Forest = jax.tree.map(jnp.asarray, join_forests(forests))
        self.affine_sites = self._affine_sites(degrees)
        parts = []
        for name, rows in zip(self.factor_names, self.rows, strict=True):
            factor = self._trace.factors[name]
            everything = rows.size == int(np.prod(self._program.shape(factor.log_prob)))
            parts.append((factor.parameters["loc"], factor.value, None if everything else rows))
        self._mean = AffineValues(self._program, degrees, self._field, parts)
        maps = {n: [(self._trace.values[n], None, None)] for n in self.affine_sites}
        self._maps = {n: AffineValues(self._program, degrees, self._field, parts) for n, parts in maps.items()}
        self._selections = frozenset(n for n in self.field if degrees.of(self._trace.locations[n]) == Degree.CONSTANT)
        self.is_design_fixed = not self._mean.depends_on(set(jax.tree.leaves(self._given)))

    def _check_components(self) -> None:
        kinds = {n: tuple(type(c).__name__ for c in self._priors[n].parameters[:2]) for n in self.field}
        if len(set(kinds.values())) > 1:
            names = {n: "/".join(dict.fromkeys(k)).replace("Potential", "") for n, k in kinds.items()}
            raise Conflict(
                f"the coefficients {list(self.field)} have components of different families ({names}). Give all of "
                "them the same family, choose the field with field=[...], or use NUTS.",
                frozenset(self.field),
            )

    def _check_analysis(self) -> None:
        found = [n for n in self.field if self._priors[n].analysis is not None]
        if not found:
            return
        if len(self.field) > 1:
            raise Conflict(
                f"site '{found[0]}' has a prior of coefficients in a frame, and {list(self.field)} were taken for the "
                "field: it must be the only one. Choose it with field=[...], or use NUTS.",
                frozenset(self.field),
            )
        prior = self._priors[found[0]]
        fixed = jax.tree.leaves((prior.analysis, prior.weight))
        if self._hyper_behind(fixed):
            raise ModelStructureError(
                f"frame or weight of the prior of site '{found[0]}' depend on {self._hyper_behind(fixed)}: they must "
                "be known.",
                site=found[0],
            )
        frame = jax.tree.map(self._known_value, prior.analysis)
        p, n = frame.shape
        one = frame.rmatvec(frame.matvec(jnp.ones((n,))))
        if not has_diagonal_gram(frame, jnp.ones(())) or float(jnp.ptp(one)) > 1e-4 * float(jnp.max(jnp.abs(one))):
            raise ModelStructureError(
                f"the operator of the prior of site '{found[0]}' ({p} x {n}) is no tight frame: its adjoint times "
                "itself must be a multiple of the identity, as with shifted_transforms(...) or stacked orthonormal "
                "transforms. For finite differences (total variation) use EP with Laplace factors.",
                site=found[0],
            )

    def _check_factor(self, name: str, factor: FactorTrace, degrees: Degrees) -> None:
        field = list(self.field)
        if factor.family is not NORMAL:
            raise ModelStructureError(
                f"observed site '{name}' ({self.sites[name].family}) depends on {field} and is not Gaussian: this "
                "engine needs dist.Normal(mean, scale). For other likelihoods use EP with flat or Gaussian latent "
                "sites (dense, up to some thousand unknowns), or NUTS.",
                site=name,
            )
        location, value = factor.parameters["loc"], factor.value
        if Degree.NONLINEAR in (degrees.of(location), degrees.of(value)):
            sites = degrees.sites_of(location) | degrees.sites_of(value)
            raise Conflict(
                f"the mean of observed site '{name}' is not affine in {sorted(sites)}. Write it as operator @ s plus "
                "what does not depend on s; use jax.numpy instead of loops and numpy calls, or use NUTS.",
                sites,
            )
        if degrees.of(factor.parameters["scale"]) != Degree.CONSTANT:
            sites = degrees.sites_of(factor.parameters["scale"])
            raise Conflict(
                f"the noise scale of observed site '{name}' depends on {sorted(sites)}: it must not depend on the "
                "coefficients. Use NUTS for noise that grows with the signal.",
                sites,
            )
        if factor.scale is not None and not bool(np.all(np.asarray(self._value_at_start(factor.scale)) == 1.0)):
            raise ModelStructureError(
                f"observed site '{name}' is inside a scale handler: this engine needs each observation once. Remove "
                "the handler, or divide the noise variance instead.",
                site=name,
            )
        scale = np.asarray(self._value_at_start(factor.parameters["scale"]))
        mask = np.asarray(self._value_at_start(factor.mask))
        bad = mask & ~((scale > 0.0) & np.isfinite(scale))
        if bad.any():
            raise ModelStructureError(
                f"the noise scale of observed site '{name}' is {scale[bad][0]:.4g} in {int(bad.sum())} of {bad.size} "
                "observations: it must be positive and finite. For data without noise use a small scale.",
                site=name,
            )

    def _value_at_start(self, atom: Atom) -> Array:
        return jnp.asarray(self._program.evaluate([atom], self._env(self.initial_hyper(), None))[0])

    def _uniform_scale(self) -> Atom | None:
        """The noise scale as a single number, if all observations share it."""
        if len(self.factor_names) != 1:
            return None
        return _single_value(self._program, self._trace.factors[self.factor_names[0]].parameters["scale"])

    def prior(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> TreeParameters:
        """Components and probabilities of the groups of :attr:`forest` at given hyperparameters."""
        env = self._env(hyper, data)
        return join([self._evaluated(self._priors[n].parameters, env) for n in self.field], self._num_groups)

    def noise_hyper(self) -> list[str]:
        """Hyperparameters on which the noise variance depends."""
        return self._hyper_behind([self._trace.factors[n].parameters["scale"] for n in self.factor_names])

    def noise_variance(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> Array:
        """Noise variance at given hyperparameters: a scalar if all observations share it, else one per row."""
        env = self._env(hyper, data)
        if self._uniform is not None:
            return jnp.square(jnp.reshape(self._program.evaluate([self._uniform], env)[0], ()))
        atoms = [self._trace.factors[n].parameters["scale"] for n in self.factor_names]
        scales = [
            jnp.reshape(v, -1)[rows] for v, rows in zip(self._program.evaluate(atoms, env), self.rows, strict=True)
        ]
        return jnp.square(jnp.concatenate(scales))

    def form(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> SparseLinear:
        """The form at given hyperparameters.

        :param hyper: constrained values of all sites in :attr:`hyper`.
        :param data: arrays to use instead of :attr:`data`; masks and forests stay as they were read.

        Cost: one evaluation of the model; the operator is a program and is not materialised.
        """
        env = self._env(hyper, data)
        operator, offset = self._mean.at(env)
        form = SparseLinear(operator, -offset, self.noise_variance(hyper, data), self.forest, self.prior(hyper, data))
        prior = self._priors[self.field[0]]
        if prior.analysis is None:
            return form
        return form._replace(analysis=self._evaluated(prior.analysis, env), weight=self._evaluated(prior.weight, env))

    def is_selection(self, name: str) -> bool:
        """True if a site consists of coefficients one by one: not if its location is made of others."""
        return name in self._selections

    def maps(
        self, hyper: Mapping[str, object], data: Sequence[object] | None = None, names: Sequence[str] | None = None
    ) -> dict[str, OperatorMap]:
        """Affine sites as maps of the unknowns: value ``= (operator @ s + offset).reshape(site_shapes[name])``."""
        env = self._env(hyper, data)
        return {n: self._maps[n].at(env) for n in (self.affine_sites if names is None else names)}

    @property
    def is_analysis(self) -> bool:
        """True if the prior speaks of coefficients in a frame instead of the unknowns themselves."""
        return self._priors[self.field[0]].analysis is not None

    def log_joint(self, hyper: Mapping[str, object], e: Array, data: Sequence[object]) -> Array:
        return super().log_joint(hyper, e, data) + self.log_constant(hyper, data)

    def draw(self, hyper: Mapping[str, object], white: Array, data: Sequence[object]) -> Array:
        component: Any = self.prior(hyper, data).high
        scale = jnp.broadcast_to(component.scale, (self.forest.num_groups,))[self.forest.groups]
        return (jnp.mean(scale) if self.is_analysis else scale) * white

    def linearity_error(self, hyper: Mapping[str, object], data: Sequence[object]) -> Array:
        return adjoint_error(self._mean.at(self._env(hyper, data)).operator)

    def explain_linearity_error(self, error: float) -> None:
        raise ModelStructureError(
            f"the mean of {list(self.factor_names)} is linear in {list(self.field)}, but its derivatives are not those "
            f"of a linear map: <A x, y> and <x, A^T y> differ by {error:.2g} of their size at random x and y. Check "
            "the operators with numpyro_ext.linalg.adjoint_error, and covariates for NaN and infinity."
        )

    def explain_nan(self) -> None:
        hyper = self.initial_hyper()
        for leaf in jax.tree.leaves(self.prior(hyper)):
            if not bool(jnp.all(jnp.isfinite(leaf))):
                raise ModelStructureError(f"the prior of {list(self.field)} has parameters that are not finite.")
        start = 0
        offset = np.asarray(self.form(hyper).observed)
        for name, rows in zip(self.factor_names, self.rows, strict=True):
            bad = ~np.isfinite(offset[start : start + rows.size])
            if bad.any():
                raise ModelStructureError(
                    f"the mean of observed site '{name}' is not finite in {int(bad.sum())} rows (the first is "
                    f"{rows[np.argmax(bad)]}): check operators and covariates for NaN and infinity.",
                    site=name,
                )
            start += rows.size
        super().explain_nan()

    def describe(self) -> str:
        lines = self._describe_sites()
        for name, rows, shape in zip(self.factor_names, self.rows, self.factor_shapes, strict=True):
            lines.append(f"observed: {name}, {rows.size} of {int(np.prod(shape))} elements in use")
        prior = self.prior(self.initial_hyper())
        kinds = dict.fromkeys(type(c).__name__.replace("Potential", "") for c in prior[:2])
        trees = f"{self.forest.num_groups} groups, {self.forest.num_levels} levels"
        lines.append(f"prior: {'/'.join(kinds)} components, {trees}")
        if self.is_analysis:
            lines.append(f"frame: {self.forest.num_nodes} coefficients of {self.num_columns} unknowns")
        lines.append(f"operator: {self._mean.num_rows} x {self._mean.num_columns}, as a program")
        return "\n".join(lines)


_SPREADING = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy", "copy_p")


def _single_value(program: Program, atom: Atom) -> Atom | None:
    """The value of one element that ``atom`` repeats, or None."""
    while int(np.prod(program.shape(atom))) > 1:
        index = None if isinstance(atom, Constant) else program.defined_by.get(atom)
        if index is None or program.equations[index].primitive.name not in _SPREADING:
            return None
        atom = program.equations[index].inputs[0]
    return atom
