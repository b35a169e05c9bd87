"""Files of events in the formats of their publishers, read from a copy that the user has."""

import gzip

import numpy as np
import pytest

from numpyro_ext.datasets import load_brightkite, load_lastfm_1k
from numpyro_ext.sequences import EventSequences


def test_check_ins_are_read_and_incomplete_rows_are_counted(tmp_path):
    rows = ["7\t2010-10-17T01:48:53Z\t39.7\t-104.9\tplaza", "7\t2010-10-16T06:02:04Z\t39.8\t-105.0\tlake",
            "7\t\t0.0\t0.0\t", "12\t2010-10-16T03:48:54Z\t39.9\t-105.1\tplaza"]  # fmt: skip
    with gzip.open(tmp_path / "checkins.txt.gz", "wt") as file:
        file.write("\n".join(rows) + "\n")
    log = load_brightkite(tmp_path / "checkins.txt.gz")
    assert (
        log.num_left_out == 1 and list(log.users) == ["7", "7", "12"] and list(log.items) == ["plaza", "lake", "plaza"]
    )
    assert log.time[1] == np.datetime64("2010-10-16T06:02:04")
    sequences = EventSequences.from_events(*log[:3])
    names = {user: sequences.item_labels[sequences[k]].tolist() for k, user in enumerate(sequences.user_labels)}
    assert names == {"12": ["plaza"], "7": ["lake", "plaza"]}


def test_artists_without_an_identifier_go_by_their_name(tmp_path):
    path = tmp_path / "plays.tsv"
    rows = ["user_1\t2009-05-04T23:08:57Z\tid-1\tDeep Dish\t\tSummer",
            "user_1\t2009-05-04T13:54:10Z\t\t坂本龍一\t\tComposition"]  # fmt: skip
    path.write_text("\n".join(rows), encoding="utf-8")
    assert list(load_lastfm_1k(path).items) == ["id-1", "坂本龍一"]
    path.write_text("user_1\t2009-05-04T23:08:57Z\tid-1\n")
    with pytest.raises(ValueError, match="row 1 has 3 columns"):
        load_lastfm_1k(path)
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        load_brightkite(path)
