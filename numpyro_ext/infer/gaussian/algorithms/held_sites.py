r"""The field given other hyperparameters than those of a fit, with the Gaussian sites of the fit held.

The prior moves with the hyperparameters :math:`\theta`, the sites :math:`\tilde t_i` stay:
:math:`q(e \mid \theta) \propto p(e \mid \theta) \prod_i \tilde t_i(\eta_i)` is Gaussian, by one conditioning and no
iteration. Gaussian factors are their own sites, at every :math:`\theta`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ....linalg.frozen_pytree import frozen_pytree
from ....linalg.gaussian.design import SparseRows
from ....linalg.gaussian.prior import LowRankPrior
from ....linalg.gaussian.spaces.observation_space import ObservationPosterior
from ....linalg.gaussian.spaces.sparse_space import SparsePosterior
from ....potentials import GaussianPotential
from ....structure.latent_gaussian import LatentGaussian
from .posterior import GaussianPosterior, gaussian_prior

LARGEST_LOW_RANK = 2000
"""Unknowns of a prior of low rank up to which its dense covariance takes its place."""


def gaussian_sites(form: LatentGaussian) -> tuple[Array, Array]:
    """Precisions and shifts of the Gaussian factors, which are their own site approximations; zeros at others.

    :param LatentGaussian form: at any hyperparameters.
    """
    precisions, shifts = [], []
    for potential, observed in zip(form.potentials, form.observed, strict=True):
        if not isinstance(potential, GaussianPotential):
            precisions.append(jnp.zeros(observed.shape, form.offset.dtype))
            shifts.append(precisions[-1])
            continue
        precision = jnp.where(observed, 1.0 / jnp.square(potential.scale), 0.0)
        precisions.append(precision)
        shifts.append(jnp.where(observed, precision * potential.observation, 0.0))
    return jnp.concatenate(precisions), jnp.concatenate(shifts)


@frozen_pytree
class HeldSites:
    """Gaussian sites on the predictors, of precisions that are not negative."""

    site_precision: Array
    """Shape ``(num_rows,)``."""
    site_shift: Array
    """Shape ``(num_rows,)``."""
    reference: Any
    """The field at the hyperparameters of the fit, of a sparse precision; ``None`` of others."""
    num_replaced: int | Array = 0
    """Number of sites of negative precision, in whose place stand tangents."""
    is_by_root: bool = dataclasses.field(default=False, metadata={"static": True})
    """True if unknowns are made of normal numbers by a root with a derivative of its own, in the space of the fit."""


def hold(posterior: GaussianPosterior, mean: Array) -> HeldSites:
    """Sites of a fit, to be held at other hyperparameters.

    A site of negative precision is replaced by its tangent at the mean, so that the field is proper under every prior.

    :param GaussianPosterior posterior: of the fit.
    :param mean: of its predictors, shape ``(num_rows,)``.
    :raises FloatingPointError: if a site is not finite.
    :raises ValueError: if the field has no map from as many normal numbers as it has unknowns.
    """
    form, precision, shift = posterior.form, posterior.site_precision, posterior.site_shift
    if not bool(jnp.all(jnp.isfinite(precision)) & jnp.all(jnp.isfinite(shift))):
        raise FloatingPointError("Sites of the fit are not finite: look at engine.diagnostics.")
    _check(form)
    is_negative = precision < 0.0
    sites = HeldSites(
        jnp.where(is_negative, 0.0, precision),
        jnp.where(is_negative, shift - precision * mean, shift),
        None,
        jnp.sum(is_negative),
    )
    found = field_given(form, sites)
    if isinstance(found.posterior, SparsePosterior):
        sites = dataclasses.replace(sites, reference=found)
    elif isinstance(found.posterior, ObservationPosterior):
        sites = dataclasses.replace(sites, is_by_root=found.posterior.suits_root)
    return sites


def field_given(form: LatentGaussian, sites: HeldSites) -> FieldGiven:
    """The field of a form, given its hyperparameters, with sites held: one conditioning, differentiable in the form.

    >>> from numpyro_ext.linalg.gaussian.design import DenseDesign
    >>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
    >>> from numpyro_ext.structure.latent_gaussian import Blocks
    >>> form = LatentGaussian(
    ...     prior=(DiagonalPrior(jnp.ones(1)),), design=DenseDesign(jnp.ones((3, 1))), offset=jnp.zeros(3),
    ...     potentials=(), observed=(), log_constant=jnp.zeros(()),
    ...     blocks=Blocks(jnp.arange(3)[None], jnp.arange(1)[None]),
    ... )
    >>> found = field_given(form, HeldSites(jnp.ones(3), jnp.array([1.0, 2.0, 3.0]), None))
    >>> print(found.mean, found.from_white(jnp.ones(1)), round(float(jnp.exp(found.log_scale)), 6))
    [1.5] [2.] 0.5

    :param LatentGaussian form: at any hyperparameters, of the structure of the fit.
    :param HeldSites sites: of the fit.
    """
    precision, shift = sites.site_precision, sites.site_shift
    if form.potentials:
        own, own_shift = gaussian_sites(form)
        is_gaussian = np.concatenate(
            [
                np.full(mask.shape, isinstance(p, GaussianPotential))
                for p, mask in zip(form.potentials, form.observed, strict=True)
            ]
        )
        precision = jnp.where(is_gaussian, own, precision)
        shift = jnp.where(is_gaussian, own_shift, shift)
    if any(isinstance(block, LowRankPrior) for block in form.prior):
        # Draws are made of noise and inducing values, more numbers than unknowns.
        dense = tuple(block.dense() if isinstance(block, LowRankPrior) else block for block in form.prior)
        form = form._replace(prior=dense, border=None)
    # What rows touch has a root of its covariance only where that is not singular: the blocks as a whole.
    prior = gaussian_prior(form._replace(touched=None), is_signed=False)
    posterior = prior.condition(precision, shift - precision * form.offset)
    return FieldGiven(form, precision, shift, posterior, sites.reference, sites.is_by_root)


@frozen_pytree
class FieldGiven:
    """A Gaussian field given hyperparameters: its mean, a map from independent normal numbers, and its evidence."""

    form: LatentGaussian
    site_precision: Array
    """Shape ``(num_rows,)``; of Gaussian factors their own."""
    site_shift: Array
    """Shape ``(num_rows,)``."""
    posterior: Any
    """Shape and algebra of the space in which it was conditioned."""
    reference: Any
    """The field at the fit, where the correlations are those there; else ``None``."""
    is_by_root: bool = dataclasses.field(metadata={"static": True})

    @property
    def mean(self) -> Array:
        """Mean of the unknowns, shape ``(num_columns,)``."""
        return self.posterior.unknowns()

    @property
    def log_partition(self) -> Array:
        """Log integral of the prior times all sites."""
        return jnp.asarray(self.posterior.marginals().log_partition + jnp.sum(self.log_sites(self.form.offset)))

    def log_sites(self, eta: Array) -> Array:
        """Logs of the sites at predictors, both of shape ``(num_rows,)``."""
        return (self.site_shift - 0.5 * self.site_precision * eta) * eta

    def from_white(self, white: Array) -> Array:
        """Unknowns of as many independent standard normal numbers, one to one; both of shape ``(num_columns,)``.

        Where the precision is sparse the correlations are those of the fit, as derivatives of a sparse factor would
        need the whole inverse. Elsewhere the unknowns have the mean and covariance of the field.
        """
        return self.place(white)[0]

    @property
    def log_scale(self) -> Array:
        """Log absolute determinant of :meth:`from_white`."""
        return self.place(jnp.zeros((self.form.num_columns,), self.form.offset.dtype))[1]

    def place(self, white: Array) -> tuple[Array, Array]:
        """Unknowns of :meth:`from_white`, and the log absolute determinant of that map."""
        if self.is_by_root and isinstance(self.posterior, ObservationPosterior):  # not where there is a border now
            unknowns, log_scale = self.posterior.place(white)
            return unknowns, log_scale
        if self.reference is not None:
            unknowns = self.mean + self._growth * (self.reference.from_white(white) - self.reference.mean)
            return unknowns, self.reference.log_scale + jnp.sum(jnp.log(self._growth))
        # The volume of the posterior is known relative to the prior's, that of the prior by its density at the mean.
        form, total = self.form, self.posterior.log_volume()
        for block in form.prior:
            total = total - block.log_density(jnp.zeros((block.size,), form.offset.dtype))
        return self.posterior.from_white(white), jnp.asarray(total - 0.5 * form.num_columns * math.log(2.0 * math.pi))

    @property
    def _growth(self) -> Array:
        """Standard deviations of the unknowns, relative to those at the fit."""
        size = self.form.num_columns
        each = SparseRows(jnp.arange(size)[:, None], jnp.ones((size, 1), self.form.offset.dtype), size)
        return jnp.sqrt(self.posterior.map_variance(each) / self.reference.posterior.map_variance(each))


def _check(form: LatentGaussian) -> None:
    sizes = [block.size for block in form.prior if isinstance(block, LowRankPrior)]
    if sum(sizes) > LARGEST_LOW_RANK:
        raise ValueError(
            f"The {sum(sizes)} unknowns of a prior of low rank have no map from as many normal numbers but by a dense "
            f"factor, which is made of up to {LARGEST_LOW_RANK}. Sample the inducing values in the model, from which "
            "the field is computed, or use NUTS."
        )
    if form.layout is not None and form.layout.elimination is not None:
        raise ValueError(
            "The field is solved by iterations, whose variances are estimates without derivatives, and coordinates "
            "made from a fit need these. Fit with space='direct', or use NUTS."
        )
    if any(getattr(block, "is_constrained", False) for block in form.prior):
        raise ValueError(
            "A sparse field that is conditioned on sums of zero has no map from as many normal numbers as it has "
            "unknowns. Give its precision as a dense matrix, or use NUTS."
        )
