"""Item-response models by ``AdaptiveQuadrature``: first and next fits, and the floor of their products.

``python -m benchmarks.items.quadrature`` writes ``results/<date>-item-response.md``. Items are ``param`` sites:
maximum marginal likelihood with standard errors. Each row has a process of its own without programs kept on the disk,
so that its first fit compiles all of its own; the next one has another key and the same data.
Data are below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import random

from numpyro_ext.datasets.external import data_path
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import item_response

from ..harness import COLD, Study, blocks, first_and_next, shortest, table

PRODUCTS = 4
"""Products of answers and table in an evaluation: two, and two of its gradient."""


class Case(NamedTuple):
    """Data and family of a row, its exact log likelihood, and CPU-seconds of ``mirt`` where they were reported."""

    data: str
    family: str
    exact: float
    peer: float | None = None
    num_people: int | None = None
    num_traits: int = 1


CASES = {
    "LSAT6, 2PL": Case("lsat6", "2pl", -2466.6534, 0.01),
    "simulated 4,000 x 50, 2PL": Case("simulated", "2pl", -113490.714, 0.38),
    "verbal aggression, graded": Case("verbagg", "graded", -6285.8175),
    "verbal aggression, GPCM": Case("verbagg", "generalised-partial-credit", -6298.4964),
    "extraversion, 4,000 rows, graded": Case("extraversion", "graded", -53855.228, 0.54, 4000),
    "extraversion, 15,000 rows, graded": Case("extraversion", "graded", -202282.024, 1.7, 15000),
    "extraversion, 4,000 rows, GPCM": Case("extraversion", "generalised-partial-credit", -54340.575, None, 4000),
    # 0.3 of the 27 of mirt by EM on 15 x 15 nodes
    "simulated 2,000 x 50, two traits, 2PL": Case("two traits", "2pl", -57496.6157, 8.1, 2000, num_traits=2),
}


def answers(case: Case) -> np.ndarray:
    """Answers from zero, shape ``(people, items)``; even items of extraversion are reversed."""
    if case.data == "simulated":
        r = np.random.default_rng(0)
        trait, slope, difficulty = r.normal(size=4000), np.exp(0.3 * r.normal(size=50)), r.normal(size=50)
        return (r.random((4000, 50)) < 1 / (1 + np.exp(-slope * (trait[:, None] - difficulty)))).astype(int)
    if case.data == "two traits":
        r = np.random.default_rng(0)
        traits, slopes = r.normal(size=(2000, 2)), np.exp(0.3 * r.normal(size=(50, 2)))
        slopes[:25, 1] *= 0.3
        slopes[25:, 0] *= 0.3
        slopes[0, 1] = 0.0
        logits = traits @ slopes.T + r.normal(size=50)
        return (r.random((2000, 50)) < 1 / (1 + np.exp(-logits))).astype(int)
    if case.data == "lsat6":
        return pd.read_csv(data_path("irt", "lsat6.csv")).to_numpy().astype(int)
    if case.data == "verbagg":
        table = pd.read_csv(data_path("irt", "verbagg_long.csv.gz"))
        table["code"] = table["resp"].map({"no": 0, "perhaps": 1, "yes": 2})
        return table.pivot(index="id", columns="item", values="code").to_numpy()
    table = pd.read_csv(data_path("ipip-big5", "big5_first15000.csv.gz"), sep=None, engine="python")
    found = table[[f"E{number}" for number in range(1, 11)]].to_numpy()[: case.num_people] - 1
    found[:, 1::2] = 4 - found[:, 1::2]
    return found


def measure(draw: int, name: str) -> dict[str, Any]:
    """CPU-seconds of two fits in this process, their log likelihood, and the time that their products take."""
    case = CASES[name]
    y = answers(case)
    options: dict[str, Any] = {}
    if case.num_traits > 1:  # the first item measures the first trait alone, so that nothing can be rotated
        pattern = np.ones((y.shape[1], case.num_traits), int)
        pattern[0, 1:] = 0
        options = {"pattern": pattern, "signed": True}

    def run(number: int) -> tuple[AdaptiveQuadrature, list[Any]]:
        engine = AdaptiveQuadrature(partial(item_response, family=case.family, **options), progress_bar=False)
        engine.run(random.key(number), y)
        return engine, [value.standard_error for value in engine.hyper.values()]

    (engine, _), first, later = first_and_next(run)
    diagnostics, num_nodes = engine.diagnostics, engine._run.algorithm.num_nodes**case.num_traits  # type: ignore[union-attr]
    one_hot = jnp.asarray((y[:, :, None] == np.arange(y.max() + 1)).reshape(len(y), -1), float)
    product = shortest(jax.jit(jnp.matmul), one_hot, jnp.ones((one_hot.shape[1], num_nodes)), rounds=10)
    evaluations = int(diagnostics.hyper.num_evaluations)
    return {
        "first": first,
        "next": later,
        "log_likelihood": float(engine.log_evidence),
        "converged": bool(diagnostics.converged),
        "evaluations": evaluations,
        "nodes": num_nodes,
        "floor": PRODUCTS * evaluations * product,
    }


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, case in CASES.items():
        for one in found[name]:
            times = f"{one['first']:.1f}", 5, f"{one['next']:.2f}", case.peer, f"{one['floor']:.2f}"
            off = f"{one['log_likelihood'] - case.exact:+.1e}"
            rest = one["nodes"], one["evaluations"], 25, f"{one['log_likelihood']:.4f}", off, one["converged"]
            yield name, *times, *rest


def main() -> None:
    study = Study(__doc__, {name: partial(measure, name=name) for name in CASES}, environment=COLD)
    found = study.run()
    lines = blocks(
        "# Item-response models by quadrature",
        "CPU-seconds of a fit by maximum marginal likelihood with standard errors, in a new process that finds no "
        "programs on the disk and again, and what is wanted of them: at most 5 of the first fit, and of the next "
        "one no more than `mirt` with SQUAREM, of two traits 0.3 of its EM (its times are as they were first reported, "
        "on a machine of this kind, and not measured again). `off` is the difference to the exact maximum. Where the "
        "first rule is not exact to 1e-4 the fit is made again with more nodes: evaluations and the floor, four "
        "products of answers and table for each evaluation, are then those of the last fit alone, and the times those "
        "of all.",
        table(
            "data and model | first | wanted | next | mirt, wanted | floor | nodes | evaluations | wanted "
            "| log likelihood | off | converged",
            _rows(found),
        ),
    )
    study.write("item-response", lines)


if __name__ == "__main__":
    main()
