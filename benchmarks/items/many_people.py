"""Items with many people: ``python -m benchmarks.items.many_people WORK`` measures parts and writes their rows.

Parts that ``--only`` may name are ``scored`` (10^5 new people at items that are known), ``fitted`` (10^6 people by
40 items, answers a byte each), ``regressed`` (the same with three covariates of each person), ``records`` (the same
answers in a table and one below the other), ``traits`` (five correlated traits by EP and Laplace's method, beside the
evidence by importance sampling) and ``draws`` (100 parameters of items with people integrated out, by
``sample_exactly`` and by NUTS, and NUTS over all unknowns). Seconds are those of the processor.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import init_to_value
from scipy.special import expit, logsumexp
from scipy.stats import multivariate_t

from numpyro_ext.infer import EP, AdaptiveQuadrature, LaplaceApproximation, marginalize
from numpyro_ext.models import item_response, item_response_records

from ..harness import CompiledNuts, Study, blocks, cpu_seconds, peak_bytes, table

_NUM_ITEMS, _NUM_NODES = 40, 73


class Part(NamedTuple):
    """A row of the page."""

    what: str
    target: str
    measured: str


def _answers(num_people: int, num_items: int = _NUM_ITEMS, seed: int = 0) -> np.ndarray:
    """Answers to 2PL items, a byte each, made for some people at a time."""
    rng, of_items = np.random.default_rng(seed), np.random.default_rng(1)
    slope, difficulty = np.exp(0.3 * of_items.normal(size=num_items)), of_items.normal(size=num_items)
    found = np.empty((num_people, num_items), np.int8)
    for start in range(0, num_people, 10_000):
        part = found[start : start + 10_000]
        trait = rng.normal(size=(len(part), 1))
        part[:] = rng.random(part.shape) < 1 / (1 + np.exp(-slope * (trait - difficulty)))
    return found


def _fitted(model: Any, *args: Any, **kwargs: Any) -> AdaptiveQuadrature:
    engine = AdaptiveQuadrature(model, progress_bar=False)
    engine.run(random.key(0), *args, **kwargs)
    jax.block_until_ready([found.standard_error for found in engine.hyper.values()])
    return engine


def scored(draw: int, num_people: int = 100_000) -> Part:
    """Seconds of the first and the next scores, the floor of one product of answers and table, and memory."""
    engine = _fitted(partial(item_response, family="2pl"), _answers(4000))
    before, seconds = peak_bytes(), []
    for number in range(3):
        answers = _answers(num_people, seed=2 + number)
        began = time.process_time()
        site = engine.fold_in(random.key(number), answers).posterior["trait"]
        jax.block_until_ready((site.mean, site.variance))
        seconds.append(time.process_time() - began)
    indicators, nodes = jnp.asarray(answers, float), jnp.ones((_NUM_ITEMS, _NUM_NODES))
    product = jax.jit(lambda a, b: a @ b)
    product(indicators, nodes).block_until_ready()
    floor = min(cpu_seconds(lambda: product(indicators, nodes).block_until_ready())[1] for _ in range(5))
    first, later, least = (1e6 * one / num_people for one in (seconds[0], min(seconds[1:]), floor))
    measured = (
        f"{later:.1f} us ({first:.0f} with what is compiled); {later / least:.0f} times one product, {least:.2f} "
    )
    measured += f"us; {(peak_bytes() - before) / 2**30:.2f} GiB"
    return Part(f"{num_people:,} new people scored, 40 items, 2PL", "at most 10 us each", measured)


def fitted(draw: int, num_people: int = 1_000_000, num_covariates: int = 0) -> Part:
    """Seconds of a first fit with standard errors, and of the scores of all people; memory beside the arguments."""
    answers, given = _answers(num_people), {}
    if num_covariates:
        given["covariates"] = np.random.default_rng(4).normal(size=(num_people, num_covariates))
    before = peak_bytes()
    engine, seconds = cpu_seconds(lambda: _fitted(partial(item_response, family="2pl"), answers, **given))
    site, more = cpu_seconds(lambda: engine.posterior["trait"].mean)
    end, memory = engine.diagnostics, (peak_bytes() - before) / 2**30
    measured = f"{seconds:.0f} s with what is compiled, {end.hyper.num_evaluations} evaluations, converged: "
    measured += f"{end.converged}; scores of all {more:.1f} s; {memory:.2f} GiB"
    words = f", {num_covariates} covariates" if num_covariates else ""
    return Part(f"{num_people:,} people by {_NUM_ITEMS} items, 2PL{words}", "at most 2 min", measured)


def records(draw: int, num_people: int = 1000, num_items: int = 20) -> Part:
    """Next fits of the same answers in a table with gaps and one below the other."""
    answers = _answers(num_people, num_items).astype(float)
    answers[np.random.default_rng(3).random(answers.shape) > 0.7] = np.nan
    person, item = np.nonzero(np.isfinite(answers))
    as_records = partial(item_response_records, num_people=num_people, num_items=num_items, family="2pl")
    cases = {
        "table": (partial(item_response, family="2pl"), answers),
        "records": (as_records, person, item, answers[person, item].astype(int)),
    }
    seconds, evidences = {}, []
    for name, (model, *args) in cases.items():
        _fitted(model, *args)
        engine, seconds[name] = cpu_seconds(_fitted, model, *args)
        evidences.append(float(engine.log_evidence))
    measured = (
        f"{seconds['records']:.2f} s, of a table {seconds['table']:.2f}; evidence {abs(np.ptp(evidences)):.0e} off"
    )
    return Part(f"records of {num_people:,} people, {num_items} items, next fit", "as a table", measured)


def _graded_answers(num_people: int, num_items: int, num_traits: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers 0 to 4 to graded items of a trait each, whose correlations are 0.3, and their pattern."""
    rng, of_items = np.random.default_rng(0), np.repeat(np.arange(num_traits), num_items // num_traits)
    covariance = 0.3 + 0.7 * np.eye(num_traits)
    trait = rng.multivariate_normal(np.zeros(num_traits), covariance, size=num_people)
    slope = np.exp(0.3 * rng.normal(size=num_items))
    cuts = np.linspace(-2.0, 2.0, 4) + 0.4 * rng.normal(size=(num_items, 1)) + 0.1 * rng.normal(size=(num_items, 4))
    above = expit((slope * trait[:, of_items])[..., None] - cuts)
    answers = (rng.random((num_people, num_items, 1)) < above).sum(-1)
    return answers, np.eye(num_traits, dtype=int)[of_items]


def _sampled_evidence(answers: np.ndarray, loadings: np.ndarray, cuts: np.ndarray, factor: np.ndarray) -> list[float]:
    """Log evidence by importance sampling and its standard error: draws of Student's t about the mode of each person,
    by arithmetic that the engines have no part in."""
    ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (-np.inf, np.inf)))
    items, inverse = np.arange(len(cuts)), np.linalg.inv(factor @ factor.T)
    total, variance = 0.0, 0.0
    for number, own in enumerate(answers):
        lower, upper = ends[items, own], ends[items, own + 1]
        mode = np.zeros(len(factor))
        for _ in range(20):
            above, under = expit(loadings @ mode - lower), expit(loadings @ mode - upper)
            slope = loadings.T @ (1.0 - above - under) - inverse @ mode
            weight = above * (1.0 - above) + under * (1.0 - under)
            precision = inverse + (loadings.T * weight) @ loadings
            mode = mode + np.linalg.solve(precision, slope)
        proposal = multivariate_t(mode, np.linalg.inv(precision), df=10, seed=number)
        draws = proposal.rvs(size=1000)
        eta = draws @ loadings.T
        log_density = np.log(expit(eta - lower) - expit(eta - upper)).sum(1)
        white = np.linalg.solve(factor, draws.T)
        log_density -= 0.5 * np.sum(white**2, 0) + np.log(np.diag(factor)).sum() + 0.5 * len(mode) * np.log(2 * np.pi)
        weights = log_density - proposal.logpdf(draws)
        total += logsumexp(weights) - np.log(len(weights))
        shares = np.exp(weights - logsumexp(weights))
        variance += np.sum(shares**2) - 1.0 / len(shares)
    return [total, float(np.sqrt(variance))]


