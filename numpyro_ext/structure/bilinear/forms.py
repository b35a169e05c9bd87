"""Bilinear forms of a model as functions of its hyperparameters, and the priors of their two sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.cholesky import cholesky, cholesky_inverse
from ...linalg.gaussian.prior import DiagonalPrior, PrecisionPrior
from ...linalg.short_axes import as_matrices
from ...potentials.base import Potential
from ..factors.recognise import Recognised
from ..model.reading import ModelReading
from ..program.program import Constant
from .common import common_block
from .factors import Unlisted, exposure_of_zeros, join_cells, take_cells
from .form import Background, Bilinear, Common, CoupledSide, GaussianSide, Side
from .vectors.coefficients import Design, Vectors, coefficients
from .vectors.incidence import Roots
from .vectors.lookups import Combinations, Lookups
from .vectors.places import Predictor


class BilinearForms(ModelReading):
    """A model of which it is known how rows, columns and cells are made: its form at any hyperparameters.

    All methods that take ``hyper`` are pure. The attributes are those of
    :class:`~numpyro_ext.structure.bilinear.reading.BilinearReading`, which finds them.
    """

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    cells: tuple[np.ndarray, ...]
    unlisted_cells: Unlisted
    elements: Sequence[np.ndarray]
    _design: Design
    _vectors: Vectors
    _predictors: Sequence[Predictor]
    _found: Sequence[Recognised]
    _signs: tuple[float, ...]
    _roots: tuple[Roots | None, Roots | None]
    _starts: dict[str, int]

    def _lookups(self, data: Sequence[Any] | None) -> Lookups:
        return (self.data if data is None else data)[-1]

    def _locations(self, env: Mapping[int, Array]) -> Array:
        """Prior means of all unknowns."""
        found = self._program.evaluate([self._trace.locations[n] for n in self.field], env)
        dtype = jnp.result_type(float)
        parts = [
            jnp.broadcast_to(v, self.site_shapes[n]).reshape(-1).astype(dtype)
            for n, v in zip(self.field, found, strict=True)
        ]
        return jnp.concatenate(parts)

    def predictor_fn(self, env: dict[int, Array], rows: Sequence[object]) -> Callable[[Array], Array]:
        """The predictors of the cells in use, :attr:`predictor_rows`, as a function of all unknowns."""
        location, given = self._locations(env), dict(env)

        def predict(unknowns: Array) -> Array:
            innovations = unknowns - location
            values = given | {number: innovations[self._columns[n]] for n, (number, _) in self._field.items()}
            found = self._program.evaluate([p.atom for p in self._predictors], values)
            parts = [
                sign * jnp.reshape(v, -1)[chosen] for v, chosen, sign in zip(found, rows, self._signs, strict=True)
            ]
            return jnp.concatenate(parts).astype(unknowns.dtype)

        return predict

    def _factors(self, number: int, env: dict[int, Any], cells: Any) -> tuple[Potential, Array, Array]:
        """Factors, shifts of the predictors and weights of these cells of one observed site."""
        traced = self._trace.factors[self.factor_names[number]]
        shape = self._program.shape(traced.log_prob)
        size = int(np.prod(shape))
        mask, weight = self._program.evaluate(
            [traced.mask, Constant(1.0) if traced.scale is None else traced.scale], env
        )
        built = self._found[number].build(env, jnp.reshape(mask, -1))

        def in_use(values: Any) -> Array:
            return jnp.broadcast_to(values, (size,))[cells].astype(jnp.result_type(float))

        weights = jnp.broadcast_to(weight, shape).reshape(-1)
        return take_cells(built.potential, size, cells), in_use(built.shift), in_use(weights)

    def form(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> Bilinear:
        """The form at given hyperparameters.

        :param hyper: constrained values of all sites in :attr:`hyper`.
        :param data: arrays to use instead of :attr:`data`, of a reading of equal :attr:`structure`.

        Cost: some evaluations of the predictor, or about as many as the vectors have components where coefficients
        differ between cells.
        """
        if not self.common_sites:
            return self._form_given(hyper, data)
        # At zero of the common unknowns, so that the offset is what they do not add.
        at_zero = self.with_common(hyper, jnp.zeros((self.common_size,), jnp.result_type(float)))
        return self._form_given(at_zero, data)._replace(common=self._common_block(at_zero, data))

    @property
    def common_size(self) -> int:
        """Number of common unknowns."""
        return sum(int(np.prod(self.hyper[n].shape)) for n in self.common_sites)

    def with_common(self, hyper: Mapping[str, Any], values: Array) -> dict[str, Any]:
        """Hyperparameters with the common sites at given unknowns, shape ``(common_size,)``."""
        out, start = dict(hyper), 0
        for name in self.common_sites:
            shape = self.hyper[name].shape
            out[name] = values[start : start + int(np.prod(shape))].reshape(shape)
            start += int(np.prod(shape))
        return out

    def _common_block(self, hyper: Mapping[str, Array], data: Sequence[object] | None) -> Common:
        found = self._lookups(data)

        def log_prior(values: Array) -> Array:
            return self._sum_factors(self.common_sites, self._env(self.with_common(hyper, values), data))

        def predict(values: Array) -> Array:
            env = self._env(self.with_common(hyper, values), data)
            return self.predictor_fn(env, found.rows)(self._vectors.zeros)

        return common_block(log_prior, predict, self.common_size, jnp.result_type(float))

    def log_prior(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> Array:
        """Log prior density of the hyperparameters in the constrained space, without that of common sites."""
        names = [n for n in self._prior_factors if n not in self.common_sites]
        return self._sum_factors(names, self._env(hyper, data))

    def _form_given(self, hyper: Mapping[str, Array], data: Sequence[object] | None) -> Bilinear:
        """The form in which all common sites are given, as offsets."""
        env, found = self._env(hyper, data), self._lookups(data)
        rows, columns = self._sides_at(env, found)
        predict = self.predictor_fn(env, found.rows)
        vectors = self._vectors._replace(of_cells=found.of_cells, reference=found.reference)
        coupling, row_linear, column_linear = coefficients(predict, vectors, self._design)
        offset = predict(vectors.zeros)
        factors = [self._factors(i, env, cells) for i, cells in enumerate(found.cells)]
        potentials, shifts, weights = zip(*factors, strict=True)
        background = found.background
        if self.unlisted_cells == "zero":
            background = Background(exposure_of_zeros(self.factor_names, potentials[0]))
        return Bilinear(
            rows,
            columns,
            *found.of_cells,
            coupling,
            row_linear,
            column_linear,
            offset + jnp.concatenate(shifts),
            join_cells(potentials),
            jnp.concatenate(weights),
            self._log_constant(env),
            *found.orders,
            background,
        )

    def priors(self, hyper: Mapping[str, Array], data: Sequence[object] | None = None) -> tuple[Side, Side]:
        """The priors of rows and columns at given hyperparameters; the rest of the form may be the same for all."""
        return self._sides_at(self._env(hyper, data), self._lookups(data))

    def prior_at(self, name: str, env: Mapping[int, Any]) -> Any:
        """The prior of a field site given all inputs and constants of the program."""
        return self._evaluated(self._trace.priors[name], env)

    def _sides_at(self, env: dict[int, Array], found: Lookups) -> tuple[Side, Side]:
        location = self._locations(env)

        def side_at(side: int) -> Side:
            elements, roots, seen = self.elements[side], self._roots[side], found.combinations[side]
            priors = {name: (self._starts[name], self.prior_at(name, env)) for name in self.sides[side]}
            if roots is None or seen is None:
                return gaussian_side(location[elements], elements, list(priors.values()))
            return coupled_side(location[elements], elements, priors, roots, seen)

        return side_at(0), side_at(1)

    def scale_hyper(self, side: int) -> list[str]:
        """Hyperparameters on which the prior covariances of a side depend."""
        atoms = [a for n in self.sides[side] for a in jax.tree.leaves(self._trace.priors[n]) if isinstance(a, int)]
        return self._hyper_behind(atoms)

    def sites_behind(self, name: str) -> list[str]:
        """Other hyperparameters on which the prior of a hyperparameter depends."""
        return [n for n in self._hyper_behind([self._trace.factors[name].log_prob]) if n != name]

    def log_prior_of(self, name: str, hyper: Mapping[str, Array], data: Sequence[object] | None = None) -> Array:
        """Log prior density of one hyperparameter given those before it, in the constrained space."""
        return self._sum_factors([name], self._env(hyper, data))

    def site_start(self, name: str) -> int:
        """Number of the first unknown of a field site."""
        return self._starts[name]

    def vectors(self, unknowns: Array) -> tuple[Array, Array]:
        """Rows and columns of all unknowns, of shape ``(..., num_columns)``."""
        return self._vectors.split(unknowns)

    def unknowns(self, rows: Array, columns: Array) -> Array:
        """All unknowns of rows and columns, whose leading axes are kept."""
        return self._vectors.join(rows, columns)

    def site_values(
        self, hyper: Mapping[str, Array], unknowns: Array, data: Sequence[object] | None = None
    ) -> dict[str, Array]:
        """Every latent and deterministic site at values of the unknowns."""
        return self.values(hyper, unknowns - self._locations(self._env(hyper, data)), data)

    def log_joint(self, hyper: Mapping[str, Any], e: Array, data: Sequence[Any]) -> Array:
        unknowns = e + self._locations(self._env(hyper, data))
        # The model knows of no other cells.
        form = self._form_given(hyper, data)._replace(background=None)
        log_prior = self._sum_factors(self._prior_factors, self._env(hyper, data))
        return form.log_density(*self.vectors(unknowns)) + log_prior


def gaussian_side(mean: Array, elements: np.ndarray, priors: Sequence[tuple[int, Any]]) -> GaussianSide:
    """The prior of the vectors of one side.

    :param mean: prior means, shape ``(num, size)``.
    :param elements: which unknowns make which vector, of the same shape.
    :param priors: for each site of the side the first of its unknowns, and its prior.
    :return: with a diagonal precision if all sites have one.
    """
    is_diagonal = all(isinstance(prior, DiagonalPrior) for _, prior in priors)
    precision = jnp.zeros(elements.shape if is_diagonal else (*elements.shape, elements.shape[1]), mean.dtype)
    for start, prior in priors:
        local = elements - start
        local = np.where((local >= 0) & (local < prior.size), local, -1)
        found = _diagonal_precision(prior, local) if is_diagonal else _dense_precision(prior, local)
        precision += found.astype(mean.dtype)
    return GaussianSide(mean, precision)


def coupled_side(
    mean: Array, elements: np.ndarray, priors: Mapping[str, tuple[int, Any]], roots: Roots, seen: Combinations
) -> CoupledSide:
    """The prior of a side whose vectors depend on each other.

    :param mean: prior means, shape ``(num, size)``.
    :param elements: which unknowns make which vector, of the same shape.
    :param priors: for each site of the side the first of its unknowns, and its prior.
    :param roots: which covariances there are.
    :param seen: which combinations of vectors cells see.
    """
    precision = jnp.zeros(elements.shape, mean.dtype)
    for start, prior in priors.values():
        if isinstance(prior, DiagonalPrior):
            local = elements - start
            precision += _diagonal_precision(prior, np.where((local >= 0) & (local < prior.size), local, -1))
    scale = jnp.where(precision > 0.0, 1.0 / jnp.sqrt(jnp.where(precision > 0.0, precision, 1.0)), 1.0)

    def root(source: tuple[str, int] | None) -> Array:
        if source is None:
            return jnp.eye(len(elements), dtype=mean.dtype)
        prior = priors[source[0]][1]
        block: Array = prior.precision if isinstance(prior, PrecisionPrior) else prior.covariance
        block = block[source[1]].astype(mean.dtype)
        return cholesky(cholesky_inverse(cholesky(block)) if isinstance(prior, PrecisionPrior) else block)

    return CoupledSide(
        mean,
        scale,
        jnp.stack([root(source) for source in roots.sources]),
        jnp.asarray(roots.group),
        jnp.asarray(seen.places),
        jnp.asarray(seen.weight, mean.dtype),
    )


def _diagonal_precision(prior: DiagonalPrior, local: np.ndarray) -> Array:
    """Precisions of these elements of the site, zero for others (-1)."""
    return jnp.where(local >= 0, 1.0 / prior.variance[np.maximum(local, 0)], 0.0)


def _dense_precision(prior: Any, local: np.ndarray) -> Array:
    """Precision matrices of the vectors with these elements of the site, zero in rows and columns of others (-1)."""
    if isinstance(prior, DiagonalPrior):
        return as_matrices(_diagonal_precision(prior, local))
    if isinstance(prior, PrecisionPrior):
        blocks = prior.precision
    else:
        blocks = cholesky_inverse(cholesky(prior.covariance))
    batch, place = np.divmod(np.maximum(local, 0), blocks.shape[-1])
    same = (batch[:, :, None] == batch[:, None, :]) & (local >= 0)[:, :, None] & (local >= 0)[:, None, :]
    batch = batch % len(blocks)
    return jnp.where(same, blocks[batch[:, :, None], place[:, :, None], place[:, None, :]], 0.0)
