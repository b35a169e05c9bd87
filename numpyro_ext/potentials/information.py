r"""Information in observations: entropies of outcomes whose predictor is Gaussian, and of mixtures of them.

With a predictor :math:`\eta \sim N(m, v)` an outcome has the predictive density :math:`\bar p(y) = \int p(y \mid \eta)
N(\eta \mid m, v)\, d\eta`. The information in it about the predictor is :math:`H[\bar p] - E\, H[p(\cdot \mid \eta)]`
(Houlsby 2014, eq. 2.10). Everything is in nats.

Arrays have an axis of mixture components in front (hyperparameters, as a rule), whose weights sum to one; factors are
on the axis after it. Potentials say what could be observed: see :mod:`.outcomes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .base import Potential
from .families.binary import ProbitPotential
from .families.gaussian import GaussianPotential
from .integrals.probit_entropy import expected_probit_entropy, probit_information
from .outcomes import log_predictive_probabilities, num_outcomes, with_outcome

EntropyMethod = Literal["quadrature", "closed-form"]

_LOG_2PI_E = math.log(2.0 * math.pi * math.e)
_SQUARED_WIDTH = 0.5 * math.pi * math.log(2.0)
r"""Squared width of the Gaussian that the entropy of a probit observation resembles: :math:`C^2` of Houlsby (2014),
eq. (3.6)."""
_FURTHEST = 8.5
"""Standard deviations to either side, at which rules over the predictor end."""
_MOST_HALVINGS = 6
"""Largest number of halvings of the distance of the nodes, for predictors that are wide."""
_REAL_REACH, _NUM_REAL = 22.0, 1601
r"""Real outcomes are integrated at ``center + width * sinh(t)``: so far, and at so many nodes, an odd number."""


def predictive_entropy(
    potential: Potential, mean: ArrayLike, variance: ArrayLike, weights: ArrayLike | None = None
) -> Array:
    r"""Entropy :math:`H[\bar p]` of an outcome that is still to be seen, in nats.

    Sums over outcomes, of which the probabilities are those that expectation propagation normalises by; counts up to
    ``1e-10`` of their mass. Gaussian noise in closed form, mixtures and other real outcomes by Simpson's rule.

    :param Potential potential: the factors; what they observed does not matter.
    :param ArrayLike mean: of the predictors, shape ``(components, ...)``, or ``(...)`` without weights.
    :param ArrayLike variance: of the predictors.
    :param ArrayLike weights: of the components of a mixture.
    :return: of the shape of the factors.
    :raises ValueError: if the potential does not say what its outcomes are, or counts have no end in sight.

    **Example:**

    >>> from numpyro_ext.potentials import PoissonExpPotential, ProbitPotential
    >>> print(predictive_entropy(ProbitPotential(0), 0.0, 5.0), jnp.log(2.0))
    0.6931 0.6931
    >>> print(predictive_entropy(PoissonExpPotential(0, 2.0), 0.0, 0.5))
    2.0794
    """
    mean, variance, weights = _with_component(potential, mean, variance, weights)
    number = num_outcomes(potential, mean, variance, weights)
    if number is not None:
        log_p = log_predictive_probabilities(potential, mean, variance, weights, number)
        return _entropy_of_outcomes(log_p)
    if isinstance(potential, GaussianPotential) and len(weights) == 1:
        return 0.5 * (_LOG_2PI_E + jnp.log(jnp.square(potential.scale) + variance))[0]
    # Gaussian noise has a closed form, which needs no nodes: none is compiled for another number of them.
    num_nodes = 0 if isinstance(potential, GaussianPotential) else _num_nodes(potential, variance)
    return _real_entropy(potential, mean, variance, weights, num_nodes)


def expected_conditional_entropy(
    potential: Potential,
    mean: ArrayLike,
    variance: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    left: ArrayLike | None = None,
    method: EntropyMethod = "quadrature",
) -> Array:
    r"""Expected entropy :math:`E\, H[p(\cdot \mid \eta)]` of an outcome if its predictor were known, in nats.

    Probit factors by Gauss-Hermite with twelve nodes about the product of the Gaussian and a density out of the
    entropy: errors below ``3e-10`` whatever the variance. ``method="closed-form"`` takes another Gaussian, which it
    resembles, for the entropy (Houlsby 2014, eq. 3.7), which is up to 0.0019 nats too large. Other factors by the
    trapezoidal rule, which for smooth ones is exact to ten digits; where the rate of a Poisson factor has a kink, to
    four.

    :param Potential potential: the factors; what they observed does not matter.
    :param ArrayLike mean: of the predictors, shape ``(components, ...)``, or ``(...)`` without weights.
    :param ArrayLike variance: of the predictors.
    :param ArrayLike weights: of the components of a mixture.
    :param ArrayLike left: what is left of each variance once the quantity of interest is known, if that does not fix
        the predictor: the entropy is then that of the outcome given this quantity.
    :param str method: see above.
    :return: of the shape of the factors.
    :raises ValueError: as :func:`predictive_entropy`, and for the closed form of other factors than probit ones.

    **Example:**

    >>> from numpyro_ext.potentials import ProbitPotential
    >>> print(expected_conditional_entropy(ProbitPotential(0), 0.0, 1.0).round(4))
    0.5
    >>> print(expected_conditional_entropy(ProbitPotential(0), 0.0, 1.0, method="closed-form").round(4))
    0.5005
    """
    mean, variance, weights = _with_component(potential, mean, variance, weights)
    remains = jnp.zeros_like(variance) if left is None else jnp.broadcast_to(jnp.asarray(left), variance.shape)
    known = jnp.where(variance < remains, 0.0, variance - remains)
    if isinstance(potential, GaussianPotential):
        entropy = 0.5 * (_LOG_2PI_E + jnp.log(jnp.square(jnp.asarray(potential.scale, mean.dtype)) + remains))
        return jnp.tensordot(weights, jnp.broadcast_to(entropy, mean.shape), 1)
    if isinstance(potential, ProbitPotential):
        return _probit_conditional_entropy(mean, known, remains, weights, method=method)
    if method == "closed-form":
        raise ValueError(f"The closed form is one of probit factors, and this is a {type(potential).__name__}.")
    number = num_outcomes(potential, mean, variance, weights)
    if number is None:
        if left is not None:
            raise ValueError(
                f"What {type(potential).__name__} would tell of a part of the unknowns is not known: only Gaussian "
                "noise and outcomes that can be counted have a rule for it."
            )
        # of values about a location, whose entropy is the same wherever it is
        zeros = jnp.zeros_like(mean)
        parts = jax.vmap(lambda w: _real_entropy(potential, mean, zeros, w, 1))(jnp.eye(len(weights), dtype=mean.dtype))
        return jnp.tensordot(weights, parts, 1)
    num_nodes = _num_nodes(potential, known)
    return _conditional_entropy(
        potential, mean, known, weights, None if left is None else remains, number=number, num_nodes=num_nodes
    )


def expected_information(
    potential: Potential,
    mean: ArrayLike,
    variance: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    left: ArrayLike | None = None,
    method: EntropyMethod = "quadrature",
) -> Array:
    r"""Information in an outcome that is still to be seen: predictive less expected conditional entropy, in nats.

    That of probit factors is a difference of entropies with all that both have in common outside, and a series where
    it is little. In single precision, where the difference of two entropies has no digits left below 1e-6, other
    outcomes that can be counted are asked for the expected divergence of their distribution from its mean instead,
    whose terms are positive.

    :param Potential potential: the factors; the other arguments as for :func:`expected_conditional_entropy`.
    :return: of the shape of the factors.
    :raises ValueError: as those two.

    **Example:**

    >>> from numpyro_ext.potentials import ProbitPotential
    >>> print(expected_information(ProbitPotential(0), 0.0, jnp.array([0.01, 1.0, 100.0])).round(4))
    [0.0032 0.1931 0.6215]
    """
    dtype = jnp.result_type(mean, variance, float)
    is_single = dtype == jnp.float32 and left is None and method == "quadrature"
    is_one = weights is None or jnp.shape(weights)[0] == 1
    if isinstance(potential, ProbitPotential) and is_one and method == "quadrature":
        return _probit_information(
            potential.label, jnp.asarray(mean, dtype), jnp.asarray(variance, dtype), left, is_mixed=weights is not None
        )
    mean, variance, weights = _with_component(potential, mean, variance, weights)
    number = num_outcomes(potential, mean, variance, weights) if is_single else None
    if number is not None:
        log_mixed = log_predictive_probabilities(potential, mean, variance, weights, number)
        return _expected_divergence(
            potential, mean, variance, weights, log_mixed, num_nodes=_num_nodes(potential, variance)
        )
    entropy = expected_conditional_entropy(potential, mean, variance, weights, left=left, method=method)
    return predictive_entropy(potential, mean, variance, weights) - entropy


def entropy_term(log_p: Array) -> Array:
    """Minus the log of a probability times it, zero with a derivative of zero where there is none left."""
    is_left = log_p != -jnp.inf  # what is no number stays none
    log_p = jnp.where(is_left, log_p, 0.0)
    return jnp.where(is_left, -jnp.exp(log_p) * log_p, 0.0)


@jax.jit
def _entropy_of_outcomes(log_p: Array) -> Array:
    return jnp.sum(entropy_term(log_p), axis=0)


def _entropy_of(p: Array) -> Array:
    return entropy_term(jnp.where(p == 0.0, -jnp.inf, jnp.log(jnp.where(p == 0.0, 1.0, p))))


def _closed_form(mean: Array, variance: Array) -> Array:
    """By the Gaussian that the entropy of a probit observation resembles."""
    total = variance + _SQUARED_WIDTH
    return math.log(2.0) * jnp.sqrt(_SQUARED_WIDTH / total) * jnp.exp(-0.5 * jnp.square(mean) / total)


@functools.partial(jax.jit, static_argnames="method")
def _probit_conditional_entropy(
    mean: Array, variance: Array, left: Array, weights: Array, *, method: EntropyMethod
) -> Array:
    """Mixed over components; what is left of a probit predictor is noise of the same kind."""
    scale = jnp.sqrt(1.0 + left)
    of = _closed_form if method == "closed-form" else expected_probit_entropy
    return jnp.tensordot(weights, of(mean / scale, variance / jnp.square(scale)), 1)


@functools.partial(jax.jit, static_argnames="is_mixed")
def _probit_information(label: Array, mean: Array, variance: Array, left: ArrayLike | None, *, is_mixed: bool) -> Array:
    """Information of one component, on an axis in front if there is one for mixtures."""
    remains = jnp.zeros_like(variance) if left is None else jnp.asarray(left, mean.dtype)
    known = jnp.where(variance < remains, 0.0, variance - remains)
    found = probit_information(mean / jnp.sqrt(1.0 + remains), known / (1.0 + remains))
    found = jnp.broadcast_to(found, jnp.broadcast_shapes(found.shape, jnp.shape(label)))
    return found[0] if is_mixed else found


@functools.partial(jax.jit, static_argnames=("number", "num_nodes"))
def _conditional_entropy(
    potential: Potential,
    mean: Array,
    variance: Array,
    weights: Array,
    left: Array | None,
    *,
    number: int,
    num_nodes: int,
) -> Array:
    """Sums over outcomes at the nodes of a trapezoidal rule; ``left`` is the variance of the predictor about these."""
    known = potential.outcomes()
    assert known is not None  # as before
    about = None if left is None else jnp.maximum(left, jnp.finfo(mean.dtype).eps ** 2 * (1.0 + jnp.square(mean)))

    def at(eta: Array) -> Array:
        def add(total: Array, value: Array) -> tuple[Array, None]:
            factors = with_outcome(potential, value)
            log_p = factors.log_density(eta) if about is None else factors.log_normaliser(eta, about)
            if known.limit is not None:
                log_p = jnp.where(value <= known.limit, log_p, -jnp.inf)
            return total + entropy_term(log_p), None

        entropy, _ = jax.lax.scan(add, jnp.zeros_like(eta), jnp.arange(number))
        return entropy

    return jnp.tensordot(weights, _normal_mean(at, mean, variance, num_nodes), 1)


@functools.partial(jax.jit, static_argnames="num_nodes")
def _expected_divergence(
    potential: Potential, mean: Array, variance: Array, weights: Array, log_mixed: Array, *, num_nodes: int
) -> Array:
    """Mean over the predictor of the divergence of the outcomes from their mixture, in terms of one sign."""
    known = potential.outcomes()
    assert known is not None  # as before

    def at(eta: Array) -> Array:
        def add(total: Array, outcome: tuple[Array, Array]) -> tuple[Array, None]:
            value, log_mean = outcome
            log_p = with_outcome(potential, value).log_density(eta)
            if known.limit is not None:
                log_p = jnp.where(value <= known.limit, log_p, -jnp.inf)
            return total + jnp.exp(log_mean) * excess_terms(log_p - log_mean), None

        found, _ = jax.lax.scan(add, jnp.zeros_like(eta), (jnp.arange(len(log_mixed)), log_mixed))
        return found

    return jnp.tensordot(weights, _normal_mean(at, mean, variance, num_nodes), 1)


def excess_terms(log_ratio: Array) -> Array:
    r""":math:`r \log r - r + 1` of a ratio :math:`r`, without cancellation near one; nan of no ratio is zero."""
    excess = jnp.expm1(jnp.where(jnp.isnan(log_ratio), 0.0, log_ratio))
    is_left = excess > -1.0
    safe = jnp.where(is_left, excess, 0.0)  # of no ratio, which rounding may make, the logarithm has no derivative
    return jnp.where(is_left, jax.scipy.special.xlog1py(1.0 + safe, safe) - safe, 1.0)


def _normal_mean(function: Callable[[Array], Array], mean: Array, variance: Array, num_nodes: int) -> Array:
    """Expectation of an elementwise function, by the trapezoidal rule."""
    z = np.linspace(-_FURTHEST, _FURTHEST, num_nodes) if num_nodes > 1 else np.zeros(1)
    density = np.exp(-0.5 * z**2)
    scale = jnp.sqrt(variance)

    def add(total: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
        return total + node[1] * function(mean + scale * node[0]), None

    grid = jnp.asarray(z, mean.dtype), jnp.asarray(density / density.sum(), mean.dtype)
    return jax.lax.scan(add, jnp.zeros_like(mean), grid)[0]


def _num_nodes(potential: Potential, variance: Array) -> int:
    """Nodes, a quarter of the width of the factors apart."""
    known = potential.outcomes()
    width = 1.0 if known is None or known.width is None else known.width
    # Which rule is taken has no derivative.
    variance, width = jax.lax.stop_gradient((variance, jnp.asarray(width, variance.dtype)))
    try:
        widest = float(jnp.max(jnp.sqrt(variance) / width, initial=1.0))
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            f"Entropies of outcomes of {type(potential).__name__} have as many nodes as the largest variance asks for, "
            "which has no value within jax.jit or vmap: call them outside, on stacked arrays; those of one probit "
            "factor need none."
        ) from error
    if not widest < 2.0**_MOST_HALVINGS:  # infinite or no number: so is the result
        widest = 2.0**_MOST_HALVINGS
    halvings = math.ceil(math.log2(widest))
    return 1 + (64 << halvings)


@functools.partial(jax.jit, static_argnames="num_nodes")
def _real_entropy(potential: Potential, mean: Array, variance: Array, weights: Array, num_nodes: int) -> Array:
    """Entropy of a mixture of densities of real numbers, by Simpson's rule on either side of its centre."""
    known = potential.outcomes()
    assert known is not None  # as before
    by_component = weights.reshape(-1, *(1,) * (mean.ndim - 1))
    center, scale = center_and_scale(mean, variance, weights, jnp.asarray(known.width, mean.dtype))
    nodes, simpson = real_nodes()

    def add(total: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
        t, weight = node
        y = center + scale * jnp.sinh(t)

        def density(eta: Array) -> Array:
            return jnp.exp(with_outcome(potential, jnp.broadcast_to(y, eta.shape)).log_density(eta))

        if num_nodes == 1 or (potential.is_smooth and not isinstance(potential, GaussianPotential)):
            parts = _normal_mean(density, mean, variance, num_nodes)
        else:  # a closed form, or quadrature that knows of kinks
            parts = jnp.exp(with_outcome(potential, jnp.broadcast_to(y, mean.shape)).log_normaliser(mean, variance))
        mixed = jnp.sum(by_component * parts, axis=0)
        return total + weight * scale * jnp.cosh(t) * _entropy_of(mixed), None

    grid = jnp.asarray(nodes, mean.dtype), jnp.asarray(simpson, mean.dtype)
    return jax.lax.scan(add, jnp.zeros_like(center), grid)[0]


def real_nodes() -> tuple[np.ndarray, np.ndarray]:
    """Nodes of an integral over real outcomes ``center + scale * sinh(node)`` by Simpson's rule, and their weights."""
    nodes = np.linspace(-_REAL_REACH, _REAL_REACH, _NUM_REAL)
    simpson = np.r_[1.0, np.tile([4.0, 2.0], (_NUM_REAL - 3) // 2), 4.0, 1.0] * (nodes[1] - nodes[0]) / 3.0
    return nodes, simpson


def center_and_scale(mean: Array, variance: Array, weights: Array, width: ArrayLike) -> tuple[Array, Array]:
    """Center and scale of the nodes for mixtures of real outcomes: nodes are dense within the narrowest component,
    and as dense where the others are."""
    by_component = weights.reshape(-1, *(1,) * (mean.ndim - 1))
    center = jnp.sum(by_component * mean, axis=0)
    away = jnp.sum(by_component * jnp.square(mean - center), axis=0)
    least = jnp.min(jnp.where(by_component > 0.0, jnp.sqrt(variance) + width, jnp.inf), axis=0)
    return center, jnp.maximum(least, 0.1 * jnp.sqrt(away))


def _with_component(
    potential: Potential, mean: ArrayLike, variance: ArrayLike, weights: ArrayLike | None
) -> tuple[Array, Array, Array]:
    dtype = jnp.result_type(mean, variance, float)
    mean, variance = jnp.asarray(mean, dtype), jnp.asarray(variance, dtype)
    if weights is not None:
        mean, variance = jnp.broadcast_arrays(mean, variance)
        return mean, variance, jnp.asarray(weights, dtype)
    known = potential.outcomes()
    # One predictor for many factors would have these on the axis of the components.
    factors = () if known is None else jnp.shape(getattr(potential, known.field))
    shape = (1, *jnp.broadcast_shapes(mean.shape, variance.shape, factors))
    return jnp.broadcast_to(mean, shape), jnp.broadcast_to(variance, shape), jnp.ones(1, dtype)
