"""Models with scans, ``python -m benchmarks.runs.scan``: growth of time and memory, and gaps to exact answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from tests import scan_models
from tests.infer.test_state_spaces import TREND, trend_by_kalman, without_scan

from ..harness import blocks, cpu_seconds, in_turns, table, write_report

ENGINES = (EP, LaplaceApproximation, VariationalGaussian)
SIZES = (10_000, 30_000, 100_000)
HYPER = {"phi": 0.3, "sigma": 0.8}
NUM_DENSE, ROUNDS = 500, 3


def binary(size: int) -> Any:
    return jnp.asarray((np.random.default_rng(3).random(size) < 0.6).astype(int))


def growth(kind: Any) -> np.ndarray:
    """CPU-seconds of a first fit and of one that compiles nothing, and bytes of the compiled solve, at all sizes."""
    found = []
    for size in SIZES:
        data, engine = binary(size), kind(scan_models.second_order, hyper_values=HYPER, progress_bar=False)

        def fit() -> Any:
            engine.run(jax.random.key(0), data)  # noqa: B023
            return engine.posterior["x"].variance  # noqa: B023

        _, first = cpu_seconds(fit)
        (later,) = in_turns(ROUNDS, fit)
        assert engine.diagnostics.converged
        run = engine._run
        arguments = run.reading.data, run.reading.initial_hyper(), None
        compiled = run.programs.solve.lower(*arguments, num_steps=20).compile()
        found.append((first, later, compiled.memory_analysis().temp_size_in_bytes))
    return np.array(found).T


def exponent(values: np.ndarray) -> float:
    return float(np.polyfit(np.log(SIZES), np.log(values), 1)[0])


def gap_to_dense(kind: Any) -> float:
    """Largest difference of evidence, means and variances to the same chain written as one site."""
    fits = []
    for model in (scan_models.second_order, without_scan):
        fits.append(kind(model, hyper_values=HYPER, tol=1e-11, progress_bar=False))
        fits[-1].run(jax.random.key(0), binary(NUM_DENSE))
    pairs = [[fit.posterior["x"].mean for fit in fits], [fit.posterior["x"].variance for fit in fits]]
    pairs.append([float(fit.log_evidence) for fit in fits])
    return max(float(np.max(np.abs(np.subtract(*pair)))) for pair in pairs)


def gap_to_smoother(kind: Any) -> float:
    """The same to a Kalman smoother, on Gaussian data."""
    rng = np.random.default_rng(4)
    slope = 0.1 + np.cumsum(0.05 * rng.normal(size=NUM_DENSE))
    y = np.cumsum(slope + 0.3 * rng.normal(size=NUM_DENSE)) + 0.6 * rng.normal(size=NUM_DENSE)
    engine = kind(scan_models.local_linear_trend, hyper_values=TREND, tol=1e-11, progress_bar=False)
    engine.run(jax.random.key(0), jnp.asarray(y))
    log_density, means, covariances = trend_by_kalman(y, **TREND)
    gaps = [abs(float(engine.log_evidence) - log_density)]
    for number, name in enumerate(("level", "slope")):
        gaps.append(float(np.max(np.abs(engine.posterior[name].mean - means[:, number]))))
        gaps.append(float(np.max(np.abs(engine.posterior[name].variance - covariances[:, number, number]))))
    return max(gaps)


def row(kind: Any) -> Iterable[Any]:
    first, later, memory = growth(kind)
    exponents = [f"{exponent(values):.2f}" for values in (later, memory)]
    gaps = [f"{gap(kind):.0e}" for gap in (gap_to_dense, gap_to_smoother)]
    return kind.__name__, f"{first[-1]:.1f}", f"{later[-1]:.2f}", *exponents, *gaps


def main() -> None:
    """Print the table, and write it beside the other results."""
    jax.config.update("jax_enable_x64", True)
    lines = blocks(
        "# Models with scans",
        f"An AR(2) below Bernoulli observations, its parameters given, at {SIZES[0]} to {SIZES[-1]} steps: CPU-seconds "
        f"at {SIZES[-1]} steps of a first fit and of one that compiles nothing (least of {ROUNDS}), and exponents of "
        "growth (asked: 1.1 at most) of the second and of the memory of the compiled solve. Largest gaps of evidence, "
        f"means and variances at {NUM_DENSE} steps (asked: 1e-8) to the dense engine, and on Gaussian data, a trend "
        "with a slope, to a Kalman smoother, both at `tol=1e-11`.",
        table(
            "engine | first | next | exponent of time | of memory | gap to dense | gap to Kalman smoother",
            map(row, ENGINES),
        ),
    )
    write_report("scan", lines)


if __name__ == "__main__":
    main()
