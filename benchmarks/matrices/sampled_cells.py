"""Binary matrices by drawn cells and by sweeps: ``python -m benchmarks.matrices.sampled_cells`` writes the table.

One item of each of 2000 transactions of BMS-WebView-2 is held out, with the preparation of Houlsby (2014), chapter 5.
Some minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import numpyro

from numpyro_ext.infer import BilinearVG, ranking_quality
from numpyro_ext.models import binary_factorization

from ..harness import blocks, cpu_seconds, table, verdict, write_report
from .closed_updates import transactions

_RANK, _NUM_COLUMNS = 20, 1000
_JOBS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ('`zeros="by_row"`', "sweeps", {"zeros": "by_row", "num_steps": 20}),
    ('`zeros="exact"`', "sweeps", {"zeros": "exact", "num_steps": 20}),
    ('`"balanced"`, 10⁴ a minibatch', "minibatches", {"batch_size": 10_000, "num_steps": 100}),
    ('`"balanced"`, 10⁴ a minibatch', "minibatches", {"batch_size": 10_000, "num_steps": 360}),
    ('`"biased"`, 10⁴ a minibatch', "minibatches", {"batch_size": 10_000, "num_steps": 360, "sampler": "biased"}),
    ('`"balanced"`, `"auto"`', "minibatches", {"num_steps": 100}),
)
_PROTOTYPE = {"by_row": ".312", "exact": ".332 (21 s)", None: ".301 (17 s, 3.6·10⁶ draws)", "biased": ".16"}
"""Recall of the same fits by a prototype in NumPy, by treatment of zeros or sampler."""


def rows(data: tuple[np.ndarray, ...], took: list[tuple[int, float]]) -> Iterator[Iterable[Any]]:
    """Rows of the fits; numbers of drawn cells of the balanced ones, and CPU-seconds, are appended to ``took``."""
    ones, columns, test_rows, test_cols = data
    sizes = {"num_rows": int(ones.max()) + 1, "num_cols": _NUM_COLUMNS, "rank": _RANK}
    for name, unit, options in _JOBS:
        is_sampled = "zeros" not in options

        def run(num_steps: int, options: dict[str, Any] = options, is_sampled: bool = is_sampled) -> BilinearVG:
            given = {"zeros": "sampled"} if is_sampled else {"num_restarts": 0}
            engine = BilinearVG(
                binary_factorization, bound="jaakkola", unlisted_cells="zero", progress_bar=False, num_samples=1,
                **{**given, **options, "num_steps": num_steps},
            )  # fmt: skip
            engine.run(jax.random.key(0), ones, columns, np.ones(ones.size, int), **sizes)
            return engine

        run(1)
        engine, seconds = cpu_seconds(run, options["num_steps"])
        found = engine.diagnostics
        drawn = found.messages[-1].split()[0] if is_sampled else ""
        if options.get("batch_size") and "sampler" not in options:
            took.append((int(drawn), seconds))
        hits = ranking_quality(engine, test_rows, test_cols).hits[10]
        change, prototype = f"{found.max_change:.1e}", _PROTOTYPE[options.get("zeros", options.get("sampler"))]
        bound = f"{float(engine.log_evidence) / 1e3:.1f}"
        yield name, f"{found.num_steps} {unit}", drawn, f"{hits:.3f}", bound, change, f"{seconds:.1f}", prototype


def main() -> None:
    """Write the table."""
    numpyro.enable_x64()
    warnings.simplefilter("ignore", UserWarning)  # a given number of steps is not convergence
    took: list[tuple[int, float]] = []
    data = transactions("bms-webview-2")
    heads = "fit | steps | cells drawn | recall@10 | bound / 1000 | its change | CPU s | NumPy prototype"
    lines = table(heads, rows(data, took))
    (few, short), (many, long) = took
    micro = 1e6 * (long - short) / (many - few)
    lines = blocks(
        "# Binary matrices by drawn cells",
        f"BMS-WebView-2, {int(data[0].max()) + 1} × {_NUM_COLUMNS}, {data[0].size} ones, rank {_RANK} with biases and "
        "an intercept, `float64`. CPU seconds of a run whose programs are compiled: reading, steps, estimates of the "
        "bound, and for drawn cells the bound with a tangent for each zero at the end; that of `by_row` has a tangent "
        "for each row. Its change is that of the last sweep, or of the last half of the minibatches, relative to "
        "itself.",
        lines,
        f"A drawn cell of `balanced`: {micro:.1f} µs. Target: at most 1.5 µs, {verdict(micro <= 1.5)}.",
    )
    write_report("sampled-cells", lines)


if __name__ == "__main__":
    main()
