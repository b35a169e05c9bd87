"""Pages of the site that are made from other files: the gallery of notebooks, the results of the benchmarks."""

from __future__ import annotations

import base64
import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

REPORTS = {
    "evidence": "Log evidences by SMC, annealed importance sampling and the deterministic engines",
    "nested": "Log evidences by SMC and by nested sampling",
    "calibration": "Are intervals as wide as they say",
    "tomography": "Adaptive tomography of one and of two qubits",
    "tomography-two-qubits": "Tomography of two qubits",
    "acquisitions-real": "Active learning on real data, beside the source",
    "activeml": "Active learning beside other libraries",
    "information_loss": "Information that approximations lose",
    "elicitation": "Which question to ask a person next",
    "phases": "Active regression in two phases",
    "hyper_information": "Information about hyperparameters",
    "sequences": "What counting knows of the next event",
    "preferences": "Learning from comparisons",
    "images": "Pictures, beside total variation, non-local means and interpolation",
    "images-medians": "Pictures: mixtures over bases",
    "images-bands": "Pictures: bands of averages over bases",
    "images-colours": "Pictures: colours",
    "images-large": "Pictures: large ones",
    "images-inpainting": "Pictures: inpainting in few steps",
    "cold": "First fits, next fits and new processes",
    "exact": "Exact draws in the coordinates of a fit, beside NUTS",
    "cpu": "Speed of all engines",
}
"""Names of the files in ``benchmarks/results`` without their date, in the order of the page."""

PACKAGES = {
    "numpyro_ext.infer": "Engines, and what stands around them",
    "numpyro_ext.design": "Choosing what to measure",
    "numpyro_ext.psychometrics": "Measuring people",
    "numpyro_ext.sequences": "Sequences of events",
    "numpyro_ext.quantum": "Quantum states and measurements",
    "numpyro_ext.distributions": "Distributions",
    "numpyro_ext.models": "Models",
    "numpyro_ext.linalg": "Linear operators and priors",
    "numpyro_ext.structure": "Reading models",
    "numpyro_ext.datasets": "Data sets",
}
"""What is public."""


def write_generated_pages(docs: Path) -> None:
    """Write ``generated/``: a page with the notebooks, which are copied beside it, one with the results of benchmarks
    and a table of them that another page includes, and one with all public names."""
    generated = docs / "generated"
    shutil.rmtree(generated, ignore_errors=True)
    (generated / "notebooks").mkdir(parents=True)
    _notebooks(docs.parent / "notebooks", generated)
    _benchmarks(docs.parent / "benchmarks" / "results", generated)
    _evidences(docs.parent / "benchmarks" / "results", generated)
    _reference(generated)


def _reference(generated: Path) -> None:
    lines = ["# Reference", "", "The public names, by package. Everything else is internal and may change.", ""]
    for package, title in {"numpyro_ext": "The package", **PACKAGES}.items():
        names = [name for name in importlib.import_module(package).__all__ if not name.startswith("__")]
        if package == "numpyro_ext":  # which shows the names of infer as well
            names = [name for name in names if name not in importlib.import_module("numpyro_ext.infer").__all__]
        lines += [
            f"## {title}: `{package}`",
            "",
            "```{eval-rst}",
            f".. currentmodule:: {package}",
            "",
            ".. autosummary::",
        ]
        lines += ["   :toctree: api", "", *(f"   {name}" for name in sorted(names, key=str.lower)), "```", ""]
    (generated / "reference.md").write_text("\n".join(lines))


