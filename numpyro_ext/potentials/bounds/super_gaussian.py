r"""Factors that are the upper envelope of Gaussians: what site bounding, the lower bound by variational widths, needs.

An even factor about its center is *super-Gaussian* if :math:`g(x) = \log t(\text{center} + \sqrt x)` is convex and
decreasing in :math:`x \ge 0`. Then (Ko 2017, eqs. (1.23), (2.58), (2.59), after Palmer et al. 2006)

.. math:: t(\text{center} + s) = \max_{\gamma > 0} \exp\bigl(-\tfrac{s^2}{2\gamma} - \tfrac12 h(\gamma)\bigr),
    \qquad \gamma^\star(x) = -\frac{1}{2 g'(x)}, \qquad h(\gamma) = \max_{x \ge 0}\bigl(-x/\gamma - 2 g(x)\bigr).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential


class ConvexifiedPenalty(NamedTuple):
    r"""A convex upper bound of :math:`-2 \log t` at one value of :math:`x`, and the width that attains it."""

    value: Array
    """The bound, equal to :math:`-2 \\log t(\\text{center} + \\sqrt x)` where the width is the reference width."""
    width: Array
    """Its minimiser :math:`\\gamma`; half its inverse is the slope of ``value`` in :math:`s` divided by :math:`2 s`."""


class SuperGaussianPotential(Potential):
    r"""A family of super-Gaussian factors. Subclasses with closed forms override :meth:`width`.

    In every method ``squared`` is :math:`x`, the squared distance from :attr:`center`, or its expectation under a
    Gaussian, and must be positive; the arguments broadcast against the parameters.

    >>> from numpyro_ext.potentials import LaplacePotential
    >>> factor = LaplacePotential(0.0, 0.5)
    >>> width = factor.width(4.0)
    >>> float(width), float(factor.width_penalty(width))
    (1.0, 4.0)
    >>> envelope = -0.5 * (4.0 / width + factor.width_penalty(width))
    >>> bool(jnp.isclose(envelope, factor.log_density(2.0)))
    True
    """

    @property
    def center(self) -> Array:
        """Place of the peak of the factor."""
        return jnp.zeros(())

    def radial_log_density(self, squared: ArrayLike) -> Array:
        r""":math:`g(x) = \log t(\text{center} + \sqrt x)`, with every normalising constant."""
        return self.log_density(self.center + jnp.sqrt(squared))

    def width(self, squared: ArrayLike) -> Array:
        r"""The width :math:`\gamma^\star(x) = -1 / (2 g'(x))` of the Gaussian that touches the factor at :math:`x`.

        :param ArrayLike squared: :math:`x > 0`.
        """
        squared = jnp.asarray(squared, jnp.result_type(squared, float))
        _, slope = jax.jvp(self.radial_log_density, (squared,), (jnp.ones_like(squared),))
        return -0.5 / slope

    def width_penalty(self, width: ArrayLike) -> Array:
        r"""The conjugate :math:`h(\gamma)`, so that the bound of the factor is :math:`-\tfrac12(x/\gamma + h(\gamma))`.

        :param ArrayLike width: :math:`\gamma > 0`.
        :raises NotImplementedError: for a family without closed form.
        """
        raise NotImplementedError(f"{type(self).__name__} has no closed form of the penalty of its width.")

    def convexified_penalty(self, squared: ArrayLike, reference_width: ArrayLike) -> ConvexifiedPenalty:
        r"""An upper bound of :math:`-2 g(x)` that is convex in :math:`s`, for a penalised least squares step.

        The concave part of :math:`h` is replaced by its tangent at the reference width (Seeger and Nickisch 2011). If
        :math:`h` is convex, as for every log-concave factor, the bound is :math:`-2 g` itself and the reference is
        ignored.

        :param ArrayLike squared: :math:`x > 0`.
        :param ArrayLike reference_width: :math:`\gamma_0`, where the bound is tight once the step has converged.
        :raises NotImplementedError: for a family that is not log-concave and has no known decomposition.
        """
        if not self.is_log_concave:
            raise NotImplementedError(f"No convex bound is known for {type(self).__name__}: treat it directly.")
        width = self.width(squared)
        value = -2.0 * self.radial_log_density(squared)
        shape = jnp.broadcast_shapes(value.shape, jnp.shape(reference_width))
        return ConvexifiedPenalty(jnp.broadcast_to(value, shape), jnp.broadcast_to(width, shape))
