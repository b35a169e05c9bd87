"""Seven engines on one model function under three non-linearities: a table, and the pictures of the fits."""

from __future__ import annotations

import inspect
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, init_to_median, log_likelihood
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.optim import optax_to_numpyro
from tqdm.auto import tqdm

from ..compilation.quick_jit import quick_jit
from ..datasets import EventCounts, load_coal_mining, load_coal_mining_counts
from ..infer import EP, INLA, SMC, LaplaceApproximation, VariationalGaussian
from ..models import cox_process
from ..structure import ModelStructureError
from .plots import Result, plot_engines, plot_intensities, plot_predictive_check

NONLINEARITIES = ("rectified", "softplus", "exponential")
_SVI_STEPS, _SVI_ROUNDS = 10_000, 10

Draw = Callable[[EventCounts], tuple[dict[str, Any], str, str]]
"""From data to draws, the log evidence as text, and a remark."""
Engine = Callable[[Callable[..., None], int], Draw]
"""From a model and a number of draws."""


def run(output: Path) -> None:
    """Fit everything, print the table, draw the pictures into ``output``."""
    data = load_coal_mining_counts(num_bins=50)
    results = compare(data)
    print(format_table(results))
    for result in results:
        if result.remark:
            print(f"  {result.engine}, {result.nonlinearity}: {result.remark}")
    plot_engines(results, output / "engines.png")
    plot_intensities(results, data, load_coal_mining(), output / "coal_mining.png")
    best = next(r for r in results if (r.engine, r.nonlinearity) == ("EP", "rectified"))
    model = partial(cox_process, nonlinearity="rectified", centered=False)
    replicated = Predictive(model, best.draws)(jax.random.key(5), data.centres)["counts"]
    plot_predictive_check(np.asarray(replicated), data, output / "predictive_check.png")


def compare(data: EventCounts, num_samples: int = 700, engines: Sequence[str] | None = None) -> list[Result]:
    """Run engines and NUTS under each non-linearity, on the whole model: field, mean and both parameters of the kernel.

    Each is run twice, the second time on the counts in reversed order: what the first run compiled serves the second.
    NUTS, which takes longest, runs beside the others in a process of its own.

    :param engines: names of those beside NUTS; all of them, if there are none.
    """
    results: list[Result] = []
    engines = list(_ENGINES) if engines is None else engines
    precision = jnp.zeros(()).dtype == jnp.float64
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, context, numpyro.enable_x64, (precision,)) as beside,
        tqdm(total=len(NONLINEARITIES) * (len(engines) + 1), desc="engines", leave=False) as bar,
    ):
        by_nuts = {name: beside.submit(_fit, "NUTS", _nuts, name, data, num_samples) for name in NONLINEARITIES}
        for nonlinearity in NONLINEARITIES:
            found = []
            for name in engines:
                bar.set_postfix_str(f"{name}, {nonlinearity}")
                found.append(_fit(name, _ENGINES[name], nonlinearity, data, num_samples))
                bar.update(1)
            bar.set_postfix_str(f"NUTS, {nonlinearity}")
            found.append(by_nuts[nonlinearity].result())
            bar.update(1)
            results += _judge(found, _model(nonlinearity), data)
    return results


def _model(nonlinearity: str) -> Callable[..., None]:
    return partial(cox_process, nonlinearity=nonlinearity, centered=False)


def _fit(name: str, make: Engine, nonlinearity: str, data: EventCounts, num_samples: int) -> Result:
    """Run an engine twice; a model that it does not apply to is a result, too."""
    draw = make(_model(nonlinearity), num_samples)
    start = time.perf_counter()
    try:
        draws, log_evidence, remark = draw(data)
        first = time.perf_counter()
        draw(data._replace(counts=data.counts[::-1]))
    except (ModelStructureError, _NotFinite) as refusal:
        return Result(nonlinearity, name, remark=str(refusal))
    seconds = first - start, time.perf_counter() - first
    values = {site: np.asarray(value) for site, value in draws.items()}
    return Result(nonlinearity, name, *seconds, values, log_evidence, remark=remark)


def _judge(results: list[Result], model: Callable[..., None], data: EventCounts) -> list[Result]:
    """The results with their leave-one-out scores, and how far the field of each is from that of NUTS."""
    nuts = np.asarray(next(r.draws for r in results if r.engine == "NUTS" and r.draws is not None)["f"])
    judged = []
    for result in results:
        if result.draws is None:
            judged.append(result)
            continue
        f = np.asarray(result.draws["f"])
        pointwise = log_likelihood(model, result.draws, data.centres, data.counts)["counts"]
        judged.append(
            result._replace(
                loo=psis_loo(np.asarray(pointwise)),
                mean_gap=float(np.max(np.abs(f.mean(0) - nuts.mean(0)) / nuts.std(0))),
                sd_gap=float(np.max(np.abs(f.std(0) / nuts.std(0) - 1.0))),
            )
        )
    return judged


class _NotFinite(ArithmeticError):
    """An objective that has no finite value at any parameter."""


def _nuts(model: Callable[..., None], num_samples: int) -> Draw:
    kernel = NUTS(model, init_strategy=init_to_median(num_samples=1), target_accept_prob=0.9)
    mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, progress_bar=False)

    def draw(data: EventCounts) -> tuple[dict[str, Any], str, str]:
        mcmc.run(jax.random.key(0), data.centres, data.counts, extra_fields=("diverging",))
        draws = jax.block_until_ready(mcmc.get_samples())
        divergent = int(mcmc.get_extra_fields()["diverging"].sum())
        return draws, "", f"{divergent} of {num_samples} transitions diverged." if divergent else ""

    return draw


