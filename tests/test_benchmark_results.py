"""The table of benchmark results: no row is lost, and a target can be missed."""

import json

import pytest

from benchmarks.results_table import ResultsTable, Row, at_least, at_most


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
