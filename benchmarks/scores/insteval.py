"""Engines on InstEval, 73,421 marks of lecturers by students, beside published estimates: a section of the scoreboard.

``python -m benchmarks.scores.insteval`` measures what ``results/scoreboard.json`` lacks and writes it there; names of
engines after it measure these alone. The data are not part of the project: ``NUMPYRO_EXT_DATA`` names their folder.
"""

from __future__ import annotations

import gzip
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random

import numpyro_ext.infer as engines
from numpyro_ext.datasets import data_path

from ..harness import complete_scoreboard, first_and_next, in_words, table_head

__all__ = ["insteval_section", "measure"]

ENGINES = {"Laplace": "LaplaceApproximation"}
MAXIMUM = {"of_students": 0.324681, "of_lecturers": 0.508347, "noise": 1.176745}
"""Deviations of greatest likelihood, from the documentation of MixedModels.jl."""
Entry = dict[str, Any]


def evaluations(cell: np.ndarray, student: np.ndarray, lecturer: np.ndarray, mark: Any = None) -> None:
    """Marks by cell of service and department, with effects of students and of lecturers."""
    cells = numpyro.sample("cells", dist.Normal(3.0, 10.0).expand([int(cell.max()) + 1]).to_event(1))
    of_students = numpyro.sample("of_students", dist.HalfNormal(5.0))
    of_lecturers = numpyro.sample("of_lecturers", dist.HalfNormal(5.0))
    noise = numpyro.sample("noise", dist.HalfNormal(5.0))
    students = numpyro.sample("students", dist.Normal(0.0, of_students).expand([int(student.max()) + 1]).to_event(1))
    lecturers = numpyro.sample(
        "lecturers", dist.Normal(0.0, of_lecturers).expand([int(lecturer.max()) + 1]).to_event(1)
    )
    numpyro.sample("mark", dist.Normal(cells[cell] + students[student] + lecturers[lecturer], noise), obs=mark)


def data() -> tuple[np.ndarray, ...]:
    """Cell of service and department, student, lecturer and mark, a row each."""
    with gzip.open(data_path("insteval", "insteval.csv.gz"), "rt", encoding="utf-8") as lines:
        names = next(lines).strip().split(",")
        columns = dict(zip(names, np.loadtxt(lines, int, delimiter=",").T, strict=True))
    student, lecturer, department = (np.unique(columns[n], return_inverse=True)[1] for n in ("s", "d", "dept"))
    cell = np.unique(2 * department + columns["service"], return_inverse=True)[1]
    return cell, student, lecturer, columns["y"].astype(float)


def measure(name: str) -> Entry:
    """Means and standard deviations of the three deviations by one engine, and its CPU-seconds."""
    engine, args = getattr(engines, ENGINES[name])(evaluations, progress_bar=False), data()

    def run(seed: int) -> dict[str, list[float]]:
        engine.run(random.key(seed), *args)
        marginals = {site: engine.posterior[site] for site in MAXIMUM}
        return {site: [round(float(m.mean), 5), round(float(m.sd), 5)] for site, m in marginals.items()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        moments, first, later = first_and_next(run)
    told = {"converged": bool(engine.diagnostics.converged), "messages": list(engine.diagnostics.messages)}
    return {"moments": moments, "first": round(first, 1), "next": round(later, 1), **told}


def insteval_section(entries: Mapping[str, Entry], environment: Mapping[str, str]) -> str:
    """Section of the page; nothing if no engine has run."""
    if not entries:
        return ""
    rows, lost = [], []
    for name, entry in entries.items():
        gaps = {site: (entry["moments"][site][0] - MAXIMUM[site]) / entry["moments"][site][1] for site in MAXIMUM}
        cells = [f"{m:.4f} ± {sd:.4f} ({gaps[site]:+.2f})" for site, (m, sd) in entry["moments"].items()]
        rows.append(f"| {' | '.join([name, *cells, str(entry['first']), str(entry['next'])])} |")
        lost += [f"- {name}, `{site}`: {gap:+.2f} sd." for site, gap in gaps.items() if abs(gap) > 1.0]
        if not entry["converged"]:
            lost.append(f"- {name} has not converged: {' '.join(entry['messages'])}")
    heads = " | ".join(["deviations", *(f"`{site}`" for site in MAXIMUM), "first, s", "next, s"])
    best = " | ".join(f"{value:.4f}" for value in MAXIMUM.values())
    words = chr(10).join(["", "", *lost, ""]) if lost else "none."
    return f"""
## InstEval

73,421 marks from 1 to 5 that 2,972 students of ETH Zurich gave 1,128 lecturers: means by cell of service and
department, and normal effects of students and of lecturers (`benchmarks/scores/insteval.py`). The first row has the
estimates of greatest likelihood that [MixedModels.jl](https://juliastats.org/MixedModels.jl/stable/constructors/)
documents for `y ~ 1 + service * dept + (1|s) + (1|d)`. A cell has the mean of a deviation, its standard deviation and,
in brackets, the distance to the estimate in these. The engine integrates over the 28 means, as restricted likelihood
does, whose deviations are somewhat larger. Other processes ran beside it.

{chr(10).join([*table_head(heads), f"| greatest likelihood | {best} |  |  |", *rows])}

Losses, which are more than one standard deviation from the estimate: {words}
Not run: lme4 and glmmTMB, as R is not on this machine; on simulated marks of this size they took 44 and 105
CPU-seconds (`benchmarks/results`, crossed effects).

Measured by `python -m benchmarks.scores.insteval`: {in_words(environment)}.
"""


def main(names: Sequence[str]) -> None:
    """Measure what the results lack, and write each as it ends."""
    complete_scoreboard("insteval", names or ENGINES, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