def _notebooks(folder: Path, generated: Path) -> None:
    cards, names = [], []
    for path in sorted(folder.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        title, sentence = _title(notebook)
        shutil.copy(path, generated / "notebooks" / path.name)
        names.append(f"notebooks/{path.stem}")
        card = [f":::{{grid-item-card}} {title}", f":link: notebooks/{path.stem}", ":link-type: doc"]
        if (picture := _first_picture(notebook)) is not None:
            (generated / "notebooks" / f"{path.stem}.png").write_bytes(picture)
            card.append(f":img-top: notebooks/{path.stem}.png")
        cards += [*card, "", sentence, ":::", ""]
    lines = [
        "# Notebooks",
        "",
        "Each tells one story, with NUTS, exact values or another library as its judge. Outputs are those that are",
        "stored with the notebooks, which are run again as the project changes.",
        "",
        "::::{grid} 1 2 2 3",
        ":gutter: 3",
        "",
        *cards,
        "::::",
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *names,
        "```",
        "",
    ]
    (generated / "notebooks.md").write_text("\n".join(lines))


def _title(notebook: dict[str, Any]) -> tuple[str, str]:
    """The heading and the first sentence."""
    text = "".join(notebook["cells"][0]["source"])
    heading, _, rest = text.partition("\n")
    if not rest.strip():
        rest = "".join(notebook["cells"][1]["source"])
    paragraph = " ".join(rest.strip().split("\n\n")[0].split())
    return heading.lstrip("# ").strip(), re.split(r"(?<=[.?])\s", paragraph)[0]


def _first_picture(notebook: dict[str, Any]) -> bytes | None:
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if found := output.get("data", {}).get("image/png"):
                return base64.b64decode("".join(found))
    return None


def _newest(folder: Path, name: str) -> Path | None:
    """The newest report of this name."""
    found = [
        path for path in folder.glob("*.md") if re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{name}(-\d)?(-loaded)?", path.stem)
    ]
    return max(found, key=lambda path: path.stem, default=None)


def _evidences(folder: Path, generated: Path) -> None:
    """The first table of the report of evidences with a row for each model and a column for each method."""
    report = _newest(folder, "evidence")
    if report is None:
        raise FileNotFoundError(f"No report of log evidences in {folder}, and docs/comparison.md shows one.")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.read_text().splitlines()]
    found: dict[str, dict[str, str]] = {}
    for model, method, evidence, *_ in (row for row in rows[1:] if len(row) == 5 and not row[0].startswith("-")):
        if model != "model":
            found.setdefault(model, {})[method.split(",")[0]] = evidence
    methods = list(dict.fromkeys(method for row in found.values() for method in row))
    lines = ["| model | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|"]
    lines += [f"| {model} | " + " | ".join(row.get(m, "") for m in methods) + " |" for model, row in found.items()]
    (generated / "evidences.txt").write_text("\n".join([*lines, "", f"*{report.name}*", ""]))


def _benchmarks(folder: Path, generated: Path) -> None:
    lines = [
        "# Benchmarks",
        "",
        "Results as the scripts of the folder `benchmarks` wrote them, the newest of each, with the machine on which",
        "they were measured. Ratios hold for other machines, seconds do not; files whose name says `loaded` were",
        "measured beside other work.",
        "",
        "```{contents}",
        ":local:",
        ":depth: 1",
        "```",
        "",
    ]
    for name, title in REPORTS.items():
        if (newest := _newest(folder, name)) is None:
            continue
        text = re.sub(r"^# .*\n", "", newest.read_text().strip())
        # headings of a report stand below that of its section
        text = re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE)
        lines += [f"## {title}", "", f"*{newest.name}*", "", text.strip(), ""]
    (generated / "benchmarks.md").write_text("\n".join(lines))


def is_foreign(app: object, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Leave out members that other packages define: those of NumPyro's distributions, of tuples and lists."""
    defined = getattr(member, "fget", None) or getattr(member, "func", None) or member
    module = getattr(defined, "__module__", None)
    if what == "class" and callable(defined) and not str(module).startswith("numpyro_ext"):
        return True
    return None


def setup(app: Any) -> dict[str, bool]:
    """The part of an extension of Sphinx."""
    write_generated_pages(Path(__file__).parent)
    app.connect("autodoc-skip-member", is_foreign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
