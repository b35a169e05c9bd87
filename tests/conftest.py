"""How the tests run: the precision, how hard programs are optimised, and how many of them are kept.

``NUMPYRO_EXT_TEST_PRECISION=float32`` asks for single precision, ``NUMPYRO_EXT_TEST_OPTIMIZE=1`` for compilation as
users have it, ``NUMPYRO_EXT_TEST_SHARE=0/4`` to ``3/4`` for a quarter of the tests. Without the second XLA optimises
little: most tests run a small program once, and two thirds of their time would be spent on making it fast.
"""

import functools
import gc
import itertools
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax._src.interpreters import mlir

from tests.compile_cache import CompileCache
from tests.readings import forget_readings

PRECISION = os.environ.get("NUMPYRO_EXT_TEST_PRECISION", "float64")
if PRECISION not in ("float32", "float64"):
    raise pytest.UsageError(f"NUMPYRO_EXT_TEST_PRECISION is {PRECISION!r}; it must be float32 or float64.")

jax.config.update("jax_enable_x64", PRECISION == "float64")
os.environ["NUMPYRO_EXT_COMPILED_PROGRAMS"] = "off"  # nor in the processes that tests start

IS_OPTIMISED = os.environ.get("NUMPYRO_EXT_TEST_OPTIMIZE") == "1"
if not IS_OPTIMISED:
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11):  # later versions do not know these flags
        quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ.setdefault("XLA_FLAGS", quick)


# Before 0.12 JAX makes a context of MLIR for every program and keeps some two thousand of them; the more there are, the
# longer each new one takes, a fifth of the time of all tests. Here programs share one, as in later versions, and it is
# renewed because it keeps constants. A program compiled while another is lowered has its own.
if jax.__version_info__ < (0, 12):
    _make_context = mlir.make_ir_context
    _number_of_programs = itertools.count()

    @functools.lru_cache(maxsize=1)
    def _shared_context(number: int) -> mlir.ir.Context:
        return _make_context()

    def _context() -> mlir.ir.Context:
        is_nested = mlir.ir.Context.current is not None
        return _make_context() if is_nested else _shared_context(next(_number_of_programs) // 200)

    mlir.make_ir_context = _context


# Compiled programs are many objects without cycles, through which the collector need not go that often.
gc.set_threshold(50_000, 20, 50)

_MEMORY_MAPS = Path("/proc/self/maps")
_MOST_MAPS = 30_000


@pytest.fixture(autouse=True)
def _forget_compiled_programs() -> Iterator[None]:
    # Every compiled program holds several memory maps, and at 65,530 of them Linux ends the process. A slow test alone
    # may compile thousands of programs; a quick one compiles few, and counting takes some milliseconds.
    start = time.process_time()
    yield
    if time.process_time() - start < 0.5 or not _MEMORY_MAPS.exists():
        return
    if _MEMORY_MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _forget_readings() -> None:
    # Tests replace parts of the reading, and count what is read.
    forget_readings()


_COMPILE_CACHE = CompileCache()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _COMPILE_CACHE.use(item.path)


def pytest_unconfigure() -> None:
    _COMPILE_CACHE.close()


def pytest_configure(config: pytest.Config) -> None:
    # At the end, one worker would run a long test while the other has nothing to do.
    config.addinivalue_line("markers", "first: a long test, which runs before all others")


def pytest_report_header() -> str:
    optimised = "optimised" if IS_OPTIMISED else "little optimised"
    return f"jax {jax.__version__} on {jax.default_backend()}, {PRECISION}, {optimised}"


SHARE = re.fullmatch(r"([0-9]+)/([1-9][0-9]*)|", os.environ.get("NUMPYRO_EXT_TEST_SHARE", ""))
if SHARE is None or (SHARE[0] and int(SHARE[1]) >= int(SHARE[2])):
    raise pytest.UsageError("NUMPYRO_EXT_TEST_SHARE must be a share of the tests such as 0/4, 1/4, 2/4 or 3/4.")


def _is_in_share(item: pytest.Item) -> bool:
    """Whether a test is in the share that is run: the same on every machine, and spread over cases of one test."""
    assert SHARE is not None
    return not SHARE[0] or zlib.crc32(item.nodeid.encode()) % int(SHARE[2]) == int(SHARE[1])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if not _is_in_share(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _is_in_share(item)]
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
