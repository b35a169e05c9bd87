"""Compiled programs of each test file, kept on disk between runs of the tests.

Every file has a folder of its own below ``.compiled``, because JAX writes there without a lock. One process at a time
has a folder: another one, as of a second ``make test``, goes without. A process that was killed may leave half a
program, so that a folder in use is marked, and one that is still marked when it is opened is emptied.
``NUMPYRO_EXT_TEST_CACHE=0`` leaves all of it out.
"""

import contextlib
import os
import shutil
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from numpyro_ext import keep_compiled_programs

try:
    import fcntl
except ImportError:  # Windows, which goes without
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT.parent / ".compiled"
_MOST_BYTES = 2**25
"""For one file and all kinds of runs of it; what was not used for longest goes first."""


class CompileCache:
    """The folder of one test file at a time.

    :param Path folder: in which the folders are.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._file: Path | None = None
        self._lock: int | None = None
        self._marker = folder

    def use(self, file: Path) -> None:
        """Keep what is compiled from now on for a test file, and read what was kept for it."""
        if file == self._file:
            return
        self.close()
        self._file = file
        if fcntl is None or os.environ.get("NUMPYRO_EXT_TEST_CACHE") == "0":
            return
        name = "-".join(file.with_suffix("").parts[len(ROOT.parts) :] if file.is_relative_to(ROOT) else [file.stem])
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return
        self._lock, self._marker = lock, folder / "in-use"
        if self._marker.exists():
            shutil.rmtree(folder)
            folder.mkdir()
        self._marker.touch()
        keep_compiled_programs(folder, max_bytes=_MOST_BYTES)

    def close(self) -> None:
        """Keep nothing more, and leave the folder to others."""
        self._file = None
        if self._lock is None:
            return
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        with contextlib.suppress(FileNotFoundError):
            self._marker.unlink()
        os.close(self._lock)
        self._lock = None
