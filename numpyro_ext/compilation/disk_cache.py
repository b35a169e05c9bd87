"""Compiled programs kept on disk, for the processes that come after.

By default they are kept from the first run of an engine on. JAX writes files where they are read, so that a process may
read half of what another one is writing: each process has a folder to itself as long as it lives, of a few, and goes
without where all are taken.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal, overload

import jax
from jax.experimental.compilation_cache import compilation_cache

from .versions import silence_false_alarms

VARIABLE = "NUMPYRO_EXT_COMPILED_PROGRAMS"
"""Name of the environment variable that says where programs are kept by default, or ``off``."""
_OFF = ("0", "false", "no", "none", "off")
_NUM_SLOTS, _MOST_BYTES = 4, 2**28
"""Processes at once that keep programs by default, and what each of their folders holds at most."""
_LONGEST_UNUSED = 60 * 24 * 3600.0
"""Seconds after which the programs of other versions and machines are removed."""
_LAST_WRITES = 2.0
"""Seconds before the last file of a process that was killed in which files may not have been finished."""
_IN_USE, _CLOSED = b"in use", b"closed"
_LOGGER = logging.getLogger("numpyro_ext")
_CONFIG: Any = jax.config
_MUTEX = threading.Lock()
_STATE: dict[str, Any] = {"decided": False, "slot": None}


@overload
def keep_compiled_programs(folder: Literal[False]) -> None: ...


@overload
def keep_compiled_programs(folder: str | os.PathLike[str] | None = None, *, max_bytes: int = 2**30) -> Path: ...


def keep_compiled_programs(
    folder: str | os.PathLike[str] | Literal[False] | None = None, *, max_bytes: int = 2**30
) -> Path | None:
    """Say where this process keeps compiled programs, by JAX's persistent cache, with limits for many small programs.

    What this process compiles from now on is written to the folder, and what an earlier one has compiled there, with
    the same versions and on the same kind of machine, is read instead.

    Without this call engines keep programs from their first run on, in the user's folder of caches, at most a gigabyte;
    importing switches nothing on. Where JAX has a folder already (``jax_compilation_cache_dir``), where its cache is
    switched off, or where nothing can be written, all stays as it is. ``keep_compiled_programs(False)`` switches that
    off for this process, the environment variable ``NUMPYRO_EXT_COMPILED_PROGRAMS=off`` for all; a path in the place
    of ``off`` is another folder. A folder that is given here may be read by other processes at the same time, which
    must not compile the same programs at once, as JAX writes without a lock.

    :param folder: where the programs are kept; by default what ``JAX_COMPILATION_CACHE_DIR`` says, or else
        ``numpyro_ext`` in the user's folder of caches. ``False`` keeps none.
    :param int max_bytes: files that were not used for longest are removed first until no more is left than this.
    :return: the folder.
    :raises OSError: if the folder cannot be made or written to.
    :raises ValueError: if ``max_bytes`` is negative.

    >>> from numpyro_ext import keep_compiled_programs
    >>> folder = keep_compiled_programs()  # doctest: +SKIP
    >>> keep_compiled_programs(False)
    """
    if max_bytes < 0:
        raise ValueError(f"max_bytes must not be negative, got {max_bytes!r}.")
    if folder is False:
        with _MUTEX:
            _STATE["decided"] = True
            _leave_slot()
        return None
    path = Path(folder if folder is not None else os.environ.get("JAX_COMPILATION_CACHE_DIR") or _default_folder())
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        _trim(path, max_bytes)
    except OSError as error:
        raise OSError(
            f"Compiled programs cannot be kept in {os.fspath(path)!r} ({error}). Give a folder that can be written to: "
            "keep_compiled_programs(folder)."
        ) from error
    with _MUTEX:
        _STATE["decided"] = True
        _leave_slot()
        _switch_on(path)
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return path


def keep_by_default() -> None:
    """Keep compiled programs where nobody has said anything else; asked by every run, decided once."""
    if _STATE["decided"]:
        return
    with _MUTEX:
        if _STATE["decided"]:
            return
        _STATE["decided"] = True
        chosen = os.environ.get(VARIABLE, "")
        if chosen.strip().lower() in _OFF or not _CONFIG.jax_enable_compilation_cache:
            return
        if _CONFIG.jax_compilation_cache_dir is not None:
            return
        folder = Path(chosen)
        try:
            folder = folder.expanduser().absolute() if chosen.strip() else _default_folder()
            is_new = not folder.exists()
            _forget_old_folders(folder)
            # Where a disk is full JAX leaves half of a file, and warns whenever it reads it.
            around = next(path for path in (folder, *folder.parents) if path.exists())
            if shutil.disk_usage(around).free < _NUM_SLOTS * _MOST_BYTES:
                raise OSError("there is less than a gigabyte left")
            slot = _Slot.take(folder)
        except (OSError, ImportError, RuntimeError) as error:  # no place, no locks on this system, no home
            _LOGGER.debug("Compiled programs are not kept in %s: %s", folder, error)
            return
        if slot is None:
            _LOGGER.debug("Compiled programs are not kept: %d other processes use %s", _NUM_SLOTS, folder)
            return
        _STATE["slot"] = slot
        _switch_on(slot.folder)
        if _CONFIG.jax_persistent_cache_min_compile_time_secs == 1.0:  # the default of JAX
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        atexit.register(slot.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_leave_slot)
        if is_new:
            _LOGGER.warning(
                "Compiled programs are kept in %s from now on, at most %.0f MB, so that fits in later processes start "
                "sooner. Set the environment variable %s=off, or call numpyro_ext.keep_compiled_programs(False), to "
                "keep none. This is said once.",
                folder,
                _NUM_SLOTS * _MOST_BYTES / 2**20,
                VARIABLE,
            )


def _switch_on(folder: Path) -> None:
    silence_false_alarms()
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A process that has compiled something before has decided for good whether it has a cache.
    compilation_cache.reset_cache()


def _leave_slot() -> None:
    """Keep no programs any more in the folder that was taken by default, in this process."""
    slot, _STATE["slot"] = _STATE["slot"], None
    if slot is None:
        return
    if _CONFIG.jax_compilation_cache_dir == os.fspath(slot.folder):
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
    if os.getpid() == slot.pid:
        slot.close()


class _Slot:
    """A folder that no other process uses as long as this one lives."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self._lock: int | None = lock

    @classmethod
    def take(cls, folder: Path) -> _Slot | None:
        """The first of a few folders that is free, ``None`` where there is none.

        :raises OSError: if nothing can be written there.
        """
        import fcntl  # not on Windows

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_NUM_SLOTS):
            path = folder / str(number)
            path.mkdir(exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            except OSError:
                os.close(lock)
                raise
            if os.pread(lock, len(_IN_USE), 0) == _IN_USE:
                _remove_last_files(path)
            _mark(lock, _IN_USE)
            _trim(path, _MOST_BYTES)
            return cls(path, lock)
        return None

    def close(self) -> None:
        """Let other processes have the folder, all of whose files are whole."""
        if self._lock is not None and os.getpid() == self.pid:
            _mark(self._lock, _CLOSED)
            os.close(self._lock)
            self._lock = None


def _mark(lock: int, word: bytes) -> None:
    os.pwrite(lock, word, 0)
    os.truncate(lock, len(word))


def _remove_last_files(folder: Path) -> None:
    """Remove what a process wrote last that did not live to close its folder: a file may be half of one."""
    times = {file: file.stat().st_mtime for file in folder.glob("*-cache")}
    last = max(times.values(), default=0.0)
    for file, when in times.items():
        if when >= last - _LAST_WRITES:
            file.unlink(missing_ok=True)


def _forget_old_folders(folder: Path) -> None:
    """Remove the programs of other versions and machines, whose folders stand beside, that nobody has used for long."""
    for other in folder.parent.glob("jax-*"):
        locks = [file.stat().st_mtime for file in other.glob("*/lock")]
        if other != folder and locks and max(locks) < time.time() - _LONGEST_UNUSED:
            shutil.rmtree(other, ignore_errors=True)


def _default_folder() -> Path:
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base.expanduser().absolute() / "numpyro_ext" / f"jax-{jax.__version__}-{_machine()}"


def _machine() -> str:
    """A word for the processor: programs for a CPU use the instructions that it has."""
    words = [platform.machine(), platform.processor(), platform.python_implementation()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words += sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    except OSError:
        pass
    return hashlib.blake2b("\n".join(words).encode(), digest_size=4).hexdigest()


def _trim(folder: Path, max_bytes: int) -> None:
    """Remove the cached programs that were not used for longest; another process may be doing the same.

    JAX has a limit of its own (``jax_compilation_cache_max_size``), which needs a package for locks, and looks at all
    files whenever it writes one.
    """
    used = []
    for file in folder.glob("*-cache"):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        used.append((max(status.st_atime, status.st_mtime), status.st_size, file))
    total = sum(size for _, size, _ in used)
    for _, size, file in sorted(used):
        if total <= max_bytes:
            break
        file.unlink(missing_ok=True)
        file.with_name(file.name.removesuffix("-cache") + "-atime").unlink(missing_ok=True)
        total -= size
