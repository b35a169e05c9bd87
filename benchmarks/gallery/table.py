"""The gallery fitted by every engine and by NUTS: ``python -m benchmarks.gallery.table WORK`` writes docs/gallery.md.

``WORK`` is a folder that keeps what has been fitted, one file for a model, so that a run that was ended goes on;
``--part 0/2`` and ``--part 1/2`` in two processes share the models. The table is written at the end, or alone with
``--table``. NUTS takes most of the hour.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpyro

from tests.gallery import MODELS

from ..harness import blocks, run_environment, table_head
from .fits import CHAINS, ENGINES, LIMITS, OTHER_HOW, Moments, fit_all, moments_of_quantiles, variants

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "gallery.md"
_SHORT = {"LaplaceApproximation": "Laplace", "VariationalGaussian": "VG"}
_FAR = 0.2
_ON_DESIGNS = (
    'The default, `integrate="auto"`, is a lattice for one and two hyperparameters, points that follow the density',
    "for three to twenty, and a normal approximation beyond. A normal approximation for all would need fewer fits; its",
    "spreads are off by two to four times as much in the median. These rows were measured before it had the skewness",
    "of the density, as it has now.",
)


def _gaps(found: dict[str, Any], engine: str, part: str = "field") -> tuple[float, float] | None:
    """Gaps of the field, or of hyperparameters: root mean squares of the differences of their centres, in spreads of
    NUTS, and of the logarithms of the ratios of the spreads; none where there is nothing to compare."""
    reference = found.get("NUTS")
    if reference is None or not reference.get("trusted"):
        return None
    return gaps_between(_own(found, engine, part), reference["moments"])


def _own(found: dict[str, Any], engine: str, part: str) -> Moments:
    """Centres and spreads as an engine has them; what it sets to a point is not among them."""
    if part == "field":
        return found.get(engine, {}).get("moments", {})
    quantiles, positive = found.get(engine, {}).get("quantiles", {}), found["NUTS"]["positive"]
    return {site: moments_of_quantiles(np.array(ends), site in positive) for site, ends in quantiles.items()}


def gaps_between(own: Moments, reference: Moments) -> tuple[float, float] | None:
    """Root mean squares over the elements of all sites that both have: of the differences of the centres in spreads of
    the reference, and of the logarithms of the ratios of the spreads."""
    pairs = [np.array([*own[site], *reference[site]]) for site in own if site in reference]
    if not pairs:
        return None
    centre, spread, expected, scale = np.concatenate(pairs, axis=1)
    known = (scale > 1e-9) & (spread > 0.0)
    if not known.any():
        return None
    differences, ratios = (centre - expected)[known] / scale[known], np.log(spread[known] / scale[known])
    return float(np.sqrt(np.mean(differences**2))), float(np.sqrt(np.mean(ratios**2)))


def _own_error(found: dict[str, Any], part: str) -> tuple[float, float] | None:
    """Error of the reference itself: half the gap between its two chains."""
    published = MODELS[found["name"]]
    sites = published.field if part == "field" else published.hyper
    one, other = ({n: m for n, m in chain.items() if n in sites} for chain in found["NUTS"]["chains"])
    gaps = gaps_between(one, other)
    return None if gaps is None else (0.5 * gaps[0], 0.5 * gaps[1])


def _quantiles(gaps: Iterable[tuple[float, float]]) -> str:
    centre, spread = np.array(list(gaps)).T
    return (
        f"{len(centre)} | {np.median(centre):.3f} | {np.quantile(centre, 0.9):.2f} "
        f"| {np.expm1(np.median(spread)):.1%} | {np.expm1(np.quantile(spread, 0.9)):.0%}"
    )


def _summary(fits: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield from table_head(
        "fields | models | mean: median | 90 % | sd: median | 90 % | first fit, CPU-s: median | NUTS there"
    )
    for engine in variants(ENGINES):
        found = {name: gaps for name, fit in fits.items() if (gaps := _gaps(fit, engine)) is not None}
        seconds, other = (np.median([fits[name][who]["seconds"] for name in found]) for who in (engine, "NUTS"))
        yield f"| {_label(engine)} | {_quantiles(found.values())} | {seconds:.1f} | {other:.1f} |"
    yield f"| NUTS itself | {_quantiles(_own_errors(fits, 'field'))} | | |"
    yield ""
    yield from table_head("hyperparameters | models | centre: median | 90 % | spread: median | 90 %")
    for engine in (name for name in variants(ENGINES) if not name.endswith("none")):
        yield f"| {_label(engine)} | {_quantiles(_all_gaps(fits, engine, 'hyper'))} |"
    yield f"| NUTS itself | {_quantiles(_own_errors(fits, 'hyper'))} |"


def _all_gaps(fits: dict[str, dict[str, Any]], engine: str, part: str) -> list[tuple[float, float]]:
    return [gaps for fit in fits.values() if (gaps := _gaps(fit, engine, part)) is not None]


def _own_errors(fits: dict[str, dict[str, Any]], part: str) -> list[tuple[float, float]]:
    trusted = [fit for fit in fits.values() if fit.get("NUTS", {}).get("trusted")]
    return [gaps for fit in trusted if (gaps := _own_error(fit, part)) is not None]


def _designs(fits: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Gaps of hyperparameters by their number, as the default of ``integrate`` has them and by a normal density."""
    yield from table_head("hyperparameters | `integrate=` | models | centre: median | 90 % | spread: median | 90 %")
    for low, high in ((1, 1), (2, 2), (3, 5), (6, 20)):
        some = {name: fit for name, fit in fits.items() if low <= (fit.get("num_hyper") or 0) <= high}
        both = {n: fit for n, fit in some.items() if all(_gaps(fit, e, "hyper") for e in ("EP auto", OTHER_HOW))}
        for engine, how in (("EP auto", '"auto"'), (OTHER_HOW, '"normal"')):
            if both:
                size = f"{low}" if low == high else f"{low} to {high}"
                yield f"| {size} | `{how}` | {_quantiles(_all_gaps(both, engine, 'hyper'))} |"


