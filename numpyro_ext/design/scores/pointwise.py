"""Scores of possible observations one by one: functions of a posterior and of arguments of its model.

All have one signature, ``(source, *args, rng_key=None, **kwargs) -> {site: array}``. The source is an engine after its
run, or :func:`~numpyro_ext.design.draws_of` whatever else. Without arguments the candidates are the masked observations
of the fit, with arguments of the model all its observations there. Arrays have the shape of the observations, larger is
better, and what cannot be observed has minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, cast, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from ...infer.front.options import check_one_of
from ...potentials.information import EntropyMethod
from ..outcomes import committee
from ..outcomes.classical import At
from ..outcomes.committee import BiasCorrection
from ..outcomes.focus import Focus
from ..outcomes.outlooks import Outlook
from ..outcomes.slopes import Hyper
from ..outcomes.sources import outlooks
from ..outcomes.vectors import Points

Acquisition = Callable[..., dict[str, np.ndarray]]
Units = Literal["nats", "bits"]
Method = Literal["quadrature", "closed-form", "sigma-points", "mode"]


def expected_information_gain(
    source: object,
    *args: object,
    rng_key: Array | None = None,
    focus: Focus | None = None,
    method: Method = "quadrature",
    bias_correction: BiasCorrection = "none",
    units: Units = "nats",
    hyper: Hyper = "mixture",
    **kwargs: object,
) -> dict[str, np.ndarray]:
    r"""Expected information in each observation about the latent sites: BALD (Houlsby 2014, eq. 2.10).

    The entropy of the predictive distribution less the expected entropy of the outcome if the latent sites were known;
    equal to the expected fall of the posterior's entropy. It is zero where only noise is left, however uncertain the
    outcome.

    Engines on Gaussian fields (EP, VariationalGaussian, LaplaceApproximation, INLA) give it by quadrature over their
    predictors, and over hyperparameters where they integrate; anything else by its draws, which are the same for all
    candidates (then it is too small by about ``num_outcomes / (2 num_draws)`` at most). Draws of a process are of its
    values at the inputs of the fit, those of groups of the groups that it has seen: given these and the
    hyperparameters, values elsewhere are Gaussian, and known in closed form at each draw; with Gaussian noise given the
    data. The draws need the arguments of the fit for it, which NUTS and engines know.

    Cost: one evaluation per candidate, outcome and node; of draws one per candidate, outcome and draw, and of a field
    elsewhere a factorisation of old and new elements per draw.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from jax.scipy.stats import norm
    >>> from numpyro_ext.design import expected_information_gain
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None, seen=True):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
    ...     with numpyro.handlers.mask(mask=seen):
    ...         numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(slope * x)), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([0.5, 1.0, 3.0]), jnp.array([1, 0, 0]), jnp.array([True, False, False]))
    >>> print(expected_information_gain(engine)["y"].round(3))
    [ -inf 0.172 0.427]
    >>> print(expected_information_gain(engine, jnp.array([0.0, 1.0]))["y"].round(3))
    [0.    0.172]

    :param source: an engine after its run, or draws.
    :param args: arguments of the model at which to look.
    :param rng_key: for draws that are made.
    :param focus: names of the sites that the measurement is made for, or a dictionary from them to indices of elements;
        the rest is a nuisance. Of engines on Gaussian fields: parts of the field, or all hyperparameters that are
        integrated over; some of them by ``hyper="mgp"`` or ``"linearised"``. Of bilinear models (BilinearVG,
        BilinearEP): vectors of one side, such as that of a user; at draws of it the items are integrated out (Houlsby
        et al. 2014). Of draws (NUTS, guides, SMC) of models with a Gaussian field whose observations have Gaussian
        noise: all hyperparameters, alone or with parts of the field, which is conditioned exactly at each of them; the
        draws need the arguments of the fit. Elsewhere draws within draws would be biased, and are refused.
    :param str method: ``"closed-form"`` for the approximation of probit factors in the source; ``"sigma-points"`` takes
        the vectors in focus at two points for each of their components, in the place of draws; ``"mode"`` has the
        entropy of outcomes given these vectors at their mean alone, which is cruder.
    :param str bias_correction: of draws, for outcomes that can be counted; see
        :func:`~numpyro_ext.design.committee_information`.
    :param str units: ``"bits"`` divides by log 2.
    :param str hyper: what is known of hyperparameters. ``"mixture"``: the points over which the fit integrates, if it
        does. ``"mgp"`` and ``"linearised"`` (for Gaussian noise, and focus on hyperparameters or everything): their
        covariance at the optimum and derivatives of the predictor, by the marginal Gaussian process (Houlsby 2014, eq.
        3.13) or to first order; one fit. They rank alike, worse than a mixture does; the former has an offset, 0.14
        nats or more even where nothing can be learned.
    :param kwargs: keyword arguments of the model.
    :return: for each observed site an array in the shape of its observations.
    :raises ValueError: if nothing could be observed, a focus is none of the model's, or outcomes have no known entropy.
    """
    check_one_of(Units, units=units)
    check_one_of(BiasCorrection, bias_correction=bias_correction)
    check_one_of(Method, method=method)
    scale = math.log(2.0) if units == "bits" else 1.0
    check_one_of(Hyper, hyper=hyper)
    points: Points = "draws" if method in get_args(EntropyMethod) else cast(Points, method)
    found = outlooks(source, args, kwargs, rng_key, focus, hyper, points=points)
    rule: EntropyMethod = "closed-form" if method == "closed-form" else "quadrature"
    return {name: o.shaped(o.information(rule, bias_correction) / scale) for name, o in found.items()}


def predictive_entropy(
    source: object, *args: object, rng_key: Array | None = None, **kwargs: object
) -> dict[str, np.ndarray]:
    """Entropy of each observation, in nats: maximum entropy sampling, or the variance where outcomes are Gaussian.

    It does not tell ignorance from noise (MacKay 1992): an observation that nobody can predict has the largest.
    Arguments as for :func:`expected_information_gain`.
    """
    return _scores(lambda o: o.predictive_entropy(), source, args, kwargs, rng_key)


def least_confidence(
    source: object, *args: object, rng_key: Array | None = None, **kwargs: object
) -> dict[str, np.ndarray]:
    """One minus the probability of the likeliest outcome; arguments as for :func:`expected_information_gain`."""
    return _scores(lambda o: committee.least_confidence(o.log_mixture), source, args, kwargs, rng_key)


def margin(source: object, *args: object, rng_key: Array | None = None, **kwargs: object) -> dict[str, np.ndarray]:
    """Minus the distance of the two likeliest outcomes; arguments as for :func:`expected_information_gain`."""
    return _scores(lambda o: committee.margin(o.log_mixture), source, args, kwargs, rng_key)


def gini(source: object, *args: object, rng_key: Array | None = None, **kwargs: object) -> dict[str, np.ndarray]:
    """One minus the sum of squared probabilities; arguments as for :func:`expected_information_gain`."""
    return _scores(lambda o: committee.gini(o.log_mixture), source, args, kwargs, rng_key)


def vote_entropy(
    source: object, *args: object, rng_key: Array | None = None, num_votes: float = math.inf, **kwargs: object
) -> dict[str, np.ndarray]:
    """Disagreement of a committee whose members vote for what they hold for likeliest (Seung et al. 1992), in nats.

    :param source: an engine after its run, or draws.
    :param args: arguments of the model at which to look.
    :param rng_key: for the members.
    :param float num_votes: members, drawn from the posterior; infinitely many by default, which needs no draws of an
        engine on a Gaussian field.
    :param kwargs: keyword arguments of the model.
    :return: for each observed site an array in the shape of its observations.
    :raises ValueError: if outcomes are real numbers, or the number of votes is no whole one.
    """
    key = _key(rng_key)
    return _scores(lambda o: committee.entropy(jnp.log(o.votes(num_votes, key))), source, args, kwargs, rng_key)


def variation_ratio(
    source: object, *args: object, rng_key: Array | None = None, num_votes: float = math.inf, **kwargs: object
) -> dict[str, np.ndarray]:
    """Share of votes that are not for the outcome with most of them; arguments as for :func:`vote_entropy`."""
    key = _key(rng_key)
    return _scores(lambda o: 1.0 - jnp.max(o.votes(num_votes, key), axis=-1), source, args, kwargs, rng_key)


def committee_divergence(
    source: object, *args: object, rng_key: Array | None = None, num_members: int = 100, **kwargs: object
) -> dict[str, np.ndarray]:
    """Mean divergence of the members of a committee from their mixture (McCallum and Nigam 1998), in nats.

    With many members it is :func:`expected_information_gain`.

    :param source: an engine after its run, or draws.
    :param args: arguments of the model at which to look.
    :param rng_key: for the members.
    :param int num_members: drawn from the posterior.
    :param kwargs: keyword arguments of the model.
    :return: for each observed site an array in the shape of its observations.
    :raises ValueError: if outcomes are real numbers.
    """
    key = _key(rng_key)
    return _scores(
        lambda o: committee.committee_information(*o.members(num_members, key)), source, args, kwargs, rng_key
    )


def random_scores(
    source: object, *args: object, rng_key: Array | None = None, **kwargs: object
) -> dict[str, np.ndarray]:
    """Uniform random numbers, the control that every score has to beat; arguments as for the others.

    :raises ValueError: without a key.
    """
    if rng_key is None:
        raise ValueError("random_scores needs a key: random_scores(engine, rng_key=random.key(0)).")
    found = outlooks(source, args, kwargs, rng_key)
    keys = random.split(rng_key, len(found))
    return {name: o.shaped(random.uniform(key, o.shape)) for key, (name, o) in zip(keys, found.items(), strict=True)}


def _scores(
    function: Callable[[Outlook], Array],
    source: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    key: Array | None,
) -> dict[str, np.ndarray]:
    return {name: o.shaped(function(o)) for name, o in outlooks(source, args, kwargs, key).items()}


def _key(rng_key: Array | None) -> Array:
    return random.key(0) if rng_key is None else rng_key


def maximum_information(
    source: object,
    *args: object,
    focus: Focus | None = None,
    at: At = "mean",
    rng_key: Array | None = None,
    **kwargs: object,
) -> dict[str, np.ndarray]:
    r"""Fisher information in each observation, as the fall of entropy it would bring to Gaussian unknowns, in nats.

    .. math:: \tfrac12 \log \det(\Sigma^{-1} + I_i) - \tfrac12 \log \det \Sigma^{-1}

    with the posterior covariance :math:`\Sigma` of the unknowns and the Fisher information :math:`I_i` of the
    observation. Of one unknown it ranks as the information does (maximum information, Lord 1980), of several it is
    D-optimality (Segall 1996). It is :func:`~numpyro_ext.design.expected_information_gain` to first order in
    :math:`I_i`, and as large as that where noise is Gaussian.

    Cost: one evaluation per candidate and outcome; with ``at="draws"`` 86.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import maximum_information
    >>> from numpyro_ext.infer import EP
    >>> def model(difficulty, y=None, seen=True):
    ...     ability = numpyro.sample("ability", dist.Normal(0, 1))
    ...     with numpyro.handlers.mask(mask=seen):
    ...         numpyro.sample("y", dist.Bernoulli(logits=ability - difficulty), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([0.0, 0.5, 3.0]), jnp.array([1, 0, 0]), jnp.array([True, False, False]))
    >>> print(maximum_information(engine)["y"].round(3))
    [ -inf 0.094 0.026]

    :param source: an engine on a Gaussian field after its run (EP, LaplaceApproximation, VariationalGaussian, INLA), or
        an adaptive test.
    :param args: arguments of the model at which to look; without, the candidates are the masked observations.
    :param focus: parts of the field that matter, the rest being a nuisance, as for
        :func:`~numpyro_ext.design.expected_information_gain`; of a test the numbers of traits.
    :param str at: ``"mean"`` for the information at the posterior mean of the predictors (traits), ``"draws"`` for its
        posterior mean.
    :param rng_key: for predictions at new arguments.
    :param kwargs: keyword arguments of the model.
    :return: for each observed site an array in the shape of its observations, minus infinity where there is no
        candidate.
    :raises ValueError: if observations have several predictors, are known at draws alone, or are real numbers with a
        noise that is not Gaussian.
    """
    check_one_of(At, at=at)
    found = outlooks(source, args, kwargs, rng_key, focus)
    return {name: outlook.shaped(outlook.classical_gain(at)) for name, outlook in found.items()}
