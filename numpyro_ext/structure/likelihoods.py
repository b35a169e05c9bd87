"""The entries of the registry for the distributions of NumPyro and of this package: see :mod:`.families`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from ..distributions import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    PlackettLuce,
    RectifiedLinearPoisson,
    SoftplusPoisson,
    StickBreakingCategorical,
)
from ..potentials import (
    BinomialLogitPotential,
    CumulativeLogitPotential,
    GaussianPotential,
    LaplacePotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    Potential,
    ProbitPotential,
    RectifiedLinearPoissonPotential,
    SoftmaxPotential,
    StudentTPotential,
    VectorPotential,
)
from ..potentials.families.binary import ComplementaryLogLogPotential
from ..potentials.families.categorical import MultinomialLogitPotential, MultinomialProbitPotential
from ..potentials.families.half_line import HalfLinePotential
from ..potentials.families.location import AsymmetricLaplacePotential, LogisticPotential, SoftLaplacePotential
from ..potentials.families.log_normal import LogNormalPotential
from ..potentials.families.ordinal import (
    AdjacentCategoryPotential,
    ContinuationRatioPotential,
    CumulativeProbitPotential,
)
from ..potentials.families.plackett_luce import PlackettLucePotential, ranking_places
from ..potentials.families.poisson import PoissonSoftplusPotential
from ..potentials.families.positive import GammaExpPotential, WeibullExpPotential
from ..potentials.families.stick_breaking import stick_breaking_labels
from .families import (
    COMPLEMENTARY_LOG_LOG,
    EXP,
    IDENTITY,
    LOG_LOG,
    LOG_SOFTMAX,
    LOGISTIC,
    PROBIT,
    RECTIFIED_LINEAR,
    SOFTMAX,
    SOFTPLUS,
    Build,
    Built,
    Family,
    Link,
    Observations,
    register_family,
)
from .half_lines import HalfLine


def _by_location(
    distribution: type,
    label: str,
    parameters: tuple[str, ...],
    potential: Callable[..., Any],
    *,
    is_sparse_prior: bool = True,
) -> Family:
    """Values about their location."""
    return register_family(
        distribution,
        label=label,
        predictor="loc",
        parameters=parameters,
        links={IDENTITY: lambda y: potential(y.value, **y.parameters)},
        is_sparse_prior=is_sparse_prior,
    )


def _cauchy(value: Array, scale: Array) -> StudentTPotential:
    return StudentTPotential(value, scale, jnp.ones_like(scale))


NORMAL = _by_location(dist.Normal, "normal", ("scale",), GaussianPotential)
_by_location(dist.LogNormal, "log normal", ("scale",), LogNormalPotential, is_sparse_prior=False)
_by_location(dist.StudentT, "student t", ("scale", "df"), StudentTPotential)
_by_location(dist.Laplace, "laplace", ("scale",), LaplacePotential)
_by_location(dist.Cauchy, "cauchy", ("scale",), _cauchy, is_sparse_prior=False)
_by_location(dist.Logistic, "logistic", ("scale",), LogisticPotential, is_sparse_prior=False)
_by_location(dist.SoftLaplace, "soft laplace", ("scale",), SoftLaplacePotential, is_sparse_prior=False)
_by_location(
    dist.AsymmetricLaplace,
    "asymmetric laplace",
    ("scale", "asymmetry"),
    AsymmetricLaplacePotential,
    is_sparse_prior=False,
)
register_family(
    HalfLine,
    label="half line",
    predictor="loc",
    parameters=("lower", "center", "precision", "rate", "log_scale"),
    # The potential is that of the distance from the location.
    links={IDENTITY: lambda y: Built(HalfLinePotential(**y.parameters), sign=-1.0, shift=y.value)},
)
register_family(
    dist.Poisson,
    label="poisson",
    predictor="rate",
    links={
        EXP: lambda y: PoissonExpPotential(y.value, y.scale),
        SOFTPLUS: lambda y: PoissonSoftplusPotential(y.value, y.scale),
        RECTIFIED_LINEAR: lambda y: RectifiedLinearPoissonPotential(y.value, y.scale, jnp.zeros_like(y.scale)),
    },
)
register_family(
    RectifiedLinearPoisson,
    label="rectified linear poisson",
    predictor="predictor",
    parameters=("exposure", "offset"),
    links={IDENTITY: lambda y: RectifiedLinearPoissonPotential(y.value, **y.parameters)},
)
register_family(
    SoftplusPoisson,
    label="softplus poisson",
    predictor="predictor",
    parameters=("exposure", "offset"),
    links={
        IDENTITY: lambda y: Built(
            PoissonSoftplusPotential(y.value, y.parameters["exposure"]), shift=y.parameters["offset"]
        )
    },
)
register_family(
    dist.Gamma,
    label="gamma",
    predictor="rate",
    parameters=("concentration",),
    links={EXP: lambda y: GammaExpPotential(y.value, y.parameters["concentration"], y.scale)},
)
register_family(
    dist.Exponential,
    label="exponential",
    predictor="rate",
    links={EXP: lambda y: GammaExpPotential(y.value, jnp.ones_like(y.value), y.scale)},
)
register_family(
    dist.Weibull,
    label="weibull",
    predictor="scale",
    parameters=("concentration",),
    links={EXP: lambda y: WeibullExpPotential(y.value, y.parameters["concentration"], y.scale)},
)


def _negative_binomial(y: Observations) -> Built:
    """Counts whose gamma variable has the rate ``scale * exp(predictor)``, which is inverse to their mean."""
    concentration = y.parameters["concentration"]
    return Built(NegativeBinomialExpPotential(y.value, concentration, concentration / y.scale), sign=-1.0)


register_family(
    dist.GammaPoisson,
    dist.NegativeBinomial2,
    dist.NegativeBinomialLogits,
    dist.NegativeBinomialProbs,
    label="negative binomial",
    predictor="rate",
    parameters=("concentration",),
    links={EXP: _negative_binomial},
)
register_family(
    dist.BernoulliLogits,
    label="bernoulli logits",
    predictor="logits",
    links={IDENTITY: lambda y: LogitPotential(y.value)},
)
register_family(
    dist.BernoulliProbs,
    label="bernoulli",
    predictor="probs",
    links={
        LOGISTIC: lambda y: LogitPotential(y.value),
        PROBIT: lambda y: ProbitPotential(y.value),
        COMPLEMENTARY_LOG_LOG: lambda y: ComplementaryLogLogPotential(y.value),
        LOG_LOG: lambda y: ComplementaryLogLogPotential(1.0 - y.value),
    },
)


def _binomial(y: Observations) -> Potential:
    return BinomialLogitPotential(y.value, y.parameters["total_count"])


register_family(
    dist.BinomialLogits,
    label="binomial logits",
    predictor="logits",
    parameters=("total_count",),
    links={IDENTITY: _binomial},
)
register_family(
    dist.BinomialProbs, label="binomial", predictor="probs", parameters=("total_count",), links={LOGISTIC: _binomial}
)


def _joint(
    distribution: type, label: str, predictor: str, build: Build, *links: Link, parameters: tuple[str, ...] = ()
) -> None:
    """Categories with a predictor each."""
    register_family(
        distribution,
        label=label,
        predictor=predictor,
        parameters=parameters,
        vectors=(predictor,),
        links=dict.fromkeys(links, build),
        is_joint=True,
    )


def _softmax(y: Observations) -> VectorPotential:
    return SoftmaxPotential(y.label, y.dimension)


def _multinomial(y: Observations) -> VectorPotential:
    return MultinomialLogitPotential(y.value)


def _multinomial_probit(y: Observations) -> VectorPotential:
    return MultinomialProbitPotential(y.label, y.dimension)


def _ranking(y: Observations) -> VectorPotential:
    return PlackettLucePotential(ranking_places(y.value, y.parameters["num_ranked"], y.dimension))


_joint(dist.CategoricalLogits, "categorical logits", "logits", _softmax, IDENTITY, LOG_SOFTMAX)
_joint(dist.CategoricalProbs, "categorical", "probs", _softmax, SOFTMAX)
_joint(dist.MultinomialLogits, "multinomial logits", "logits", _multinomial, IDENTITY, LOG_SOFTMAX)
_joint(dist.MultinomialProbs, "multinomial", "probs", _multinomial, SOFTMAX)
_joint(MultinomialProbit, "multinomial probit", "predictor", _multinomial_probit, IDENTITY)
_joint(PlackettLuce, "plackett luce", "utilities", _ranking, IDENTITY, parameters=("num_ranked",))


def _stick_breaking(y: Observations) -> Built:
    labels, observed = stick_breaking_labels(y.value, y.dimension)
    # A stick that was never looked at is no trial, and so does not count in the prediction of a held-out value.
    labels, observed = jnp.reshape(labels, -1), jnp.reshape(observed, -1)
    return Built(BinomialLogitPotential(labels, observed.astype(int)), observed=observed)


register_family(
    StickBreakingCategorical,
    label="stick breaking",
    predictor="logits",
    vectors=("logits",),
    links={IDENTITY: _stick_breaking},
)


def _ordered(distribution: type, label: str, parameters: tuple[str, ...], potential: Callable[..., Any]) -> None:
    """Categories on a scale with one predictor, and vectors of thresholds and the like."""
    links: dict[Link, Build] = {IDENTITY: lambda y: potential(y.label, *y.parameters.values())}
    register_family(
        distribution, label=label, predictor="predictor", parameters=parameters, vectors=parameters, links=links
    )


_ordered(dist.OrderedLogistic, "ordered logistic", ("cutpoints",), CumulativeLogitPotential)
_ordered(OrderedProbit, "ordered probit", ("cutpoints",), CumulativeProbitPotential)
_ordered(ContinuationRatio, "continuation ratio", ("thresholds",), ContinuationRatioPotential)
_ordered(AdjacentCategory, "adjacent category", ("thresholds", "scores"), AdjacentCategoryPotential)
