"""Log evidences of four models by SMC, annealed importance sampling and the deterministic engines, with their cost.

``python -m benchmarks.evidence.four_models`` writes ``results/<date>-evidence.md``. BlackJAX's adaptive tempering
stands beside SMC on the model with a Gaussian prior: both with 1000 particles and elliptical slices; its standard
error, which it does not tell, is the spread of repeated runs, as is that of SMC there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC, NUTS

from numpyro_ext.infer import EP, INLA, SMC, VariationalGaussian, annealed_importance_sampling

from ..harness import table_head, write_report

GAIN = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERROR = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
GROUP = np.repeat(np.arange(12), 6)
COUNTS = np.random.default_rng(0).poisson(np.exp(0.5 + 0.7 * np.random.default_rng(1).normal(size=12))[GROUP])
PLACES = np.linspace(-2.0, 2.0, 30)
LABELS = (np.random.default_rng(3).uniform(size=30) < 1.0 / (1.0 + np.exp(-2.0 * np.sin(2.0 * PLACES)))).astype(int)
SERIES = np.random.default_rng(2).poisson(np.exp(np.sin(np.arange(40) / 6.0)))
REPEATS = 100


def eight_schools(error: Any, gain: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    spread = numpyro.sample("spread", dist.HalfNormal(5))
    with numpyro.plate("schools", 8):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("gain", dist.Normal(mean + spread * z, error), obs=gain)


def random_intercepts(group: Any, counts: Any) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", 12):
        z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("counts", dist.Poisson(jnp.exp(intercept + scale * z[group])), obs=counts)


def covariance(x: Any, scale: float, length: float) -> Any:
    return scale**2 * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-6 * jnp.eye(len(x))


def classification(x: Any, y: Any) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance(x, 2.0, 0.7)))
    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def cox_process(counts: Any) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance(jnp.arange(40.0), 1.0, 6.0)))
    numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)


MODELS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "eight schools": (eight_schools, (ERROR, GAIN)),
    "Poisson intercepts": (random_intercepts, (GROUP, COUNTS)),
    "classification by a Gaussian process": (classification, (PLACES, LABELS)),
    "Cox process": (cox_process, (SERIES,)),
}


def timed(function: Callable[[int], Any]) -> tuple[Any, float, float]:
    """The second result, and CPU-seconds of a first call and of one that compiles nothing."""
    seconds, found = [], None
    for number in range(2):
        start = time.process_time()
        found = function(number)
        seconds.append(time.process_time() - start)
    return found, seconds[0], seconds[1]


def by_engine(kind: Callable[..., Any], model: Any, args: Any, **options: Any) -> Callable[[int], Any]:
    engine = kind(model, progress_bar=False, **options)

    def run(number: int) -> Any:
        engine.run(random.key(number), *args)
        return engine.log_evidence

    return run


def blackjax_tempering() -> Callable[[int], float]:
    """Its own loop, compiled, on the model of classification."""
    from blackjax import adaptive_tempered_smc, elliptical_slice
    from blackjax.smc import resampling

    x = jnp.asarray(PLACES)
    prior = dist.MultivariateNormal(jnp.zeros(30), covariance(x, 2.0, 0.7))

    def log_likelihood(f: Any) -> Any:
        return jnp.sum(dist.Bernoulli(logits=f).log_prob(jnp.asarray(LABELS)))

    slices = elliptical_slice.build_kernel(prior.covariance_matrix, jnp.zeros(30))

    # the density that it hands over is prior times likelihood, of which slices take the second part
    def step(key: Any, state: Any, log_density: Any) -> Any:
        return slices(key, state, lambda f: log_density(f) - prior.log_prob(f))

    def init(position: Any, log_density: Any) -> Any:
        return elliptical_slice.init(position, lambda f: log_density(f) - prior.log_prob(f))

    sampler = adaptive_tempered_smc(
        prior.log_prob, log_likelihood, step, init, {}, resampling.systematic, 0.5, num_mcmc_steps=10
    )

    @jax.jit
    def run(key: Any) -> Any:
        start_key, key = random.split(key)
        state = sampler.init(prior.sample(start_key, (1000,)))

        def advance(carry: Any) -> Any:
            key, state, total = carry
            now, key = random.split(key)
            state, info = sampler.step(now, state)
            return key, state, total + info.log_likelihood_increment

        carry = (key, state, jnp.zeros(()))
        return jax.lax.while_loop(lambda c: c[1].tempering_param < 1.0, advance, carry)[2]

    return lambda number: float(run(random.key(number)))


def moments() -> list[str]:
    """Errors of means and deviations by SMC and NUTS, to a long run of NUTS, and their price."""
    rows = []
    for name, (model, args) in MODELS.items():
        if model is classification:
            continue
        start = WHITE.get(name, model)
        truth = nuts_draws(start, args, 2000, 40_000, 0)[0]
        smc = SMC(start, num_particles=4000, progress_bar=False)
        smc.run(random.key(1), *args)
        begun = time.process_time()
        smc.run(random.key(2), *args)
        seconds = {"SMC, 4000 particles": time.process_time() - begun}
        found = {"SMC, 4000 particles": (smc.get_samples(), int(smc.history.num_evaluations.sum()))}
        nuts_draws(start, args, 1000, 4000, 1)
        begun = time.process_time()
        found["NUTS, 1000 + 4000"] = nuts_draws(start, args, 1000, 4000, 2)
        seconds["NUTS, 1000 + 4000"] = time.process_time() - begun
        for way, (draws, evaluations) in found.items():
            means = [np.abs(draws[n].mean(0) - truth[n].mean(0)) / truth[n].std(0) for n in truth]
            deviations = [np.abs(draws[n].std(0) / truth[n].std(0) - 1.0) for n in truth]
            mean, deviation = max(np.max(m) for m in means), max(np.max(d) for d in deviations)
            cells = f"{mean:.3f} | {deviation:.1%} | {evaluations:,} | {seconds[way]:.2f}"
            rows.append(f"| {name} | {way} | {cells} |")
            print(rows[-1], flush=True)
    return rows


def nuts_draws(model: Any, args: Any, num_warmup: int, num_samples: int, seed: int) -> tuple[dict[str, Any], int]:
    """Draws, and how many gradients they and the warm-up took."""
    mcmc = MCMC(NUTS(model), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.warmup(random.key(seed), *args, extra_fields=("num_steps",), collect_warmup=True)
    steps = int(mcmc.get_extra_fields()["num_steps"].sum())
    mcmc.run(random.key(seed + 1), *args, extra_fields=("num_steps",))
    return mcmc.get_samples(), steps + int(mcmc.get_extra_fields()["num_steps"].sum())


def white_cox_process(counts: Any) -> None:
    """In coordinates that NUTS needs."""
    root = jnp.linalg.cholesky(covariance(jnp.arange(40.0), 1.0, 6.0))
    f = numpyro.deterministic("f", root @ numpyro.sample("white", dist.Normal(0, 1).expand([40]).to_event(1)))
    numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)


WHITE = {"Cox process": white_cox_process}


def main() -> None:
    numpyro.enable_x64()
    rows, notes = [], []
    for name, (model, args) in MODELS.items():
        ways = {"EP": by_engine(EP, model, args), "VariationalGaussian": by_engine(VariationalGaussian, model, args)}
        ways["INLA"] = by_engine(INLA, model, args)
        ways["SMC, 4000 particles"] = by_engine(SMC, model, args, num_particles=4000)
        if model in (classification, cox_process):
            ways["annealed importance sampling"] = lambda number, model=model, args=args: annealed_importance_sampling(
                model, random.key(number), *args, num_chains=1000
            )
        for way, run in ways.items():
            found, first, later = timed(run)
            value = found if isinstance(found, float) else float(found.log_evidence)
            error = getattr(found, "standard_error", None)
            sign = ">= " if getattr(found, "is_lower_bound", False) else ""
            told = "" if error is None else f" ± {float(error):.3f}"
            rows.append(f"| {name} | {way} | {sign}{value:.3f}{told} | {first:.2f} | {later:.3f} |")
            print(rows[-1], flush=True)
    smc = SMC(classification, num_particles=1000, progress_bar=False)

    def ours(number: int) -> float:
        smc.run(random.key(number), PLACES, LABELS)
        return float(smc.log_evidence)

    def annealed(number: int) -> float:
        found = annealed_importance_sampling(classification, random.key(number), PLACES, LABELS, num_chains=1000)
        return float(found.log_evidence)

    for way, run in (
        ("SMC", ours),
        ("adaptive tempering of BlackJAX, ten slices a step", blackjax_tempering()),
        ("annealed importance sampling, 1000 chains", annealed),
    ):
        run(0)
        start = time.process_time()
        values = [run(1 + number) for number in range(REPEATS)]
        seconds, spread = (time.process_time() - start) / REPEATS, np.std(values, ddof=1)
        notes.append(
            f"{way}, on the model of classification, 1000 particles: mean {np.mean(values):.3f}, spread {spread:.3f}, "
            f"{seconds:.3f} CPU-s a run, {seconds * (spread / 0.03) ** 2:.2f} CPU-s for a standard error of 0.03"
        )
        print(notes[-1], flush=True)
    judge, found = SMC(cox_process, num_particles=4000, progress_bar=False), []
    for number in range(16):
        judge.run(random.key(100 + number), SERIES)
        found.append(judge.log_evidence)
    values, told = np.array(found), np.sqrt(np.mean([value.standard_error**2 for value in found]))
    mean = np.log(np.mean(np.exp(values - values.max()))) + values.max()
    engine = EP(cox_process, progress_bar=False)
    engine.run(random.key(0), SERIES)
    notes.append(
        f"Cox process, 16 runs of SMC: {mean:.4f} ± {values.std(ddof=1) / 4:.4f}; spread of the runs "
        f"{values.std(ddof=1):.4f}, standard error that they tell {told:.4f}; EP corrected by cumulants "
        f"{engine.corrected().log_evidence:.4f}"
    )
    beside_nuts = moments()
    lines = [
        "# Log evidences of four models",
        "",
        "Hyperparameters integrated over. Seconds are CPU-seconds of a first run and of one that compiles nothing.",
        "",
        *table_head("model | by | log evidence | first | next"),
        *rows,
        "",
        *(f"- {note}" for note in notes),
        "",
        "Means and deviations to those of 40,000 draws of NUTS: the worst error of a mean in posterior deviations, the",
        "worst relative error of a deviation, evaluations of the density (of NUTS gradients, warm-up included), and",
        "CPU-seconds of a second run.",
        "",
        *table_head("model | by | mean | deviation | evaluations | seconds"),
        *beside_nuts,
    ]
    write_report("evidence", lines)


if __name__ == "__main__":
    main()
