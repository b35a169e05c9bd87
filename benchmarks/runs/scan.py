"""Models with scans, ``python -m benchmarks.runs.scan``: growth of time and memory, and gaps to exact answers."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from tests import scan_models
from tests.infer.test_state_spaces import TREND, trend_by_kalman, without_scan

from ..harness import table_head, write_report

ENGINES = (EP, LaplaceApproximation, VariationalGaussian)
SIZES = (10_000, 30_000, 100_000)
HYPER = {"phi": 0.3, "sigma": 0.8}
NUM_DENSE, ROUNDS = 500, 3


def binary(size: int) -> Any:
    return jnp.asarray((np.random.default_rng(3).random(size) < 0.6).astype(int))


def growth(kind: Any) -> tuple[list[float], list[float], list[float]]:
    """CPU-seconds of a first fit and of one that compiles nothing, and bytes of the compiled solve, at all sizes."""
    first, later, memory = [], [], []
    for size in SIZES:
        data, engine = binary(size), kind(scan_models.second_order, hyper_values=HYPER, progress_bar=False)
        seconds = []
        for _ in range(1 + ROUNDS):
            started = time.process_time()
            engine.run(jax.random.key(0), data)
            jax.block_until_ready(engine.posterior["x"].variance)
            seconds.append(time.process_time() - started)
        assert engine.diagnostics.converged
        run = engine._run
        arguments = run.reading.data, run.reading.initial_hyper(), None
        compiled = run.programs.solve.lower(*arguments, num_steps=20).compile()
        first.append(seconds[0])
        later.append(min(seconds[1:]))
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    return first, later, memory


def exponent(values: list[float]) -> float:
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


def main() -> None:
    """Print the table, and write it beside the other results."""
    jax.config.update("jax_enable_x64", True)
    lines = [
        "# Models with scans",
        "",
        f"An AR(2) below Bernoulli observations, its parameters given, at {SIZES[0]} to {SIZES[-1]} steps: CPU-seconds",
        f"at {SIZES[-1]} steps of a first fit and of one that compiles nothing (least of {ROUNDS}), and exponents of",
        "growth (asked: 1.1 at most) of the second and of the memory of the compiled solve. Largest gaps of evidence,",
        f"means and variances at {NUM_DENSE} steps (asked: 1e-8) to the dense engine, and on Gaussian data, a trend",
        "with a slope, to a Kalman smoother, both at `tol=1e-11`.",
        "",
        *table_head("engine | first | next | exponent of time | of memory | gap to dense | gap to Kalman smoother"),
    ]
    for kind in ENGINES:
        first, later, memory = growth(kind)
        lines.append(
            f"| {kind.__name__} | {first[-1]:.1f} | {later[-1]:.2f} | {exponent(later):.2f} | {exponent(memory):.2f} "
            f"| {gap_to_dense(kind):.0e} | {gap_to_smoother(kind):.0e} |"
        )
        print(lines[-1], later, memory, flush=True)
    write_report("scan", lines)


if __name__ == "__main__":
    main()
