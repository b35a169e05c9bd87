"""Number of traits of the IPIP-50: ``python -m benchmarks.items.trait_numbers WORK`` writes the table.

Experiments of Houlsby (2014, sections 8.3 and 8.4) on open data: 500 and 5000 people, 80 % of whose answers are there
to learn from; factor analysis (GFA) with 1 to 20 traits by ``variational_em``, with the loadings of the five scales
(GFA-BIG5) and random ones (GFA-rand); graded and partial-credit items (MIRT) with one and two traits by
``AdaptiveQuadrature`` and with three and four by ``EP``. Data are below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.special import expit
from scipy.stats import norm

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import EP, AdaptiveQuadrature, LatentGaussianRows, pit_histogram, variational_em
from numpyro_ext.models import item_response
from numpyro_ext.potentials import GaussianPotential
from numpyro_ext.psychometrics import (
    bic,
    canonical_correlations,
    category_probabilities,
    chance_levels,
    exponentiated_log_likelihood,
    fraction_correct,
    response_of,
    smallest_sufficient_dimension,
)

from ..harness import Study, blocks, cpu_seconds, table_head

DIMENSIONS = {500: (1, 2, 3, 4, 5, 6, 8, 10, 20), 5000: (1, 2, 5, 8, 10, 20)}
REPEATS = {500: 5, 5000: 1}
MIRT = {"graded": "MIRT graded", "generalised-partial-credit": "MIRT partial credit"}
MIRT_TRAITS = 1, 2, 3, 4
MIRT_REPEATS = 1
SCALES = "ENACO"
REVERSED = {"E": (2, 4, 6, 8, 10), "N": (2, 4), "A": (1, 3, 5, 7), "C": (2, 4, 6, 8), "O": (2, 4, 6)}
KEY = np.kron(np.eye(5), np.ones((10, 1)))
CUTS = np.array([-np.inf, 1.5, 2.5, 3.5, 4.5, np.inf])
NUM_STEPS, NUM_DRAWS = 150, 200


@cache
def ipip() -> np.ndarray:
    """Answers 1 to 5 of 15,000 people to 50 items, reversed items turned round, nan where there is none."""
    frame = pd.read_csv(data_path("ipip-big5", "big5_first15000.csv.gz"))
    columns = []
    for scale in SCALES:
        for k in range(1, 11):
            column = frame[f"{scale}{k}"].to_numpy(float)
            column[column == 0] = np.nan
            columns.append(6 - column if k in REVERSED[scale] else column)
    return np.stack(columns, -1)


def synthetic(rng: np.random.Generator, number: int, num_items: int = 100, dimension: int = 10) -> np.ndarray:
    """Answers 1 to 5 drawn from factor analysis with ten traits, in five equally frequent categories."""
    loadings = rng.normal(size=(num_items, dimension)) / np.sqrt(dimension)
    y = rng.normal(size=(number, dimension)) @ loadings.T + rng.normal(size=(number, num_items))
    return 1.0 + np.searchsorted(norm.ppf([0.2, 0.4, 0.6, 0.8]) * np.sqrt(2.0), y)


def graded(rng: np.random.Generator, number: int, num_items: int = 50) -> np.ndarray:
    """Answers 1 to 5 drawn from graded items with one trait."""
    slope, cuts = np.exp(0.3 * rng.normal(size=num_items)), np.sort(1.5 * rng.normal(size=(num_items, 4)), axis=1)
    eta = slope * rng.normal(size=(number, 1))
    above = expit(eta[..., None] - cuts)
    return 1.0 + (rng.random((number, num_items, 1)) < above).sum(-1)


def _divided(answers: np.ndarray, seed: int) -> tuple[np.ndarray, np.random.Generator]:
    """Cells that are held out, a fifth of all that have an answer, and the generator that drew them."""
    rng = np.random.default_rng(seed)
    return np.isfinite(answers) & (rng.random(answers.shape) < 0.2), rng


def _scores(p: np.ndarray, answers: np.ndarray, held: np.ndarray) -> dict[str, float]:
    """Scores of probabilities ``(people, items, 5)``."""
    own = np.where(np.isfinite(answers), answers, 1).astype(int) - 1
    log_p = np.log(np.maximum(np.take_along_axis(p, own[..., None], -1)[..., 0], 1e-300))
    upper = np.take_along_axis(np.cumsum(p, -1), own[..., None], -1)[..., 0]
    lower = upper - np.take_along_axis(p, own[..., None], -1)[..., 0]
    limits = np.clip(lower[held], 0.0, 1.0), np.clip(upper[held], 0.0, 1.0)
    return {
        "test": exponentiated_log_likelihood(log_p[held]),
        "train": exponentiated_log_likelihood(log_p[np.isfinite(answers) & ~held]),
        "correct": fraction_correct(p[held], own[held]),
        "kl": pit_histogram(*limits).kl,
    }


def _fitted(table: np.ndarray, loadings: np.ndarray, learn: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, float]:
    """Loadings, noise variances and the log likelihood of a centred table with gaps, by EM."""
    known = np.isfinite(table)
    rows = LatentGaussianRows(
        mean=jnp.zeros(loadings.shape[1]),
        covariance=jnp.eye(loadings.shape[1]),
        loadings=jnp.asarray(loadings),
        intercept=jnp.zeros(table.shape[1]),
        potentials=(GaussianPotential(jnp.asarray(np.where(known, table, 0.0)), jnp.ones(table.shape[1])),),
        observed=(jnp.asarray(known),),
        weights=jnp.ones(len(table)),
    )
    found = variational_em(rows, learn=tuple(learn), num_steps=NUM_STEPS, progress_bar=False)
    (noise,) = found.rows.potentials
    assert isinstance(noise, GaussianPotential)
    return np.asarray(found.rows.loadings), np.asarray(noise.scale) ** 2, float(found.objective_trace[-1])


def _probabilities(means: np.ndarray, table: np.ndarray, a: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Predictive probabilities of the five categories of each cell, shape ``(people, items, 5)``."""
    known = np.isfinite(table)
    precision = np.eye(a.shape[1]) + np.einsum("np,pd,pe->nde", known / noise, a, a, optimize=True)
    covariance = np.linalg.inv(precision)
    x = (covariance @ ((np.where(known, table, 0.0) / noise) @ a)[..., None])[..., 0]
    spread = np.sqrt(np.einsum("nde,pd,pe->np", covariance, a, a, optimize=True) + noise)
    return np.diff(norm.cdf((CUTS - (x @ a.T + means)[..., None]) / spread[..., None]), axis=-1)


