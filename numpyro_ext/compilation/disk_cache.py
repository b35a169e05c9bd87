"""Compiled programs kept on disk, for the processes that come after."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

__all__ = ["keep_compiled_programs"]


def keep_compiled_programs(folder: str | os.PathLike[str] | None = None, *, max_bytes: int = 2**30) -> Path:
    """Switch JAX's persistent cache on, with limits that suit many small programs, for this process.

    What this process compiles from now on is written to the folder, and what an earlier one has compiled there, with
    the same versions and on the same kind of machine, is read instead. It is never switched on by importing.

    :param folder: where the programs are kept; by default what ``JAX_COMPILATION_CACHE_DIR`` says, or else
        ``numpyro_ext`` in the user's folder of caches.
    :param int max_bytes: files that were not used for longest are removed first until no more is left than this.
    :return: the folder.
    :raises OSError: if the folder cannot be made or written to.
    :raises ValueError: if ``max_bytes`` is negative.

    >>> from numpyro_ext import keep_compiled_programs
    >>> folder = keep_compiled_programs()  # doctest: +SKIP
    """
    if max_bytes < 0:
        raise ValueError(f"max_bytes must not be negative, got {max_bytes!r}.")
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
    jax.config.update("jax_compilation_cache_dir", os.fspath(path))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A process that has compiled something before has decided for good whether it has a cache.
    compilation_cache.reset_cache()
    return path


def _default_folder() -> Path:
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base / "numpyro_ext" / f"jax-{jax.__version__}"


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
