"""Scores of observations by their Fisher information, as classical adaptive tests use it."""

from __future__ import annotations

import numpy as np
from jax import Array

from ...infer.front.options import check_one_of
from ..outcomes.classical import At
from ..outcomes.focus import Focus
from ..outcomes.sources import outlooks


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