def _label(variant: str) -> str:
    name, *how = variant.split()
    return _SHORT.get(name, name) + (", at the optimum" if how == ["none"] else "")


def _rows(fits: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield from table_head(
        "model | source | " + " | ".join(_SHORT.get(name, name) for name in ENGINES) + " | NUTS | other engines"
    )
    for name, fit in fits.items():
        published, cells = MODELS[name], []
        for engine in (name if name in fit else f"{name} auto" for name in ENGINES):
            parts = [_gaps(fit, engine, part) for part in ("field", "hyper")]
            own = fit.get(engine, {"converged": True})
            text = "" if engine not in fit else "fails" if "error" in own else "fitted"
            text = "; ".join(f"{gaps[0]:.2f}, {np.expm1(gaps[1]):.0%}" for gaps in parts if gaps) or text
            cells.append(text + ("" if own["converged"] else " ¹") + (" ²" if own.get("edges") else ""))
        nuts = fit.get("NUTS", {"trusted": True, "way": "none"})
        cells.append({"as written": ""}.get(nuts.get("way"), nuts.get("way")) if nuts.get("trusted") else "not trusted")
        others = ", ".join(sorted(published.engines - set(ENGINES)))
        yield f"| `{name}` | {published.source} | " + " | ".join(cells) + f" | {others} |"


def _largest(fits: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Runs that have converged, with hyperparameters farther from NUTS than a fifth of their spread."""
    for name, fit in fits.items():
        for engine in (name if name in fit else f"{name} auto" for name in ENGINES):
            gaps = _gaps(fit, engine, "hyper")
            if gaps and fit[engine]["converged"] and (gaps[0] > _FAR or np.expm1(gaps[1]) > _FAR):
                error = _own_error(fit, "hyper") or (np.nan, np.nan)
                yield (
                    f"| `{name}` | {_label(engine)} | {gaps[0]:.2f} | {np.expm1(gaps[1]):.0%} "
                    f"| {error[0]:.2f}, {np.expm1(error[1]):.0%} | {' '.join(fit[engine]['messages'])[:160]} |"
                )


def write_table(work: Path) -> None:
    """Write docs/gallery.md from what ``work`` holds."""
    files = {name: work / f"{name}.json" for name in MODELS}
    fits = {name: {**json.loads(file.read_text()), "name": name} for name, file in files.items() if file.exists()}
    refused = [published for published in MODELS.values() if published.refusal]
    untrusted = [name for name, fit in fits.items() if "NUTS" in fit and not fit["NUTS"].get("trusted")]
    again = [name for name, fit in fits.items() if fit.get("NUTS", {}).get("way", "as written") != "as written"]
    without = [name for name, fit in fits.items() if "NUTS" not in fit]
    measured_with = ", ".join(f"{key} {value}" for key, value in run_environment().items())
    lines = blocks(
        "# Gallery: published models, and how close each engine comes to NUTS",
        f"{len(MODELS)} models written down from the tutorials, books and case studies of other projects, with small "
        f"simulated data (`tests/gallery`): {len(fits)} are read and fitted, {len(refused)} refused by name. "
        "A gap is the root mean square over all elements: of the difference of the centres in spreads of NUTS, and of "
        "the ratio of the spreads (its logarithm). Centre and spread of a field are mean and standard deviation. "
        "Those of hyperparameters are the median and the width of a central 90 % interval over 3.29, of the logarithm "
        "where they are positive: tails of scales are too heavy for standard deviations of draws. "
        'Hyperparameters are integrated over (`integrate="auto"`, the default), but where the table says that they are '
        f"at their optimum. NUTS has {CHAINS.number} chains of {CHAINS.warmup} + {CHAINS.samples} draws; its own error "
        "is half the gap between its chains.",
        _summary(fits),
        f"NUTS is not trusted with fewer than {LIMITS.effective} effective draws, an r-hat above {LIMITS.r_hat} or "
        f"more than {LIMITS.divergent:.0%} of divergences. {len(again)} models were decentred with chains of "
        f"{CHAINS.longer} times the length, or sampled in the coordinates of a fit (their own density). Still not "
        f"trusted, and not in these figures: {', '.join(f'`{name}`' for name in untrusted) or 'none'}; {len(without)} "
        "with `param` sites or of other forms have no reference here.",
        "## Which design over hyperparameters",
        _designs(fits),
        _ON_DESIGNS,
        "## Hyperparameters that are off",
        "Runs that have converged, with a centre off by a fifth of the spread or a spread off by a fifth; beside them "
        "the error of NUTS itself, and how the run's own messages begin. Quantiles of simplices (`phi` of `r2d2`) are "
        "from three moments and end at zero, where a logarithm is far away; scales near zero are known least.",
        [*table_head("model | engine | centre | spread | NUTS itself | messages"), *_largest(fits)],
        "## All models",
        "Gaps of the field; gaps of the hyperparameters. ¹ the run says that it has not converged; ² a scale ended at "
        "the edge of its support, and the run says so. The column of NUTS says how it was run where not as written.",
        _rows(fits),
        "## Refused",
        [
            *table_head("model | source | reason"),
            *(
                f"| `{name}` | {published.source} | {published.refusal.reason.name.lower().replace('_', ' ')} |"
                for name, published in MODELS.items()
                if published.refusal
            ),
        ],
        f"Measured by `python -m benchmarks.gallery.table`, beside other work: {measured_with}.",
    )
    _DOCUMENT.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    if not arguments.table:
        fit_all(arguments.work, *map(int, arguments.part.split("/")))
    write_table(arguments.work)


if __name__ == "__main__":
    main()
