"""The registry of distributions with closed forms, which users add theirs to.

The first entries are in :mod:`.likelihoods`.

A site of any other distribution needs no entry: where its log density is an elementwise function of one predictor, that
function is integrated by quadrature. An entry gives it closed forms, and the engines that ask for more than a function
(bilinear models, sparse linear models) learn from the potential what they need to know.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import scipy.special
from jax import Array
from numpyro.distributions import constraints

from ..potentials import Potential, VectorPotential
from ..potentials.families.zero_inflated import ZeroInflatedPotential
from ..potentials.vector_rows import VectorRows


class Observations(NamedTuple):
    """The observations of a site, flattened, from which its potential is made."""

    value: Array
    """Floating point, shape ``(n,)``, or ``(n, k)`` of values that are vectors; where data are missing, some value of
    the support."""
    parameters: Mapping[str, Array]
    """The other parameters of the distribution: shape ``(n,)``, and one axis more for those that are vectors."""
    scale: Array
    """The factor that the link leaves open, such as the exposure in ``exposure * exp(predictor)``: shape ``(n,)``, or
    a one without shape."""
    dimension: int
    """Length of the last axis of the parameter that carries the predictors."""

    @property
    def label(self) -> Array:
        """The values as integers."""
        return self.value.astype(int)


class Built(NamedTuple):
    """A potential of ``sign * predictor + shift``."""

    potential: Potential
    sign: float = 1.0
    shift: Any = 0.0
    observed: Any = True
    """Mask of the rows that have a factor at all, besides the mask of the model."""


Build = Callable[[Observations], Potential | VectorPotential | Built]


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """A function from the predictor to the parameter that carries it, told from others by its values on a grid.

    :param str name: as users read it.
    :param Callable function: of a NumPy array, elementwise; the sign of the predictor may be either.
    :param bool has_scale: whether the parameter may be any positive multiple of the function.
    :param bool is_joint: whether the function is one of vectors on the last axis, for factors of several predictors.
    """

    name: str
    function: Callable[[np.ndarray], np.ndarray]
    has_scale: bool = False
    is_joint: bool = False


IDENTITY = Link("identity", lambda x: x)
EXP = Link("exp", np.exp, has_scale=True)
SOFTPLUS = Link("softplus", lambda x: np.logaddexp(x, 0.0), has_scale=True)
RECTIFIED_LINEAR = Link("rectified linear", lambda x: np.maximum(x, 0.0), has_scale=True)
COMPLEMENTARY_LOG_LOG = Link("complementary log-log", lambda x: -np.expm1(-np.exp(x)))
LOG_LOG = Link("log-log", lambda x: np.exp(-np.exp(x)))
LOGISTIC = Link("logistic", lambda x: 1.0 / (1.0 + np.exp(-x)))
SOFTMAX = Link("softmax", lambda x: scipy.special.softmax(x, axis=-1), is_joint=True)
LOG_SOFTMAX = Link("log softmax", lambda x: scipy.special.log_softmax(x, axis=-1), is_joint=True)
PROBIT = Link("probit", scipy.special.ndtr)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Family:
    """Registered facts about a distribution; made by :func:`register_family`, which describes the fields."""

    label: str
    predictor: str
    links: Mapping[Link, Build]
    parameters: tuple[str, ...]
    vectors: frozenset[str]
    is_joint: bool
    is_sparse_prior: bool
    support: constraints.Constraint
    """Support of the observations; where it depends on parameters, the counts and categories."""

    def __repr__(self) -> str:
        return f"Family({self.label})"

    def build(self, link: Link, observations: Observations) -> Built:
        """The factors of a site whose parameter is this link of the predictor."""
        made = self.links[link](observations)
        if isinstance(made, VectorPotential):
            made = VectorRows(made)
        return made if isinstance(made, Built) else Built(made)


_REGISTRY: dict[type, Family] = {}
_WITH_GATE = dist.ZeroInflatedPoisson, dist.ZeroInflatedProbs, dist.ZeroInflatedLogits
_GATE = "log_gate", "log_rest"


def family_of(distribution: object) -> Family | None:
    """The family of a distribution (an instance without wrappers, or a class), if there is one.

    A subclass has a density of its own, and so is not of the family of its base. Counts with more zeros than they would
    have are of the family of the counts, with a gate.
    """
    kind = distribution if isinstance(distribution, type) else getattr(distribution, "stands_for", type(distribution))
    if kind in _REGISTRY or kind not in _WITH_GATE or isinstance(distribution, type):
        return _REGISTRY.get(kind)
    family = family_of(_without_gate(distribution))
    if family is None or family.is_joint or family.vectors:
        return None
    return _with_gate(family)


def parameter_of(distribution: Any, name: str) -> Any:
    """A parameter of a distribution, by the name that its family has for it."""
    if type(distribution) not in _WITH_GATE:
        return getattr(distribution, name)
    if name not in _GATE:
        return getattr(_without_gate(distribution), name)
    if hasattr(distribution, "gate_logits"):
        logits = distribution.gate_logits
        return jax.nn.log_sigmoid(logits if name == "log_gate" else -logits)
    return jnp.log(distribution.gate) if name == "log_gate" else jnp.log1p(-distribution.gate)


def _without_gate(distribution: Any) -> object:
    base = distribution.base_dist
    return base.base_dist if isinstance(base, dist.ExpandedDistribution) else base


@functools.cache  # readings of one program have one family
def _with_gate(family: Family) -> Family:
    def gated(link: Link) -> Build:
        def build(y: Observations) -> Built:
            own = {name: value for name, value in y.parameters.items() if name not in _GATE}
            built = family.build(link, y._replace(parameters=own))
            gate = (y.parameters[name] for name in _GATE)
            return built._replace(potential=ZeroInflatedPotential(built.potential, y.value == 0.0, *gate))

        return build

    links = {link: gated(link) for link in family.links}
    parameters = (*family.parameters, *_GATE)
    return dataclasses.replace(family, label=f"zero-inflated {family.label}", links=links, parameters=parameters)


def register_family(
    *distributions: type,
    label: str,
    predictor: str,
    links: Mapping[Link, Build],
    parameters: tuple[str, ...] = (),
    vectors: tuple[str, ...] = (),
    is_joint: bool = False,
    is_sparse_prior: bool = False,
) -> Family:
    """Teach all readers a likelihood: which parameter carries the predictor, and the potential behind it.

    What a distribution was registered as before is forgotten.

    :param distributions: classes of NumPyro distributions, without ``mask``, ``expand`` or ``to_event``. They share
        the parameters that are named here, which are attributes of their instances.
    :param str label: the name of the family, as users read it.
    :param str predictor: the parameter that carries the predictor. It varies with the field, and no other may.
    :param links: for each function from the predictor to that parameter how to build the factors of
        :class:`Observations`: a potential of the predictor, or a :class:`Built` for factors of
        ``sign * predictor + shift``. Where the parameter is another function of the predictor, or is not the only one
        that varies, the site is left to quadrature.
    :param parameters: the other parameters that the potential is made of.
    :param vectors: those parameters that have an axis after the shape of the observations, such as thresholds.
    :param bool is_joint: whether the last axis of the parameter that carries the predictors belongs to one factor; the
        potential is then a :class:`~numpyro_ext.potentials.VectorPotential`. A vector that is not joint has one factor
        for each of its elements.
    :param bool is_sparse_prior: whether coefficients of sparse linear models may have this distribution. It must then
        be symmetric about its location, which is the parameter that carries the predictor, by the identity link.
    :return: the family.
    :raises TypeError: if a distribution is not a class of distributions.
    :raises ValueError: if there is no distribution or no link, if ``vectors`` are no parameters, or if factors are
        joint and a link other than the identity is not, or the other way round.

    **Example:**

    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.potentials import Potential, potential
    >>> from numpyro_ext.structure import EXP, register_family
    >>> class Waiting(dist.Exponential):
    ...     pass
    >>> @potential
    ... class WaitingPotential(Potential):
    ...     time: jax.Array
    ...     scale: jax.Array
    ...     is_log_concave = True
    ...     def log_density(self, eta):
    ...         rate = self.scale * jnp.exp(eta)
    ...         return jnp.log(rate) - rate * self.time
    >>> register_family(
    ...     Waiting, label="waiting", predictor="rate", links={EXP: lambda y: WaitingPotential(y.value, y.scale)}
    ... )
    Family(waiting)
    """
    for each in distributions:
        if not (isinstance(each, type) and issubclass(each, dist.Distribution)):
            raise TypeError(f"register_family takes classes of NumPyro distributions; got {each!r}.")
    if not distributions or not links:
        raise ValueError(
            f"The family {label!r} needs a distribution and a link; got {distributions} and {list(links)}."
        )
    unknown = set(vectors) - {predictor, *parameters}
    if unknown:
        raise ValueError(f"The family {label!r} has vectors {sorted(unknown)} that are none of its parameters.")
    if any(link.is_joint != is_joint for link in links if link is not IDENTITY):
        raise ValueError(
            f"The family {label!r} has factors of {'several predictors' if is_joint else 'one predictor'} each, and "
            f"so have to have its links other than the identity (is_joint); got {[link.name for link in links]}."
        )
    support = getattr(distributions[0], "support", None)
    if isinstance(support, property) or not isinstance(support, constraints.Constraint):
        support = constraints.nonnegative_integer  # it depends on parameters, as numbers of trials or of categories do
    family = Family(
        label, predictor, dict(links), tuple(parameters), frozenset(vectors), is_joint, is_sparse_prior, support
    )
    _REGISTRY.update(dict.fromkeys(distributions, family))
    return family
