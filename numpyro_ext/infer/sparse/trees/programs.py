"""The compiled functions of expectation propagation with a forest as one factor, shared by runs of one structure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....compilation.pytree import PyTree
from ....linalg.cholesky import LARGEST_DENSE, solve_lower, solve_upper
from ....potentials.trees.chunks import FOREST_COSTS, ForestCosts, map_trees, num_parts
from ....potentials.trees.draws import tree_draws
from ....potentials.trees.forest import Forest
from ....potentials.trees.mixture import (
    TreeMoments,
    TreeParameters,
    components_of_nodes,
    state_posterior,
    tilted_moments,
)
from ....structure import SparseLinearReading
from ...hyper import search as hyper_search
from ...hyper.evaluation import Evaluation, evaluation_fn
from ...hyper.search import EVALUATIONS_PER_CHUNK
from ...hyper.space import UnconstrainedSpace
from ..programs import Inputs, SparsePrograms
from . import propagation as core


class TreeOptions(NamedTuple):
    """Static choices."""

    is_exact: bool
    """True if the likelihood is a product over coefficients."""
    num_steps: int
    tol: float
    damping: float
    hyper_tol: float
    costs: ForestCosts = FOREST_COSTS


class Searched(NamedTuple):
    """Coordinates of the search for hyperparameters: ``origin + units * x``."""

    data: Any
    fixed: dict[str, Array]
    projection: Any
    origin: Array
    units: Array
    sample: core.Sample | None = None
    """Sample of the trees of a large forest; the objective is then the share of it that these have."""
    others: Any = None
    """Data and projections of further bases, stacked; the objective is then the average over all bases."""


class NodeMoments(NamedTuple):
    """Moments of the coefficients and probabilities of their high states, each of shape ``(num_nodes,)``."""

    mean: Array
    variance: Array
    marginals: Array


class Probes(NamedTuple):
    """Data and elements of a site at random coefficients, and the observations."""

    rows: Array
    """Shape ``(num_rows, num_probes)``, without offsets."""
    elements: Array
    """Elements of the site, shape ``(size, num_probes)``, without offset."""
    observed: Array
    """Data less their offsets, shape ``(num_rows,)``."""
    offset: Array
    """Offset of the elements, shape ``(size,)``."""
    noise_variance: Array
    """Shape ``(num_rows,)``."""


class TreePrograms(SparsePrograms):
    """Compiled functions of EP on trees for one model structure; what is prepared is the projection of the data.

    :param SparseLinearReading reading: any reading of the structure.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param TreeOptions options: static choices.
    """

    def __init__(self, reading: SparseLinearReading, space: UnconstrainedSpace, options: TreeOptions) -> None:
        super().__init__(reading, space)
        self.options = options
        self.num_parts = num_parts(reading.forest, options.costs) if options.is_exact else 1
        self.project = jax.jit(self._project)
        self.init_state = jax.jit(self._init_state)
        self.units = jax.jit(self._units)
        self.evaluate = jax.jit(self._evaluate)
        self.search = jax.jit(self._search)
        self.probes = jax.jit(self._probes, static_argnames=("name", "num_probes"))

    # Fitting

    def _project(self, data: Sequence[object], hyper: dict[str, Array]) -> object:
        """The data as Gaussians over single coefficients; nothing where they are not."""
        if not self.options.is_exact:
            return ()
        form = self._reading.form(hyper, data)
        return core.project(form.operator, form.observed, form.noise_variance)

    def _init_state(self, data: Sequence[object], hyper: dict[str, Array]) -> object:
        return () if self.options.is_exact else core.init(self._reading.form(hyper, data))

    def _cavity(self, data: Sequence[object], hyper: dict[str, Array], projection: Any, state: Any) -> core.Cavity:
        if self.options.is_exact:
            return core.exact_cavity(projection, self._reading.noise_variance(hyper, data))
        return core.gaussian(self._reading.form(hyper, data), state).cavity

    def _units(self, at: Searched, state: object, sample: core.Sample | None = None) -> Array:
        """About the standard error of each hyperparameter, at most one: the steps of the search are in these units.

        :param sample: what they are measured on, if not on all of what is searched on.
        """
        reading, space = self._reading, self._space
        data, fixed, projection, origin = at[:4]
        num_rows = sum(rows.size for rows in reading.rows)

        def parameters(values: Array) -> tuple[Any, Array]:
            hyper = space.unpack(values, fixed)
            return reading.prior(hyper, data), jnp.broadcast_to(reading.noise_variance(hyper, data), (num_rows,))

        cavity = self._cavity(data, space.unpack(origin, fixed), projection, state)
        scales = core.gradient_scales(reading.forest, parameters, origin, cavity, sample, self.options.costs)
        if sample is not None and at.sample is not None:
            scales *= jnp.sqrt(at.sample.share / sample.share)
        return 1.0 / jnp.sqrt(1.0 + jnp.square(scales))

    def _evaluate(self, at: Searched, x: Array, state: PyTree) -> Evaluation:
        """The objective."""
        reading, options = self._reading, self.options
        data, fixed, projection, origin, units, sample, others = at
        num_rows = sum(rows.size for rows in reading.rows)

        def hyper_at(x: Array) -> dict[str, Array]:
            return self._space.unpack(origin + units * x, fixed)

        def share(value: Array) -> Array:
            return value if sample is None else sample.share * value

        def exact(hyper: dict[str, Array], data: Sequence[object], projection: Any) -> Array:
            prior, noise_variance = reading.prior(hyper, data), reading.noise_variance(hyper, data)
            found = core.exact_log_evidence(
                reading.forest, prior, projection, noise_variance, num_rows, sample, options.costs
            )
            return share(reading.log_constant(hyper, data)) + found

        def form(x: Array) -> Any:
            hyper = hyper_at(x)
            # Where the posterior is known the parameters are all that an evaluation needs of the form.
            return hyper if options.is_exact else (reading.form(hyper, data), reading.log_constant(hyper, data))

        def log_evidence(form: Any, state: Any) -> Array:
            if not options.is_exact:
                parts, constant = form
                return share(constant) + core.log_evidence(parts, state)
            value = exact(form, data, projection)
            if others is None:
                return value
            values = jax.lax.map(lambda other: exact(form, *other), others)
            return (value + jnp.sum(values)) / (1 + values.size)

        def solve(form: Any, state: Any) -> tuple[Any, core.SolveInfo]:
            if options.is_exact:
                zero = jnp.zeros(())
                return state, core.SolveInfo(jnp.asarray(True), jnp.ones((), jnp.int32), zero, zero)
            return core.solve(form[0], state, num_steps=options.num_steps, tol=options.tol, damping=options.damping)

        def log_prior(x: Array) -> Array:
            return share(reading.log_prior(hyper_at(x), data))

        return evaluation_fn(form, log_prior, solve, log_evidence)(x, state)

    def init_search(self, at: Searched, with_curvature: bool, x: Array, state: object) -> hyper_search.SearchState:
        """The search before its first evaluation."""
        shapes = jax.eval_shape(self._evaluate, at, x, state)
        start = hyper_search.init_search(shapes, x, state)
        if not with_curvature:
            start = start._replace(num_probes=jnp.asarray(2 * x.size, jnp.int32))
        return start

    def _search(
        self, at: Searched, search: hyper_search.SearchState, max_iterations: Array, num_evaluations: Array
    ) -> tuple[hyper_search.SearchState, Array]:
        return hyper_search.search(
            partial(self._evaluate, at),
            search,
            num_evaluations=num_evaluations,
            tol=self.options.hyper_tol,
            max_iterations=max_iterations,
            trace_length=EVALUATIONS_PER_CHUNK,
        )

    # Answers

    def _probes(self, inputs: Inputs, *, name: str, num_probes: int) -> Probes:
        """Rows of the data and elements of a site at the same random coefficients, which tell who is who."""
        form, (operator, offset) = self._reading.form(inputs.hyper, inputs.data), self._map(inputs, name)
        s = jax.random.normal(jax.random.key(0), (num_probes, form.num_columns))
        rows, elements = (jax.vmap(each.matvec, out_axes=1)(s) for each in (form.operator, operator))
        size = form.observed.size
        return Probes(
            rows,
            elements,
            form.observed,
            jnp.broadcast_to(offset, elements.shape[:1]),
            jnp.broadcast_to(form.noise_variance, (size,)),
        )

    def _cavity_at(self, inputs: Inputs) -> tuple[TreeParameters, core.Cavity]:
        data, hyper, projection, state = inputs
        return self._reading.prior(hyper, data), self._cavity(data, hyper, projection, state)

    def _moments(self, inputs: Inputs) -> NodeMoments:
        prior, (mean, variance) = self._cavity_at(inputs)

        def of(trees: Forest, *cavity: Array) -> NodeMoments:
            moments: TreeMoments = tilted_moments(trees, prior, *cavity)
            return NodeMoments(moments.mean, moments.variance, moments.marginals)

        variances = jnp.broadcast_to(variance, mean.shape)
        return map_trees(of, self._reading.forest, mean, variances, costs=self.options.costs)

    def _gaussian(self, inputs: Inputs) -> core.GaussianMoments:
        return core.gaussian(self._reading.form(inputs.hyper, inputs.data), inputs.state)

    def has_exact_variance(self, name: str) -> bool:
        return (
            self._reading.num_columns <= LARGEST_DENSE or not self.options.is_exact or self._reading.is_selection(name)
        )

    def _state_probabilities(self, inputs: Inputs) -> Array:
        return self._moments(inputs).marginals

    def _mean(self, inputs: Inputs) -> Array:
        return self._moments(inputs).mean if self.options.is_exact else self._gaussian(inputs).mean

    def _site_variance(self, inputs: Inputs, *, name: str) -> Array:
        if self.options.is_exact and self._reading.is_selection(name):
            operator, _ = self._map(inputs, name)
            return operator @ self._moments(inputs).variance
        return jnp.diagonal(self._site_covariance(inputs, name=name))

    def _site_covariance(self, inputs: Inputs, *, name: str) -> Array:
        matrix = self._map(inputs, name).operator.materialise()
        if not self.options.is_exact:
            root = solve_lower(self._gaussian(inputs).factor, matrix.T)
            return root.T @ root
        return matrix @ self._covariance(inputs) @ matrix.T

    def _covariance(self, inputs: Inputs) -> Array:
        """Given the states the coefficients are independent; the covariance of the states is a slope of marginals."""
        forest, (prior, cavity) = self._reading.forest, self._cavity_at(inputs)
        low, high = (c.tilted_moments(*cavity) for c in components_of_nodes(forest, prior))
        evidence = jnp.stack([low.log_z, high.log_z], axis=-1)

        def marginals(extra: Array) -> Array:
            return state_posterior(forest, prior, evidence.at[:, 1].add(extra)).marginals

        zeros = jnp.zeros_like(cavity.mean)
        p, gap = marginals(zeros), high.mean - low.mean
        states: Array = jax.jacfwd(marginals)(zeros)
        within = (1.0 - p) * low.variance + p * high.variance
        return jnp.diag(within) + gap[:, None] * states * gap

    def _draw(self, inputs: Inputs, rng_key: Array, *, num_samples: int) -> Array:
        if self.options.is_exact:
            prior, cavity = self._cavity_at(inputs)
            return tree_draws(rng_key, self._reading.forest, prior, *cavity, num_samples)[0]
        moments = self._gaussian(inputs)
        white = jax.random.normal(rng_key, (num_samples, moments.mean.size), moments.mean.dtype)
        return moments.mean + solve_upper(moments.factor, white.T).T