def traits(draw: int, num_people: int = 1500, num_items: int = 50, num_traits: int = 5) -> Part:
    """First and next fit of correlated traits by EP and Laplace's method, and the evidence at the items that EP found
    by importance sampling."""
    answers, pattern = _graded_answers(num_people, num_items, num_traits)
    given = {"family": "graded", "pattern": pattern, "correlated": True, "num_categories": 5}
    words = []
    for kind in (LaplaceApproximation, EP):
        engine = kind(item_response, progress_bar=False)
        first, later = (cpu_seconds(partial(engine.run, random.key(0), answers, **given))[1] for _ in range(2))
        end = engine.diagnostics
        words.append(
            f"{kind.__name__} {later:.1f} s (first {first:.1f}), {end.hyper.num_evaluations} evaluations, converged: "
            f"{end.converged}, largest derivative {end.hyper.max_gradient:.0e}, log evidence {engine.log_evidence:.2f}"
        )
    names = ("free_discrimination", "cutpoints", "trait_cholesky")
    slope, cuts, factor = (np.asarray(engine.hyper[name].value) for name in names)
    has_errors = all(np.all(np.isfinite(np.asarray(engine.hyper[name].standard_error))) for name in names)
    value, error = _sampled_evidence(answers, pattern * slope[:, None], cuts, factor)
    words.append(f"at the items of EP, by importance sampling {value:.2f} ± {error:.2f}")
    words.append(f"EP has standard errors: {has_errors}")
    what = "five correlated traits, graded 1,500 x 50, Laplace / EP next"
    return Part(what, "at most 10 / 60", "; ".join(words))


