"""Choice of the space in which to condition a Gaussian: that of the predictors or of the unknowns, whichever is
cheaper."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import Array

from ..sparse_cholesky import SparsePattern
from .design import AnyDesign, DenseDesign, OperatorRows, SparseRows, StateSpaceDesign
from .prior import FlatPrior, LowRankPrior, PriorBlock, is_flat
from .row_pairs import is_summed_by_pair
from .spaces.banded_space import BandedPosterior, BandedSpace, can_be_banded, is_worth_banding
from .spaces.border_space import Border, BorderPosterior, BorderSpace
from .spaces.coefficient_space import CoefficientPosterior, CoefficientSpace
from .spaces.low_rank_space import LowRankPosterior, LowRankSpace
from .spaces.observation_space import ObservationPosterior, ObservationSpace
from .spaces.operator_space import OperatorPosterior, OperatorSpace, has_independent_unknowns
from .spaces.shared_space import SharedPosterior, SharedSpace
from .spaces.sparse_space import SparsePosterior, SparseSpace
from .spaces.state_space import StatePosterior, StateSpace
from .spaces.touched_space import Touched, TouchedPosterior, TouchedSpace
from .sparse_layout import SparseLayout

Space = Literal[
    "auto",
    "observation",
    "coefficient",
    "sparse",
    "sparse-cholesky",
    "iterative",
    "banded",
    "border",
    "operator",
    "shared",
    "state",
    "touched",
]
LinearGaussian = (
    ObservationSpace
    | CoefficientSpace
    | BandedSpace
    | BorderSpace
    | LowRankSpace
    | OperatorSpace
    | SharedSpace
    | SparseSpace
    | StateSpace
    | TouchedSpace
)
LinearGaussianPosterior = (
    ObservationPosterior
    | CoefficientPosterior
    | BandedPosterior
    | BorderPosterior
    | LowRankPosterior
    | OperatorPosterior
    | SharedPosterior
    | SparsePosterior
    | StatePosterior
    | TouchedPosterior
)

# A scattered update costs about as much as this many multiply-adds of a matrix product, of few rows and of many.
_SCATTER_COSTS = 64, 4


def choose_space(
    prior: tuple[PriorBlock, ...],
    design: AnyDesign,
    rows: Array,
    columns: Array,
    *,
    border: Border | None = None,
    touched: Touched | None = None,
    layout: SparseLayout | None = None,
    is_sequential: bool = False,
) -> Space:
    """The cheaper space, from shapes and kinds of prior alone, so that it is known before anything is traced.

    Sparse Cholesky factors where a prior has a sparse precision, iterations where the layout has an elimination; a
    state space where the design is one, and products where it is an operator and the unknowns are independent; what
    rows touch, or blocks with a border, where the form has them; unknowns in a band where each row touches only a
    stretch of them, as in images; predictors where a block has no more rows than columns and every prior is proper;
    otherwise unknowns, with the design kept sparse when one block has few entries per row.

    :param tuple prior: the prior blocks.
    :param AnyDesign design: the linear map from unknowns to predictors.
    :param jax.Array rows: rows of each block, shape ``(num_blocks, max_rows)``.
    :param jax.Array columns: columns of each block, shape ``(num_blocks, max_columns)``.
    :param Border border: blocks that are independent given a few unknowns, if that pays.
    :param Touched touched: what rows touch of blocks, if that is much less than the blocks.
    :param SparseLayout layout: places of all entries in a sparse posterior precision, where a prior is sparse.
    :param bool is_sequential: whether sites will be updated one by one, which needs a dense joint.
    :return: ``"observation"``, ``"coefficient"``, ``"sparse"``, ``"sparse-cholesky"``, ``"iterative"``, ``"banded"``,
        ``"border"``, ``"touched"``, ``"operator"`` or ``"state"``.
    """
    if layout is not None:
        return "sparse-cholesky" if layout.elimination is None else "iterative"
    if isinstance(design, StateSpaceDesign):
        if not is_sequential:
            return "state"
    elif isinstance(design, OperatorRows) and not is_sequential and has_independent_unknowns(prior):
        return "operator"
    elif touched is not None and not is_sequential:
        return "touched"
    elif border is not None and not is_sequential:
        return "border"
    elif not isinstance(design, OperatorRows) and rows.shape[0] == 1 and not is_sequential:
        if can_be_banded(prior, design) and is_worth_banding(design):
            return "banded"
    is_proper = not any(is_flat(block) for block in prior)
    if is_proper and rows.shape[1] <= columns.shape[1]:
        return "observation"
    if isinstance(design, SparseRows) and rows.shape[0] == 1:
        cost = _SCATTER_COSTS[is_summed_by_pair(design.columns)]
        if cost * design.columns.shape[1] ** 2 < design.num_columns**2:
            return "sparse"
    return "coefficient"


def linear_gaussian(
    prior: tuple[PriorBlock, ...],
    design: AnyDesign,
    rows: Array,
    columns: Array,
    *,
    border: Border | None = None,
    touched: Touched | None = None,
    layout: SparseLayout | None = None,
    is_signed: bool = False,
    space: Space = "auto",
) -> LinearGaussian:
    """Prepare to condition ``e ~ prior`` on Gaussian sites of ``A e``; do this once, then ``condition`` many times.

    :param tuple prior: the prior blocks.
    :param AnyDesign design: the linear map ``A``.
    :param jax.Array rows: rows of each independent block, padded with ``num_rows``.
    :param jax.Array columns: columns of each independent block, padded with ``num_columns``.
    :param Border border: blocks that are independent given a few unknowns, for the space of this name. The inducing
        values of priors of low rank are unknowns here, behind all others, and in the border.
    :param Touched touched: what rows touch of blocks, for the space of this name.
    :param SparseLayout layout: places of all entries in a sparse posterior precision, for the spaces
        ``"sparse-cholesky"`` and ``"iterative"``.
    :param bool is_signed: whether site precisions may be negative.
    :param str space: the space to work in; ``"auto"`` takes :func:`choose_space`, which never takes ``"shared"``, for
        blocks that are alike.
    :return: an object with ``condition(site_precision, site_shift)``.
    :raises ValueError: if the space is unknown or cannot hold the prior or the design.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> space = linear_gaussian(
    ...     (DiagonalPrior(jnp.ones(1)),), DenseDesign(jnp.ones((3, 1))), jnp.arange(3)[None], jnp.arange(1)[None]
    ... )
    >>> posterior = space.condition(jnp.ones(3), jnp.array([1.0, 2.0, 3.0]))
    >>> round(float(posterior.unknowns()[0]), 3), round(float(posterior.marginals().variance[0]), 3)
    (1.5, 0.25)
    """
    if space == "auto":
        touched_if_positive = None if is_signed else touched
        space = choose_space(prior, design, rows, columns, border=border, touched=touched_if_positive, layout=layout)
    if space == "sparse-cholesky":
        if layout is None or not isinstance(design, SparseRows):
            raise ValueError(
                "The space of sparse Cholesky factors needs sparse rows, and unknowns of a sparse precision, as large "
                "fields of GaussianMarkovRandomField have. Leave the choice to space='auto'."
            )
        if not (isinstance(layout.pattern, SparsePattern) or layout.pattern.length):
            raise ValueError("A layout for iterations has no sparse factors: read the model with space='direct'.")
        return SparseSpace.build(prior, design, dataclasses.replace(layout, elimination=None))
    if space == "iterative":
        if layout is None or layout.elimination is None or not isinstance(design, SparseRows):
            raise ValueError(
                "The iterative space needs sparse rows, and a layout with the order in which unknowns are eliminated, "
                "as LaplaceApproximation(model, space='iterative') makes it."
            )
        return SparseSpace.build(prior, design, layout)
    if space == "state":
        if not isinstance(design, StateSpaceDesign):
            raise ValueError("The state space needs a design of one, as models with scans have.")
        return StateSpace.build(prior, design, is_signed)
    if space == "operator":
        if not isinstance(design, OperatorRows) or not has_independent_unknowns(prior):
            raise ValueError(
                "The space of operators needs independent unknowns and predictors that are known by their products, as "
                "of Fourier transforms."
            )
        return OperatorSpace.build(prior, design)
    if isinstance(design, StateSpaceDesign | OperatorRows):
        design = DenseDesign(design.to_dense())
    if space == "observation":
        if any(isinstance(block, FlatPrior) for block in prior):
            raise ValueError("Flat priors have no covariance: condition in the space of the coefficients instead.")
        return ObservationSpace.build(prior, design, rows, columns, is_signed)
    if space == "border":
        if border is None or not isinstance(design, SparseRows):
            raise ValueError(
                "The space with a border needs sparse rows, and blocks of unknowns that are independent given a few "
                "others; this design has none that would pay. Leave the choice to space='auto'."
            )
        is_of_low_rank = any(isinstance(block, LowRankPrior) for block in prior)
        return (LowRankSpace if is_of_low_rank else BorderSpace).build(prior, design, border)
    if space == "touched":
        if touched is None or is_signed:
            raise ValueError(
                "The space of what rows touch needs blocks of which they touch a part, and sites of positive precision."
            )
        return TouchedSpace.build(prior, touched)
    if space == "shared":
        return SharedSpace.build(prior, design, rows, columns)
    if space == "banded":
        if rows.shape[0] > 1 or not can_be_banded(prior, design):
            raise ValueError(
                "The banded space needs independent unknowns, sparse rows of known bandwidth and a single block."
            )
        assert isinstance(design, SparseRows)
        return BandedSpace.build(prior, design)
    if space == "sparse":
        if not isinstance(design, SparseRows) or rows.shape[0] > 1:
            raise ValueError("The sparse space needs a design of sparse rows and a single block.")
        return CoefficientSpace.build(prior, design, rows, columns, is_sparse=True)
    if space == "coefficient":
        return CoefficientSpace.build(prior, design, rows, columns, is_sparse=False)
    names = "'auto', 'observation', 'coefficient', 'sparse', 'sparse-cholesky', 'iterative', 'banded', "
    names += "'border', 'operator', 'shared', 'state' or 'touched'"
    raise ValueError(f"Unknown space {space!r}: expected {names}.")


def kl_divergence(space: LinearGaussian, posterior: LinearGaussianPosterior, variance: Array) -> Array:
    r"""Kullback-Leibler divergence from the prior to a Gaussian made of it by sites.

    With sites :math:`\tau`, variances :math:`v` of the predictors and volumes as determinants,

    .. math::
        KL = \tfrac12 \bar e^T P \bar e - \tfrac12 \sum_i \tau_i v_i - \log \frac{\text{volume}}{\text{prior volume}},

    the same in both spaces: the sum is the number of unknowns minus the trace of prior precision times covariance
    (Khan 2012, eq. 3.51). A flat unknown has density one as its prior, and then the result may have any sign.

    :param LinearGaussian space: the prior, as given by :func:`linear_gaussian`.
    :param LinearGaussianPosterior posterior: what ``space.condition(...)`` returned.
    :param jax.Array variance: posterior variances of the predictors, shape ``(num_rows,)``.
    :return: a scalar.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> rows = jnp.arange(1)[None]
    >>> space = linear_gaussian((DiagonalPrior(jnp.ones(1)),), DenseDesign(jnp.ones((1, 1))), rows, rows)
    >>> posterior = space.condition(jnp.ones(1), jnp.ones(1))
    >>> round(float(kl_divergence(space, posterior, posterior.marginals().variance)), 4)
    0.2216
    """
    precision = posterior.site_precision
    if isinstance(posterior, ObservationPosterior):
        precision = posterior.space.to_rows(precision)
    return -0.5 * jnp.sum(precision * variance) - log_partition_without_sites(space, posterior)


def log_partition_without_sites(space: LinearGaussian, posterior: LinearGaussianPosterior) -> Array:
    r"""Log integral of the prior times all sites, less the logs of the sites at the posterior means of the predictors.

    These logs, :math:`\sum_i \nu_i \bar h_i - \tfrac12 \tau_i \bar h_i^2`, are as large as the squares of the data over
    their variance. Who adds factors and takes sites off does so at the means, for single precision to hold the result.

    :param LinearGaussian space: the prior, as given by :func:`linear_gaussian`.
    :param LinearGaussianPosterior posterior: what ``space.condition(...)`` returned.
    :return: a scalar.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> rows = jnp.arange(1)[None]
    >>> space = linear_gaussian((DiagonalPrior(jnp.ones(1)),), DenseDesign(jnp.ones((1, 1))), rows, rows)
    >>> posterior = space.condition(jnp.ones(1), jnp.ones(1))
    >>> mean = posterior.marginals().mean[0]
    >>> round(float(log_partition_without_sites(space, posterior) + mean - 0.5 * mean**2), 4)
    -0.0966
    >>> round(float(posterior.marginals().log_partition), 4)
    -0.0966
    """
    return posterior.log_volume() - 0.5 * space.inner(posterior.coordinates, posterior.coordinates)
