"""Information lost by approximations: ``python -m benchmarks.queries.information_loss WORK`` writes the table.

As in Houlsby (2014, table 3.2): labels of a few of the Wisconsin cancers, and of each approximation of the information
in the others how much less its choice tells than the best, by NUTS. Needs ``NUMPYRO_EXT_DATA``. About five minutes of
one core.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.stats import norm
from numpyro.infer import MCMC, NUTS

from numpyro_ext.design import expected_information_gain
from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.potentials.information import expected_information

from ..harness import Study, blocks, mean_and_error, table
from .acquisitions import SETTINGS, classifier, hyper_values

_DATA = "cancer (Wisconsin)"
_NUM_LABELS, _NUM_POOL, _NUM_DRAWS, _NOISE = 30, 342, 4000, 1e-3
_THESIS = {
    "NUTS, closed form": "0.16 ± 0.05",
    "EP": "7.51 ± 2.51",
    "EP, closed form": "7.43 ± 2.40",
    "Laplace": "41.57 ± 4.02",
    "Laplace, closed form": "40.45 ± 3.67",
}


def _white(factor: Array, y: Array) -> None:
    """The classifier on labelled rows alone, in coordinates that suit a sampler."""
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([factor.shape[0]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(factor @ z)), obs=y)


def _kernel(x: np.ndarray, hyper: Mapping[str, Any]) -> np.ndarray:
    z = x / np.exp(hyper["log_length"])
    squares = np.maximum((z**2).sum(1)[:, None] + (z**2).sum(1) - 2.0 * z @ z.T, 0.0)
    return np.asarray(np.exp(2.0 * hyper["log_scale"]) * (np.exp(-0.5 * squares) + _NOISE * np.eye(len(x))))


@partial(jax.jit, static_argnames="method")
def _of_draws(mean: Array, variance: Array, method: Any) -> Array:
    """Information of each candidate under draws of the labelled predictors, each of which leaves a Gaussian there."""
    weights = jnp.full(len(mean), 1.0 / len(mean))
    factors = ProbitPotential(jnp.zeros(mean.shape))
    return expected_information(factors, mean, jnp.broadcast_to(variance, mean.shape), weights, method=method)


@functools.cache
def _sampler() -> MCMC:
    """One program for all trials."""
    return MCMC(NUTS(_white), num_warmup=1000, num_samples=_NUM_DRAWS, jit_model_args=True, progress_bar=False)


def trial(number: int) -> dict[str, float]:
    """Per cent of the information that the choice of each approximation loses."""
    started, hyper, sampler = time.process_time(), hyper_values(_DATA), _sampler()
    data = SETTINGS[_DATA].data(None)
    pool = np.random.default_rng(number).permutation(len(data["y"]))[:_NUM_POOL]
    x, y, seen = data["x"][pool], data["y"][pool], np.arange(_NUM_POOL) < _NUM_LABELS
    kernel = _kernel(x, hyper)
    own, cross = kernel[:_NUM_LABELS, :_NUM_LABELS], kernel[:_NUM_LABELS, _NUM_LABELS:]
    factor = np.linalg.cholesky(own)
    sampler.run(random.key(number), jnp.asarray(factor), jnp.asarray(y[:_NUM_LABELS]))
    white = np.linalg.solve(factor, cross)
    means = jnp.asarray(np.asarray(sampler.get_samples()["z"]) @ white)
    variance = jnp.asarray(np.diag(kernel)[_NUM_LABELS:] - (white**2).sum(0))
    judge = np.asarray(_of_draws(means, variance, "quadrature"))
    halves = [np.asarray(_of_draws(part, variance, "quadrature")) for part in (means[::2], means[1::2])]
    choices = {"NUTS, closed form": np.argmax(_of_draws(means, variance, "closed-form"))}
    for name, kind in (("EP", EP), ("Laplace", LaplaceApproximation)):
        engine = kind(classifier, hyper_values=hyper, progress_bar=False)
        engine.run(random.key(0), x, y, seen, noise=_NOISE)
        for suffix, method in (("", "quadrature"), (", closed form", "closed-form")):
            choices[name + suffix] = np.argmax(expected_information_gain(engine, method=method)["y"][_NUM_LABELS:])
    losses = {name: float(100.0 * (1.0 - judge[choice] / judge.max())) for name, choice in choices.items()}
    first, second = halves
    losses["NUTS, half of the draws"] = float(100.0 * (1.0 - second[np.argmax(first)] / second.max()))
    return {**losses, "cpu": time.process_time() - started}


def main() -> None:
    """Compare, and write the table."""
    study = Study(__doc__, {"trial": trial}, draws=20)
    trials = study.run()["trial"]
    lines = blocks(
        "# Information lost by approximations",
        f"Wisconsin cancers, {_NUM_LABELS} labels at random, {_NUM_POOL - _NUM_LABELS} candidates, {len(trials)} "
        "trials: how much less the candidate tells that is best by an approximation than the best one, in per cent of "
        f"this, both by {_NUM_DRAWS} draws of NUTS (mean ± standard error). Half of the draws against the other half: "
        "what the judge himself is not sure of. The last column is table 3.2 of Houlsby (2014).",
        table(
            "choice by | information lost | thesis",
            (
                (name, mean_and_error((each[name] for each in trials), digits=2), _THESIS.get(name))
                for name in ("NUTS, half of the draws", *_THESIS)
            ),
        ),
        f"All of it took {sum(each['cpu'] for each in trials):.0f} CPU-seconds.",
    )
    study.write("information_loss", lines)


if __name__ == "__main__":
    main()
