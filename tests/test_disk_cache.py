"""Compiled programs on disk: written by one process, read by the next, never without being asked for."""

import os
import subprocess
import sys

import pytest

from numpyro_ext import keep_compiled_programs

PROGRAM = """
import sys
import jax
import numpyro_ext
import numpyro_ext.infer
assert jax.config.jax_compilation_cache_dir is None
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
jax.jit(lambda x: x - 1.0)(2.0)
numpyro_ext.keep_compiled_programs(sys.argv[1])
jax.jit(lambda x: 2.0 * x + 1.0)(3.0)
print(len(hits))
"""


def run(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return int(done.stdout)


def test_next_process_reads_what_the_last_one_compiled(tmp_path):
    folder = tmp_path / "made" / "here"
    assert run(folder) == 0
    assert len(list(folder.glob("*-cache"))) >= 1
    assert run(folder) >= 1


def test_folder_that_cannot_be_written_to_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match=r"cannot be kept in .*file.*Give a folder"):
        keep_compiled_programs(file / "below")


def test_negative_limit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_bytes must not be negative"):
        keep_compiled_programs(tmp_path, max_bytes=-1)


def test_what_was_not_used_for_longest_is_removed(tmp_path):
    from numpyro_ext.compilation.disk_cache import _trim

    for number, name in enumerate(("old", "older", "new")):
        file = tmp_path / f"{name}-cache"
        file.write_bytes(bytes(100))
        os.utime(file, times=(1000.0 - number if number < 2 else 2000.0,) * 2)
    (tmp_path / "mine.txt").write_text("kept")
    _trim(tmp_path, 250)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["mine.txt", "new-cache", "old-cache"]
    _trim(tmp_path, 0)
    assert [f.name for f in tmp_path.iterdir()] == ["mine.txt"]
