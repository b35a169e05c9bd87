"""The table of the demo, its pictures, and engines run as it runs them."""

from functools import partial

import numpy as np
import pytest

from numpyro_ext.datasets import load_coal_mining, load_coal_mining_counts
from numpyro_ext.demo import comparison
from numpyro_ext.demo.comparison import format_table
from numpyro_ext.demo.plots import Result, plot_engines, plot_intensities
from numpyro_ext.infer import EP, SMC


def test_columns_of_the_table():
    """Numbers of all engines end at the same places, an evidence with its error among them."""
    results = [
        Result("rectified", "EP", 10.0, 0.25, {}, "-108.01", -99.5, 0.04, 0.03),
        Result("rectified", "SMC", 7.0, 1.5, {}, "-107.95 ± 0.20", -99.25, 0.1, 0.05),
        Result("rectified", "SVI", remark="not finite"),
        Result("exponential", "NUTS", 8.0, 7.0, {}, "", -101.0),
    ]
    head, ep, smc, svi, nuts = format_table(results).splitlines()[-5:]
    for title, column in (("first", 2), ("next", 3), ("evidence", 4), ("mean (sd)", 6), ("sd (%)", 7)):
        end = head.index(title) + len(title)
        for row, cells in ((ep, ep.split()), (smc, smc.replace(" ± 0.20", "").split())):
            assert row[:end].split()[-1] == cells[column] and row[end : end + 1].strip() == ""
    assert nuts.rstrip().endswith("-101.00") and nuts.index("-101.00") + 7 == head.index("PSIS-LOO") + 8
    assert "-107.95 ± 0.20" in smc and svi.endswith("not applicable (below)")


@pytest.mark.thorough
def test_engines_of_the_demo():
    """SMC tells the error of its evidence, which contains EP's; SVI stops at its first round without a finite value."""
    data = load_coal_mining_counts(num_bins=20)
    few = partial(comparison._engine, partial(SMC, num_particles=400, waste_free=True))
    smc = comparison._fit("SMC", few, "rectified", data, 60)
    value, error = map(float, smc.log_evidence.split(" ± "))
    ep = comparison._fit("EP", partial(comparison._engine, EP), "rectified", data, 60)
    assert 0.0 < error < 1.0
    assert abs(value - float(ep.log_evidence)) < 4.0 * error
    assert smc.draws["f"].shape == (60, 20)
    assert smc.next_seconds < smc.first_seconds
    svi = comparison._fit("SVI", comparison._svi, "rectified", data, 60)
    assert svi.draws is None and "mass where the density is zero" in svi.remark


@pytest.mark.slow
def test_comparison(tmp_path):
    """NUTS in its own process, judged and drawn with the others."""
    data = load_coal_mining_counts(num_bins=20)
    results = comparison.compare(data, num_samples=700, engines=["EP"])
    assert [r.engine for r in results] == ["EP", "NUTS"] * 3
    assert all(0.0 < r.sd_gap < 0.5 for r in results if r.engine == "EP")
    assert all(np.isfinite(r.loo) and r.next_seconds < r.first_seconds for r in results)
    plot_engines(results, tmp_path / "engines.png")
    plot_intensities(results, data, load_coal_mining(), tmp_path / "coal_mining.png")
    assert (tmp_path / "engines.png").stat().st_size > 10_000
