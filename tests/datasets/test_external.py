"""Finding downloaded data: what a user reads when it is not there."""

import pytest

from numpyro_ext.datasets import data_path


def test_finds_a_file_below_the_folder(tmp_path, monkeypatch):
    (tmp_path / "ratings").mkdir()
    (tmp_path / "ratings" / "u.csv").write_text("1\n")
    monkeypatch.setenv("NUMPYRO_EXT_DATA", str(tmp_path))
    assert data_path("ratings", "u.csv").read_text() == "1\n"
    assert data_path("ratings").is_dir()


@pytest.mark.parametrize("value", [None, ""])
def test_an_unset_variable_is_named(monkeypatch, value):
    monkeypatch.delenv("NUMPYRO_EXT_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("NUMPYRO_EXT_DATA", value)
    with pytest.raises(FileNotFoundError, match="'ratings/u.csv' is not part.*set the environment variable NUMPYRO"):
        data_path("ratings", "u.csv")


def test_a_missing_folder_and_a_missing_file_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMPYRO_EXT_DATA", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="NUMPYRO_EXT_DATA names .*absent.*, which is not a folder"):
        data_path("u.csv")
    monkeypatch.setenv("NUMPYRO_EXT_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="There is no 'u.csv' in .*, the folder that NUMPYRO_EXT_DATA names"):
        data_path("u.csv")