def factor_analyses(answers: np.ndarray, seed: int, dimensions: Sequence[int]) -> list[dict[str, Any]]:
    """Scores of all factor analyses on one division of the answers."""
    held, rng = _divided(answers, seed)
    train = np.where(held, np.nan, answers)
    means = np.nanmean(train, 0)
    number = answers.shape[1]
    models: dict[str, tuple[np.ndarray, tuple[str, ...]]] = {
        f"GFA {d}": (0.5 * rng.normal(size=(number, d)), ("loadings", "noise")) for d in dimensions
    }
    is_real = number == len(KEY)
    if is_real:
        models |= {"GFA-BIG5": (KEY, ("noise",)), "GFA-rand": (rng.normal(size=KEY.shape), ("noise",))}
    rows = []
    for name, (loadings, learn) in models.items():
        a, noise, log_likelihood = _fitted(train - means, loadings, learn)
        found: dict[str, Any] = _scores(_probabilities(means, train - means, a, noise), answers, held)
        if learn[0] == "loadings":
            found["bic"] = bic(log_likelihood, *answers.shape, a.shape[1], free_means=True)
        if name == "GFA 5" and is_real:
            pairs = canonical_correlations(a, KEY[:, :4])  # the five columns of the key sum to a constant
            found |= {"canonical": float(pairs.correlations.mean()), "permuted": float(pairs.permuted.mean())}
        rows.append({"repeat": seed, "model": name, **found})
    return rows


