"""Levels with normal noise, of which sequential Monte Carlo is asked what is known exactly."""

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from scipy.stats import multivariate_normal

Y = np.random.default_rng(1).normal(1.0, 1.0, 40)


def level_model(y, mask=True):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(level, 1), obs=y)


def level_evidence(y):
    return multivariate_normal.logpdf(y, np.zeros(len(y)), np.eye(len(y)) + 1.0)


def with_param(y):
    scale = numpyro.param("scale", 1.0)
    level_model(y / scale)