def two_parameter_logistic(response: Any = None, *, num_people: int, num_items: int) -> None:
    """Items with priors, as a person writes them."""
    with numpyro.plate("items", num_items):
        a = numpyro.sample("discrimination", dist.LogNormal(0, 0.5))
        d = numpyro.sample("intercept", dist.Normal(0, 3))
    with numpyro.plate("people", num_people):
        trait = numpyro.sample("trait", dist.Normal(0, 1))
    numpyro.sample("response", dist.Bernoulli(logits=a * trait[:, None] + d), obs=response)


def _rates(draws: dict[str, Any], seconds: float, with_warmup: float) -> dict[str, float]:
    """Smallest and median effective draws of the items' parameters in a second."""
    sizes = np.concatenate([effective_sample_size(np.asarray(draws[name])) for name in ("discrimination", "intercept")])
    return {
        "smallest": float(sizes.min() / seconds), "median": float(np.median(sizes) / seconds),
        "smallest with warm-up": float(sizes.min() / with_warmup),
    }  # fmt: skip


def draws(draw: int, num_people: int = 4000, num_items: int = 50) -> Part:
    """Effective draws of the items in a second of a compiled chain: NUTS over all unknowns and over the items alone,
    from the true values on, and ``sample_exactly`` from a fit."""
    rng = np.random.default_rng(0)
    trait, slope = rng.normal(size=num_people), np.exp(0.3 * rng.normal(size=num_items))
    difficulty = rng.normal(size=num_items)
    logits = slope * (trait[:, None] - difficulty)
    answers = (rng.random((num_people, num_items)) < 1 / (1 + np.exp(-logits))).astype(int)
    sizes = {"num_people": num_people, "num_items": num_items}
    start = {"discrimination": slope, "intercept": -slope * difficulty, "trait": trait}
    models = {
        "marginal": (marginalize(two_parameter_logistic, AdaptiveQuadrature), 200, 400),
        "plain": (two_parameter_logistic, 200, 1000),
    }
    found: dict[str, Any] = {}
    for name, (model, num_warmup, num_samples) in models.items():
        own = {site: jnp.asarray(value) for site, value in start.items() if name == "plain" or site != "trait"}
        sized = partial(model, **sizes)
        chain = CompiledNuts(sized, num_warmup, num_samples, answers, init_strategy=init_to_value(values=own))
        measured = chain.run(1)
        found[name] = _rates(measured.draws, measured.seconds_of_draws, measured.seconds) | {
            "steps": measured.gradients / num_samples,
            "milliseconds": 1e3 * measured.seconds_of_draws / measured.gradients,
        }
    engine = AdaptiveQuadrature(two_parameter_logistic, integrate="none", progress_bar=False)
    fits = [cpu_seconds(partial(engine.run, random.key(0), answers, **sizes))[1] for _ in range(2)]
    exact = engine.sample_exactly(random.key(1), 1000)
    run = partial(exact.run, random.key(2), answers, **sizes)
    run()  # for these arguments
    exact.post_warmup_state = None
    whole = cpu_seconds(run)[1]
    exact.post_warmup_state = exact.last_state
    seconds = cpu_seconds(run)[1]
    fields, some = exact.get_extra_fields(), np.random.default_rng(0).choice(4000, 200, replace=False)
    items = {name: exact._states["z"][name] for name in ("discrimination", "intercept")}
    recover = partial(marginalize(two_parameter_logistic, AdaptiveQuadrature).recover, random.key(3))
    given = {name: value.reshape(-1, num_items)[some] for name, value in items.items()}
    people = [cpu_seconds(partial(recover, given, answers, **sizes))[1] for _ in range(2)]
    plain, marginal, exactly = found["plain"], found["marginal"], _rates(items, seconds, whole)
    words = []
    for name, each in (("`sample_exactly`", exactly), ("NUTS over the items", marginal)):
        gain = {key: each[key] / plain[key] for key in exactly}
        words.append(
            f"{name} {gain['smallest']:.0f} times by the smallest effective size ({each['smallest']:.0f} against "
            f"{plain['smallest']:.2f} a second; with warm-up {gain['smallest with warm-up']:.0f} times), "
            f"{gain['median']:.0f} times by the median ({each['median']:.0f} against {plain['median']:.1f})"
        )
    number = len(fields["num_steps"])
    words.append(
        f"{number} draws of {1e3 * seconds / number:.1f} ms, {np.mean(fields['num_steps']):.2f} gradients and "
        f"acceptance {np.mean(fields['accept_prob']):.2f}, after a fit of {fits[1]:.1f} s; NUTS over the items "
        f"{marginal['steps']:.0f} steps of {marginal['milliseconds']:.1f} ms a draw, plain NUTS {plain['steps']:.0f} "
        f"of {plain['milliseconds']:.1f}; a draw of the people {1e3 * people[1] / len(some):.0f} ms"
    )
    what = f"effective draws of 100 item parameters, {num_people:,} x {num_items}, people integrated out"
    return Part(what, "at least 50 times plain NUTS", "; ".join(words))


def main() -> None:
    """Measure, each part in a process of its own, and write the rows of all parts that have run."""
    parts = {"scored": scored, "fitted": fitted, "regressed": partial(fitted, num_covariates=3)}
    study = Study(__doc__, parts | {"records": records, "traits": traits, "draws": draws}, environment={})
    found = study.run()
    rows = (row for name in study.experiments for row in found[name])
    study.write("many-people", blocks("# Items with many people", table("what | target | measured", rows)))


if __name__ == "__main__":
    main()
