"""Compiled programs on disk: written by one process, read by the next, never where somebody has said otherwise."""

import os
import subprocess
import sys

import pytest

from numpyro_ext import keep_compiled_programs
from numpyro_ext.compilation import disk_cache
from numpyro_ext.compilation.disk_cache import VARIABLE, _default_folder, _Slot

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
jax.jit(lambda x: jax.numpy.sin(x) / (2.0 + x))(jax.numpy.linspace(0.0, 1.0, 300))
print(len(hits))
"""


def run(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return int(done.stdout)


@pytest.mark.thorough
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


BY_DEFAULT = """
import os
import jax
import numpyro_ext.infer
from numpyro_ext.compilation.disk_cache import keep_by_default
from numpyro_ext.infer.front.answers.last_run import LastRun
before = jax.config.jax_compilation_cache_dir
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
with LastRun()._running(jax.random.key(0)):  # as in every run of an engine
    pass
jax.jit(lambda x: jax.numpy.sin(x) / (2.0 + x))(jax.numpy.linspace(0.0, 1.0, 300))
keep_by_default()
print(len(hits), before, jax.config.jax_compilation_cache_dir)
"""


def by_default(home, **settings):
    """Hits of the cache, JAX's folder before and after the first run of a process, and what it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(home), "JAX_PLATFORMS": "cpu", VARIABLE: ""} | settings
    command = [sys.executable, "-c", BY_DEFAULT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    hits, before, after = done.stdout.split()
    return int(hits), before, after, done.stderr


needs_locks = pytest.mark.skipif(sys.platform != "linux", reason="the folder of caches is named as on Linux")


@pytest.mark.thorough
@needs_locks
def test_programs_are_kept_by_default_and_that_is_said_once(tmp_path):
    hits, before, after, said = by_default(tmp_path)
    assert (hits, before) == (0, "None") and after.startswith(f"{tmp_path}/numpyro_ext/jax-")
    assert f"{VARIABLE}=off" in said and after.rsplit("/", 1)[0] in said and "at most 1024 MB" in said
    hits, before, again, said = by_default(tmp_path)
    assert hits >= 1 and again == after and said == ""


@needs_locks
@pytest.mark.thorough
def test_what_cannot_be_kept_is_not_and_another_folder_can_be_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert by_default(file) == (0, "None", "None", "")
    theirs = tmp_path / "theirs"
    assert by_default(tmp_path, JAX_COMPILATION_CACHE_DIR=str(theirs))[1:3] == (str(theirs), str(theirs))
    assert by_default(tmp_path, **{VARIABLE: "off"})[:3] == (0, "None", "None")
    assert by_default(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false") == (0, "None", "None", "")
    assert by_default(tmp_path, **{VARIABLE: str(tmp_path / "mine")})[2] == str(tmp_path / "mine" / "0")


def test_processes_at_once_have_folders_of_their_own(tmp_path):
    """Two open files of one lock exclude each other within a process as between two."""
    slots = [_Slot.take(tmp_path) for _ in range(4)]
    assert [slot.folder.name for slot in slots] == ["0", "1", "2", "3"]
    assert _Slot.take(tmp_path) is None
    slots[1].close()
    again = _Slot.take(tmp_path)
    assert again.folder.name == "1"
    for slot in (slots[0], again, *slots[2:]):
        slot.close()


def test_what_a_killed_process_wrote_last_is_removed(tmp_path):
    def with_files():
        slot = _Slot.take(tmp_path)
        for name, when in (("whole", 1000.0), ("half", 2000.0)):
            (slot.folder / f"{name}-cache").write_bytes(b"x")
            os.utime(slot.folder / f"{name}-cache", times=(when, when))
        return slot

    def names(slot):
        return sorted(file.name for file in slot.folder.glob("*-cache"))

    with_files().close()
    slot = _Slot.take(tmp_path)
    assert names(slot) == ["half-cache", "whole-cache"]
    os.close(slot._lock)  # as when a process ends without a word
    assert names(_Slot.take(tmp_path)) == ["whole-cache"]


def test_folders_are_of_a_machine_and_those_of_others_do_not_stay_for_ever(tmp_path, monkeypatch):
    name = _default_folder().name
    monkeypatch.setattr(disk_cache.platform, "machine", lambda: "another")
    assert _default_folder().name != name
    old, new = tmp_path / "jax-0.1-a", tmp_path / "jax-0.2-b"
    for folder, when in ((old, 1000.0), (new, None)):
        (folder / "0").mkdir(parents=True)
        (folder / "0" / "lock").touch()
        if when:
            os.utime(folder / "0" / "lock", times=(when, when))
    disk_cache._forget_old_folders(tmp_path / "jax-0.3-c")
    assert not old.exists() and new.exists()
