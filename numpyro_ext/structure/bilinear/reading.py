"""Models read as bilinear: two Gaussian blocks, and predictors that are affine in each given the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.lean_jit import lean_jit
from ...compilation.recent import Recent
from ...linalg.cholesky import cholesky, solve_lower
from ...linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior, PrecisionPrior
from ...potentials.base import Potential
from ..conflict import Conflict
from ..errors import ModelStructureError
from ..factors.recognise import Recognised, recognise
from ..model.priors import colour, prior_block
from ..model.reading import ModelReading
from ..model.tracing import SiteInfo
from ..program.degrees import Degree, Degrees, classify
from ..program.program import Constant
from .factors import (
    TAKEN,
    Unlisted,
    check_factor,
    check_same_family,
    check_unlisted,
    is_exponential,
    join_cells,
    take_cells,
)
from .form import Bilinear, GaussianSide
from .layouts import (
    Layout,
    Predictor,
    check_indices,
    elements_of,
    find_layouts,
    same_layout,
    self_product,
    shared_block,
)

__all__ = ["BilinearReading"]

_COMPILED = Recent(32)
_LARGEST_COUPLING = 100_000_000


class _Design(NamedTuple):
    """What was found of the coefficients: which there are, and which are the same for all cells."""

    num_pairs: int | None
    """Products of single components, or ``None`` if the coupling is a matrix."""
    is_coupling_shared: bool
    has_linear: tuple[bool, bool]
    is_linear_shared: tuple[bool, bool]


class BilinearReading(ModelReading):
    """A model read as a bilinear form, with a given split into field and hyperparameters.

    Made by :func:`~numpyro_ext.structure.bilinear.read`. The unknowns are the values of the field sites, in the order
    of the model; ``elements`` says which of them make which vector. All methods that take ``hyper`` are pure.

    :ivar sides: names of the sites of the rows and of the columns.
    :ivar elements: for rows and columns the flat indices of the unknowns, shape ``(num, size)``.
    :ivar index: for rows and columns the vector that each cell touches.
    :ivar factor_names: observed sites whose cells the form has, one after another.
    :ivar cells: for each of them the flat indices of the observations in use.
    :ivar unlisted_cells: whether pairs that are no cells are ``"missing"``, or ``"zero"`` counts.
    :ivar has_boundary: whether expectations are infinite for wide posteriors, as those of exponential rates are.
    :ivar is_design_fixed: whether everything but the priors is the same for all hyperparameters.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        sites: Mapping[str, SiteInfo],
        field: Sequence[str],
        rng_key: Array,
        *,
        like: BilinearReading | None = None,
        is_held_out: bool = False,
        unlisted_cells: Unlisted = "missing",
    ):
        super().__init__(model, args, kwargs, sites, field, rng_key, prior_block)
        degrees = classify(self._program, {n: number for n, (number, _) in self._field.items()}, with_sources=False)
        self._check_priors(degrees)
        self.factor_names = tuple(self._sort_factors(degrees))
        self.factor_shapes = tuple(self._program.shape(self._trace.factors[n].log_prob) for n in self.factor_names)
        self.rows_per_observation = (1,) * len(self.factor_names)
        check_indices(self._program, degrees, self.field)
        self._found = [self._recognise(n, degrees) for n in self.factor_names]
        self.cells = tuple(self._observations_in_use(n, is_held_out=is_held_out) for n in self.factor_names)
        self._predictors = [
            Predictor(n, f.predictor, np.asarray(f.rows)[cells])
            for n, f, cells in zip(self.factor_names, self._found, self.cells, strict=True)
        ]
        start_env = self._env(self.initial_hyper(), None)
        self._signs = tuple(f.build(start_env, jnp.asarray(True)).sign for f in self._found)
        shapes_of = [jax.eval_shape(lambda i=i: self._factors(i, start_env)[0]) for i in range(len(self._found))]
        check_same_family(self.factor_names, shapes_of)
        self.has_boundary = is_exponential(shapes_of[0])
        coupled = {n: self._coupled_axes(n) for n in self.field}
        shapes = {n: tuple(self.site_shapes[n]) for n in self.field}
        numbers = {n: number for n, (number, _) in self._field.items()}
        if like is None:
            self.layouts = find_layouts(self._program, numbers, shapes, coupled, self._predictors)
        else:
            known = (same_layout(self._program, numbers, shapes, self._predictors, layout) for layout in like.layouts)
            self.layouts = (next(known), next(known))
        self._check_flat(self.layouts)
        self.sides = (self.layouts[0].names, self.layouts[1].names)
        self.index = (self.layouts[0].vector, self.layouts[1].vector)
        sizes = np.cumsum([0, *(size for _, size in self._field.values())])
        self._starts = dict(zip(self.field, sizes[:-1].tolist(), strict=True))
        self.elements = tuple(elements_of(layout, shapes, self._starts) for layout in self.layouts)
        inputs = set(jax.tree.leaves(self._given))
        wanted = [p.atom for p in self._predictors]
        wanted += [a for n in self.field for a in [self._trace.locations[n]] if isinstance(a, int)]
        exposures = [self._trace.factors[n] for n in self.factor_names]
        wanted += [a for f in exposures for a in jax.tree.leaves((f.log_prob, f.scale)) if isinstance(a, int)]
        self.is_design_fixed = not self._program.ancestors(wanted) & inputs
        self._design = self._probe(rng_key, like)
        self.unlisted_cells: Unlisted = unlisted_cells
        if unlisted_cells == "zero":
            self._check_unlisted()
        self.affine_sites = self.field
        self.structure_key = self._structure_key()

    # Reading

    def _check_priors(self, degrees: Degrees) -> None:
        for name in self.field:
            used = frozenset().union(
                *(degrees.sites_of(a) for a in jax.tree.leaves((self._trace.locations[name], self._trace.priors[name])))
            )
            if used:
                raise Conflict(f"the prior of site '{name}' depends on {sorted(used)}.", used - {name} or used)

    def _recognise(self, name: str, degrees: Degrees) -> Recognised:
        """The predictor of an observed site, seen from the first site that finds one."""
        traced, program = self._trace.factors[name], self._program
        for part, atom in (("mask", traced.mask), ("scale", traced.scale), ("value", traced.value)):
            if atom is not None and degrees.of(atom) != Degree.CONSTANT:
                raise ModelStructureError(
                    f"the {part} of site '{name}' depends on {sorted(degrees.sites_of(atom))}.", site=name
                )
        probe = self._env(self.initial_hyper(), None)
        for number, _ in self._field.values():
            probe[number] = jnp.zeros(program.shape(number), jnp.result_type(float))
        for site, (number, _) in self._field.items():
            alone = classify(program, {site: number}, with_sources=False)
            if alone.of(traced.log_prob) == Degree.CONSTANT:
                continue
            found = recognise(program, alone, traced, probe)
            if found is None:
                if alone.of(traced.log_prob) == Degree.NONLINEAR and self._is_squared(alone, name):
                    raise ModelStructureError(shared_block(site))
                continue
            potential = jax.eval_shape(lambda found=found: found.build(probe, jnp.asarray(True)).potential)
            check_factor(name, found.label, potential, len(found.rows) // int(np.prod(program.shape(traced.log_prob))))
            fields = {n for n, _ in self._field.values()}
            parameters = [a for a in traced.parameters.values() if isinstance(a, int)]
            if program.ancestors(parameters, [found.predictor]) & fields:
                continue
            return found
        raise ModelStructureError(
            f"observed site '{name}' ({self.sites[name].family}) has no predictor that is affine in one of "
            f"{list(self.field)}, or is of a family that was not recognised: this engine takes {TAKEN}. Use NUTS for "
            "other models.",
            site=name,
        )

    def _is_squared(self, degrees: Degrees, name: str) -> bool:
        parameters = [a for a in self._trace.factors[name].parameters.values() if isinstance(a, int)]
        return any(self_product(self._program, degrees, a) for a in parameters)

    def _coupled_axes(self, name: str) -> frozenset[int]:
        prior, shape = self._trace.priors[name], self.site_shapes[name]
        return frozenset([len(shape) - 1]) if isinstance(prior, CovariancePrior | PrecisionPrior) else frozenset()

    def _check_flat(self, layouts: tuple[Layout, Layout]) -> None:
        for name in (n for layout in layouts for n in layout.names):
            if isinstance(self._trace.priors[name], FlatPrior):
                raise ModelStructureError(
                    f"site '{name}' has a flat prior: a factor of a product needs a proper one, because its scale is "
                    "not determined by the data. Use dist.Normal with a scale of its own.",
                    site=name,
                )

    # Coefficients

    def _locations(self, env: Mapping[int, Any]) -> Array:
        """Prior means of all unknowns."""
        found = self._program.evaluate([self._trace.locations[n] for n in self.field], env)
        dtype = jnp.result_type(float)
        parts = [
            jnp.broadcast_to(v, self.site_shapes[n]).reshape(-1).astype(dtype)
            for n, v in zip(self.field, found, strict=True)
        ]
        return jnp.concatenate(parts)

    def _predictor_fn(self, env: dict[int, Any]) -> Callable[[Array], Array]:
        """The predictors of the cells in use as a function of all unknowns."""
        location = self._locations(env)
        given = dict(env)

        def predict(unknowns: Array) -> Array:
            values, start = dict(given), 0
            for number, size in self._field.values():
                piece = (unknowns - location)[start : start + size]
                values[number] = piece.reshape(self._program.shape(number))
                start += size
            found = self._program.evaluate([p.atom for p in self._predictors], values)
            parts = [
                sign * jnp.reshape(v, -1)[p.rows]
                for v, p, sign in zip(found, self._predictors, self._signs, strict=True)
            ]
            return jnp.concatenate(parts).astype(unknowns.dtype)

        return predict

    def _direction(self, side: int, position: Array) -> Array:
        """Unknowns that are one at a position of every vector of a side, else zero."""
        elements = jnp.asarray(self.elements[side])
        zeros = jnp.zeros((self.num_columns,), jnp.result_type(float))
        return zeros.at[elements[:, position]].set(1.0)

    def _spread(self, side: int, vector: Array) -> Array:
        """Unknowns in which every vector of a side is the same."""
        elements = jnp.asarray(self.elements[side])
        zeros = jnp.zeros((self.num_columns,), jnp.result_type(float))
        return zeros.at[elements].set(jnp.broadcast_to(vector, elements.shape))

    def _first_cell(self, predict: Callable[[Array], Array]) -> tuple[Array, Array, Array]:
        """Coupling and both linear coefficients of the first cell, each with a leading axis of length one."""
        zeros = jnp.zeros((self.num_columns,), jnp.result_type(float))
        rows, columns = (jnp.asarray(e[i[0]]) for e, i in zip(self.elements, self.index, strict=True))
        slope = jax.grad(lambda x: predict(x)[0])

        def product(places: Array) -> Array:
            """Of all components of the row with the sum of some of the column."""
            return jax.jvp(slope, (zeros,), (zeros.at[places].set(1.0),))[1][rows]

        if self._design.num_pairs is not None:
            coupling = product(columns)[: self._design.num_pairs]
        else:
            coupling = jax.lax.map(product, columns).T
        at_zero = slope(zeros)
        return coupling[None], at_zero[rows][None], at_zero[columns][None]

    def _slopes(self, predict: Callable[[Array], Array], side: int) -> Array:
        """Of the predictors in each component where all else is zero, shape ``(cells, size)``."""
        zeros = jnp.zeros((self.num_columns,), jnp.result_type(float))
        positions = jnp.arange(self.elements[side].shape[1])
        return jax.lax.map(lambda i: jax.jvp(predict, (zeros,), (self._direction(side, i),))[1], positions).T

    def _mixed(self, predict: Callable[[Array], Array], row_positions: Array, column_positions: Array) -> Array:
        """Mixed second derivatives in pairs of components, shape ``(cells, pairs)``."""
        zeros = jnp.zeros((self.num_columns,), jnp.result_type(float))

        def one(pair: tuple[Array, Array]) -> Array:
            row, column = self._direction(0, pair[0]), self._direction(1, pair[1])

            def slope(x: Array) -> Array:
                return jax.jvp(predict, (x,), (row,))[1]

            return jax.jvp(slope, (zeros,), (column,))[1]

        return jax.lax.map(one, (row_positions, column_positions)).T

    def _probe(self, rng_key: Array, like: BilinearReading | None) -> _Design:
        """Find which components meet, order those that meet one other first, and look what all cells share."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
        num_cells = self.index[0].size
        weights = jnp.asarray(rng.uniform(1.0, 2.0, num_cells), jnp.result_type(float))
        point = jnp.asarray(rng.standard_normal(self.num_columns), jnp.result_type(float))
        sizes = self.elements[0].shape[1], self.elements[1].shape[1]
        tests = tuple(jnp.asarray(rng.uniform(1.0, 2.0, size), jnp.result_type(float)) for size in sizes)
        reading = self.skeleton()

        def meetings(
            env: dict[int, Any], weights: Array, point: Array, tests: tuple[Array, Array]
        ) -> tuple[Array, list[Array]]:
            """How strongly components meet; of combinations of the coefficients the range over the cells."""
            predict, zeros = reading._predictor_fn(env), jnp.zeros_like(point)
            slopes = jax.grad(lambda x: jnp.dot(weights, predict(x)))

            def products_of(position: Array) -> Array:
                return jax.jvp(slopes, (point,), (reading._direction(0, position),))[1]

            found = jax.lax.map(products_of, jnp.arange(sizes[0]))
            largest = jnp.max(jnp.abs(found[:, jnp.asarray(reading.elements[1])]), axis=1)
            rows, columns = (reading._spread(side, test) for side, test in enumerate(tests))

            def slope_of_rows(x: Array) -> Array:
                return jax.jvp(predict, (x,), (rows,))[1]

            row_slopes, products = map(_limits, jax.jvp(slope_of_rows, (zeros,), (columns,)))
            return largest, [products, row_slopes, _limits(jax.jvp(predict, (zeros,), (columns,))[1])]

        env = self._env(_off_zero(self), None)
        key = ("meetings", self._layout_key())
        compiled = _COMPILED.get(key, lambda: lean_jit(meetings))
        largest, ranges = jax.tree.map(np.asarray, compiled(env, weights, point, tests))
        rounding = 1e-9 if largest.dtype == np.float64 else 1e-5
        meets = largest > rounding * np.max(largest, initial=0.0)
        if like is None:
            is_matching = bool(meets.any() and np.all(meets.sum(0) <= 1) and np.all(meets.sum(1) <= 1))
            rows, columns = np.nonzero(meets) if is_matching else (np.zeros(0, int), np.zeros(0, int))
            self._orders = (_first(rows, sizes[0]), _first(columns, sizes[1]))
            num_pairs = len(rows)
        else:
            is_matching = like._design.num_pairs is not None
            self._orders, num_pairs = like._orders, like._design.num_pairs or 0
        if is_matching:
            orders = self._orders
            self.elements = tuple(e[:, order] for e, order in zip(self.elements, orders, strict=True))
        elif not _is_shared(ranges[0]) and num_cells * sizes[0] * sizes[1] > _LARGEST_COUPLING:
            raise ModelStructureError(
                f"the {num_cells} cells have products of {sizes[0]} x {sizes[1]} components each, which is more "
                "than can be kept. Write the predictor as a sum of products of single components."
            )
        return _Design(
            num_pairs if is_matching else None,
            _is_shared(ranges[0]),
            (bool(np.any(ranges[1])), bool(np.any(ranges[2]))),
            (_is_shared(ranges[1]), _is_shared(ranges[2])),
        )

    def _layout_key(self) -> tuple[Any, ...]:
        static = hashlib.blake2b(digest_size=16)
        for array in (*self.index, *self.elements, *(p.rows for p in self._predictors)):
            static.update(str(array.shape).encode())
            static.update(np.ascontiguousarray(array).tobytes())
        return (self._model_key(), static.hexdigest())

    def _structure_key(self) -> tuple[Any, ...]:
        return ("bilinear", self._layout_key(), self.sides, self._design, self.unlisted_cells)

    def _check_unlisted(self) -> None:
        """Refuse what zeros in all other cells cannot be added to."""
        is_shared = self._design.is_coupling_shared and all(self._design.is_linear_shared)
        check_unlisted(self.form(_off_zero(self)), self.factor_names, self.cells, self.factor_shapes, is_shared)

    def _factors(self, number: int, env: dict[int, Any]) -> tuple[Potential, Array, Array]:
        """Factors, shifts of the predictors and weights of the cells in use of one observed site."""
        traced, cells = self._trace.factors[self.factor_names[number]], self.cells[number]
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

    # The form

    def form(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> Bilinear:
        """The form at given hyperparameters.

        :param hyper: constrained values of all sites in :attr:`hyper`.
        :param data: arrays to use instead of :attr:`data`; masks and indices stay as they were read.

        Cost: some evaluations of the predictor, or about as many as the vectors have components where coefficients
        differ between cells.
        """
        env = self._env(hyper, data)
        rows, columns = self._sides_at(env)
        predict, design = self._predictor_fn(env), self._design
        num_cells, sizes = self.index[0].size, tuple(e.shape[1] for e in self.elements)
        is_any_shared = design.is_coupling_shared or any(design.is_linear_shared)
        first: Any = self._first_cell(predict) if is_any_shared else ()
        if design.is_coupling_shared:
            coupling = first[0]
        elif design.num_pairs is not None:
            positions = jnp.arange(design.num_pairs)
            coupling = self._mixed(predict, positions, positions)
        else:
            row_positions, column_positions = np.divmod(np.arange(sizes[0] * sizes[1]), sizes[1])
            coupling = self._mixed(predict, jnp.asarray(row_positions), jnp.asarray(column_positions))
            coupling = coupling.reshape(num_cells, *sizes)
        linear = []
        for side in (0, 1):
            if not design.has_linear[side]:
                linear.append(jnp.zeros((1, 0)))
            else:
                is_shared = design.is_linear_shared[side]
                linear.append(first[1 + side] if is_shared else self._slopes(predict, side))
        offset = predict(jnp.zeros((self.num_columns,), jnp.result_type(float)))
        factors = [self._factors(i, env) for i in range(len(self.factor_names))]
        potentials, shifts, weights = zip(*factors, strict=True)
        return Bilinear(
            rows,
            columns,
            jnp.asarray(self.index[0]),
            jnp.asarray(self.index[1]),
            coupling,
            linear[0],
            linear[1],
            offset + jnp.concatenate(shifts),
            join_cells(potentials),
            jnp.concatenate(weights),
            self._log_constant(env),
            jnp.asarray(np.argsort(self.index[0], kind="stable")),
            jnp.asarray(np.argsort(self.index[1], kind="stable")),
            potentials[0].exposure[0] if self.unlisted_cells == "zero" else None,
        )

    def priors(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> tuple[GaussianSide, GaussianSide]:
        """The priors of rows and columns at given hyperparameters; the rest of the form may be the same for all."""
        return self._sides_at(self._env(hyper, data))

    def log_constant(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> Array:
        """Terms of the log density that depend on no unknown and are no priors of hyperparameters."""
        return self._log_constant(self._env(hyper, data))

    def _sides_at(self, env: dict[int, Any]) -> tuple[GaussianSide, GaussianSide]:
        location = self._locations(env)
        starts = self._starts
        out = []
        for names, elements in zip(self.sides, self.elements, strict=True):
            priors = {name: self._evaluated(self._trace.priors[name], env) for name in names}
            mean = location[elements]
            if all(isinstance(p, DiagonalPrior) for p in priors.values()):
                variance = jnp.zeros((self.num_columns,), mean.dtype)
                for name in names:
                    size = priors[name].size
                    variance = variance.at[starts[name] : starts[name] + size].set(priors[name].variance)
                out.append(GaussianSide(mean, 1.0 / variance[elements]))
                continue
            precision = jnp.zeros((*elements.shape, elements.shape[1]), mean.dtype)
            for name in names:
                local = elements - starts[name]
                is_own = (local >= 0) & (local < priors[name].size)
                precision += _dense_precision(priors[name], np.where(is_own, local, -1)).astype(mean.dtype)
            out.append(GaussianSide(mean, precision))
        return out[0], out[1]

    def scale_hyper(self, side: int) -> list[str]:
        """Hyperparameters on which the prior covariances of a side depend."""
        atoms = [a for n in self.sides[side] for a in jax.tree.leaves(self._trace.priors[n]) if isinstance(a, int)]
        return self._hyper_behind(atoms)

    def site_start(self, name: str) -> int:
        """Where the elements of a field site begin among the unknowns."""
        return self._starts[name]

    def vectors(self, unknowns: Array) -> tuple[Array, Array]:
        """Rows and columns of all unknowns, of shape ``(..., num_columns)``."""
        return unknowns[..., self.elements[0]], unknowns[..., self.elements[1]]

    def unknowns(self, rows: Array, columns: Array) -> Array:
        """All unknowns of rows and columns, whose leading axes are kept."""
        lead = rows.shape[:-2]
        out = jnp.zeros((*lead, self.num_columns), rows.dtype)
        for vectors, elements in zip((rows, columns), self.elements, strict=True):
            out = out.at[..., elements.reshape(-1)].set(vectors.reshape(*lead, -1))
        return out

    def site_values(
        self, hyper: Mapping[str, Any], unknowns: Array, data: Sequence[Any] | None = None
    ) -> dict[str, Array]:
        """Every latent and deterministic site at values of the unknowns."""
        return self.values(hyper, unknowns - self._locations(self._env(hyper, data)), data)

    def log_joint(self, hyper: Mapping[str, Any], e: Array, data: Sequence[Any]) -> Array:
        unknowns = e + self._locations(self._env(hyper, data))
        # The model knows of no other cells.
        form = self.form(hyper, data)._replace(zero_exposure=None)
        return form.log_density(*self.vectors(unknowns)) + self.log_prior(hyper, data)

    def draw(self, hyper: Mapping[str, Any], white: Array, data: Sequence[Any]) -> Array:
        env, parts, start = self._env(hyper, data), [], 0
        for name in self.field:
            block = self._evaluated(self._trace.priors[name], env)
            parts.append(colour(block, white[start : start + block.size]))
            start += block.size
        return jnp.concatenate(parts)

    def explain_nan(self) -> None:
        hyper = self.initial_hyper()
        form = self.form(hyper)
        for names, side in zip(self.sides, (form.rows, form.columns), strict=True):
            if not bool(jnp.all(jnp.isfinite(side.log_determinant()))):
                raise ModelStructureError(f"the prior of {list(names)} is not that of a Gaussian: check its scales.")
        at_offset = form.potential.log_density(form.offset)
        for what, value in (("predictor", form.offset), ("log density or an exposure", at_offset)):
            if not bool(jnp.all(jnp.isfinite(value))):
                raise ModelStructureError(f"the {what} of {list(self.factor_names)} is not finite in some cells.")
        super().explain_nan()

    def describe(self) -> str:
        """The split and what was recognised, one line each."""
        lines = self._describe_sites()
        for what, names, elements in zip(("rows", "columns"), self.sides, self.elements, strict=True):
            num, size = elements.shape
            lines.append(f"{what}: {num} vectors of {size} components ({', '.join(names)})")
        sites = zip(self.factor_names, self.cells, self.factor_shapes, self._found, strict=True)
        for name, cells, shape, found in sites:
            lines.append(f"observed: {name}, {cells.size} of {int(np.prod(shape))} cells in use ({found.label})")
        pairs = self._design.num_pairs
        kind = "a matrix of products" if pairs is None else f"{pairs} products of components"
        shared = "the same in all cells" if self._design.is_coupling_shared else "of different weights in the cells"
        lines.append(f"coupling: {kind}, {shared}")
        if self.unlisted_cells == "zero":
            lines.append(f"unlisted: {np.prod([len(e) for e in self.elements]) - self.index[0].size} counts of zero")
        return "\n".join(lines)


def _dense_precision(prior: Any, local: np.ndarray) -> Array:
    """Precision matrices of the vectors with these elements of the site, zero in rows and columns of others (-1)."""
    num, size = local.shape
    if isinstance(prior, DiagonalPrior):
        values = jnp.where(local >= 0, 1.0 / prior.variance[np.maximum(local, 0)], 0.0)
        return values[:, :, None] * jnp.eye(size, dtype=values.dtype)
    if isinstance(prior, PrecisionPrior):
        blocks = prior.precision
    else:
        factor = cholesky(prior.covariance)
        identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
        half = solve_lower(factor, identity)
        blocks = half.swapaxes(-1, -2) @ half
    batch, place = np.divmod(np.maximum(local, 0), blocks.shape[-1])
    same = (batch[:, :, None] == batch[:, None, :]) & (local >= 0)[:, :, None] & (local >= 0)[:, None, :]
    return jnp.where(same, blocks[batch[:, :, None], place[:, :, None], place[:, None, :]], 0.0)


def _first(chosen: np.ndarray, size: int) -> np.ndarray:
    """Positions with the chosen ones in front."""
    return np.concatenate([chosen, np.setdiff1d(np.arange(size), chosen)])


def _limits(x: Array) -> Array:
    return jnp.stack([jnp.min(x), jnp.max(x)])


def _is_shared(limits: np.ndarray) -> bool:
    """Whether what lies between two limits is the same up to rounding."""
    return bool(np.ptp(limits) <= 16 * np.finfo(limits.dtype).eps * np.abs(limits).max())


def _off_zero(reading: BilinearReading) -> dict[str, Any]:
    """Hyperparameters near their starting values, none of which makes a coefficient zero by chance."""
    out = {}
    for number, (name, site) in enumerate(reading.hyper.items()):
        free = site.transform.inv(jnp.asarray(site.init, jnp.result_type(float)))
        shift = 0.3 + 0.1 * jnp.cos(1.0 + number + jnp.arange(free.size)).reshape(free.shape)
        out[name] = site.transform(free + shift)
    return out
