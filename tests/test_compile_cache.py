"""Folders of compiled programs: one for each test file, for one process at a time, whole whatever happens."""

import os

import pytest

from tests import compile_cache
from tests.compile_cache import ROOT, CompileCache

pytestmark = pytest.mark.skipif(compile_cache.fcntl is None, reason="locks of files are those of POSIX")


@pytest.fixture
def opened(monkeypatch):
    """The folders that are opened, which JAX knows nothing of."""
    folders = []
    monkeypatch.delenv("NUMPYRO_EXT_TEST_CACHE", raising=False)
    monkeypatch.setattr(compile_cache, "keep_compiled_programs", lambda folder, max_bytes: folders.append(folder))
    return folders


def test_a_file_has_a_folder_that_one_process_has_at_a_time(opened, tmp_path):
    one, other = CompileCache(tmp_path), CompileCache(tmp_path)
    for _ in range(2):
        one.use(ROOT / "infer" / "test_smc.py")
    other.use(ROOT / "infer" / "test_smc.py")
    assert opened == [tmp_path / "infer-test_smc"]
    other.use(ROOT / "linalg" / "test_smc.py")
    assert opened[1:] == [tmp_path / "linalg-test_smc"]
    one.close()
    other.use(ROOT / "infer" / "test_smc.py")
    assert opened[2:] == [tmp_path / "infer-test_smc"]
    other.close()


def test_what_a_killed_process_has_left_is_thrown_away(opened, tmp_path):
    one, other = CompileCache(tmp_path), CompileCache(tmp_path)
    one.use(ROOT / "test_layout.py")
    (opened[0] / "whole").touch()
    one.close()
    other.use(ROOT / "test_layout.py")
    assert (opened[0] / "whole").exists()
    os.close(other._lock)  # as the end of its process does
    other._lock = None
    one.use(ROOT / "test_layout.py")
    assert not (opened[0] / "whole").exists()
    one.close()


def test_it_can_be_left_out(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMPYRO_EXT_TEST_CACHE", "0")
    CompileCache(tmp_path).use(ROOT / "test_layout.py")
    assert not opened and not list(tmp_path.iterdir())
