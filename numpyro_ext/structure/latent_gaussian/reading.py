"""Reading of a latent Gaussian model, as pure functions of hyperparameters and data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.store import shared
from ...linalg.gaussian.design import StateSpaceDesign
from ...linalg.gaussian.prior import FlatPrior, LowRankPrior, SparsePrecisionPrior
from ...linalg.gaussian.spaces.border_space import Border
from ...potentials.families.half_line import HalfLinePotential
from ..errors import ModelStructureError, Reason
from ..factors.plan import FactorPlan, factor_of_rows, plan_factor
from ..families import family_of
from ..half_lines import HalfLine
from ..model.priors import prior_block
from ..model.reading import ModelReading, Treatment
from ..model.running.execution import ModelCall
from ..model.running.inspection import SiteInfo
from ..program.patterns import TooLarge
from ..program.rows.affine_rows import AffineRows, Parts
from ..program.rows.chosen_rows import ChosenIndices, ChosenRows
from ..program.rows.state_rows import NoStateSpace, StateRows
from .blocks import find_blocks
from .border import find_border
from .costs import COSTS, LayoutCosts
from .form import AffineMap, BlockKinds, Blocks, LatentGaussian, MoreBlocks
from .looked_up import LookedUp
from .not_finite import explain_not_finite, explain_rounding
from .predictor_rows import LARGEST_DENSE, predictor_rows
from .prior_columns import PriorColumns
from .sparse_fields import describe_layout, iterative_layout, large_rest, sparse_layout
from .touched import find_touched

_MOST_KEPT = 200_000
"""Numbers beside the data in a reading that is kept for the next run."""
_LONGEST_WAY = 5.0
"""Largest predictor of the paths at which a form with scans is checked: likelihoods overflow elsewhere."""


class LatentGaussianReading(ModelReading):
    """A model read as a latent Gaussian form, with a given split into field and hyperparameters.

    Made by :func:`~numpyro_ext.structure.read_latent_gaussian`. What all readings have is described at
    :class:`~numpyro_ext.structure.ModelReading`.

    :ivar observed_names: observed sites that depend on the field.
    :ivar factor_names: one per family of factors of the form: these, and sites of the field whose prior is a factor.
    :ivar factor_shapes: shapes of the observations of each family.
    :ivar rows_per_observation: how many rows of the form each observation of a family has.
    :ivar affine_sites: field and deterministic sites that are affine in the field.
    :ivar large_sites: others, so large that only chosen elements have maps: see :meth:`choose`.
    """

    opens_scans = True

    def __init__(
        self,
        call: ModelCall,
        sites: Mapping[str, SiteInfo],
        field: Iterable[str],
        costs: LayoutCosts = COSTS,
    ):
        super().__init__(call, sites, field, prior_block)
        self._costs = costs
        degrees = self._classify("jointly Gaussian")
        self._sort_factors(degrees)
        probe = self._env(self.initial_hyper(), None)
        self.plans: list[FactorPlan] = [
            plan_factor(self._questions, degrees, name, self._trace.factors[name], probe) for name in self.factor_names
        ]
        self.factor_shapes = tuple(p.shape for p in self.plans)
        self.rows_per_observation = tuple(p.rows_per_observation for p in self.plans)
        parts = [part for plan in self.plans for part in plan.parts]
        together = self._priors.independent_blocks()
        self._rows = predictor_rows(self._questions, degrees, self._field, parts, together, costs)
        self._touched = None
        priors = self._trace.priors.values()
        is_sparse = any(isinstance(prior, SparsePrecisionPrior) for prior in priors)
        is_plain = not is_sparse and not any(isinstance(prior, FlatPrior | LowRankPrior) for prior in priors)
        if isinstance(self._rows, AffineRows) and is_plain:
            self._touched = find_touched(self._questions, degrees, self._rows, self._priors.coupled(), costs)
        pattern = None if is_sparse else self._rows.pattern
        factor = factor_of_rows(self.plans)
        blocks = find_blocks(pattern, self._rows.num_rows, self._rows.num_columns, self._priors.coupled(), factor)
        border, rows = None, self._rows
        if isinstance(rows, AffineRows) and not is_sparse and (self._touched is None or self._touched.num_blocks <= 1):
            touched_cost = None if self._touched is None else self._touched.cost
            border = find_border(rows.pattern, rows, self._priors, blocks, touched_cost, overhead=costs.border)
        num_shared = None if border is None else border.shared.size
        self.dense_rest = 0
        if not (is_sparse or self._touched) or costs.largest_rest <= 0:
            largest = min(costs.largest_rest, costs.large_rest)
            self.dense_rest = large_rest(self._priors, rows, blocks, num_shared, largest)
        is_iterative = self.dense_rest > costs.largest_rest
        if is_iterative:
            self.dense_rest = 0
            border, self._touched = None, None
            blocks = np.arange(rows.num_rows)[None], np.arange(rows.num_columns)[None]
        if border is not None:  # what one coefficient joins falls apart without it
            blocks = np.arange(self._rows.num_rows)[None], np.arange(self._rows.num_columns)[None]
            self._touched = None
        affine = self._affine_sites(degrees)
        is_large = {n: self._touched and math.prod(self.site_shapes[n]) > costs.large_site for n in affine}
        self.large_sites = tuple(n for n in affine if is_large[n])
        found = {n: self._map(n) for n in affine if n not in self.large_sites}
        self._maps = {n: rows for n, rows in found.items() if rows is not None}
        self.affine_sites = tuple(self._maps)
        self._block_shape = blocks[1].shape if border is None else (*border[0].shape, border[1].size)
        maps = {name: rows.indices for name, rows in self._maps.items()}
        touched = None if self._touched is None else self._touched.indices
        layout, affine_maps = None, list(self._maps.values())
        if is_iterative:
            assert isinstance(rows, AffineRows)
            layout = iterative_layout(self._priors, rows, affine_maps)
        elif is_sparse:
            layout = sparse_layout(self._priors, rows, affine_maps)
        # Of the questions, as factors may have added to them what they looked up.
        self.data = (*self._questions.data, LookedUp(self._rows.indices, maps, blocks, border, touched, layout))

    def without_data(self) -> Self:
        out = super().without_data()
        out._rows = self._rows.without_data()
        out._touched = None if self._touched is None else self._touched.without_data()
        out._maps = {name: rows.without_data() for name, rows in self._maps.items()}
        return out

    @property
    def serves_other_data(self) -> bool:
        """True if it may be kept and read again by :meth:`with_looked_up`."""
        return self.holds_no_values and holds_little(self.looked_up, _MOST_KEPT)

    @property
    def holds_no_values(self) -> bool:
        """True if nothing of the data is in its functions but what the program has looked up."""
        rows = [self._rows, *self._maps.values()]
        is_plain = all(isinstance(r, AffineRows) for r in rows) and not (self.large_sites or self._program.recurrences)
        # What factors of no family look up is in their functions, and bounds are computed of the data.
        return is_plain and all(plan.is_recognised for plan in self.plans) and not (self._trace.bounds or self.changing)

    @property
    def looked_up(self) -> LookedUp:
        """Indices that were looked up in the data."""
        return self._indices(None)

    def with_looked_up(self, call: ModelCall, sites: Mapping[str, SiteInfo], looked_up: LookedUp) -> Self | None:
        """:meth:`TracedModel.on_data_of`, of a structure, with what a reading of it has looked up."""
        out = self.on_data_of(call, sites)
        if out is None:
            return None
        out.data = (*out._questions.data, looked_up)
        by_values = [plan.holds for plan in self.plans if plan.holds is not None]
        probe = out._env(out.initial_hyper(), None) if by_values else {}
        return out if all(holds(out._program, probe) for holds in by_values) else None

    def _indices(self, data: Sequence[Any] | None) -> LookedUp:
        return (self.data if data is None else data)[-1]

    @property
    def has_estimates(self) -> bool:
        """True if variances and log determinants of its field are estimates by probes."""
        layout = self.abstract_form.layout
        return layout is not None and layout.elimination is not None

    @property
    def num_closed_forms(self) -> int:
        return sum(plan.is_closed_form for plan in self.plans)

    @property
    def treatments(self) -> dict[str, Treatment]:
        """Treatment of each factor outside the field, by the name of its site."""
        return {
            p.name: Treatment(p.label, p.rows_per_observation, p.is_recognised)
            for p in self.plans
            if p.name not in self.field
        }

    @property
    def unknown_pairs(self) -> frozenset[str]:
        pairs = [p for p in self.plans if not p.is_recognised and p.rows_per_observation > 1]
        return frozenset(p.name for p in pairs if not p.is_closed_form)

    @property
    def _priors(self) -> PriorColumns:
        return PriorColumns(self._columns, self._trace.priors, self._program.shape, self._known)

    def _known(self, tree: object) -> Any:
        return self._evaluated(tree, dict(zip(self._program.constants, self.data, strict=False)))

    def _affine_rows(self, parts: Parts) -> AffineRows:
        return AffineRows(self._questions, self._field, parts, self._costs.rows)

    def form(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> LatentGaussian:
        """The form at given hyperparameters.

        :param hyper: constrained values of all sites in :attr:`hyper`.
        :param data: arrays to use instead of :attr:`data`, of a reading of equal :attr:`structure`.
        :return: the form; its columns are the innovations of the field sites in the order of :attr:`field`.
        """
        env = self._env(hyper, data)
        prior = tuple(self._evaluated(self._trace.priors[n], env) for n in self.field)
        indices = self._indices(data)
        design, offset = self._rows.design(env, indices.rows)
        built = [plan.build(env) for plan in self.plans]
        sizes = [sum(len(rows) for _, rows in plan.parts) for plan in self.plans]
        sign = jnp.concatenate([jnp.full((n,), b.sign) for n, (b, _) in zip(sizes, built, strict=True)])
        shift = jnp.concatenate([jnp.broadcast_to(b.shift, (n,)) for n, (b, _) in zip(sizes, built, strict=True)])
        if any(b.sign != 1.0 for b, _ in built):
            design = design.scale_rows(sign)
        touched = None
        if self._touched is not None and indices.touched is not None:
            touched = self._touched.build(env, indices.touched, sign)
        return LatentGaussian(
            prior,
            design,
            sign * offset + shift,
            tuple(b.potential for b, _ in built),
            tuple(mask for _, mask in built),
            self._log_constant(env),
            Blocks(*map(jnp.asarray, indices.placed_blocks)),
            None if indices.border is None else Border(*jax.tree.map(jnp.asarray, indices.border)),
            touched,
            indices.layout,
            indices.kinds,
        )

    @cached_property
    def abstract_form(self) -> LatentGaussian:
        """The form with shapes and dtypes in place of numbers, for questions about its families."""
        return shared(_compiled_form, self).eval_shape(self.initial_hyper(), self.with_kinds(None).data)

    def compiled_form(self, hyper: Mapping[str, object]) -> LatentGaussian:
        """:meth:`form` of the model's data, by one compiled function instead of one for each operation.

        :param hyper: all hyperparameters, constrained.
        """
        form: LatentGaussian = shared(_compiled_form, self)(hyper, self.with_kinds(None).data)
        return form._replace(kinds=self.kinds)

    @property
    def kinds(self) -> BlockKinds | MoreBlocks | None:
        """Blocks that are known to be alike, in the data of this reading, or beyond it."""
        return self._indices(None).kinds

    def with_kinds(self, kinds: BlockKinds | MoreBlocks | None) -> Self:
        """The same reading, whose forms say which blocks are alike, as a caller has found; ``None`` to say nothing."""
        return self if kinds is self.kinds else self._changed(kinds=kinds)

    def with_rows_by_column(self, rows: np.ndarray | None) -> Self:
        """The same reading, whose forms have the rows of blocks in other places, and say of none that they are alike.

        :param rows: shape ``(num_blocks, columns)``, padded one past the end; ``None`` for those that were read.
        """
        return self._changed(kinds=None, rows_by_column=rows)

    def _changed(self, **found: Any) -> Self:
        out = self._copy()
        out.data = (*self.data[:-1], self._indices(None)._replace(**found))
        return out

    def for_held_sites(self) -> Self:
        """The same reading, laid out for one conditioning after the other, at many hyperparameters, with sites held.

        Sums over rows are the same each time where the design is, so that unknowns which many rows share are split off
        as a border in much smaller models than a fit would. Series of short states have a block for each step.
        """
        indices, rows = self._indices(None), self._rows
        if isinstance(rows, StateRows):
            by_steps = rows.by_steps(self._questions, self._priors.independent_blocks())
            if by_steps is None:
                return self
            out = self._copy()
            out._rows = by_steps
            return out
        is_plain = indices.touched is None and indices.layout is None and not self._priors.inducing()
        if not is_plain or not isinstance(rows, AffineRows) or indices.rows is None:
            return self
        pattern = np.where(indices.rows.is_entry, indices.rows.columns, -1)
        overhead = self._costs.held_border
        border = find_border(pattern, rows, self._priors, indices.blocks, overhead=overhead, are_sites_held=True)
        if border is None:
            return self
        out = self._copy()
        whole = np.arange(rows.num_rows)[None], np.arange(rows.num_columns)[None]
        out.data = (*self.data[:-1], indices._replace(blocks=whole, border=border))
        out._block_shape = (*border.columns.shape, border.shared.size)
        return out

    def maps(
        self, hyper: Mapping[str, object], data: Sequence[object] | None = None, names: Sequence[str] | None = None
    ) -> dict[str, AffineMap]:
        """Affine sites as maps of the unknowns: value ``= (design @ e + offset).reshape(site_shapes[name])``."""
        env, indices = self._env(hyper, data), self._indices(data).maps
        names = self.affine_sites if names is None else names
        return {n: AffineMap(*self._maps[n].design(env, indices[n])) for n in names}

    def choose(self, name: str, elements: np.ndarray) -> tuple[ChosenRows, ChosenIndices]:
        """Chosen elements of one of :attr:`large_sites`.

        :param elements: their numbers in C order.
        :raises ValueError: if they depend on too many unknowns.
        """
        try:
            assert isinstance(self._rows, AffineRows)  # as of all that have large sites
            return ChosenRows.build(self._questions, self._rows, self._trace.values[name], elements)
        except TooLarge as error:
            raise ValueError(f"{len(elements)} elements of {name!r} are too many at once: ask for fewer.") from error

    def chosen_map(
        self, chosen: ChosenRows, indices: ChosenIndices, hyper: Mapping[str, object], data: Sequence[object]
    ) -> AffineMap:
        """Map of the unknowns that :meth:`choose` found."""
        return AffineMap(*chosen.design(self._env(hyper, data), indices))

    def _map(self, name: str) -> AffineRows | StateRows | None:
        """Rows of a site; None for one that sees several blocks of a long scan, such as differences in time."""
        parts = [((self._trace.values[name],), np.arange(int(np.prod(self.site_shapes[name]))))]
        if isinstance(self._rows, StateRows):
            try:
                return StateRows.build(self._questions, self._rows.blocks, parts)
            except NoStateSpace:
                if len(parts[0][1]) * self.num_columns > LARGEST_DENSE:
                    return None
        return self._affine_rows(parts)

    @property
    def half_lines(self) -> dict[str, slice]:
        """Columns of the sites of the field whose prior is a density on a half line, by name."""
        found, family = self._trace.factors, family_of(HalfLine)
        return {n: self._columns[n] for n in self.field if n in found and found[n].family is family}

    def lower_bounds(self, name: str) -> np.ndarray:
        """Bounds of the elements of one of :attr:`half_lines`, in C order."""
        traced = self._trace.factors[name]
        return np.ravel(np.broadcast_to(self._known_value(traced.parameters["lower"]), self.site_shapes[name]))

    def draw(self, hyper: Mapping[str, object], white: Array, data: Sequence[object]) -> Array:
        e, form = super().draw(hyper, white, data), self.form(hyper, data)
        if isinstance(form.design, StateSpaceDesign):
            # a long path goes where likelihoods overflow
            e = e * jnp.minimum(1.0, _LONGEST_WAY / jnp.max(jnp.abs(form.design.matvec(e))))
        for name, columns in self.half_lines.items():
            prior = form.potentials[self.factor_names.index(name)]
            assert isinstance(prior, HalfLinePotential)  # by its family
            e = e.at[columns].set(prior.inside(e[columns]))
        return e

    def linearity_error(self, hyper: Mapping[str, object], data: Sequence[object]) -> Array:
        """Distance of rows by way of their quantities from the rows, at one point."""
        form = self.form(hyper, data)
        if form.touched is None:
            return super().linearity_error(hyper, data)
        e = jnp.cos(jnp.arange(self.num_columns, dtype=form.offset.dtype) ** 2)
        whole = form.design.matvec(e)
        difference = form.touched.rows.matvec(form.touched.quantities.matvec(e)) - whole
        return jnp.max(jnp.abs(difference)) / (1.0 + jnp.max(jnp.abs(whole)))

    def check_conditioning(self, tolerance: float) -> None:
        super().check_conditioning(tolerance)
        explain_rounding(self.form(self.initial_hyper()), self.factor_names, tolerance)

    def explain_linearity_error(self, error: float) -> None:
        raise ModelStructureError(
            f"the model was misread: its predictors differ by {error:.2g} from what they touch. What was read:\n"
            f"{self.describe()}\nPlease report this model; NUTS is not affected.",
            reason=Reason.MISREAD,
        )

    def explain_nan(self) -> None:
        explain_not_finite(self.form(self.initial_hyper()), self.field, self.factor_names, self._at_start())
        super().explain_nan()

    def describe(self) -> str:
        lines = self._describe_sites()
        lines += [f"factor: {p.name} {p.shape} ({p.label})" for p in self.plans]
        blocks, width, *border = self._block_shape
        lines.append(f"design: {self._rows.num_rows} x {self._rows.num_columns}, {self._rows.describe()}")
        if blocks > 1:
            given = f" given {border[0]} that they share" if border else ""
            lines.append(f"blocks: {blocks} independent, of up to {width} unknowns{given}")
        if self._touched is not None:
            lines.append(self._touched.describe())
        if (layout := self._indices(None).layout) is not None:
            lines += describe_layout(layout)
        return "\n".join(lines)


def _compiled_form(reading: LatentGaussianReading) -> Any:
    return quick_jit(reading.form, is_small=True)
