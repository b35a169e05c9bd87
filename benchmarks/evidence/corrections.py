"""Log evidence of EP with and without its cumulants: ``python -m benchmarks.evidence.corrections`` writes the table.

Small problems are judged by quadrature, larger ones by importance weights. A minute or two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import logsumexp

from numpyro_ext.infer import EP
from numpyro_ext.infer.front.answers.resampling import LARGEST_SHAPE, pareto_smoothed
from tests.infer.small_problems import PROBLEMS, by_quadrature

from ..harness import blocks, cpu_seconds, table, write_report

_NUM_BATCHES, _DRAWS_PER_BATCH = 50, 20_000


def _larger() -> dict[str, tuple[Any, np.ndarray]]:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((60, 8))
    t = np.linspace(0.0, 5.0, 40)
    kernel = 4.0 * np.exp(-0.5 * (t[:, None] - t) ** 2) + 1e-6 * np.eye(40)
    group = np.arange(60) % 20

    def regression(y: Any) -> None:
        weights = numpyro.sample("weights", dist.Normal(0, 2).expand([8]))
        numpyro.sample("y", dist.Bernoulli(logits=jnp.asarray(x) @ weights), obs=y)

    def process(y: Any) -> None:
        f = numpyro.sample("f", dist.MultivariateNormal(0.0, jnp.asarray(kernel)))
        numpyro.sample("y", dist.Bernoulli(jax.scipy.stats.norm.cdf(f)), obs=y)

    def intercepts(y: Any) -> None:
        effect = numpyro.sample("effect", dist.Normal(-0.5, 1.5).expand([20]))
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)

    labels = (generator.random(60) < 1 / (1 + np.exp(-x @ generator.standard_normal(8)))).astype(int)
    classes = (np.sin(2.0 * t) + 0.5 * generator.standard_normal(40) > 0).astype(int)
    counts = generator.poisson(np.exp(-0.5 + 1.5 * generator.standard_normal(20))[group])
    return {
        "logistic regression, 60 x 8": (regression, labels),
        "Gaussian process, 40 classes": (process, classes),
        "Poisson intercepts, 20 groups of 3": (intercepts, counts),
    }


def _by_weights(engine: EP) -> tuple[float, float]:
    """Log evidence by importance weights of draws from the Gaussian of EP, and its standard error."""
    keys = jax.random.split(jax.random.key(1), _NUM_BATCHES)
    parts = [engine._run._propose(key, _DRAWS_PER_BATCH, is_weighted=True).log_weight for key in keys]  # type: ignore
    log_weights = np.concatenate(parts)
    _, shape = pareto_smoothed(log_weights)
    if shape > LARGEST_SHAPE:
        raise RuntimeError(f"The weights cannot be averaged: k-hat is {shape:.2f}.")
    total = float(logsumexp(log_weights) - np.log(log_weights.size))
    return total, float(np.std(np.exp(log_weights - total)) / np.sqrt(log_weights.size))


def _row(name: str, model: Any, y: np.ndarray) -> tuple[str, float, float, float, float, float]:
    """Name, exact value and its error, error of EP, of the corrected value, and CPU-seconds of the correction."""
    engine = EP(model, progress_bar=False)
    engine.run(jax.random.key(0), y)
    found, seconds = cpu_seconds(engine.corrected)
    exact, error = (float(by_quadrature(engine)[0]), 0.0) if name in PROBLEMS else _by_weights(engine)
    return name, exact, error, engine.log_evidence - exact, found.log_evidence - exact, seconds


def main() -> None:
    """Fit and write."""
    numpyro.enable_x64()
    rows = [_row(name, *problem) for name, problem in (PROBLEMS | _larger()).items()]
    closer = sum(abs(after) < abs(before) for *_, before, after, _ in rows)
    formats = ("", ".4f", ".4f", "+.1e", "+.1e", ".2f")
    lines = blocks(
        "# The log evidence of EP, corrected by cumulants",
        f"`EP(model).corrected()`, second order. Closer to the exact value on {closer} of {len(rows)} problems. "
        f"Exact values by quadrature, or by {_NUM_BATCHES * _DRAWS_PER_BATCH:,} importance weights with the standard "
        "error that is given.",
        table(
            "problem | exact | its error | error of EP | error of the corrected value | CPU-seconds of the correction",
            ((format(value, how) for value, how in zip(row, formats, strict=True)) for row in rows),
        ),
    )
    write_report("corrections", lines)


if __name__ == "__main__":
    main()
