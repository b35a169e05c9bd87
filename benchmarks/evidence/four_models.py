"""Log evidences of four models by SMC, annealed importance sampling and the deterministic engines, with their cost.

``python -m benchmarks.evidence.four_models`` writes ``results/<date>-evidence.md``. BlackJAX's adaptive tempering
stands beside SMC on the model with a Gaussian prior: both with 1000 particles and elliptical slices; its standard
error, which it does not tell, is the spread of repeated runs, as is that of SMC there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random

from numpyro_ext.infer import EP, INLA, SMC, VariationalGaussian, annealed_importance_sampling

from ..harness import blocks, cpu_seconds, first_and_next, make_nuts, run_chains, table, write_report

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


def moments() -> Iterator[Iterable[Any]]:
    """Errors of means and deviations by SMC and NUTS, to a long run of NUTS, and their price."""
    for name, (model, args) in MODELS.items():
        if model is classification:
            continue
        start = WHITE.get(name, model)
        truth = nuts_draws(start, args, 2000, 40_000)(0)[0]
        smc = SMC(start, num_particles=4000, progress_bar=False)

        def by_smc(number: int) -> tuple[Any, int]:
            smc.run(random.key(1 + number), *args)  # noqa: B023
            return smc.get_samples(), int(smc.history.num_evaluations.sum())  # noqa: B023

        ways = {"SMC, 4000 particles": by_smc, "NUTS, 1000 + 4000": nuts_draws(start, args, 1000, 4000)}
        for way, run in ways.items():
            (draws, evaluations), _, seconds = first_and_next(run)
            mean = max(np.max(np.abs(draws[n].mean(0) - truth[n].mean(0)) / truth[n].std(0)) for n in truth)
            deviation = max(np.max(np.abs(draws[n].std(0) / truth[n].std(0) - 1.0)) for n in truth)
            yield name, way, f"{mean:.3f}", f"{deviation:.1%}", f"{evaluations:,}", f"{seconds:.2f}"


def nuts_draws(model: Any, args: Any, num_warmup: int, num_samples: int) -> Callable[[int], tuple[dict[str, Any], int]]:
    """Function of a seed to draws, and how many gradients they and the warm-up took."""

    def run(seed: int) -> tuple[dict[str, Any], int]:
        mcmc = make_nuts(model, num_warmup, num_samples)
        mcmc.warmup(random.key(2 * seed), *args, extra_fields=("num_steps",), collect_warmup=True)
        steps = int(mcmc.get_extra_fields()["num_steps"].sum())
        chains = run_chains(mcmc, 2 * seed + 1, *args)
        return {name: draws[0] for name, draws in chains.draws.items()}, steps + chains.gradients

    return run


def white_cox_process(counts: Any) -> None:
    """In coordinates that NUTS needs."""
    root = jnp.linalg.cholesky(covariance(jnp.arange(40.0), 1.0, 6.0))
    f = numpyro.deterministic("f", root @ numpyro.sample("white", dist.Normal(0, 1).expand([40]).to_event(1)))
    numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)


WHITE = {"Cox process": white_cox_process}


def evidences() -> Iterator[Iterable[Any]]:
    """Log evidences by all ways, and CPU-seconds of a first and a next run."""
    for name, (model, args) in MODELS.items():
        ways = {kind.__name__: by_engine(kind, model, args) for kind in (EP, VariationalGaussian, INLA)}
        ways["SMC, 4000 particles"] = by_engine(SMC, model, args, num_particles=4000)
        if model in (classification, cox_process):
            ways["annealed importance sampling"] = annealed(model, args)
        for way, run in ways.items():
            found, first, later = first_and_next(run)
            value, error = float(getattr(found, "log_evidence", found)), getattr(found, "standard_error", None)
            sign = ">= " if getattr(found, "is_lower_bound", False) else ""
            told = "" if error is None else f" ± {float(error):.3f}"
            yield name, way, f"{sign}{value:.3f}{told}", f"{first:.2f}", f"{later:.3f}"


def annealed(model: Any, args: Any) -> Callable[[int], Any]:
    """Annealed importance sampling by a thousand chains."""
    return lambda number: annealed_importance_sampling(model, random.key(number), *args, num_chains=1000)


def price(way: str, run: Callable[[int], Any]) -> str:
    """Words on the spread of repeated runs, and CPU-seconds for a standard error of 0.03."""
    run(0)
    values, seconds = cpu_seconds(lambda: [float(run(1 + number)) for number in range(REPEATS)])
    seconds, spread = seconds / REPEATS, np.std(values, ddof=1)
    return (
        f"{way}, on the model of classification, 1000 particles: mean {np.mean(values):.3f}, spread {spread:.3f}, "
        f"{seconds:.3f} CPU-s a run, {seconds * (spread / 0.03) ** 2:.2f} CPU-s for a standard error of 0.03"
    )


def of_the_cox_process() -> str:
    """Words on the error that SMC tells, beside the spread of its runs."""
    run = by_engine(SMC, cox_process, (SERIES,), num_particles=4000)
    found = [run(100 + number) for number in range(16)]
    values, told = np.array(found, float), np.sqrt(np.mean([value.standard_error**2 for value in found]))
    mean = np.log(np.mean(np.exp(values - values.max()))) + values.max()
    engine = EP(cox_process, progress_bar=False)
    engine.run(random.key(0), SERIES)
    return (
        f"Cox process, 16 runs of SMC: {mean:.4f} ± {values.std(ddof=1) / 4:.4f}; spread of the runs "
        f"{values.std(ddof=1):.4f}, standard error that they tell {told:.4f}; EP corrected by cumulants "
        f"{engine.corrected().log_evidence:.4f}"
    )


def main() -> None:
    numpyro.enable_x64()
    rows = table("model | by | log evidence | first | next", evidences())
    data = (PLACES, LABELS)
    ais = annealed(classification, data)
    ways: dict[str, Callable[[int], Any]] = {
        "SMC": by_engine(SMC, classification, data, num_particles=1000),
        "adaptive tempering of BlackJAX, ten slices a step": blackjax_tempering(),
        "annealed importance sampling, 1000 chains": lambda number: ais(number).log_evidence,
    }
    notes = [*(price(way, run) for way, run in ways.items()), of_the_cox_process()]
    lines = blocks(
        "# Log evidences of four models",
        "Hyperparameters integrated over. Seconds are CPU-seconds of a first run and of one that compiles nothing.",
        rows,
        (f"- {note}" for note in notes),
        "Means and deviations to those of 40,000 draws of NUTS: the worst error of a mean in posterior deviations, the "
        "worst relative error of a deviation, evaluations of the density (of NUTS gradients, warm-up included), and "
        "CPU-seconds of a second run.",
        table("model | by | mean | deviation | evaluations | seconds", moments()),
    )
    write_report("evidence", lines)


if __name__ == "__main__":
    main()
