"""The gallery fitted by every engine and by NUTS: ``python -m benchmarks.gallery_table WORK`` writes docs/gallery.md.

``WORK`` is a folder that keeps what has been fitted, one file for a model, so that a run that was ended goes on; the
table is written at the end, or alone with ``--table``. NUTS takes most of the hour.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS, init_to_median
from tqdm.auto import tqdm

import numpyro_ext.infer as engines
from numpyro_ext.structure import read_latent_gaussian
from tests.gallery import GAUSSIAN, MODELS, Published

from .results_table import run_environment

__all__ = ["fit_all", "main", "write_table"]

_DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "gallery.md"
_NUM_WARMUP, _NUM_SAMPLES, _NUM_CHAINS = 500, 1000, 2
_LEAST_EFFECTIVE, _LARGEST_R_HAT, _MOST_DIVERGENT = 100, 1.05, 0.02
_ENGINES = GAUSSIAN.split()
_SHORT = {"LaplaceApproximation": "Laplace", "VariationalGaussian": "VG"}
_HOW = ("none", "auto")
"""What becomes of hyperparameters: their optimum, or integrated over. INLA always integrates."""


def _reference(published: Published) -> dict[str, Any]:
    """Moments of the field by NUTS, the seconds it took, and whether its diagnostics allow to trust them."""
    kernel = NUTS(published.model, init_strategy=init_to_median)
    mcmc = MCMC(
        kernel,
        num_warmup=_NUM_WARMUP,
        num_samples=_NUM_SAMPLES,
        num_chains=_NUM_CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    start = time.process_time()
    mcmc.run(jax.random.key(0), *published.data(), extra_fields=("diverging",))
    draws = {name: np.asarray(value) for name, value in mcmc.get_samples(group_by_chain=True).items()}
    seconds = time.process_time() - start
    field = {name: draws[name] for name in sorted(published.field)}
    table = summary(field)
    least = min(np.min(row["n_eff"]) for row in table.values())
    largest = max(np.max(row["r_hat"]) for row in table.values())
    divergent = float(np.mean(mcmc.get_extra_fields()["diverging"]))
    trusted = bool(least >= _LEAST_EFFECTIVE and largest <= _LARGEST_R_HAT and divergent <= _MOST_DIVERGENT)
    moments = {name: (row["mean"].ravel().tolist(), row["std"].ravel().tolist()) for name, row in table.items()}
    return {"seconds": seconds, "trusted": trusted, "moments": moments}


def _variants(names: Iterable[str]) -> Iterator[str]:
    """Names of engines, with how they treat hyperparameters where that is a choice."""
    for name in names:
        yield from [name] if name not in _ENGINES or name == "INLA" else [f"{name} {how}" for how in _HOW]


def _fit(published: Published, variant: str) -> dict[str, Any]:
    """Moments of the field by an engine, its seconds and how the run ended."""
    name, *how = variant.split()
    options = {"integrate": how[0]} if how else {}
    engine = getattr(engines, name)(published.model, progress_bar=False, **options)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the messages are in the diagnostics
        try:
            engine.run(jax.random.key(0), *published.data())
        except Exception as error:  # to be seen in the table, beside the others
            return {"converged": False, "error": f"{type(error).__name__}: {error}"}
    out: dict[str, Any] = {"converged": bool(engine.diagnostics.converged), "messages": engine.diagnostics.messages}
    if name in _ENGINES:
        out["kind"] = engine.log_evidence.hyperparameters
        out["moments"] = {
            site: (
                np.ravel(engine.posterior[site].mean).tolist(),
                np.sqrt(np.ravel(engine.posterior[site].variance)).tolist(),
            )
            for site in sorted(published.field & set(engine.posterior))
        }
        out["edges"] = engine.diagnostics.edges
    engine.get_samples()
    out["seconds"] = time.process_time() - start
    return out


def _has_params(published: Published) -> bool:
    reading = read_latent_gaussian(published.model, published.data())
    return any(site.is_param for site in reading.hyper.values())


def fit_all(work: Path) -> None:
    """Fit what ``work`` does not hold yet."""
    work.mkdir(parents=True, exist_ok=True)
    for name, published in tqdm([item for item in MODELS.items() if not item[1].refusal]):
        file = work / f"{name}.json"
        if file.exists():
            continue
        found = {variant: _fit(published, variant) for variant in _variants(sorted(published.engines))}
        if published.is_latent_gaussian and not _has_params(published):
            found["NUTS"] = _reference(published)
        file.write_text(json.dumps(found))
        jax.clear_caches()


def _gaps(found: dict[str, Any], engine: str) -> tuple[float, float] | None:
    """Root mean square over the field: of the differences of the means in NUTS's standard deviations, and of the
    logarithms of the ratios of the standard deviations."""
    reference = found.get("NUTS")
    if "moments" not in found.get(engine, {}) or reference is None or not reference["trusted"]:
        return None
    means, scales = [], []
    for site, own in found[engine]["moments"].items():  # what an engine sets to a point is not among them
        (mean, sd), (own_mean, own_sd) = reference["moments"][site], (np.array(part) for part in own)
        known = (np.array(sd) > 1e-9) & (own_sd > 0.0)
        means.append(((own_mean - mean) / np.maximum(sd, 1e-12))[known])
        scales.append(np.log(own_sd[known] / np.array(sd)[known]))
    together, ratios = np.concatenate(means), np.concatenate(scales)
    return float(np.sqrt(np.mean(together**2))), float(np.sqrt(np.mean(ratios**2)))


def _summary(fits: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| engine | models | mean: median | 90 % | sd: median | 90 % | first fit, CPU-s: median | NUTS there |"
    yield "|---|---|---|---|---|---|---|---|"
    for engine in _variants(_ENGINES):
        found = {name: gaps for name, fit in fits.items() if (gaps := _gaps(fit, engine)) is not None}
        mean, sd = np.array(list(found.values())).T
        seconds, other = (np.median([fits[name][who]["seconds"] for name in found]) for who in (engine, "NUTS"))
        yield (
            f"| {_label(engine)} | {len(found)} | {np.median(mean):.3f} | {np.quantile(mean, 0.9):.2f} "
            f"| {np.expm1(np.median(sd)):.1%} | {np.expm1(np.quantile(sd, 0.9)):.0%} | {seconds:.1f} | {other:.1f} |"
        )


def _label(variant: str) -> str:
    name, *how = variant.split()
    return _SHORT.get(name, name) + (", at the optimum" if how == ["none"] else "")


def _rows(fits: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| model | source | " + " | ".join(_SHORT.get(name, name) for name in _ENGINES) + " | other engines |"
    yield "|---|---|" + "---|" * (len(_ENGINES) + 1)
    for name, fit in fits.items():
        published, cells = MODELS[name], []
        for engine in (name if name in fit else f"{name} auto" for name in _ENGINES):
            gaps = _gaps(fit, engine)
            own = fit.get(engine, {"converged": True})
            text = "" if engine not in fit else "fails" if "error" in own else "fitted"
            text = f"{gaps[0]:.2f}, {np.expm1(gaps[1]):.0%}" if gaps else text
            cells.append(text + ("" if own["converged"] else " ¹") + (" ²" if own.get("edges") else ""))
        others = ", ".join(sorted(set(fit) - {*_variants(_ENGINES), "NUTS"}))
        yield f"| `{name}` | {published.source} | " + " | ".join(cells) + f" | {others} |"


def write_table(work: Path) -> None:
    """Write docs/gallery.md from what ``work`` holds."""
    fits = {
        name: json.loads((work / f"{name}.json").read_text()) for name in MODELS if (work / f"{name}.json").exists()
    }
    refused = [published for published in MODELS.values() if published.refusal]
    untrusted = [name for name, fit in fits.items() if "NUTS" in fit and not fit["NUTS"]["trusted"]]
    without = [name for name, fit in fits.items() if "NUTS" not in fit]
    measured_with = ", ".join(f"{key} {value}" for key, value in run_environment().items())
    lines = [
        "# Gallery: published models, and how close each engine comes to NUTS",
        "",
        f"{len(MODELS)} models written down from the tutorials, books and case studies of other projects, with small",
        f"simulated data (`tests/gallery`): {len(fits)} are read and fitted, {len(refused)} refused by name.",
        "A gap is the root mean square over all elements of the field: of the difference of the means in standard",
        "deviations of NUTS, and of the ratio of the standard deviations (its logarithm). Hyperparameters are",
        'integrated over (`integrate="auto"`, the default), but where the table says that they are at their optimum.',
        f"NUTS has {_NUM_CHAINS} chains of {_NUM_WARMUP} + {_NUM_SAMPLES} draws: 0.03 and 3 % are its own error.",
        "",
        *_summary(fits),
        "",
        f"Not in these figures: {len(untrusted)} models on which NUTS itself is not to be trusted (fewer than "
        f"{_LEAST_EFFECTIVE} effective draws, r-hat above {_LARGEST_R_HAT} or more than {_MOST_DIVERGENT:.0%} of",
        f"divergences: {', '.join(f'`{name}`' for name in untrusted) or 'none'}), and {len(without)} with `param` sites"
        " or other forms, which have no reference here.",
        "",
        "## All models",
        "",
        "Mean gap and sd gap per engine; ¹ the run says that it has not converged; ² a scale ended at the edge of its",
        "support, and the run says so.",
        "",
        *_rows(fits),
        "",
        "## Refused",
        "",
        "| model | source | reason |",
        "|---|---|---|",
        *(
            f"| `{name}` | {published.source} | {published.refusal.reason.name.lower().replace('_', ' ')} |"
            for name, published in MODELS.items()
            if published.refusal
        ),
        "",
        f"Measured by `python -m benchmarks.gallery_table`: {measured_with}.",
        "",
    ]
    _DOCUMENT.write_text("\n".join(lines))


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    if not arguments.table:
        fit_all(arguments.work)
    write_table(arguments.work)


if __name__ == "__main__":
    main()
