"""CPU seconds of tests, which a busy machine changes little: ``python -m pytest -p tests.cpu_times tests/infer``.

Those of a test have the fixtures that it is the first to need, and the programs that others use after it.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

_MOST = 40
_TIMES: Counter[str] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    start = time.process_time()
    found = yield
    _TIMES[item.nodeid] += time.process_time() - start
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (sent := getattr(session.config, "workeroutput", None)) is not None:  # a worker of pytest-xdist
        sent["cpu_times"] = dict(_TIMES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _TIMES.update(getattr(node, "workeroutput", {}).get("cpu_times", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files: Counter[str] = Counter()
    for name, seconds in _TIMES.items():
        files[name.split("::")[0]] += seconds
    terminalreporter.section(f"CPU seconds of {len(_TIMES)} tests: {sum(_TIMES.values()):.0f}")
    for title, times in (("tests", _TIMES), ("files", files)):
        terminalreporter.write_line(f"most of {title}")
        for name, seconds in times.most_common(_MOST):
            terminalreporter.write_line(f"{seconds:8.2f} {name}")