def _svi(model: Callable[..., None], num_samples: int) -> Draw:
    guide = AutoMultivariateNormal(model, init_loc_fn=init_to_median(num_samples=1))
    optimizer = optax_to_numpyro(optax.adam(optax.cosine_decay_schedule(0.02, _SVI_STEPS)))
    svi = SVI(model, guide, optimizer, Trace_ELBO())

    @quick_jit
    def climb(state: object, t: object, counts: object) -> tuple[Any, Any]:
        return jax.lax.scan(lambda s, _: svi.update(s, t, counts), state, length=_SVI_STEPS // _SVI_ROUNDS)

    @quick_jit
    def draws_of(params: object, t: object, counts: object) -> dict[str, Any]:
        sites = guide.sample_posterior(jax.random.key(2), params, sample_shape=(num_samples,))
        values = Predictive(model, sites)(jax.random.key(3), t, counts)
        return {**sites, "f": values["f"], "intensity": values["intensity"]}

    starts: list[Callable[[Any], Any]] = []

    def draw(data: EventCounts) -> tuple[dict[str, Any], str, str]:
        if not starts:
            # one by one, the operations of init take longer to compile than all the rest; the guide keeps the arguments
            # that it has seen first, so they are no inputs of this program
            starts.append(quick_jit(lambda key: svi.init(key, data.centres, data.counts)))
        state = starts[0](jax.random.key(1))
        for _ in range(_SVI_ROUNDS):
            state, losses = climb(state, data.centres, data.counts)
            elbo = -float(jnp.mean(losses[-500:]))
            if not np.isfinite(elbo):
                raise _NotFinite("the guide has mass where the density is zero (no intensity at a bin with events).")
        return draws_of(svi.get_params(state), data.centres, data.counts), f"≥ {elbo:.2f}", ""

    return draw


def _engine(kind: Callable[..., Any], model: Callable[..., None], num_samples: int) -> Draw:
    engine = kind(model, num_samples=num_samples, progress_bar=False)

    def draw(data: EventCounts) -> tuple[dict[str, Any], str, str]:
        engine.run(jax.random.key(4), data.centres, data.counts)
        draws = jax.block_until_ready(engine.get_samples())
        evidence = engine.log_evidence
        sign = "≥ " if evidence.is_lower_bound else ""
        error = "" if evidence.standard_error is None else f" ± {evidence.standard_error:.2f}"
        return draws, f"{sign}{float(evidence):.2f}{error}", ""

    return draw


_ENGINES: dict[str, Engine] = {
    "EP": partial(_engine, EP),
    "Laplace": partial(_engine, LaplaceApproximation),
    "VG": partial(_engine, VariationalGaussian),
    "INLA": partial(_engine, INLA),
    "SVI": _svi,
    "SMC": partial(_engine, partial(SMC, num_particles=1000, waste_free=True)),
}


def format_table(results: list[Result]) -> str:
    """The table: seconds of a first fit and of the next, evidence, PSIS-LOO, and the largest gaps of ``f`` to NUTS."""
    lines = [
        "All engines fit the whole model; EP, Laplace, VG and INLA integrate over the two parameters of the kernel.",
        "SMC has 1000 particles, waste-free; ± is its own estimate of its error. NUTS ran beside the others.",
        _line("", "", "", "seconds", "log", "", "", "largest gap", "to NUTS"),
        _line("non-linearity", "engine", "first", "next", "evidence", "", "PSIS-LOO", "mean (sd)", "sd (%)"),
    ]
    for result in results:
        if result.draws is None:
            lines.append(f"{result.nonlinearity:<13}  {result.engine:<8}  not applicable (below)")
            continue
        value, plus, error = result.log_evidence.partition(" ± ")
        is_judge = result.engine == "NUTS"
        lines.append(
            _line(
                result.nonlinearity,
                result.engine,
                f"{result.first_seconds:.1f}",
                f"{result.next_seconds:.2f}",
                value,
                plus + error,
                f"{result.loo:.2f}",
                "" if is_judge else f"{result.mean_gap:.2f}",
                "" if is_judge else f"{100 * result.sd_gap:.0f}",
            )
        )
    return "\n".join(lines)


def _line(link: str, engine: str, first: str, later: str, value: str, error: str, loo: str, mean: str, sd: str) -> str:
    return f"{link:<13}  {engine:<8} {first:>6}  {later:>7}   {value:>9}{error:<7} {loo:>9}   {mean:>11}   {sd:>7}"


def psis_loo(pointwise: np.ndarray) -> float:
    """Expected log pointwise predictive density by Pareto-smoothed importance sampling (Vehtari et al., 2017).

    :param pointwise: log likelihood of each observation under each draw, shape ``(num_draws, num_observations)``.
    :return: ``elpd_loo``, higher is better.
    """
    import arviz as az

    draws: dict[str, Any] = {"posterior": {"draw_number": np.arange(len(pointwise), dtype=float)[None]}}
    draws["log_likelihood"] = {"counts": pointwise[None]}
    with warnings.catch_warnings():
        # a few observations with a large Pareto k are expected of isolated events, and seen in the plots
        warnings.simplefilter("ignore", UserWarning)
        # The first generation takes groups as keywords, the second one dictionary of them.
        takes_keywords = "posterior" in inspect.signature(az.from_dict).parameters
        found = az.loo(az.from_dict(**draws) if takes_keywords else az.from_dict(draws))
        return float(found.elpd_loo if hasattr(found, "elpd_loo") else found.elpd)
