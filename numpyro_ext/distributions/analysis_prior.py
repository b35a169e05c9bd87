"""Priors that speak of the coefficients of a signal in more bases than it has dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from ..linalg.operators.operator import LinearOperator


class AnalysisPrior(Distribution):
    r"""A signal ``x`` whose coefficients ``B x`` in a frame have a prior each: :math:`p(x) \propto p(B x)^{w}`.

    With the ``K`` orthonormal bases of :func:`~numpyro_ext.linalg.shifted_transforms` and the weight ``1 / K`` this is
    the geometric mean of the priors under all shifts: no basis is preferred to its shifted copies, and the blocks that
    a single one leaves disappear.

    ``log_prob`` is not normalised. By Hölder's inequality the integral of a geometric mean of densities is at most one,
    so that with orthonormal bases and weights that sum to one **a lower bound of the log evidence computed with it is
    one for the normalised prior too**, also while parameters are learned from it.

    It can be evaluated and differentiated (NUTS, SVI, engines), but not sampled from.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.distributions import AnalysisPrior
        >>> from numpyro_ext.linalg import shifted_transforms, wavelet_transform
        >>> frame = shifted_transforms(wavelet_transform((4,), "haar"), [[0], [1]])
        >>> prior = AnalysisPrior(frame, dist.Laplace(0.0, 1.0).expand([8]).to_event(1), 0.5)
        >>> steps = jnp.array([1.0, 1.0, 0.0, 0.0])
        >>> print(prior.log_prob(steps).round(2), prior.log_prob(jnp.roll(steps, 1)).round(2))
        -4.98 -4.98

    **References**

    1. Elad, M., Milanfar, P. and Rubinstein, R. (2007), *Analysis versus synthesis in signal priors*, Inverse Problems
       23, 947-968.
    2. Coifman, R. R. and Donoho, D. L. (1995), *Translation-invariant de-noising*, in Wavelets and Statistics.

    :param LinearOperator operator: ``B``, of shape ``(p, n)``.
    :param Distribution prior: of vectors of ``p`` coefficients (``HiddenMarkovTree``, or ``Laplace``, ``Normal`` or
        ``StudentT`` with ``to_event(1)``).
    :param weight: the power ``w``.
    :raises TypeError: if the first argument is no operator.
    :raises ValueError: if the prior is not one of ``p`` coefficients, or the weight is not positive.
    """

    arg_constraints = {"weight": constraints.positive}
    support = constraints.real_vector
    pytree_data_fields = ("operator", "prior", "weight")

    def __init__(
        self,
        operator: LinearOperator,
        prior: Distribution,
        weight: ArrayLike = 1.0,
        *,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(operator, LinearOperator):
            raise TypeError(f"AnalysisPrior needs a LinearOperator; got {type(operator).__name__}.")
        p, n = operator.shape
        if prior.batch_shape != () or prior.event_shape != (p,):
            raise ValueError(
                f"AnalysisPrior: the operator makes {p} coefficients, so the prior must have the event shape ({p},) "
                f"and no batch shape; got {prior.event_shape} and {prior.batch_shape}."
            )
        base = prior
        while hasattr(base, "base_dist"):
            base = base.base_dist
        location = getattr(base, "loc", 0.0)
        if not isinstance(location, jax.core.Tracer) and np.any(np.asarray(location) != 0.0):
            raise ValueError("AnalysisPrior: the prior of the coefficients must be centered at zero.")
        self.operator, self.prior = operator, prior
        self.weight = jnp.asarray(weight, float)
        if jnp.shape(self.weight) != ():
            raise ValueError(f"AnalysisPrior: the weight must be a number; got the shape {jnp.shape(self.weight)}.")
        if not isinstance(self.weight, jax.core.Tracer) and not float(self.weight) > 0.0:
            raise ValueError(f"AnalysisPrior: the weight must be positive; got {self.weight}.")
        super().__init__(batch_shape=(), event_shape=(n,), validate_args=validate_args)

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        value = jnp.asarray(value)
        flat = value.reshape(-1, value.shape[-1])
        coefficients = jax.vmap(self.operator.matvec)(flat).reshape(*value.shape[:-1], self.operator.shape[0])
        return self.weight * self.prior.log_prob(coefficients)

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        raise NotImplementedError("AnalysisPrior is known up to a constant only: it cannot be sampled from.")

    @property
    def mean(self) -> Array:
        """Zero: all priors of coefficients that engines take are symmetric."""
        return jnp.zeros(self.event_shape)
