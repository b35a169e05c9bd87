"""Fits of the gallery by every engine and by NUTS, one file for a model: what :mod:`benchmarks.gallery.table` shows."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, init_to_median
from tqdm.auto import tqdm

import numpyro_ext.infer as engines
from numpyro_ext.structure import read_latent_gaussian
from tests.gallery import GAUSSIAN, MODELS, Published

from ..harness import decentred, make_nuts


class _Chains(NamedTuple):
    warmup: int = 500
    samples: int = 1000
    number: int = 2
    longer: int = 3
    """Times the length, where the model is decentred."""


class _Limits(NamedTuple):
    """Limits within which chains are trusted."""

    effective: int = 100
    r_hat: float = 1.05
    divergent: float = 0.02


CHAINS, LIMITS = _Chains(), _Limits()
ENGINES = GAUSSIAN.split()
_HOW = ("none", "auto")
"""Treatments of hyperparameters: at their optimum, or integrated over. INLA always integrates."""
OTHER_HOW = "EP normal"
"""A further run, to be compared with the default of ``integrate``."""
_PROBS = (0.05, 0.5, 0.95)
_WIDTH = 3.29
"""Central 90 % interval of a normal density, in standard deviations."""

Moments = dict[str, tuple[list[float], list[float]]]
"""Centre and spread of each element, by site."""


def moments_of_draws(
    draws: Mapping[str, np.ndarray], field: Iterable[str], hyper: Iterable[str]
) -> tuple[Moments, list[str]]:
    """Means and standard deviations of the field, and of hyperparameters the medians and the widths of central 90 %
    intervals over 3.29, of logarithms where all draws are positive; with the names of the latter."""
    out: Moments = {}
    for name in field:
        own = draws[name].reshape(-1, math.prod(draws[name].shape[2:]))
        out[name] = own.mean(0).tolist(), own.std(0, ddof=1).tolist()
    positive = [name for name in hyper if np.all(draws[name] > 0.0)]
    for name in hyper:
        own = draws[name].reshape(-1, math.prod(draws[name].shape[2:]))
        out[name] = moments_of_quantiles(np.quantile(own, _PROBS, axis=0), name in positive)
    return out, positive


def moments_of_quantiles(ends: np.ndarray, is_positive: bool) -> tuple[list[float], list[float]]:
    low, middle, high = np.log(np.maximum(ends, 1e-30)) if is_positive else ends
    return np.ravel(middle).tolist(), np.ravel((high - low) / _WIDTH).tolist()


def _reference(published: Published, fitted: Any) -> dict[str, Any]:
    """Moments by NUTS, by the first of several ways that can be trusted, its seconds, and the moments of its chains.

    The ways are the model as it is written; decentred, where that is possible, and longer; and in the coordinates of a
    fit, whose target is the density of the same model.

    :param fitted: an engine that has run, or none.
    """
    ways: list[tuple[str, Callable[[], MCMC]]] = [
        ("as written", lambda: _nuts(published.model, published, 1)),
        ("decentred, longer", lambda: _nuts(decentred(published.model), published, CHAINS.longer)),
    ]
    if fitted is not None:
        ways.append(
            ("in coordinates of EP", lambda: fitted.sample_exactly(jax.random.key(1), num_chains=CHAINS.number))
        )
    found: dict[str, Any] = {}
    start = time.process_time()
    for name, run in ways:
        try:
            mcmc = run()
        except Exception as error:  # the next way
            found.setdefault("errors", []).append(f"{name}: {type(error).__name__}: {error}"[:300])
            continue
        found |= _judged(mcmc, published) | {"way": name}
        found.setdefault("seconds", time.process_time() - start)
        if found["trusted"]:
            break
    return found


def _nuts(model: Callable[..., Any], published: Published, times: int) -> MCMC:
    options = {"num_chains": CHAINS.number, "init_strategy": init_to_median}
    mcmc = make_nuts(model, times * CHAINS.warmup, times * CHAINS.samples, **options)
    mcmc.run(jax.random.key(0), *published.data(), extra_fields=("diverging",))
    return mcmc


def _judged(mcmc: MCMC, published: Published) -> dict[str, Any]:
    grouped = mcmc.get_samples(group_by_chain=True)
    names = [name for name in sorted(published.field | published.hyper) if name in grouped]
    draws = {name: np.asarray(grouped[name]) for name in names}
    table = summary(draws)
    alive = [row for row in table.values() if np.max(row["std"]) > 0.0]
    sizes = np.concatenate([np.ravel(row["n_eff"])[np.ravel(row["std"]) > 1e-9] for row in alive])
    r_hats = np.concatenate([np.ravel(row["r_hat"])[np.ravel(row["std"]) > 1e-9] for row in alive])
    extra = mcmc.get_extra_fields()
    divergent = float(np.mean(extra["diverging"])) if "diverging" in extra else 0.0
    trusted = sizes.min() >= LIMITS.effective and r_hats.max() <= LIMITS.r_hat and divergent <= LIMITS.divergent
    sites = sorted(published.field & set(draws)), sorted(published.hyper & set(draws))
    moments, positive = moments_of_draws(draws, *sites)
    chains = [moments_of_draws({name: x[[k]] for name, x in draws.items()}, *sites)[0] for k in (0, 1)]
    return {"trusted": bool(trusted), "moments": moments, "positive": positive, "chains": chains}


def variants(names: Iterable[str]) -> Iterator[str]:
    """Engines on a Gaussian field, with how they treat hyperparameters where that is a choice: EP in both ways."""
    for name in ENGINES:
        if name in names:
            yield from [name] if name == "INLA" else [f"{name} {how}" for how in (_HOW if name == "EP" else _HOW[1:])]


def _fit(published: Published, variant: str) -> tuple[dict[str, Any], Any]:
    """Moments by an engine, its seconds and how the run ended; and the engine, if it ended."""
    name, *how = variant.split()
    options = {"integrate": how[0]} if how else {}
    engine = getattr(engines, name)(published.model, progress_bar=False, **options)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the messages are in the diagnostics
        try:
            engine.run(jax.random.key(0), *published.data())
        except Exception as error:  # to be seen in the table, beside the others
            return {"converged": False, "error": f"{type(error).__name__}: {error}"}, None
        out: dict[str, Any] = {"converged": bool(engine.diagnostics.converged), "messages": engine.diagnostics.messages}
        out["kind"], out["method"] = engine.log_evidence.hyperparameters, engine.log_evidence.method
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
        if out["kind"] == "integrated":
            out["quantiles"] = {
                site: np.asarray(engine.posterior[site].quantile(np.array(_PROBS))).reshape(3, -1).tolist()
                for site in sorted(published.hyper & set(engine.posterior))
                if not getattr(engine.posterior[site], "is_fixed", False)
            }
    return out, engine


def _num_hyper(published: Published) -> int | None:
    """Number of hyperparameters with a prior; none of a model with ``param`` sites."""
    hyper = read_latent_gaussian(published.model, published.data()).hyper.values()
    return None if any(site.is_param for site in hyper) else sum(math.prod(site.shape) for site in hyper)


def fit_all(work: Path, part: int = 0, parts: int = 1) -> None:
    """Fit what ``work`` does not hold yet, every so many of the models."""
    work.mkdir(parents=True, exist_ok=True)
    for name, published in tqdm([item for item in MODELS.items() if not item[1].refusal][part::parts]):
        file = work / f"{name}.json"
        if file.exists():
            continue
        number = _num_hyper(published) if published.is_latent_gaussian else None
        others = [OTHER_HOW] if number and "EP" in published.engines else []
        runs = {variant: _fit(published, variant) for variant in (*variants(published.engines), *others)}
        found = {variant: fit for variant, (fit, _) in runs.items()}
        if number is not None:
            found["NUTS"] = _reference(published, runs.get("EP auto", (None, None))[1])
            found["num_hyper"] = number
        file.write_text(json.dumps(found))
        jax.clear_caches()