def item_responses(
    answers: np.ndarray, seed: int, traits: Sequence[int], families: Mapping[str, str] = MIRT
) -> list[dict[str, Any]]:
    """Scores of items of each family on the same division; missing answers are left out."""
    held, _ = _divided(answers, seed)
    train = np.where(held, np.nan, answers) - 1
    rows = []
    for family, name in families.items():
        for num_traits in traits:
            make = AdaptiveQuadrature if num_traits < 3 else EP
            engine = make(item_response, num_samples=NUM_DRAWS, progress_bar=False)
            engine.run(jax.random.key(seed), train, family=family, num_traits=num_traits, signed=True)
            response, theta = response_of(engine), engine.get_samples()["trait"]
            p = np.zeros((*answers.shape, 5))
            for draw in theta:
                p += np.asarray(category_probabilities(response, draw)) / NUM_DRAWS
            rows.append({"repeat": seed, "model": f"{name} {num_traits}", **_scores(p, answers, held),
                         "converged": bool(engine.diagnostics.converged)})  # fmt: skip
    return rows


def _table_of(scores: pd.DataFrame) -> list[str]:
    mean = scores.groupby("model", sort=False).mean(numeric_only=True)
    counts = scores.groupby("model", sort=False).size()
    lines = table_head("model | repeats | test LL | train LL | correct | BIC | PIT KL")
    for model, row in mean.iterrows():
        by_bic = f"{row['bic']:.0f}" if np.isfinite(row.get("bic", np.nan)) else ""
        lines.append(
            f"| {model} | {counts[model]} | {row['test']:.4f} | {row['train']:.4f} | {row['correct']:.3f} "
            f"| {by_bic} | {row['kl']:.4f} |"
        )
    return lines


def _gfa(scores: pd.DataFrame) -> tuple[list[int], pd.DataFrame, pd.DataFrame]:
    """Numbers of traits, mean scores of each, and test scores of repeats ``(repeats, dimensions)``."""
    gfa = scores[scores["model"].str.match(r"GFA \d+$")]
    wide = gfa.pivot(index="repeat", columns="model", values="test")
    dimensions = sorted(int(name.split()[1]) for name in wide.columns)
    names = [f"GFA {d}" for d in dimensions]
    return dimensions, gfa.groupby("model").mean(numeric_only=True).loc[names], wide[names]


def _row(number: int, what: str, found: str, is_so: bool) -> str:
    return f"| {what} | {number} | {found} | {'holds' if is_so else 'does not hold'} |"


def _signs(scores: pd.DataFrame, number: int) -> list[str]:
    """Rows that hold the findings of the thesis against the scores."""
    dimensions, gfa, wide = _gfa(scores)
    mean = scores.groupby("model", sort=False).mean(numeric_only=True)
    peak = dimensions[int(gfa["test"].to_numpy().argmax())]
    least = smallest_sufficient_dimension(dimensions, wide.to_numpy()) if len(wide) > 2 else None
    by_bic = dimensions[int(gfa["bic"].to_numpy().argmin())]
    rises = bool(np.all(np.diff(gfa["train"]) > 0))
    five, known, random = (mean.loc[name, "test"] for name in ("GFA 5", "GFA-BIG5", "GFA-rand"))
    canonical, permuted = mean.loc["GFA 5", "canonical"], mean.loc["GFA 5", "permuted"]
    kl = gfa["kl"].to_numpy()
    fall = gfa["test"].iloc[-1] / gfa["test"].max()
    rows = [
        _row(number, "8.1: test LL highest at D in 4 to 10", f"D = {peak}; by BIC {by_bic}"
             + ("" if least is None else f"; smallest that does not differ {least}"), 4 <= peak <= 10),
        _row(number, "8.1: train LL rises", " ".join(f"{value:.3f}" for value in gfa["train"]), rises),
        _row(number, "8.9: GFA above GFA-BIG5 above GFA-rand, D = 5", f"{five:.4f} {known:.4f} {random:.4f}",
             five > known > random),
        _row(number, "8.5: PIT KL falls with D", " ".join(f"{v:.4f}" for v in kl), bool(np.all(np.diff(kl) < 0))),
        _row(number, "8.7: canonical correlations with the key far above permuted", f"{canonical:.2f}, {permuted:.2f}",
             canonical > 2 * permuted),
    ]  # fmt: skip
    if number == min(DIMENSIONS):
        rows.insert(2, _row(number, "8.2: test LL falls for large D",
                            f"{fall:.3f} of the highest at D = {dimensions[-1]}", fall < 0.98))  # fmt: skip
    for traits in MIRT_TRAITS:
        rivals = [f"{name} {traits}" for name in MIRT.values() if f"{name} {traits}" in mean.index]
        if rivals and f"GFA {traits}" in mean.index:
            both = scores[scores["repeat"].isin(set(scores.loc[scores["model"] == rivals[0], "repeat"]))]
            test = both.groupby("model")["test"].mean()
            found = ", ".join(f"{test[name]:.4f}" for name in rivals) + f" against {test[f'GFA {traits}']:.4f}"
            is_above = len(rivals) == 2 and min(test[rivals]) > test[f"GFA {traits}"]
            rows.append(_row(number, f"8.10: both MIRT above GFA, D = {traits}", found, is_above))
    return rows


