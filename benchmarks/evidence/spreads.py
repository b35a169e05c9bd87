"""Means and standard deviations of hyperparameters and coefficients beside those of long chains of NUTS.

``python -m benchmarks.evidence.spreads`` writes ``results/<date>-spreads.md``. The models are written as their authors
would and have simulated data (eight schools apart). NUTS runs a model with centred effects decentred by
``LocScaleReparam``, or a decentred twin where effects are correlated; two chains, double precision. Errors of its means
and standard deviations are those of 40 batches of the chains. Each model runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian

from ..harness import COLD, Study, blocks, first_and_next, make_nuts, run_chains, table

NUM_BATCHES = 40
NUM_WARMUP, NUM_DRAWS = 1500, 4000
"""Length of each of the two chains of NUTS; the engine has as many draws."""


class Case(NamedTuple):
    """A model with its data, and what is compared."""

    model: Callable[..., None]
    data: tuple[Any, ...]
    sites: tuple[str, ...]
    """Sites whose elements are compared."""
    engine: Callable[..., Any] = EP
    options: dict[str, Any] = {}
    twin: Callable[..., None] | None = None
    """The model as NUTS runs it, with the same sites; by default the model itself, ``centred`` sites decentred."""
    centred: tuple[str, ...] = ()


def eight_schools() -> Case:
    y, sigma = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model(sigma, y):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    return Case(model, (sigma, y), ("mu", "tau"), centred=("theta",))


def eight_schools_normal() -> Case:
    return eight_schools()._replace(options={"integrate": "normal"})


def sleep_study() -> Case:
    """Eighteen subjects on ten days, with correlated intercepts and slopes."""
    rng = np.random.default_rng(3)
    subject, days = np.repeat(np.arange(18), 10), np.tile(np.arange(10.0), 18)
    effects = rng.normal(size=(18, 2)) @ np.array([[25.0, 0.0], [0.1 * 6.0, 6.0]]).T
    y = 250.0 + effects[subject, 0] + (10.5 + effects[subject, 1]) * days + 25.0 * rng.normal(size=180)
    y = (y - 300.0) / 50.0

    def hyper():
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
        L = numpyro.sample("L", dist.LKJCholesky(2, concentration=1))
        return tau[:, None] * L, numpyro.sample("sigma", dist.HalfNormal(1))

    def likelihood(b, effect, sigma, subject, days, y):
        mean = b[0] + effect[subject, 0] + (b[1] + effect[subject, 1]) * days
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    def model(subject, days, y):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        scale, sigma = hyper()
        with numpyro.plate("subjects", 18):
            effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale))
        likelihood(b, effect, sigma, subject, days, y)

    def twin(subject, days, y):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        scale, sigma = hyper()
        with numpyro.plate("subjects", 18):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        likelihood(b, z @ scale.T, sigma, subject, days, y)

    return Case(model, (subject, days, y), ("b", "tau", "L", "sigma"), twin=twin)


def seven_components() -> Case:
    """Seven variance components of six groups each, and noise: 140 rows."""
    rng = np.random.default_rng(5)
    groups = rng.integers(0, 6, (7, 140))
    spreads = np.array([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.8])
    y = sum(s * rng.normal(size=6)[g] for s, g in zip(spreads, groups, strict=True)) + 0.5 * rng.normal(size=140)
    names = tuple(f"s{k}" for k in range(7))

    def model(groups, y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        for k in range(7):
            spread = numpyro.sample(f"s{k}", dist.HalfNormal(0.5))
            mean = mean + numpyro.sample(f"e{k}", dist.Normal(0, spread).expand([6]).to_event(1))[groups[k]]
        numpyro.sample("y", dist.Normal(mean, numpyro.sample("noise", dist.HalfNormal(1))), obs=y)

    return Case(model, (groups, y), ("mean", *names, "noise"), centred=tuple(f"e{k}" for k in range(7)))


def dose_response() -> Case:
    """Curves of six plates; bottom and top are linear."""
    rng = np.random.default_rng(7)
    plate, dose = np.repeat(np.arange(6), 12), np.tile(np.linspace(-3.0, 3.0, 12), 6)
    share = 1.0 / (1.0 + np.exp(-1.4 * (dose - 0.4)))
    y = 0.2 + 1.9 * share + 0.15 * rng.normal(size=6)[plate] + 0.2 * rng.normal(size=72)

    def model(plate, dose, y):
        bottom = numpyro.sample("bottom", dist.Normal(0, 1))
        top = numpyro.sample("top", dist.Normal(2, 1))
        slope = numpyro.sample("slope", dist.LogNormal(0, 0.5))
        log_ec50 = numpyro.sample("log_ec50", dist.Normal(0, 1))
        spread = numpyro.sample("spread", dist.HalfNormal(0.5))
        with numpyro.plate("plates", 6):
            shift = numpyro.sample("shift", dist.Normal(0, spread))
        mean = bottom + (top - bottom) * jax.nn.sigmoid(slope * (dose - log_ec50)) + shift[plate]
        numpyro.sample("y", dist.Normal(mean, numpyro.sample("noise", dist.HalfNormal(0.5))), obs=y)

    sites = ("bottom", "top", "slope", "log_ec50", "spread", "noise")
    return Case(model, (plate, dose, y), sites, centred=("shift",))


def zero_inflated() -> Case:
    """Counts of fifteen groups with effects on the rate and on the gate."""
    rng = np.random.default_rng(11)
    group = np.repeat(np.arange(15), 12)
    rate = np.exp(1.0 + 0.5 * rng.normal(size=15)[group])
    gate = 1.0 / (1.0 + np.exp(1.0 - 0.8 * rng.normal(size=15)[group]))
    y = rng.poisson(rate) * (rng.random(180) > gate)

    def model(group, y):
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        s_rate = numpyro.sample("s_rate", dist.HalfNormal(1))
        s_gate = numpyro.sample("s_gate", dist.HalfNormal(1))
        with numpyro.plate("groups", 15):
            u = numpyro.sample("u", dist.Normal(0, s_rate))
            v = numpyro.sample("v", dist.Normal(0, s_gate))
        numpyro.sample(
            "y", dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(a + u[group])), gate_logits=b + v[group]), obs=y
        )

    return Case(model, (group, y), ("a", "b", "s_rate", "s_gate"), engine=LaplaceApproximation, centred=("u", "v"))


def media_mix() -> Case:
    """Saturation and decay of three channels over two years of weeks."""
    rng = np.random.default_rng(13)
    spend = rng.gamma(2.0, 0.5, (104, 3)) * (rng.random((104, 3)) < 0.7)

    def adstock(spend, decay):
        weights = decay[None, :] ** jnp.arange(8)[:, None]
        weights = weights / weights.sum(0)
        padded = jnp.concatenate([jnp.zeros((7, 3)), spend])
        return sum(weights[k] * padded[7 - k : 7 - k + len(spend)] for k in range(8))

    def saturated(spend, decay, gamma):
        carried = adstock(spend, decay)
        return carried / (carried + gamma)

    decay, gamma = np.array([0.3, 0.6, 0.8]), np.array([0.5, 1.0, 1.0])
    mean = 2.0 + np.asarray(saturated(spend, decay, gamma)) @ [1.0, 1.5, 0.8]
    y = mean + 0.2 * rng.normal(size=104)

    def model(spend, y):
        base = numpyro.sample("base", dist.Normal(0, 3))
        beta = numpyro.sample("beta", dist.Normal(0, 2).expand([3]).to_event(1))
        decay = numpyro.sample("decay", dist.Beta(2, 2).expand([3]).to_event(1))
        gamma = numpyro.sample("gamma", dist.HalfNormal(1).expand([3]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        numpyro.sample("y", dist.Normal(base + saturated(spend, decay, gamma) @ beta, noise), obs=y)

    return Case(model, (spend, y), ("base", "beta", "decay", "gamma", "noise"))


def raters() -> Case:
    """Forty items rated by six raters on four grades, with cut points of their own: eighteen of them."""
    rng = np.random.default_rng(17)
    item, rater = np.repeat(np.arange(40), 6), np.tile(np.arange(6), 40)
    cuts = np.array([-1.0, 0.0, 1.0]) + 0.4 * rng.normal(size=(6, 1)) + 0.1 * rng.normal(size=(6, 3))
    value = 1.2 * rng.normal(size=40)[item] + rng.logistic(size=240)
    y = np.sum(value[:, None] > np.sort(cuts, axis=1)[rater], axis=1)

    def model(item, rater, y):
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        ordered = dist.transforms.OrderedTransform()
        with numpyro.plate("raters", 6):
            cuts = numpyro.sample(
                "cuts", dist.TransformedDistribution(dist.Normal(0, 2).expand([3]).to_event(1), ordered)
            )
        with numpyro.plate("items", 40):
            quality = numpyro.sample("quality", dist.Normal(0, spread))
        numpyro.sample("y", dist.OrderedLogistic(quality[item], cuts[rater]), obs=y)

    return Case(model, (item, rater, y), ("spread", "cuts"), centred=("quality",))


def separated() -> Case:
    """A logistic regression whose classes are nearly separated, under a wide prior; there are no hyperparameters."""
    x = np.linspace(-2.0, 2.0, 16)
    y = (x > 0.1).astype(int)
    y[7] = 1

    def model(x, y):
        a, b = (numpyro.sample(name, dist.Normal(0, 10)) for name in ("a", "b"))
        numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)

    return Case(model, (x, y), ("a", "b"))


def robust_groups() -> Case:
    """Group effects of a t distribution whose degrees of freedom are learned."""
    rng = np.random.default_rng(19)
    group = np.repeat(np.arange(20), 6)
    y = 1.0 + 0.5 * rng.standard_t(3, 20)[group] + 0.6 * rng.normal(size=120)

    def model(group, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        with numpyro.plate("groups", 20):
            effect = numpyro.sample("effect", dist.StudentT(nu, 0, tau))
        numpyro.sample("y", dist.Normal(mu + effect[group], noise), obs=y)

    def twin(group, y):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        with numpyro.plate("groups", 20):
            z = numpyro.sample("z", dist.StudentT(nu, 0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * z[group], noise), obs=y)

    return Case(model, (group, y), ("mu", "tau", "nu", "noise"), engine=VariationalGaussian, twin=twin)


def weibull() -> Case:
    """Lifetimes of thirty groups with correlated effects on shape and scale."""
    rng = np.random.default_rng(23)
    group = np.repeat(np.arange(30), 8)
    effects = rng.normal(size=(30, 2)) @ np.array([[0.5, 0.0], [0.2, 0.25]]).T
    shape, scale = np.exp(0.4 + effects[group, 1]), np.exp(1.0 + effects[group, 0])
    y = scale * rng.weibull(shape)

    def hyper():
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
        return tau[:, None] * numpyro.sample("L", dist.LKJCholesky(2, concentration=1))

    def likelihood(b, effect, group, y):
        scale, shape = jnp.exp(b[0] + effect[group, 0]), jnp.exp(b[1] + effect[group, 1])
        numpyro.sample("y", dist.Weibull(scale, shape), obs=y)

    def model(group, y):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        scale = hyper()
        with numpyro.plate("groups", 30):
            effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale))
        likelihood(b, effect, group, y)

    def twin(group, y):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        scale = hyper()
        with numpyro.plate("groups", 30):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        likelihood(b, z @ scale.T, group, y)

    return Case(model, (group, y), ("b", "tau", "L"), engine=LaplaceApproximation, twin=twin)


CASES: dict[str, Callable[[], Case]] = {
    "eight schools": eight_schools,
    "eight schools, normal": eight_schools_normal,
    "sleep study": sleep_study,
    "seven components": seven_components,
    "dose-response": dose_response,
    "zero-inflated, Laplace": zero_inflated,
    "media mix": media_mix,
    "raters' cut points": raters,
    "near separation": separated,
    "t effects, VG": robust_groups,
    "Weibull, Laplace": weibull,
}


def _flat(draws: dict[str, np.ndarray], sites: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Draws of each element that varies, shape ``(chains, n)``."""
    out = {}
    for site in sites:
        values = np.asarray(draws[site])
        for place in np.ndindex(values.shape[2:]):
            column = values[(slice(None), slice(None), *place)]
            if column.std() > 1e-10:
                out[site + (str(list(place)) if place else "")] = column
    return out


