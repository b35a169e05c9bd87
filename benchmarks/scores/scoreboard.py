"""Engines beside the reference draws of posteriordb, and the page of all scores: ``make scoreboard``.

Every fit is one entry of ``results/scoreboard.json``, written as it ends, so that a run that was stopped goes on.
``docs/scoreboard.md`` is made from that file alone; ``--page`` does no more than that.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import numpyro_ext.infer as engines

from ..harness import SCOREBOARD as RESULTS
from ..harness import complete_scoreboard, first_and_next, in_words
from .insteval import insteval_section
from .park import park_section
from .posteriordb_models import POSTERIORS, reference_moments
from .simulations import simulations_section

__all__ = ["DOCUMENT", "RESULTS", "measure", "page_of"]

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "scoreboard.md"
ENGINES = {"EP": "EP", "Laplace": "LaplaceApproximation", "INLA": "INLA", "VG": "VariationalGaussian"}
LARGEST_GAP, LARGEST_RATIO = 0.1, 1.1
"""Gap of means in standard deviations, and factor between standard deviations, beyond which a fit is lost."""
_TARGET_MEDIAN, _TARGET_LARGEST, _TIE = 0.02, 0.1, 0.02
_HEADER = ("engine", "fitted", "median gap, sd", "largest", "farthest ratio", "first, s", "next, s", "lost")
Entry = dict[str, Any]


def measure(name: str, engine_name: str, reference: Mapping[str, Mapping[str, float]]) -> Entry:
    """Gaps of one fit to the reference, and its CPU-seconds; what an engine refuses is its own sentence."""
    posterior = POSTERIORS[name]
    args = posterior.data(name)
    options = {} if posterior.field is None else {"field": list(posterior.field)}

    def run(seed: int) -> dict[str, tuple[Any, Any]]:
        engine.run(jax.random.key(seed), *args)
        return {site: (np.asarray(p.mean), np.asarray(p.sd)) for site, p in engine.posterior.items()}

    try:
        engine = getattr(engines, ENGINES[engine_name])(posterior.model, progress_bar=False, **options)
        moments, first, later = first_and_next(run)
    except Exception as error:  # it stands in the list of losses
        return {"refused": f"{type(error).__name__}: {error}"}
    entry: Entry = _gaps(moments, reference)
    entry |= {"first": round(first, 2), "next": round(later, 2)}
    entry["converged"] = bool(engine.diagnostics.converged)
    entry["messages"] = list(engine.diagnostics.messages)
    if is_lost(entry):
        entry |= _told(engine, reference)
    return entry


def _gaps(moments: Mapping[str, tuple[Any, Any]], reference: Mapping[str, Mapping[str, float]]) -> Entry:
    """Largest gap of means, in standard deviations of the reference, and the farthest ratio of these to one."""
    names, gaps, ratios = list(reference), [], []
    for parameter, exact in reference.items():
        site, _, index = parameter.removesuffix("]").partition("[")
        place = tuple(int(i) - 1 for i in index.split(",")) if index else ()
        mean, sd = (float(np.asarray(values)[place]) for values in moments[site])
        gaps.append((mean - exact["mean"]) / exact["sd"])
        ratios.append(sd / exact["sd"])
    worst = int(np.argmax(np.abs(gaps)))
    farthest = int(np.argmax(np.abs(np.log(np.maximum(ratios, 1e-9)))))
    return {
        "gap": round(gaps[worst], 4),
        "gap_at": names[worst],
        "gap_error": round(reference[names[worst]]["mcse"] / reference[names[worst]]["sd"], 4),
        "ratio": round(ratios[farthest], 4),
        "ratio_at": names[farthest],
    }


def _told(engine: Any, reference: Mapping[str, Mapping[str, float]]) -> Entry:
    """Answers of the checks that a user has without a reference; exact draws also check the model itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            exact = engine.sample_exactly(jax.random.key(3), 1000, num_chains=2)
    except Exception as error:  # a check that does not run is none
        return {"agreement": f"{type(error).__name__}: {error}"}
    draws = {site: np.asarray(values) for site, values in exact.get_samples().items()}
    gaps = _gaps({site: (values.mean(0), values.std(0)) for site, values in draws.items()}, reference)
    found = {"agreement": exact.agreement.word, "exact_gap": gaps["gap"], "exact_ratio": gaps["ratio"]}
    return found | {"kernel": type(exact.sampler).__name__}