def some(number: int, seed: int) -> np.ndarray:
    """Answers of so many random people."""
    answers = ipip()
    return answers[np.random.default_rng(100 + seed).permutation(len(answers))[:number]]


def timed(measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of scores with their share of the CPU-seconds."""
    rows, seconds = cpu_seconds(measure)
    return [row | {"seconds": seconds / len(rows)} for row in rows]


def some_gfa(seed: int, number: int) -> list[dict[str, Any]]:
    return timed(lambda: factor_analyses(some(number, seed), seed, DIMENSIONS[number]))


def some_mirt(seed: int, number: int, num_traits: int) -> list[dict[str, Any]]:
    return timed(lambda: item_responses(some(number, seed), seed, (num_traits,)))


def drawn(seed: int) -> list[dict[str, Any]]:
    answers = synthetic(np.random.default_rng(7), 500)
    return timed(lambda: factor_analyses(answers, seed, (5, 8, 10, 12, 15)))


def drawn_graded(seed: int) -> list[dict[str, Any]]:
    answers = graded(np.random.default_rng(8), 500)
    return timed(lambda: item_responses(answers, seed, (1,), {"graded": MIRT["graded"]}))


def main() -> None:
    """Fit all, and write the table and its signs."""
    experiments: dict[str, Callable[[int], Any]] = {"drawn": drawn, "graded": drawn_graded}
    draws = {"drawn": 3, "graded": 1}
    for number in DIMENSIONS:
        experiments[f"GFA of {number}"] = partial(some_gfa, number=number)
        draws[f"GFA of {number}"] = REPEATS[number]
        for traits in MIRT_TRAITS:
            name = f"MIRT {traits} of {number}"
            experiments[name], draws[name] = partial(some_mirt, number=number, num_traits=traits), MIRT_REPEATS
    study = Study(__doc__, experiments, draws=draws)
    found = {name: pd.DataFrame([row for rows in each for row in rows]) for name, each in study.run().items() if each}
    lines, signs = [], table_head("finding | people | found | ")
    for number in (n for n in DIMENSIONS if f"GFA of {n}" in found):
        names = (f"{kind} of {number}" for kind in ("GFA", *(f"MIRT {traits}" for traits in MIRT_TRAITS)))
        parts = [found[name] for name in names if name in found]
        scores, chance = pd.concat(parts, ignore_index=True), chance_levels(ipip()[:number])
        lines += ["", f"## {number} people", "", *_table_of(scores),
                  f"| chance, all answers alike | | {chance.likelihood:.4f} | | {chance.fraction_correct:.3f} | | |",
                  f"| chance by item | | {chance.likelihood_by_item:.4f} | "
                  f"| {chance.fraction_correct_by_item:.3f} | | |",
                  "", f"{scores['seconds'].sum():.0f} CPU-seconds."]  # fmt: skip
        signs += _signs(scores, number)
    if "drawn" in found:
        dimensions, gfa, _ = _gfa(found["drawn"])
        peak = dimensions[int(gfa["test"].to_numpy().argmax())]
        signs.append(_row(500, "8.3: ten traits found where answers were drawn with ten", f"D = {peak}", peak == 10))
        lines += ["", "## 500 people and 100 items drawn with ten traits", "", *_table_of(found["drawn"])]
    if "graded" in found:
        kl, what = float(found["graded"]["kl"].mean()), "8.5: PIT KL near zero at the model that drew the answers"
        signs.append(_row(500, f"{what} (graded, D = 1)", f"{kl:.4f}", kl < 0.002))
    what = "LL is the geometric mean of the probabilities of answers; 80 % of them are there to learn from."
    study.write(
        "trait-numbers",
        blocks(
            "# Numbers of traits of the IPIP-50",
            what,
            [*signs, *lines],
        ),
    )


if __name__ == "__main__":
    main()
