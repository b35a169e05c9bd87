"""A Gaussian posterior over the unknowns of a form: its prior times one Gaussian site per predictor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array

from ....linalg.frozen_pytree import frozen_pytree
from ....linalg.gaussian.conditioning import (
    LinearGaussian,
    LinearGaussianPosterior,
    Space,
    linear_gaussian,
    log_partition_without_sites,
)
from ....linalg.gaussian.design import AnyDesign, DenseDesign, OperatorRows, SparseRows, StateSpaceDesign
from ....linalg.gaussian.mean_field_space import MeanFieldPosterior, MeanFieldSpace
from ....linalg.gaussian.spaces.border_space import BorderPosterior
from ....linalg.gaussian.spaces.coefficient_space import CoefficientPosterior
from ....linalg.gaussian.spaces.operator_space import OperatorPosterior
from ....linalg.gaussian.spaces.sparse_space import SparsePosterior
from ....linalg.gaussian.spaces.state_space import StatePosterior
from ....linalg.gaussian.spaces.touched_space import TouchedPosterior
from ....potentials import Potential
from ....potentials.vector_rows import vector_factors
from ....structure.latent_gaussian import AffineMap, LatentGaussian

LARGEST_DENSE_COVARIANCE = 30_000
"""Unknowns at most of which all covariances are held at once: 7 GB in double precision."""

Covariance = Literal["full", "diagonal"]


# Programs ask for it in many places, which trace it once.
_linear_gaussian = jax.jit(linear_gaussian, static_argnames=("is_signed", "space"))


def has_signed_sites(potential: Potential) -> bool:
    """True if sites on rows of factors may have negative precisions: where these are not log-concave, or where a
    site of several predictors together is written on their rows."""
    vectors = vector_factors(potential)
    return not potential.is_log_concave or (vectors is not None and vectors[0].base.has_tilted_moments)


@overload
def gaussian_prior(
    form: LatentGaussian, space: Space = ..., covariance: Literal["full"] = ..., is_signed: bool | None = ...
) -> LinearGaussian: ...


@overload
def gaussian_prior(
    form: LatentGaussian, space: Space = ..., covariance: Covariance = ..., is_signed: bool | None = ...
) -> LinearGaussian | MeanFieldSpace: ...


def gaussian_prior(
    form: LatentGaussian, space: Space = "auto", covariance: Covariance = "full", is_signed: bool | None = None
) -> LinearGaussian | MeanFieldSpace:
    """The prior and the linear map of ``form``, prepared for conditioning on sites of ``eta - offset``.

    With ``covariance="diagonal"`` what conditioning returns has independent unknowns. Sites may be negative with
    ``is_signed``, by default where the factors are of such a kind.
    """
    if is_signed is None:
        is_signed = any(has_signed_sites(potential) for potential in form.potentials)
    joint = _linear_gaussian(
        form.prior,
        form.design,
        form.blocks.rows,
        form.blocks.columns,
        border=form.border,
        touched=form.touched,
        layout=form.layout,
        is_signed=is_signed,
        space=space,
    )
    return joint if covariance == "full" else MeanFieldSpace.build(joint, form.prior, form.design)


@frozen_pytree
class GaussianPosterior:
    r"""The density proportional to :math:`p(e) \prod_i \exp(-\tau_i \eta_i^2/2 + \nu_i \eta_i)`.

    It is kept as its sites, one pair of numbers per observation; every method factorises once, in the space of the
    observations or of the unknowns, whichever is smaller, and runs under ``jit`` and ``vmap``. With ``M`` rows and
    ``N`` columns a factorisation costs ``O(min(M, N)^3)``, or the sum of that over the blocks of the form.
    An improper posterior gives nan.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> from numpyro_ext.structure.latent_gaussian import Blocks
    >>> form = LatentGaussian(
    ...     prior=(DiagonalPrior(jnp.ones(1)),), design=DenseDesign(jnp.ones((3, 1))), offset=jnp.zeros(3),
    ...     potentials=(), observed=(), log_constant=jnp.zeros(()),
    ...     blocks=Blocks(jnp.arange(3)[None], jnp.arange(1)[None]),
    ... )
    >>> posterior = GaussianPosterior(form, site_precision=jnp.ones(3), site_shift=jnp.array([1.0, 2.0, 3.0]))
    >>> mean, variance = posterior.predictor_moments()
    >>> bool(jnp.allclose(mean, 1.5)), bool(jnp.allclose(variance, 0.25))
    (True, True)
    """

    form: LatentGaussian
    site_precision: Array
    """:math:`\\tau`, shape ``(num_rows,)``; zero where a row has no factor."""
    site_shift: Array
    """:math:`\\nu`, shape ``(num_rows,)``."""
    space: Space = dataclasses.field(default="auto", metadata={"static": True})
    covariance_family: Covariance = dataclasses.field(default="full", metadata={"static": True})
    """``"diagonal"``: independent unknowns, with the means that the sites give; see
    :class:`~numpyro_ext.linalg.gaussian.mean_field_space.MeanFieldSpace`."""
    held: BorderPosterior | SparsePosterior | None = None
    """Outcome of :meth:`condition`, where a fit has it at hand."""

    def condition(self, space: Space | None = None) -> LinearGaussianPosterior | MeanFieldPosterior:
        """Factorise, in another space than the posterior's own if asked."""
        if self.held is not None and space is None:
            return self.held
        shift = self.site_shift - self.site_precision * self.form.offset
        prior = gaussian_prior(self.form, space or self.space, self.covariance_family)
        return prior.condition(self.site_precision, shift)

    @property
    def mean(self) -> Array:
        """Mean of the unknowns, shape ``(N,)``."""
        return self.condition().unknowns()

    def predictor_moments(self) -> tuple[Array, Array]:
        """Mean and variance of every predictor, shapes ``(M,)``, rows without factor included."""
        marginals = self.condition().marginals()
        return marginals.mean + self.form.offset, marginals.variance

    def mean_and_variance(self, affine_map: AffineMap) -> tuple[Array, Array]:
        """Exact marginal moments of a quantity affine in the unknowns.

        :param AffineMap affine_map: ``R`` quantities ``design @ e + offset``.
        :return: means and variances, shapes ``(R,)``.
        """
        return self.moments({"": affine_map})[""]

    def moments(self, maps: Mapping[str, AffineMap]) -> dict[str, tuple[Array, Array]]:
        """Marginal moments of several quantities from one factorisation, by name; see :meth:`mean_and_variance`."""
        posterior = self.condition()
        unknowns = posterior.unknowns()
        return {
            name: (design.matvec(unknowns) + offset, posterior.map_variance(_readable(posterior, design)))
            for name, (design, offset) in maps.items()
        }

    def covariance(self, affine_map: AffineMap) -> Array:
        """Exact joint covariance of ``R`` quantities affine in the unknowns, shape ``(R, R)``."""
        posterior = self.condition()
        return posterior.map_covariance(_readable(posterior, affine_map.design))

    def covariance_of(self, affine_map: AffineMap, used: Array, places: Array) -> Array:
        """Covariance of ``R`` quantities that depend on few of the unknowns; see :meth:`covariance`.

        :param AffineMap affine_map: the quantities, with sparse rows.
        :param used: the unknowns on which they depend, shape ``(m,)``.
        :param places: of the entries of the rows among these.
        """
        posterior, design = self.condition(), affine_map.design
        if not (isinstance(posterior, TouchedPosterior) and isinstance(design, SparseRows)):
            return self.covariance(affine_map)
        return posterior.covariance_of(SparseRows(places, design.values, used.shape[0]), used)

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Independent exact draws of the unknowns.

        :param jax.Array rng_key: random key.
        :param int num_samples: number of draws.
        :return: draws of shape ``(num_samples, N)``.
        """
        return self.condition().sample(rng_key, num_samples)

    def log_weight_fn(self) -> Callable[..., Array]:
        r"""Log density of unknowns and data over the density of the unknowns here, as a function of ``e``, ``(N,)``.

        The prior is in both: what is left are the factors over the sites, times the integral of prior and sites. With a
        second argument it is the density of unknowns of which flat ones are moved, over that of ``e``.
        """
        form, posterior = self.form, self.condition()
        if isinstance(posterior, MeanFieldPosterior):
            mean, is_free = posterior.unknowns(), posterior.variance > 0.0
            variance = jnp.where(is_free, posterior.variance, 1.0)

            def over_independent(e: Array) -> Array:
                terms = -0.5 * ((e - mean) ** 2 / variance + jnp.log(2.0 * jnp.pi * variance))
                return form.log_density(e) - jnp.sum(jnp.where(is_free, terms, 0.0))

            return over_independent
        prior = posterior.space
        log_partition = form.log_constant + log_partition_without_sites(prior, posterior)
        mean = form.offset + prior.predictor(posterior.coordinates)
        slope = self.site_shift - self.site_precision * mean

        def over_sites(e: Array, moved: Array | None = None) -> Array:
            eta = form.predictor(e)
            away = eta - mean
            factors = form.log_factors(eta if moved is None else form.predictor(moved))
            return log_partition + jnp.sum(factors - (slope - 0.5 * self.site_precision * away) * away)

        return over_sites

    def scale_tril(self) -> Array:
        """Lower Cholesky factor of the dense covariance of the unknowns, ``(N, N)``, at cost ``O(N^3)``.

        :raises ValueError: if that is far more than fits into memory.
        """
        check_dense_covariance(self.form)
        if self.form.layout is not None:
            raise ValueError(
                "The joint covariance of a field of a sparse precision, which guides and importance weights need, is "
                "not formed. Moments of each site (engine.posterior) and draws (engine.get_samples()) need none."
            )
        if self.covariance_family == "diagonal":
            posterior = self.condition()
            assert isinstance(posterior, MeanFieldPosterior)  # asked for by name
            return posterior.scale_tril()
        rows, columns = self.form.blocks
        if rows.shape[0] > 1:
            one_block = type(self.form.blocks)(_all(self.form.num_rows), _all(self.form.num_columns))
            whole = dataclasses.replace(self, form=self.form._replace(blocks=one_block), held=None)
        else:
            whole = self
        dense = whole.condition("coefficient")
        assert isinstance(dense, CoefficientPosterior)  # asked for by name
        return dense.scale_tril()


def check_dense_covariance(form: LatentGaussian) -> None:
    """Refuse the covariance of all unknowns where it is far more than fits into memory.

    :raises ValueError: if there are more than :data:`LARGEST_DENSE_COVARIANCE` of them.
    """
    if form.num_columns > LARGEST_DENSE_COVARIANCE:
        raise ValueError(
            f"The joint covariance of the {form.num_columns} unknowns of this field, which guides and importance "
            "weights need, is too large to be held. Moments of each site (engine.posterior) and draws "
            "(engine.get_samples()) are exact without it."
        )


def prior_range(form: LatentGaussian, first: int) -> tuple[Array, Array]:
    """Prior mean and standard deviation of the predictors of one family of factors; infinite where a prior is flat.

    :param LatentGaussian form: the model.
    :param int first: number of the family.
    """
    zeros = jnp.zeros_like(form.offset)
    mean, variance = (form.split_rows(x)[first] for x in GaussianPosterior(form, zeros, zeros).predictor_moments())
    return mean, jnp.sqrt(variance)


def _readable(posterior: LinearGaussianPosterior | MeanFieldPosterior, design: AnyDesign) -> Any:
    """The design as a matrix, where the posterior does not know its products."""
    is_state = isinstance(design, StateSpaceDesign) and not isinstance(posterior, StatePosterior)
    is_operator = isinstance(design, OperatorRows) and not isinstance(posterior, OperatorPosterior)
    return DenseDesign(design.to_dense()) if is_state or is_operator else design


def _all(size: int) -> Array:
    return jax.numpy.arange(size)[None]
