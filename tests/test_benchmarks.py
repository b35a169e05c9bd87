"""The harness of the benchmarks: no row and no draw is lost, and every script can be imported."""

import importlib
import json
import math
from pathlib import Path

import pytest

import benchmarks
from benchmarks.harness import Row, Study, at_least, at_most, blocks, mean_and_error, pages, table
from benchmarks.harness.results_table import ResultsTable
from benchmarks.matrices import pairs

FOLDER = Path(benchmarks.__file__).parent
SCRIPTS = sorted(path.relative_to(FOLDER.parent).with_suffix("") for path in FOLDER.rglob("*.py"))


def row(peer="quad", value=2.0, **options):
    fields = {"item": "moments", "dtype": "float64", "seconds": 1.0, "peer_seconds": 2.0, "figure": "speed-up"}
    return Row(peer=peer, value=value, **(fields | options))


def written(folder, *rows):
    table = ResultsTable()
    for one in rows:
        table.add(one)
    table.write(folder)
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())["rows"]


def test_one_item_against_several_peers_makes_several_rows(tmp_path):
    rows = written(tmp_path, row(), row("the same, y = 10", figure="time ratio"), row("NUTS", 3.0))
    assert [(r["peer"], r["value"]) for r in rows] == [("quad", 2.0), ("the same, y = 10", 2.0), ("NUTS", 3.0)]
    # a later run replaces what it measured anew, and nothing else
    rows = written(tmp_path, row("NUTS", 5.0))
    assert [r["value"] for r in rows] == [2.0, 2.0, 5.0]


def test_a_row_that_would_replace_another_is_refused():
    table = ResultsTable()
    table.add(row())
    with pytest.raises(ValueError, match="different names"):
        table.add(row(value=4.0))


def test_verdicts():
    assert row(target=at_least(3.0)).verdict == "missed" and row(target=at_most(3.0)).verdict == "met"
    assert row(target=at_least(3.0), is_lower_limit=True).verdict == "not decided"
    assert row().verdict == ""


@pytest.mark.parametrize("script", [".".join(path.parts) for path in SCRIPTS if path.name != "__init__"])
def test_every_script_can_be_imported(script):
    try:
        importlib.import_module(script)
    except ModuleNotFoundError as error:  # a peer that is not installed
        assert not str(error.name).startswith(("benchmarks", "numpyro_ext", "tests", "models"))
        pytest.skip(str(error))


def test_a_study_keeps_its_draws_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "results_folder", lambda: tmp_path)
    runs = []

    def experiment(draw):
        runs.append(draw)
        return {"square": draw**2}

    def study():
        return Study("A study.", {"squares": experiment, "once": experiment}, draws={"squares": 3, "once": 1})

    work = tmp_path / "work"
    first, second = {"square": 0}, {"square": 1}
    assert study().run([str(work), "--draws", "2", "--only", "squares"]) == {"squares": [first, second], "once": []}
    one = study()
    found = one.run([str(work)])
    assert runs == [0, 1, 0, 2] and found["squares"][2] == {"square": 4} and found["once"] == [first]
    assert study().run([str(work), "--write"]) == found and len(runs) == 4
    assert study().run(["--minutes", "-1"]) == {"squares": [], "once": []}  # in a folder of its own
    (work / "remarks.md").write_text("As expected.")
    one.write("squares", table("draw | square", ((draw, row["square"]) for draw, row in enumerate(found["squares"]))))
    (page,) = tmp_path.glob("*-squares.md")
    assert "| 2 | 4 |\n\nAs expected." in page.read_text() and "Measured by `python -m benchmarks" in page.read_text()


def test_cells_say_what_is_missing():
    row = ("name", 1234, 0.5, True, None, math.nan)
    assert table("a | b | c | d | e | f", [row])[-1] == "| name | 1234 | 0.5 | yes |  |  |"
    assert mean_and_error([1.0, 3.0], "+") == "+2.0 ± 1.0" and mean_and_error([1.0], digits=2) == "1.00"


def test_the_scoreboard_is_completed(tmp_path, monkeypatch):
    path = tmp_path / "scoreboard.json"
    path.write_text(json.dumps({"cells": {"a": {"value": 1}, "b": {}}}))
    monkeypatch.setattr(pages, "keep_compiled_programs", lambda folder: None)
    measured = []
    pages.complete_scoreboard(
        "cells", ["a", "b", "c"], lambda name: measured.append(name) or {"value": 2}, ["value"], path
    )
    found = json.loads(path.read_text())
    assert measured == ["b", "c"] and "cells_environment" in found
    assert found["cells"] == {"a": {"value": 1}, "b": {"value": 2}, "c": {"value": 2}}


def test_blocks_of_a_page_stand_apart():
    lines = blocks("# Title", "Words.", [], table("a | b", [(1, 2)]), (f"- {note}" for note in "xy"))
    assert lines == ["# Title", "", "Words.", "", "| a | b |", "|---|---|", "| 1 | 2 |", "", "- x", "- y"]


def test_figures_follow_from_the_times():
    results = ResultsTable()
    for figure in ("time ratio", "speed-up", "CPU-seconds"):
        results.record("fit", (2.0, 8.0), peer="NUTS", figure=figure)
    results.record("memory", (2.0, None), peer="", figure="GiB", value=3.0)
    assert [found.value for found in results._rows] == [0.25, 4.0, 2.0, 3.0]
    assert results._rows[0].seconds == 2.0 and results._rows[0].peer_seconds == 8.0 and results._rows[3].seconds == 2.0


@pytest.mark.parametrize(
    ("rank", "users", "items", "of_pairs", "of_users"),
    [(20, 1.6e9, 101e6, 2.2e12, 4.0e10), (50, 4.0e9, 551e6, 1.16e13, 4.9e11)],
)
def test_the_plan_counts_what_its_source_counts(rank, users, items, of_pairs, of_users):
    """Bytes and operations of 10^9 pairs, of two ranks, to the digits that are printed."""
    plan = pairs.PLAN._replace(rank=rank)
    found = plan.user_bytes, plan.item_sum_bytes, plan.pair_operations, plan.solve_operations
    for one, expected in zip(found, (users, items, of_pairs, of_users), strict=True):
        assert one == pytest.approx(expected, rel=0.03)


def test_costs_of_a_pair_and_of_a_vector_are_told_apart():
    names = "1e6, few users", "1e6"
    seconds = [1e-6 * n + 5e-6 * (users + items) for n, users, items in (pairs._SIZES[name] for name in names)]
    assert pairs.linear_costs(*seconds) == pytest.approx((1e-6, 5e-6))


def test_pairs_are_different_and_sorted():
    users, items = pairs.make_pairs(2_000, 300, 50)
    key = users * 50 + items
    assert key.size == 2_000 and (key[1:] > key[:-1]).all() and users.max() < 300
