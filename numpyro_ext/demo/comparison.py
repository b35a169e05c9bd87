"""Four engines on one model function under three non-linearities: a table, and the pictures of the fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, init_to_median, log_likelihood
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import optax_to_numpyro
from tqdm.auto import tqdm

from ..datasets import EventCounts, load_coal_mining, load_coal_mining_counts
from ..infer import EP, LaplaceApproximation
from ..models import cox_process
from ..structure import ModelStructureError
from .compilation import stopwatch
from .leave_one_out import psis_loo
from .plots import plot_intensities, plot_predictive_check
from .results import Result

__all__ = ["NONLINEARITIES", "compare", "format_table", "run"]

NONLINEARITIES = ("rectified", "softplus", "exponential")
_SVI_STEPS = 10_000


def run(output: Path) -> None:
    """Fit everything, print the table, draw the pictures into ``output``."""
    data = load_coal_mining_counts()
    results = compare(data)
    print(format_table(results))
    for result in results:
        if result.remark:
            print(f"  {result.engine}, {result.nonlinearity}: {result.remark}")
    plot_intensities(results, data, load_coal_mining(), output / "coal_mining.png")
    best = next(r for r in results if (r.engine, r.nonlinearity) == ("EP", "rectified"))
    model = partial(cox_process, nonlinearity="rectified", centered=False)
    replicated = Predictive(model, best.draws)(jax.random.key(5), data.centres)["counts"]
    plot_predictive_check(np.asarray(replicated), data, output / "predictive_check.png")


def compare(data: EventCounts, num_samples: int = 1000) -> list[Result]:
    """Run EP, Laplace, SVI (``AutoMultivariateNormal``) and NUTS under each non-linearity.

    EP learns the hyperparameters. The other engines get the same function, conditioned on what it found, so that all
    four approximate the same posterior and their differences are those of the approximations.
    """
    runs: dict[str, Callable[..., Result]] = {"EP": _ep, "Laplace": _laplace, "SVI": _svi, "NUTS": _nuts}
    results = []
    with tqdm(total=len(NONLINEARITIES) * len(runs), desc="engines", leave=False) as bar:
        for nonlinearity in NONLINEARITIES:
            model: Callable[..., None] = partial(cox_process, nonlinearity=nonlinearity, centered=False)
            for name, engine in runs.items():
                bar.set_postfix_str(f"{name}, {nonlinearity}")
                found = engine(nonlinearity, model, data, num_samples)
                if found.draws is not None:
                    pointwise = log_likelihood(model, found.draws, data.centres, data.counts)["counts"]
                    found = found._replace(loo=psis_loo(np.asarray(pointwise)))
                if name == "EP":
                    model = _with_values(model, found.draws, ("scale", "length"))
                results.append(found)
                bar.update(1)
    return results


def _with_values(model: Callable[..., None], draws: Any, names: tuple[str, ...]) -> Callable[..., None]:
    """The model with some sites fixed to their (constant) value among the draws, and their priors left out."""
    fixed = handlers.substitute(model, data={name: draws[name][0] for name in names})
    found: Callable[..., None] = handlers.block(fixed, hide=list(names))
    return found


def _nuts(nonlinearity: str, model: Callable[..., None], data: EventCounts, num_samples: int) -> Result:
    kernel = NUTS(model, init_strategy=init_to_median(num_samples=1), target_accept_prob=0.95)
    with stopwatch() as watch:
        mcmc = MCMC(kernel, num_warmup=1000, num_samples=2 * num_samples, progress_bar=False)
        mcmc.run(jax.random.key(0), data.centres, data.counts, extra_fields=("diverging",))
        draws = jax.block_until_ready(mcmc.get_samples())
    divergent = int(mcmc.get_extra_fields()["diverging"].sum())
    remark = f"{divergent} of {2 * num_samples} transitions diverged." if divergent else ""
    return Result(nonlinearity, "NUTS", watch, draws, remark=remark)


def _svi(nonlinearity: str, model: Callable[..., None], data: EventCounts, num_samples: int) -> Result:
    with stopwatch() as watch:
        guide = AutoMultivariateNormal(model, init_loc_fn=init_to_median(num_samples=1))
        optimizer = optax_to_numpyro(optax.adam(optax.cosine_decay_schedule(0.02, _SVI_STEPS)))
        svi = SVI(model, guide, optimizer, Trace_ELBO())
        fit = svi.run(jax.random.key(1), _SVI_STEPS, data.centres, data.counts, progress_bar=False)
        elbo = -float(jnp.mean(fit.losses[-500:]))
    if not np.isfinite(elbo):
        return Result(
            nonlinearity,
            "SVI",
            remark="the guide has mass where the density is zero (no intensity at a bin with events).",
        )
    sites = guide.sample_posterior(jax.random.key(2), fit.params, sample_shape=(num_samples,))
    values = Predictive(model, sites)(jax.random.key(3), data.centres, data.counts)
    draws = {**sites, "f": values["f"], "intensity": values["intensity"]}
    return Result(nonlinearity, "SVI", watch, draws, f"≥ {elbo:.2f}")


def _engine(name: str, engine: Any, nonlinearity: str, data: EventCounts) -> Result:
    with stopwatch() as watch:
        engine.run(jax.random.key(4), data.centres, data.counts)
        draws = jax.block_until_ready(engine.get_samples())
    return Result(nonlinearity, name, watch, draws, f"{float(engine.log_evidence):.2f}")


def _laplace(nonlinearity: str, model: Callable[..., None], data: EventCounts, num_samples: int) -> Result:
    engine = LaplaceApproximation(model, num_samples=num_samples, progress_bar=False)
    try:
        return _engine("Laplace", engine, nonlinearity, data)
    except ModelStructureError as refusal:
        return Result(nonlinearity, "Laplace", remark=str(refusal))


def _ep(nonlinearity: str, model: Callable[..., None], data: EventCounts, num_samples: int) -> Result:
    return _engine("EP", EP(model, num_samples=num_samples, progress_bar=False), nonlinearity, data)


def format_table(results: list[Result]) -> str:
    """The table: seconds, evidence, PSIS-LOO, and the largest gaps of the posterior of ``f`` to NUTS."""
    lines = [
        "EP learns the hyperparameters; the others are given what it found.",
        "                         seconds   without     log      PSIS-LOO   largest gap to NUTS",
        "non-linearity  engine      total   compiling   evidence            mean (sd)   sd (%)",
    ]
    for result in results:
        head = f"{result.nonlinearity:<13}  {result.engine:<8}"
        if result.draws is None or result.watch is None:
            lines.append(f"{head}  not applicable (below)")
            continue
        reference = next(r for r in results if (r.engine, r.nonlinearity) == ("NUTS", result.nonlinearity))
        gaps = "" if result.engine == "NUTS" else _gaps(result, reference)
        seconds = f"{result.watch.total:8.1f}  {result.watch.without_compilation:8.2f}"
        lines.append(f"{head} {seconds}   {result.log_evidence:>9} {result.loo:9.2f}   {gaps}")
    return "\n".join(lines)


def _gaps(result: Result, reference: Result) -> str:
    assert result.draws is not None
    assert reference.draws is not None
    f, nuts = np.asarray(result.draws["f"]), np.asarray(reference.draws["f"])
    mean = np.abs(f.mean(0) - nuts.mean(0)) / nuts.std(0)
    sd = np.abs(f.std(0) / nuts.std(0) - 1.0)
    return f"{mean.max():9.2f}   {100 * sd.max():6.0f}"
