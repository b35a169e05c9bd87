"""Models whose spreads are measured, as their authors would write them; data are simulated, eight schools apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

from numpyro_ext.datasets import data_path
from numpyro_ext.models import item_response

NUM_ROWS, NUM_SITES, NUM_VISITS = 300, 200, 5
TWO = ("EP", "Laplace")


class Case(NamedTuple):
    """A model with its data, and what is compared."""

    model: Callable[..., None]
    data: tuple[Any, ...] | Callable[[], tuple[Any, ...]]
    """Arguments of the model; a function where they are in a file that may be missing."""
    sites: tuple[str, ...] = ()
    """Sites of whose draws the moments are compared; marginals of all unknowns where there are none."""
    engines: tuple[str, ...] = ("EP",)
    """The first is that whose times are wanted."""
    wanted: str = ""
    """CPU-seconds of a first and of a next run at most."""
    twin: Callable[..., None] | None = None
    """The model with the same sites as NUTS runs it, where it is not enough to decentre its sites."""
    same_as: str = ""
    """Name of a case with the same posterior, whose chains serve both."""

    def arguments(self) -> tuple[Any, ...]:
        return self.data() if callable(self.data) else self.data


def _normal(name: str, scale: float, size: int = 0) -> Any:
    prior = dist.Normal(0, scale)
    return numpyro.sample(name, prior.expand([size]).to_event(1) if size else prior)


def _half_normal(name: str, scale: float) -> Any:
    return numpyro.sample(name, dist.HalfNormal(scale))


def eight_schools() -> Case:
    y, sigma = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model(sigma, y):
        mu, tau = _normal("mu", 5), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    return Case(model, (sigma, y), ("mu", "tau"), ("EP", "EP, normal"))


def sleep_study() -> Case:
    """Eighteen subjects on ten days, with correlated intercepts and slopes."""
    rng = np.random.default_rng(3)
    subject, days = np.repeat(np.arange(18), 10), np.tile(np.arange(10.0), 18)
    effects = rng.normal(size=(18, 2)) @ np.array([[25.0, 0.0], [0.1 * 6.0, 6.0]]).T
    y = 250.0 + effects[subject, 0] + (10.5 + effects[subject, 1]) * days + 25.0 * rng.normal(size=180)

    def model(subject, days, y, is_centred=True):
        b = _normal("b", 2, 2)
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
        scale = tau[:, None] * numpyro.sample("L", dist.LKJCholesky(2, concentration=1))
        sigma = _half_normal("sigma", 1)
        with numpyro.plate("subjects", 18):
            if is_centred:
                effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale))
            else:
                effect = _normal("z", 1, 2) @ scale.T
        mean = b[0] + effect[subject, 0] + (b[1] + effect[subject, 1]) * days
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    data = subject, days, (y - 300.0) / 50.0
    return Case(model, data, ("b", "tau", "L", "sigma"), twin=partial(model, is_centred=False))


def seven_components() -> Case:
    """Seven variance components of six groups each, and noise: 140 rows."""
    rng = np.random.default_rng(5)
    groups = rng.integers(0, 6, (7, 140))
    spreads = np.array([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.8])
    y = sum(s * rng.normal(size=6)[g] for s, g in zip(spreads, groups, strict=True)) + 0.5 * rng.normal(size=140)

    def model(groups, y):
        mean = _normal("mean", 1)
        for k in range(7):
            spread = _half_normal(f"s{k}", 0.5)
            mean = mean + numpyro.sample(f"e{k}", dist.Normal(0, spread).expand([6]).to_event(1))[groups[k]]
        numpyro.sample("y", dist.Normal(mean, _half_normal("noise", 1)), obs=y)

    return Case(model, (groups, y), ("mean", *(f"s{k}" for k in range(7)), "noise"))


def dose_response() -> Case:
    """Curves of six plates; bottom and top are linear."""
    rng = np.random.default_rng(7)
    plate, dose = np.repeat(np.arange(6), 12), np.tile(np.linspace(-3.0, 3.0, 12), 6)
    share = 1.0 / (1.0 + np.exp(-1.4 * (dose - 0.4)))
    y = 0.2 + 1.9 * share + 0.15 * rng.normal(size=6)[plate] + 0.2 * rng.normal(size=72)

    def model(plate, dose, y):
        bottom, top = _normal("bottom", 1), numpyro.sample("top", dist.Normal(2, 1))
        slope = numpyro.sample("slope", dist.LogNormal(0, 0.5))
        log_ec50, spread = _normal("log_ec50", 1), _half_normal("spread", 0.5)
        with numpyro.plate("plates", 6):
            shift = numpyro.sample("shift", dist.Normal(0, spread))
        mean = bottom + (top - bottom) * jax.nn.sigmoid(slope * (dose - log_ec50)) + shift[plate]
        numpyro.sample("y", dist.Normal(mean, _half_normal("noise", 0.5)), obs=y)

    return Case(model, (plate, dose, y), ("bottom", "top", "slope", "log_ec50", "spread", "noise"))


def media_mix() -> Case:
    """Saturation and decay of three channels over two years of weeks."""
    rng = np.random.default_rng(13)
    spend = rng.gamma(2.0, 0.5, (104, 3)) * (rng.random((104, 3)) < 0.7)

    def saturated(spend, decay, gamma):
        weights = decay[None, :] ** jnp.arange(8)[:, None]
        weights = weights / weights.sum(0)
        padded = jnp.concatenate([jnp.zeros((7, 3)), spend])
        carried = sum(weights[k] * padded[7 - k : 7 - k + len(spend)] for k in range(8))
        return carried / (carried + gamma)

    decay, gamma = np.array([0.3, 0.6, 0.8]), np.array([0.5, 1.0, 1.0])
    mean = 2.0 + np.asarray(saturated(spend, decay, gamma)) @ [1.0, 1.5, 0.8]

    def model(spend, y):
        base, beta = _normal("base", 3), _normal("beta", 2, 3)
        decay = numpyro.sample("decay", dist.Beta(2, 2).expand([3]).to_event(1))
        gamma = numpyro.sample("gamma", dist.HalfNormal(1).expand([3]).to_event(1))
        mean = base + saturated(spend, decay, gamma) @ beta
        numpyro.sample("y", dist.Normal(mean, _half_normal("noise", 1)), obs=y)

    return Case(model, (spend, mean + 0.2 * rng.normal(size=104)), ("base", "beta", "decay", "gamma", "noise"))


def raters() -> Case:
    """Forty items rated by six raters on four grades, with cut points of their own: eighteen of them."""
    rng = np.random.default_rng(17)
    item, rater = np.repeat(np.arange(40), 6), np.tile(np.arange(6), 40)
    cuts = np.array([-1.0, 0.0, 1.0]) + 0.4 * rng.normal(size=(6, 1)) + 0.1 * rng.normal(size=(6, 3))
    value = 1.2 * rng.normal(size=40)[item] + rng.logistic(size=240)
    y = np.sum(value[:, None] > np.sort(cuts, axis=1)[rater], axis=1)

    def model(item, rater, y):
        spread = _half_normal("spread", 2)
        thresholds = dist.Normal(0, 2).expand([3]).to_event(1)
        with numpyro.plate("raters", 6):
            ordered = dist.TransformedDistribution(thresholds, dist.transforms.OrderedTransform())
            cuts = numpyro.sample("cuts", ordered)
        with numpyro.plate("items", 40):
            quality = numpyro.sample("quality", dist.Normal(0, spread))
        numpyro.sample("y", dist.OrderedLogistic(quality[item], cuts[rater]), obs=y)

    return Case(model, (item, rater, y), ("spread", "cuts"))


def separated() -> Case:
    """A logistic regression whose classes are nearly separated, under a wide prior; there are no hyperparameters."""
    x = np.linspace(-2.0, 2.0, 16)
    y = (x > 0.1).astype(int)
    y[7] = 1

    def model(x, y):
        numpyro.sample("y", dist.Bernoulli(logits=_normal("a", 10) + _normal("b", 10) * x), obs=y)

    return Case(model, (x, y), ("a", "b"))


def robust_groups() -> Case:
    """Group effects of a t distribution whose degrees of freedom are learned."""
    rng = np.random.default_rng(19)
    group = np.repeat(np.arange(20), 6)
    y = 1.0 + 0.5 * rng.standard_t(3, 20)[group] + 0.6 * rng.normal(size=120)

    def model(group, y):
        mu, tau = _normal("mu", 2), _half_normal("tau", 1)
        nu, noise = numpyro.sample("nu", dist.Gamma(2, 0.1)), _half_normal("noise", 1)
        with numpyro.plate("groups", 20):
            effect = numpyro.sample("effect", dist.StudentT(nu, 0, tau))
        numpyro.sample("y", dist.Normal(mu + effect[group], noise), obs=y)

    return Case(model, (group, y), ("mu", "tau", "nu", "noise"), ("VG",))


_NODES = np.linspace(-8.0, 8.0, 61)


def _items(response):
    """Two-parameter logistic items of which all people are summed out, sharing nothing with the engine."""
    with numpyro.plate("items", response.shape[1]):
        a, d = numpyro.sample("discrimination", dist.LogNormal(0, 0.5)), _normal("intercept", 3)
    logits = a[:, None] * _NODES + d[:, None]
    joint = response @ logits - jnp.sum(jax.nn.softplus(logits), axis=0) + dist.Normal().log_prob(_NODES)
    numpyro.factor("people", jnp.sum(jax.nn.logsumexp(joint, axis=1)))


def verbal_aggression() -> tuple[np.ndarray]:
    """Answers of 316 people to 24 items, yes or not, below ``NUMPYRO_EXT_DATA``."""
    table = pd.read_csv(data_path("irt", "verbagg_long.csv.gz"))
    table["code"] = (table["r2"] == "Y").astype(int)
    return (table.pivot(index="id", columns="item", values="code").to_numpy(),)


def simulated_items(seed: int) -> tuple[np.ndarray]:
    """Answers of 200 people to 20 items drawn from the priors."""
    r = np.random.default_rng(seed)
    slope, intercept, trait = np.exp(0.5 * r.normal(size=20)), 3.0 * r.normal(size=20), r.normal(size=(200, 1))
    return ((r.random((200, 20)) < 1.0 / (1.0 + np.exp(-slope * trait - intercept))).astype(int),)


def items(answers: Callable[[], tuple[np.ndarray]]) -> Case:
    model = partial(item_response, family="2pl", priors=True)
    return Case(model, answers, ("discrimination", "intercept"), ("quadrature",), twin=_items)


# Two predictors in an observation, or more, and likelihoods of the user's own


def _grouped(num_groups: int, seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
    """Random numbers, groups of the rows, a covariate, and standard normal effects of the groups."""
    draws = np.random.default_rng(seed)
    group = draws.integers(0, num_groups, NUM_ROWS)
    return draws, group, draws.normal(size=NUM_ROWS), draws.normal(size=(2, num_groups))


def _effects(name: str, num_groups: int) -> Any:
    spread = _half_normal(f"spread_{name}", 1)
    with numpyro.plate(f"groups_{name}", num_groups):
        return spread * _normal(f"effect_{name}", 1)


def _lines(x: Any, group: Any, num_groups: int, *names: str) -> list[Any]:
    """Predictors that are each an intercept, a slope and effects of groups."""
    return [
        _normal(f"intercept_{name}", 1) + _normal(f"slope_{name}", 1) * x + _effects(name, num_groups)[group]
        for name in names
    ]


def zero_inflated() -> Case:
    draws, group, x, effect = _grouped(15, 1)
    rate = np.exp(0.8 + 0.4 * x + 0.4 * effect[0][group])
    gate = 1 / (1 + np.exp(-(-0.8 + 0.5 * x + 0.7 * effect[1][group])))
    y = draws.poisson(rate) * (draws.uniform(size=NUM_ROWS) > gate)

    def model(x, group, y):
        log_rate, gate_logits = _lines(x, group, 15, "rate", "gate")
        counts = dist.Poisson(jnp.exp(log_rate))
        numpyro.sample("y", dist.ZeroInflatedDistribution(counts, gate_logits=gate_logits), obs=y)

    return Case(model, (x, group, y), engines=TWO, wanted="10 / 1")


def weibull(is_factor: bool = False) -> Case:
    draws, group, x, effect = _grouped(30, 2)
    shape = np.exp(0.5 + 0.2 * x + 0.25 * effect[0][group])
    y = np.exp(1.0 - 0.3 * x + 0.3 * effect[1][group]) * draws.weibull(shape)

    def model(x, group, y):
        log_shape, log_scale = _lines(x, group, 30, "shape", "scale")
        shape, log_ratio = jnp.exp(log_shape), jnp.log(y) - log_scale
        if is_factor:
            numpyro.factor("y", jnp.sum(log_shape + shape * log_ratio - jnp.log(y) - jnp.exp(shape * log_ratio)))
        else:
            numpyro.sample("y", dist.Weibull(jnp.exp(log_scale), shape), obs=y)

    return Case(model, (x, group, y), engines=TWO, wanted="10 / 1")


def negative_binomial() -> Case:
    draws, group, x, effect = _grouped(30, 3)
    mean, size = np.exp(1.2 + 0.4 * x + 0.4 * effect[0][group]), np.exp(0.8 - 0.3 * x + 0.4 * effect[1][group])

    def model(x, group, y):
        log_mean, log_size = _lines(x, group, 30, "mean", "size")
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(log_mean), jnp.exp(log_size)), obs=y)

    return Case(model, (x, group, draws.poisson(draws.gamma(size, mean / size))), engines=TWO, wanted="10 / 1")


def occupancy() -> Case:
    draws = np.random.default_rng(4)
    region, x, z = draws.integers(0, 20, NUM_SITES), *draws.normal(size=(2, NUM_SITES))
    presence, detection = 0.3 + 0.8 * x + 0.7 * draws.normal(size=20)[region], -0.5 + 0.6 * z
    is_there = draws.uniform(size=NUM_SITES) < 1 / (1 + np.exp(-presence))
    seen = draws.binomial(NUM_VISITS, 1 / (1 + np.exp(-detection)))

    def model(x, z, region, seen):
        b, c = _normal("presence", 1.5, 2), _normal("detection", 1.5, 2)
        presence, detection = b[0] + b[1] * x + _effects("region", 20)[region], c[0] + c[1] * z
        there = jax.nn.log_sigmoid(presence) + dist.Binomial(NUM_VISITS, logits=detection).log_prob(seen)
        not_there = jnp.where(seen == 0, jax.nn.log_sigmoid(-presence), -jnp.inf)
        numpyro.factor("seen", jnp.sum(jnp.logaddexp(there, not_there)))

    return Case(model, (x, z, region, seen * is_there), engines=TWO, wanted="10 / 1")


class CensoredWeibull(dist.Distribution):
    """Survival times of which some are known to be longer than what is observed."""

    support = dist.constraints.positive

    def __init__(self, scale: Any, shape: Any, is_event: Any) -> None:
        self.scale, self.concentration, self.is_event = scale, shape, is_event
        batch_shape = jnp.broadcast_shapes(jnp.shape(scale), jnp.shape(shape), jnp.shape(is_event))
        super().__init__(batch_shape, validate_args=False)

    def log_prob(self, value: Any) -> Any:
        base = dist.Weibull(self.scale, self.concentration)
        return jnp.where(self.is_event, base.log_prob(value), -((value / self.scale) ** self.concentration))


def censored() -> Case:
    draws, group, x, effect = _grouped(15, 5)
    time_of_event = np.exp(1.0 + 0.4 * x + 0.4 * effect[0][group]) * draws.weibull(1.4, NUM_ROWS)
    end = draws.uniform(1.0, 6.0, NUM_ROWS)

    def model(x, group, t, is_event):
        intercept, slope = _normal("intercept", 2), _normal("slope", 1)
        shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
        eta = intercept + slope * x + _effects("group", 15)[group]
        numpyro.sample("t", CensoredWeibull(jnp.exp(eta), shape, is_event), obs=t)

    data = x, group, np.minimum(time_of_event, end), time_of_event < end
    return Case(model, data, engines=TWO, wanted="6 / 0.5")


def location_scale() -> Case:
    draws, group, x, effect = _grouped(30, 6)
    scale = np.exp(-0.4 + 0.3 * x + 0.4 * effect[1][group])

    def model(x, group, y):
        location, log_scale = _lines(x, group, 30, "location", "scale")
        numpyro.sample("y", dist.Normal(location, jnp.exp(log_scale)), obs=y)

    y = 1.0 + 0.5 * x + 0.6 * effect[0][group] + scale * draws.normal(size=NUM_ROWS)
    return Case(model, (x, group, y), engines=TWO, wanted="8 / 0.5")


def categories(number: int, wanted: str, *engines: str) -> Case:
    """Softmax with effects on all categories but one."""
    draws, group, x, effect = _grouped(25, 7 if number == 3 else 8)
    levels, slopes = np.array([0.5, -0.3, 0.2, -0.2])[: number - 1], np.array([0.6, -0.4, 0.2, 0.5])[: number - 1]
    effects = effect.T if number == 3 else draws.normal(size=(25, number - 1))
    eta = np.pad(levels + slopes * x[:, None] + 0.6 * effects[group], ((0, 0), (1, 0)))
    names = ("first", "second", "third", "fourth")[: number - 1]

    def model(x, group, y):
        lines = _lines(x, group, 25, *names)
        numpyro.sample("y", dist.Categorical(logits=jnp.stack([jnp.zeros_like(lines[0]), *lines], axis=-1)), obs=y)

    y = np.argmax(eta + draws.gumbel(size=eta.shape), axis=1)
    return Case(model, (x, group, y), engines=engines, wanted=wanted)


_WEIBULL = "Weibull, effects on shape and scale"
CASES: dict[str, Callable[[], Case]] = {
    "eight schools": eight_schools,
    "sleep study": sleep_study,
    "seven components": seven_components,
    "dose-response": dose_response,
    "media mix": media_mix,
    "raters' cut points": raters,
    "near separation": separated,
    "t effects": robust_groups,
    "verbal aggression, 2PL": partial(items, verbal_aggression),
    "simulated 2PL, seed 0": partial(items, partial(simulated_items, 0)),
    "simulated 2PL, seed 1": partial(items, partial(simulated_items, 1)),
    "zero-inflated Poisson, effects on rate and gate": zero_inflated,
    _WEIBULL: weibull,
    "the same by `numpyro.factor`": lambda: weibull(is_factor=True)._replace(same_as=_WEIBULL),
    "negative binomial, effects on mean and dispersion": negative_binomial,
    "occupancy, covariates of presence and detection": occupancy,
    "right-censored survival, a class with `log_prob`": censored,
    "location and scale, effects on both": location_scale,
    "three categories, effects on both": partial(categories, 3, "10 / 1", "VG", "EP", "Laplace"),
    "four categories, effects on all but one": partial(categories, 4, "15 to 25 / 4", "EP", "VG", "Laplace"),
    "five categories, effects on all but one": partial(categories, 5, "", "EP", "VG", "Laplace"),
}
