"""The counts of the report on the source, on a small tree in which each of them is known."""

import importlib.util
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "house_report.py"

FILES = {
    "numpyro_ext/__init__.py": '"""A package."""',
    "numpyro_ext/rooms/__init__.py": "",
    "numpyro_ext/rooms/one/__init__.py": "from .first import f",
    "numpyro_ext/rooms/one/first.py": """
        '''What it is.'''
        from typing import Any

        from ..two import g

        def f(x: Any, y: int) -> int:
            '''Whatever is added.'''

        def h(x: int, y: "list[Any]") -> int: ...
        """,
    "numpyro_ext/rooms/two.py": """
        class A:
            a: int = 1
            '''Of a.'''
            b: int = 2
            '''Number of b.'''

        def g(x: int) -> int:
            from .one.first import f
            'no docstring'
            return 'Any'
        """,
    "numpyro_ext/rooms/three.py": "from .two import g" + "\n" * 401,
    "benchmarks/bench.py": "1\n2\n",
    "benchmarks/results/a.json": "",
    "docs/design.md": "Four words and more",
    "tests/test_a.py": """
        def test(monkeypatch):
            monkeypatch.setattr(module, "_MOST_POINTS", 1)
            monkeypatch.setattr("package.module.LARGEST", 1)
            monkeypatch.setattr(module, "record", None)
        """,
}


@pytest.fixture(scope="module")
def house_report():
    specification = importlib.util.spec_from_file_location("house_report", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def counts(house_report, tmp_path):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return house_report.report(tmp_path)


def test_counts_of_a_small_tree(counts):
    assert counts["lines of benchmarks/"] == "2" and counts["files in benchmarks/results/"] == "1"
    assert counts["functions with Any in their signature"] == "2 of 3, 66.7 %"
    # "Whatever" is another word, and an attribute has a docstring as well.
    assert counts["docstrings that begin with a clause"] == "2 of 5, 40.0 %"
    assert counts["words of docs/design.md"] == "4"
    assert counts["patches of a threshold in tests"] == "2"
    assert counts["modules over 400 lines"] == "1 numpyro_ext/rooms/three.py"
    # A folder imports its own modules to show their names, which is no circle.
    assert counts["folders with a circle"] == "1 numpyro_ext/rooms: one, two"


def test_docstrings_begin_with_a_subject_or_a_verb(house_report):
    """'Of the predictors' or 'What one sweep found' need the code to be understood."""
    root = SCRIPT.parents[1]
    trees = house_report.sources(root / "numpyro_ext") | house_report.sources(root / "models")
    found = [
        house_report.begins_with_a_clause(text) for tree in trees.values() for text in house_report.docstrings(tree)
    ]
    assert sum(found) <= 0.03 * len(found)
