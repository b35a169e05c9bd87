"""Counts of what makes the source hard to read, printed as a table: ``python scripts/house_report.py [root]``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "numpyro_ext"
LONGEST_MODULE = 400
CLAUSES = ("What", "Which", "Whether", "Of", "As", "Where", "How", "Why", "That", "Those")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(folder: Path) -> dict[Path, ast.Module]:
    """The trees of all modules below a folder."""
    return {file: ast.parse(file.read_text()) for file in sorted(folder.rglob("*.py"))}


def num_lines(folder: Path) -> int:
    """Lines of all modules below a folder."""
    return sum(file.read_text().count("\n") for file in folder.rglob("*.py"))


def functions(trees: dict[Path, ast.Module]) -> list[Function]:
    return [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]


def has_any(function: Function) -> bool:
    """Return whether an annotation of the signature holds ``Any``."""
    parts = [a.annotation for a in ast.walk(function.args) if isinstance(a, ast.arg)] + [function.returns]
    names = (node for part in parts if part is not None for node in ast.walk(part))
    return any(
        re.search(r"\bAny\b", n.id if isinstance(n, ast.Name) else str(getattr(n, "value", ""))) is not None
        for n in names
    )


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Docstrings of modules, classes, functions and, behind assignments, of attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for place, part in enumerate(body if isinstance(body, list) else []):
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                is_of_attribute = place > 0 and isinstance(body[place - 1], ast.Assign | ast.AnnAssign)
                if is_of_attribute or place == 0 and isinstance(node, ast.Module | ast.ClassDef | Function):
                    yield part.value.value


def begins_with_a_clause(docstring: str) -> bool:
    """Return whether a reader has to go on before there is a subject."""
    return re.match(rf"\s*({'|'.join(CLAUSES)})\b", docstring) is not None


def patches_of_thresholds(tree: ast.Module) -> int:
    """Calls of ``setattr`` in tests for names in capitals, such as ``_MOST_POINTS``."""
    number = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            number += any(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", word.rsplit(".", 1)[-1]) is not None for word in words)
    return number


def circles(root: Path, trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Folders in which parts (modules, and folders that count as one) import each other in a circle, and which do."""
    modules = {_module(file.relative_to(root)): file for file in trees}
    arrows: dict[str, dict[str, set[str]]] = {}
    for source, file in modules.items():
        for target in _targets(source, file, trees[file], set(modules)):
            here, there = source.split("."), target.split(".")
            shared = 0
            while shared < min(len(here), len(there)) and here[shared] == there[shared]:
                shared += 1
            if shared < min(len(here), len(there)):  # else one is the folder that the other stands in
                inside = arrows.setdefault("/".join(here[:shared]), {})
                inside.setdefault(here[shared], set()).add(there[shared])
    found = {
        folder: sorted(part for part in inside if part in _reached(inside, part)) for folder, inside in arrows.items()
    }
    return {folder: parts for folder, parts in sorted(found.items()) if parts}


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(source: str, file: Path, tree: ast.Module, modules: set[str]) -> Iterator[str]:
    package = source.split(".") if file.name == "__init__.py" else source.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                yield from [name for name in (inner, target) if name in modules][:1]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


def _reached(arrows: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    new = set(arrows.get(start, ()))
    while new:
        found |= new
        new = {target for part in new for target in arrows.get(part, ())} - found
    return found


def report(root: Path) -> dict[str, str]:
    """The counts by their names."""
    trees = sources(root / PACKAGE)
    of_functions = [has_any(function) for function in functions(trees)]
    texts = [begins_with_a_clause(text) for tree in trees.values() for text in docstrings(tree)]
    rings = circles(root, trees)
    long = [str(file.relative_to(root)) for file in trees if file.read_text().count("\n") > LONGEST_MODULE]
    design = root / "docs" / "design.md"
    return {
        f"lines of {PACKAGE}/": str(num_lines(root / PACKAGE)),
        "lines of benchmarks/": str(num_lines(root / "benchmarks")),
        "files in benchmarks/results/": str(len(list((root / "benchmarks" / "results").glob("*")))),
        "functions with Any in their signature": _share(of_functions),
        "docstrings that begin with a clause": _share(texts),
        "words of docs/design.md": str(len(design.read_text().split()) if design.exists() else 0),
        "patches of a threshold in tests": str(sum(map(patches_of_thresholds, sources(root / "tests").values()))),
        f"modules over {LONGEST_MODULE} lines": f"{len(long)} {', '.join(long)}".strip(),
        "folders with a circle": f"{len(rings)} {'; '.join(map(_ring, rings.items()))}".strip(),
    }


def _ring(parts: tuple[str, list[str]]) -> str:
    return f"{parts[0]}: {', '.join(parts[1])}"


def _share(found: list[bool]) -> str:
    return f"{sum(found)} of {len(found)}, {100 * sum(found) / max(1, len(found)):.1f} %"


if __name__ == "__main__":
    for name, value in report(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]).items():
        print(f"{name:40s} {value}")