def by_nuts(case: Case, num_warmup: int = NUM_WARMUP, num_samples: int = NUM_DRAWS) -> dict[str, Any]:
    """Moments by two chains, and their errors by batches; CPU-seconds."""
    model = case.twin or reparam(case.model, config={name: LocScaleReparam(0.0) for name in case.centred})
    options = {"target_accept_prob": 0.95, "max_tree_depth": 9}
    chains = run_chains(make_nuts(model, num_warmup, num_samples, num_chains=2, **options), 1, *case.data)
    found = {}
    for name, values in _flat(chains.draws, case.sites).items():
        sd, batches = values.std(), values.reshape(NUM_BATCHES, -1)
        squares = (batches - values.mean()) ** 2
        found[name] = {
            "mean": float(values.mean()),
            "sd": float(sd),
            "mean_error": float(batches.mean(1).std(ddof=1) / NUM_BATCHES**0.5),
            "sd_error": float(0.5 * squares.mean(1).std(ddof=1) / NUM_BATCHES**0.5 / sd**2),
        }
    return {"seconds": chains.seconds, "divergent": chains.divergent, "moments": found}


def by_engine(case: Case) -> dict[str, Any]:
    """Moments of draws, CPU-seconds of a first and of the next run with them, and what the run says of itself."""

    def run(_: int) -> tuple[Any, dict[str, Any]]:
        engine = case.engine(case.model, progress_bar=False, num_samples=NUM_DRAWS, **case.options)
        engine.run(random.key(0), *case.data)
        return engine, engine.get_samples()

    (engine, draws), first, later = first_and_next(run)
    flat = _flat({site: np.asarray(draws[site])[None] for site in case.sites}, case.sites)
    return {
        "first": first,
        "next": later,
        "evidence": float(engine.log_evidence),
        "converged": bool(engine.diagnostics.converged),
        "messages": list(engine.diagnostics.messages),
        "distinct": min((len(np.unique(values)) for values in flat.values()), default=0),
        "moments": {name: {"mean": float(v.mean()), "sd": float(v.std())} for name, v in flat.items()},
    }


