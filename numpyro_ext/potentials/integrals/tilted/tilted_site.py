"""Site of a factor whose tilted density has given moments, without the digits that a difference of them loses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ...moments import TiltedMoments
from .tilted_window import Cavity


def with_site(
    log_z: Array, shift: Array, tilted_variance: Array, slope: Array, shrinkage: Array, cavity: Cavity
) -> TiltedMoments:
    """Add the site parameters to the tilted density whose mean is that of the cavity plus ``shift``.

    By Stein's identity ``slope``, the mean of the slope of the log factor, is the shift of the mean over the variance
    of the cavity, and ``shrinkage``, minus its covariance with ``eta``, is one minus the ratio of the variances. These
    do not cancel for a factor that says little, but miss the jumps of a factor that has any.
    """
    return _with_site(log_z, shift, tilted_variance, slope, shrinkage, cavity)


@jax.jit  # traced once for all rules
def _with_site(
    log_z: Array, shift: Array, tilted_variance: Array, slope: Array, shrinkage: Array, cavity: Cavity
) -> TiltedMoments:
    mean, variance = cavity
    ratio = tilted_variance / variance
    tolerance = jnp.sqrt(jnp.finfo(mean.dtype).eps)
    direct = 1.0 - ratio
    shrinkage = jnp.where(jnp.abs(shrinkage - direct) < tolerance, shrinkage, direct)
    agrees = jnp.abs(variance * slope - shift) < tolerance * (jnp.abs(shift) + jnp.sqrt(variance))
    slope = jnp.where(agrees, slope, shift / variance)
    return TiltedMoments(
        log_z=log_z,
        mean=mean + shift,
        variance=tilted_variance,
        site_precision=shrinkage / tilted_variance,
        site_shift=jnp.where(
            ratio < 0.5,
            (mean + shift) / tilted_variance - mean / variance,
            (slope + shrinkage * mean / variance) / ratio,
        ),
    )
