"""Models read as bilinear: two Gaussian blocks, and predictors that are affine in each given the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.quick_jit import quick_jit
from ...compilation.store import shared
from ...linalg.gaussian.prior import CovariancePrior, PrecisionPrior
from ...potentials.base import Potential
from ..errors import Conflict, ModelStructureError
from ..model.priors import dense_prior_block
from ..model.running.execution import ModelCall
from ..model.running.inspection import SiteInfo
from ..program.degrees import Degrees, classify
from .common import find_common
from .factors import (
    Unlisted,
    check_same_family,
    check_unlisted,
    is_exponential,
)
from .forms import BilinearForms
from .pairs import PairSites, refuse_censored
from .recognition import recognise_cells
from .refusals import check_components, check_finite, check_names, check_proper
from .vectors.coefficients import (
    Design,
    Probe,
    Vectors,
    find_design,
    find_pairs,
    meetings,
    off_zero,
    random_probe,
)
from .vectors.incidence import LaidOut, find_incidence, find_roots
from .vectors.layouts import (
    Layout,
    elements_of,
    find_layouts,
    same_layout,
)
from .vectors.lookups import Lookups
from .vectors.places import Predictor


class BilinearReading(BilinearForms):
    """A model read as a bilinear form, with a given split into field and hyperparameters.

    Made by :func:`~numpyro_ext.structure.bilinear.read`. The unknowns are the values of the field sites, in the order
    of the model; ``elements`` says which of them make which vector. All methods that take ``hyper`` are pure.

    :ivar sides: names of the sites of the rows and of the columns.
    :ivar elements: for rows and columns the flat indices of the unknowns, shape ``(num, size)``.
    :ivar index: for rows and columns the vector that each cell touches, or the combination of vectors.
    :ivar is_coupled: for rows and columns whether vectors depend on each other, or cells touch several of them.
    :ivar factor_names: observed sites whose cells the form has, one after another.
    :ivar cells: for each of them the flat indices of the observations in use.
    :ivar unlisted_cells: whether pairs that are no cells are ``"missing"``, or ``"zero"`` counts.
    :ivar pair_sites: what else is read of censored pairs, of which the cells are the emitted ones.
    :ivar takes_any_factor: whether log factors need be neither concave nor analytic.
    :ivar common_sites: Gaussian sites that all cells see, which have a block of the form of their own. They stand among
        the hyperparameters; where :meth:`form` is asked for, their values there play no part.
    :ivar factor_kind: potential of the cells, with shapes in the place of arrays.
    :ivar has_boundary: whether expectations are infinite for wide posteriors, as those of exponential rates are.
    :ivar is_design_fixed: whether everything but the priors is the same for all hyperparameters.
    """

    elements: Sequence[np.ndarray]

    def __init__(
        self,
        call: ModelCall,
        sites: Mapping[str, SiteInfo],
        field: Iterable[str],
        *,
        like: BilinearReading | None = None,
        is_held_out: bool = False,
        unlisted_cells: Unlisted = "missing",
        by_component: Collection[str] | bool = False,
        takes_any_factor: bool = False,
        takes_common: Callable[[Potential], bool] | None = None,
        given: Collection[str] = (),
        pair_sites: PairSites | None = None,
    ):
        if pair_sites is None:
            refuse_censored(sites)
        super().__init__(call, sites, field, dense_prior_block)
        self.takes_any_factor = takes_any_factor
        self.unlisted_cells: Unlisted = unlisted_cells
        self.pair_sites = pair_sites
        for name in self.field:
            if 0 in sites[name].shape:
                raise ModelStructureError(
                    f"Site '{name}' has the shape {tuple(sites[name].shape)}, so that the product has no components: "
                    "give it one at least, or leave the product out and use EP.",
                    site=name,
                )
        degrees = classify(self._program, {n: number for n, (number, _) in self._field.items()})
        self._check_priors(degrees)
        if not isinstance(by_component, bool):
            check_names(by_component, self.field, self.sites)

        # What is observed: the cells of each site and their predictors.
        self._sort_factors(degrees)
        self.rows_per_observation = (1,) * len(self.factor_names)
        probe = self._env(self.initial_hyper(), None)
        numbers = {n: number for n, (number, _) in self._field.items()}
        self._found = [
            recognise_cells(
                self._questions, n, self.sites[n], self._trace.factors[n], degrees, numbers, probe, takes_any_factor
            )
            for n in self.factor_names
        ]
        self.cells = tuple(self._observations_in_use(n, is_held_out=is_held_out) for n in self.factor_names)
        self._predictors = [
            Predictor(n, f.predictor, np.asarray(f.rows)[cells])
            for n, f, cells in zip(self.factor_names, self._found, self.cells, strict=True)
        ]
        start = self._env(self.initial_hyper(), None)
        self._signs = tuple(f.build(start, jnp.asarray(True)).sign for f in self._found)
        families = [
            jax.eval_shape(lambda i=i: self._factors(i, start, self.cells[i])[0]) for i in range(len(self._found))
        ]
        check_same_family(self.factor_names, families)
        self.has_boundary = is_exponential(families[0])
        self.factor_kind = families[0]

        # Which sites make the rows and which the columns, and the vectors of both: this takes the predictors.
        self._starts: dict[str, int] = {n: columns.start for n, columns in self._columns.items()}
        self.layouts = self._find_layouts(like, by_component)
        check_proper({n: self._trace.priors[n] for layout in self.layouts for n in layout.names})
        self.sides = (self.layouts[0].names, self.layouts[1].names)
        elements = tuple(elements_of(layout, self.site_shapes, self._starts) for layout in self.layouts)
        if like is not None:
            check_components(self.sides, like.elements, elements)
        places = [layout.places for layout in self.layouts]
        self.is_coupled = (places[0] is not None, places[1] is not None)
        vectors = Vectors(self.num_columns, elements, [layout.vector for layout in self.layouts], self.is_coupled)
        inputs = [self._env(hyper, None) for hyper in (off_zero(self.hyper), self.initial_hyper())]
        vectors, self._incidences, like_first = find_incidence(self, vectors, places, inputs, call.rng_key)

        # What coefficients there are, and in which order components stand: this takes the vectors.
        self._design, self._orders = self._probe(vectors, call.rng_key, like)
        if like is not None:
            self.common_sites = like.common_sites
        elif takes_common is not None and self.takes_closed_updates and takes_common(self.factor_kind):
            self.common_sites = self._find_common(frozenset(given))
        self.is_design_fixed = self._is_design_fixed()
        self._vectors = vectors.ordered(self._orders)
        self.elements, self.index = self._vectors.elements, self._vectors.of_cells
        self._roots = find_roots(self, like_first)
        one, other = (None if found is None else found.combinations() for found in self._incidences)
        background = None if pair_sites is None else pair_sites.background()
        found = Lookups.of(self.predictor_rows, self.cells, self.index, (one, other), self._vectors.first, background)
        self.data = (*self.data, found)
        self.affine_sites = self.field
        if unlisted_cells == "zero":
            self._check_unlisted()

    def without_data(self) -> Self:
        out, nothing = super().without_data(), np.zeros(0, int)
        one, other = (layout._replace(vector=nothing, places=None) for layout in self.layouts)
        out.layouts, out.index, out.cells = (one, other), (), ()
        out._incidences = (None, None)
        if hasattr(self, "_vectors"):  # else these are looked for
            out._vectors = self._vectors.without_cells()
        out._predictors = [p._replace(rows=nothing) for p in self._predictors]
        if self.pair_sites is not None:
            out.pair_sites = self.pair_sites.without_data()
        return out

    @property
    def written_data(self) -> tuple[Any, ...]:
        # What was looked up follows from the rest, but for what censored pairs have beside their cells.
        return (*super().written_data[:-1], *jax.tree.leaves(self._lookups(None).background))

    @property
    def share_sites(self) -> tuple[str, ...]:
        """Sites of the probabilities with which rows and columns are selected, where pairs are censored."""
        return () if self.pair_sites is None else self.pair_sites.shares

    @property
    def behind_predictive(self) -> tuple[str, ...]:
        # The shares in censored pairs have a posterior.
        return tuple(n for n in super().behind_predictive if n not in self.share_sites)

    @property
    def uses_all_cells(self) -> bool:
        """True if no observation is masked."""
        return all(c.size == int(np.prod(s)) for c, s in zip(self.cells, self.factor_shapes, strict=True))

    @property
    def takes_closed_updates(self) -> bool:
        """True if all cells have the same coefficients, and vectors are independent and seen one at a time."""
        return self._design.is_shared and not any(self.is_coupled)

    @property
    def has_products_alone(self) -> bool:
        """True if predictors are made of products of single components that are in no linear term, and of others."""
        return self._design.num_pairs is not None and not self._design.is_mixed

    @property
    def num_products(self) -> int:
        """Number of products of single components in a predictor; zero where a matrix is between both vectors."""
        return self._design.num_pairs or 0

    @property
    def predictor_rows(self) -> tuple[np.ndarray, ...]:
        """For each observed site the flat indices of the predictors of its cells."""
        return tuple(p.rows for p in self._predictors)

    # Reading

    def _check_priors(self, degrees: Degrees) -> None:
        for name in self.field:
            used = frozenset().union(
                *(degrees.sites_of(a) for a in jax.tree.leaves((self._trace.locations[name], self._trace.priors[name])))
            )
            if used:
                raise Conflict(f"the prior of site '{name}' depends on {sorted(used)}.", used - {name} or used)

    def _find_common(self, given: frozenset[str]) -> tuple[str, ...]:
        """Gaussian sites that all cells see, without those that are given values."""
        program, trace = self._program, self._trace
        wanted = [n for n in self.hyper if self.sites[n].is_candidate and n in self._prior_factors and n not in given]
        priors = {n: trace.factors[n].log_prob for n in self._prior_factors}
        others = [a for n in self.field for a in jax.tree.leaves((trace.locations[n], trace.priors[n]))]
        predictors = [f.predictor for f in self._found]
        # What of the observations is behind no predictor.
        rest = program.ancestors([trace.factors[n].log_prob for n in self.factor_names], predictors)
        candidates = {n: jax.tree.leaves(self._given[n])[0] for n in wanted}
        candidates = {n: number for n, number in candidates.items() if number not in rest}
        field = {n: number for n, (number, _) in self._field.items()}
        return find_common(program, candidates, field, predictors, priors, [a for a in others if isinstance(a, int)])

    def _is_design_fixed(self) -> bool:
        traced = [self._trace.factors[n] for n in self.factor_names]
        wanted = [p.atom for p in self._predictors]
        others = ([self._trace.locations[n] for n in self.field], [(f.log_prob, f.scale) for f in traced])
        wanted += [a for a in jax.tree.leaves(others) if isinstance(a, int)]
        return not self._program.ancestors(wanted) & self._learned_atoms()

    def _learned_atoms(self) -> set[int]:
        """Inputs of the program of all hyperparameters, without common sites."""
        return {a for n, atoms in self._given.items() if n not in self.common_sites for a in jax.tree.leaves(atoms)}

    @property
    def has_fixed_predictors(self) -> bool:
        """True if predictors know of no hyperparameter, nor prior means of the field."""
        wanted = [p.atom for p in self._predictors] + [self._trace.locations[n] for n in self.field]
        return not self._program.ancestors(wanted) & self._learned_atoms()

    def _find_layouts(
        self, like: BilinearReading | None, by_component: Collection[str] | bool
    ) -> tuple[Layout, Layout]:
        shapes = {n: tuple(self.site_shapes[n]) for n in self.field}
        numbers = {n: number for n, (number, _) in self._field.items()}
        if like is None:
            is_joint = {n: isinstance(self._trace.priors[n], CovariancePrior | PrecisionPrior) for n in self.field}
            coupled = {n: frozenset([len(shapes[n]) - 1] if is_joint[n] else []) for n in self.field}
            wanted = frozenset(n for n in self.field if self.is_named(n, by_component))
            return find_layouts(self._questions, numbers, shapes, coupled, self._predictors, wanted)
        known = (same_layout(self._questions, numbers, shapes, self._predictors, layout) for layout in like.layouts)
        return next(known), next(known)

    def is_named(self, name: str, names: Collection[str] | bool) -> bool:
        """True if a site, or a plate that it is in, is among these names; all are in ``True``."""
        if isinstance(names, bool):
            return names
        return name in names or any(plate in names for plate, _ in self.sites[name].plates)

    # Coefficients

    def _probe(
        self, vectors: Vectors, rng_key: Array, like: BilinearReading | None
    ) -> tuple[Design, tuple[np.ndarray, np.ndarray]]:
        """Find the coefficients, and the orders of components in which pairs come first."""
        found = shared(_meetings, LaidOut(self, vectors))(
            self._env(off_zero(self.hyper), None), random_probe(vectors, rng_key), self.predictor_rows
        )
        largest, ranges, linear = jax.tree.map(np.asarray, found)
        num_pairs, orders = find_pairs(largest) if like is None else (like._design.num_pairs, like._orders)
        return find_design(num_pairs, ranges, linear, orders, vectors), orders

    def _check_unlisted(self) -> None:
        """Refuse what zeros in all other cells cannot be added to."""
        form, is_shared = self.form(off_zero(self.hyper)), self._design.is_shared
        check_unlisted(form, self.factor_names, self.cells, self.factor_shapes, is_shared)

    def explain_nan(self) -> None:
        hyper = self.initial_hyper()
        form = self.form(hyper)
        for names, side in zip(self.sides, (form.rows, form.columns), strict=True):
            if not bool(jnp.all(jnp.isfinite(side.log_determinant()))):
                raise ModelStructureError(f"the prior of {list(names)} is not that of a Gaussian: check its scales.")
        at_offset = form.potential.log_density(form.offset)
        sites = [*zip(self.factor_names, self.cells, self.factor_shapes, strict=True)]
        for what, value in (("predictor", form.offset), ("log density or an exposure", at_offset)):
            check_finite(what, np.isfinite(np.asarray(value)), sites)
        super().explain_nan()

    def _role_of(self, name: str) -> str:
        return "common to all cells" if name in self.common_sites else super()._role_of(name)

    def describe(self) -> str:
        lines = self._describe_sites()
        for what, names, elements in zip(("rows", "columns"), self.sides, self.elements, strict=True):
            num, size = elements.shape
            lines.append(f"{what}: {num} vectors of {size} components ({', '.join(names)})")
        lines += [f"combinations: {found.describe()}" for found in self._incidences if found]
        sites = zip(self.factor_names, self.cells, self.factor_shapes, self._found, strict=True)
        for name, cells, shape, found in sites:
            lines.append(f"observed: {name}, {cells.size} of {int(np.prod(shape))} cells in use ({found.label})")
        pairs = self._design.num_pairs
        kind = "a matrix of products" if pairs is None else f"{pairs} products of components"
        shared = "the same in all cells" if self._design.is_coupling_shared else "of different weights in the cells"
        lines.append(f"coupling: {kind}, {shared}")
        if self.pair_sites is not None:
            lines = [line for line in lines if line.rpartition(" ")[2] not in self.share_sites]
            named = zip(self.share_sites, self.pair_sites.concentrations, strict=True)
            lines += [f"selection: {name} ({x.size},) (Dirichlet)" for name, x in named]
            lines.append(f"censored: {self.pair_sites.num_censored:g} pairs")
        if self.unlisted_cells == "zero":
            lines.append(f"unlisted: {np.prod([len(e) for e in self.elements]) - self.index[0].size} zeros")
        return "\n".join(lines)


def _meetings(of: LaidOut) -> Callable[..., tuple[Array, list[Array], list[Array]]]:
    def look(env: dict[int, Any], probe: Probe, rows: Sequence[Any]) -> tuple[Array, list[Array], list[Array]]:
        return meetings(of.reading.predictor_fn(env, rows), of.vectors, probe)

    return quick_jit(look, is_lean=True)