def is_lost(entry: Entry) -> bool:
    """True if a fit is refused, has not converged, or is too far from the reference."""
    if "refused" in entry:
        return True
    is_near = abs(entry["gap"]) <= LARGEST_GAP and 1 / LARGEST_RATIO <= entry["ratio"] <= LARGEST_RATIO
    return not (is_near and entry["converged"])


def is_told(entry: Entry) -> bool:
    """True if something other than the reference says that a fit is poor."""
    return not entry["converged"] or bool(entry["messages"]) or entry.get("agreement") == "off"


def _distance(entry: Entry) -> float:
    """Larger of the gap of means and the logarithm of the ratio."""
    return max(abs(entry["gap"]), abs(float(np.log(max(entry["ratio"], 1e-9)))))


def winner(entries: Mapping[str, Entry]) -> str:
    """Engine nearest to the reference; of those within its error of the nearest, the one whose next run is fastest."""
    near = {name: _distance(e) for name, e in entries.items() if "refused" not in e and e["converged"]}
    if not near:
        return "none"
    tied = [name for name, distance in near.items() if distance <= min(near.values()) + _TIE]
    return min(tied, key=lambda name: float(entries[name]["next"]))


def page_of(results: Mapping[str, Any]) -> str:
    """Text of the page."""
    fits: Mapping[str, Mapping[str, Entry]] = results["posteriors"]
    number = {engine: sum(engine in fits.get(name, {}) for name in POSTERIORS) for engine in ENGINES}
    lost = list(_losses(fits))
    told = [is_told(entry) for _, _, entry in lost if "refused" not in entry]
    missing = [f"{engine} on {len(POSTERIORS) - n}" for engine, n in number.items() if n < len(POSTERIORS)]
    rows = [
        [name, *(_cell(fits.get(name, {}).get(engine)) for engine in ENGINES), winner(fits.get(name, {}))]
        for name in POSTERIORS
    ]
    return f"""# Scoreboard

Engines beside reference draws, beside the truth of simulated data, and beside NUTS. Every loss stands in a list.

## Posteriors of posteriordb

[posteriordb](https://github.com/stan-dev/posteriordb) has reference draws of 46 posteriors, of which
{len(POSTERIORS)} have a Gaussian part given their other parameters. They are written as NumPyro functions from their
Stan programs (`benchmarks/scores/posteriordb_models.py`) and fitted by each engine with its defaults. The reference is
10 chains of 1000 draws of NUTS, whose own errors are about 0.01 sd and 1 %, and more where its chains were slow.

A cell has the largest gap of means over all parameters, scales and lengths included, in standard deviations of the
reference; the ratio of standard deviations that is farthest from one; and the CPU-seconds of the first run, which
compiles, and of the next. Every engine compares the density that it has read with NumPyro's before it runs. Most rows
are linear regressions with normal noise, in which the engines differ in how they treat its scale and in nothing else.

{_table(_HEADER, _summaries(fits))}

Seconds are medians. A median gap of at most {_TARGET_MEDIAN} sd and a largest of at most {_TARGET_LARGEST} sd are asked
for. {_verdicts(fits)}

### All posteriors

{_table(["posterior", *ENGINES, "won"], rows)}

The winner is nearest to the reference; of engines within {_TIE} of the nearest, the one whose next run is fastest. Bold
is lost.

### Losses

A fit is lost where it is refused, has not converged, has a mean off by more than {LARGEST_GAP} sd, or a standard
deviation off by more than a factor of {LARGEST_RATIO}. These are {len(lost)} of {sum(number.values())} fits. Of the
{len(told)} that have an answer all the same, {sum(told)} are told: by a message of the run, or by the agreement with
exact draws (`engine.sample_exactly`). The draws' own gap to the reference, with 2 chains of 1000,
checks the model as it is written here.

{chr(10).join(f"- **{name}**, {engine}: {_reason(entry)}" for name, engine, entry in lost) or "None."}

Not run: {", ".join(missing) or "none"}. Not in the table, as they have no Gaussian part: `garch11`, `hmm_example`,
`hmm_drive_0`, `hmm_drive_1`, `lotka_volterra`, `low_dim_gauss_mix` and `one_comp_mm_elim_abs`.

Measured by `make scoreboard`: {in_words(results["posteriors_environment"])}.
{simulations_section(results.get("simulations", {}), results.get("simulations_environment", {}))}\
{park_section(results.get("park", {}), results.get("park_environment", {}))}\
{insteval_section(results.get("insteval", {}), results.get("insteval_environment", {}))}"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _answered(engine: str, fits: Mapping[str, Mapping[str, Entry]]) -> list[Entry]:
    found = [fits.get(name, {}).get(engine) for name in POSTERIORS]
    return [entry for entry in found if entry is not None and "refused" not in entry]


def _summaries(fits: Mapping[str, Mapping[str, Entry]]) -> Iterator[list[str]]:
    for engine in ENGINES:
        found = _answered(engine, fits)
        if found:
            gaps = np.abs([entry["gap"] for entry in found])
            ratio = max((entry["ratio"] for entry in found), key=lambda r: abs(float(np.log(max(r, 1e-9)))))
            first, later = (np.median([entry[key] for entry in found]) for key in ("first", "next"))
            lost = sum(is_lost(entries[engine]) for entries in fits.values() if engine in entries)
            figures = f"{np.median(gaps):.3f} {gaps.max():.3f} {ratio:.3f} {first:.1f} {later:.2f} {lost}"
            yield [engine, str(len(found)), *figures.split()]


def _verdicts(fits: Mapping[str, Mapping[str, Entry]]) -> str:
    """Sentence that says who meets the targets and who misses them."""
    said = []
    for engine in ENGINES:
        gaps = np.abs([entry["gap"] for entry in _answered(engine, fits)])
        if gaps.size:
            met = np.median(gaps) <= _TARGET_MEDIAN, gaps.max() <= _TARGET_LARGEST
            said.append(f"{engine}: " + ", ".join("met" if is_met else "missed" for is_met in met))
    return "; ".join(said) + "." if said else ""


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    if "refused" in entry:
        return "**refused**"
    text = f"{abs(entry['gap']):.3f}, {entry['ratio']:.2f}; {entry['first']:.1f}, {entry['next']:.2f} s"
    return f"**{text}**" if is_lost(entry) else text


def _losses(fits: Mapping[str, Mapping[str, Entry]]) -> Iterator[tuple[str, str, Entry]]:
    for name in POSTERIORS:
        for engine, entry in fits.get(name, {}).items():
            if is_lost(entry):
                yield name, engine, entry


def _reason(entry: Entry) -> str:
    if "refused" in entry:
        return "refused. " + " ".join(entry["refused"].split())
    said = (
        f"mean of `{entry['gap_at']}` {entry['gap']:+.2f} sd, sd of `{entry['ratio_at']}` times {entry['ratio']:.2f}. "
    )
    said += "Told. " if is_told(entry) else "**Not told.** "
    said += f"Agreement with exact draws: {entry.get('agreement', 'not asked')}"
    if "exact_gap" in entry:
        # entries without a kernel are from before there was another one
        kernel = {"Rotations": "quarter turns"}.get(entry.get("kernel", "NUTS"), "NUTS")
        said += f" ({kernel}), whose own gap is {entry['exact_gap']:+.2f} sd, times {entry['exact_ratio']:.2f}"
    return said + "." + "".join(f" “{' '.join(message.split())}”" for message in entry["messages"])


def main() -> None:
    """Measure what the results do not hold, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--only", nargs="*", default=list(POSTERIORS))
    parser.add_argument("--page", action="store_true", help="write the page, and measure nothing")
    arguments = parser.parse_args()
    if not arguments.page:
        reference = reference_moments()

        def fits_of(name: str, engine: str) -> Entry:
            """Fits of a posterior that are known, and that by one engine more."""
            known = json.loads(RESULTS.read_text())["posteriors"].get(name, {})
            return known | {engine: measure(name, engine, reference[name])}

        for engine in arguments.engines:
            complete_scoreboard("posteriors", arguments.only, partial(fits_of, engine=engine), needed=[engine])
    DOCUMENT.write_text(page_of(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