def compare(reference: dict[str, Any], found: dict[str, Any]) -> list[tuple[str, float, float, float, float]]:
    """For each element the ratio of sds, its error, the gap of the means in sds, and its error; both by NUTS."""
    rows = []
    for name, true in reference["moments"].items():
        if name in found["moments"]:
            ours = found["moments"][name]
            gap = (ours["mean"] - true["mean"]) / true["sd"]
            rows.append((name, ours["sd"] / true["sd"], true["sd_error"], gap, true["mean_error"] / true["sd"]))
    return rows


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name in CASES:
        for ours, theirs in zip(found[name], found[_reference(name)], strict=False):
            gaps = compare(theirs, ours)
            ratio = max(gaps, key=lambda row: abs(np.log(max(row[1], 1e-3))))
            gap = max(gaps, key=lambda row: abs(row[3]))
            moments = f"{ratio[1]:.2f} ± {ratio[2]:.2f} ({ratio[0]})", f"{gap[3]:+.2f} ± {gap[4]:.2f} ({gap[0]})"
            said = f"{ours['evidence']:.3f}", ours["distinct"], ours["converged"], len(ours["messages"])
            times = f"{ours['first']:.1f} / {ours['next']:.2f}", f"{theirs['seconds']:.0f} ({theirs['divergent']})"
            yield name, *moments, *said, *times


def _reference(name: str) -> str:
    """Name of the chains; both fits of the eight schools have the same."""
    return f"{'eight schools' if name.startswith('eight schools') else name} by NUTS"


def main() -> None:
    experiments: dict[str, Callable[[int], Any]] = {
        name: lambda _, case=case: by_engine(case()) for name, case in CASES.items()
    }
    experiments |= {_reference(name): lambda _, case=case: by_nuts(case()) for name, case in CASES.items()}
    study = Study(__doc__, experiments, environment=COLD)
    found = study.run()
    lines = blocks(
        "# Spreads of hyperparameters",
        "The largest deviation of a ratio of standard deviations (the engine's over that of NUTS) and of the means (in "
        "standard deviations), with the Monte Carlo error of NUTS; draws have so many distinct values of the "
        f"hyperparameter that has the fewest; CPU-seconds of a first and a next run with {NUM_DRAWS} draws, and of "
        f"NUTS with two chains of {NUM_WARMUP} + {NUM_DRAWS} (with divergent transitions).",
        table(
            "model | sd over NUTS's | gap of means | log evidence | distinct | converged | messages | CPU-s | NUTS",
            _rows(found),
        ),
    )
    study.write("spreads", lines)


if __name__ == "__main__":
    main()
