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
from typing import Any

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

from ..harness import CompiledNuts, Study, cpu_seconds, peak_bytes, table

_NUM_ITEMS, _NUM_NODES = 40, 73
_DRAWS = "effective draws of 100 item parameters, 4,000 x 50, people integrated out"


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


def scored(draw: int, num_people: int = 100_000) -> dict[str, Any]:
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
    memory = peak_bytes() - before
    return {"people": num_people, "first": seconds[0], "next": min(seconds[1:]), "floor": floor, "memory": memory}


def fitted(draw: int, num_people: int = 1_000_000, num_covariates: int = 0) -> dict[str, Any]:
    """Seconds of a first fit with standard errors, and of the scores of all people; memory beside the arguments."""
    answers, given = _answers(num_people), {}
    if num_covariates:
        given["covariates"] = np.random.default_rng(4).normal(size=(num_people, num_covariates))
    before = peak_bytes()
    engine, seconds = cpu_seconds(lambda: _fitted(partial(item_response, family="2pl"), answers, **given))
    site, more = cpu_seconds(lambda: engine.posterior["trait"].mean)
    diagnostics = engine.diagnostics
    return {
        "people": num_people, "seconds": seconds, "scores": more, "memory": peak_bytes() - before,
        "converged": diagnostics.converged, "evaluations": diagnostics.hyper.num_evaluations,
    }  # fmt: skip


def regressed(draw: int) -> dict[str, Any]:
    """The same with three covariates of each person."""
    return fitted(draw, num_covariates=3)


def records(draw: int, num_people: int = 1000, num_items: int = 20) -> dict[str, Any]:
    """Next fits of the same answers in a table with gaps and one below the other."""
    answers = _answers(num_people, num_items).astype(float)
    answers[np.random.default_rng(3).random(answers.shape) > 0.7] = np.nan
    person, item = np.nonzero(np.isfinite(answers))
    as_records = partial(item_response_records, num_people=num_people, num_items=num_items, family="2pl")
    cases = {
        "table": (partial(item_response, family="2pl"), answers),
        "records": (as_records, person, item, answers[person, item].astype(int)),
    }
    found: dict[str, Any] = {}
    for name, (model, *args) in cases.items():
        _fitted(model, *args)
        engine, seconds = cpu_seconds(_fitted, model, *args)
        found[name] = {"seconds": seconds, "evidence": float(engine.log_evidence)}
    return found


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


def traits(draw: int, num_people: int = 1500, num_items: int = 50, num_traits: int = 5) -> dict[str, Any]:
    """First and next fit of correlated traits by EP and Laplace's method, and the evidence at the items that EP found
    by importance sampling."""
    answers, pattern = _graded_answers(num_people, num_items, num_traits)
    given = {"family": "graded", "pattern": pattern, "correlated": True, "num_categories": 5}
    found: dict[str, Any] = {"cells": answers.size}
    for kind in (LaplaceApproximation, EP):
        engine, seconds = kind(item_response, progress_bar=False), []
        for _ in range(2):
            seconds.append(cpu_seconds(partial(engine.run, random.key(0), answers, **given))[1])
        learned = engine.diagnostics.hyper
        found[kind.__name__] = {
            "first": seconds[0], "next": seconds[1], "evaluations": learned.num_evaluations,
            "converged": bool(engine.diagnostics.converged), "gradient": learned.max_gradient,
            "evidence": float(engine.log_evidence),
        }  # fmt: skip
    names = ("free_discrimination", "cutpoints", "trait_cholesky")
    slope, cuts, factor = (np.asarray(engine.hyper[name].value) for name in names)
    errors = [np.asarray(engine.hyper[name].standard_error) for name in names]
    found["has errors"] = all(bool(np.all(np.isfinite(error))) for error in errors)
    found["sampled"] = _sampled_evidence(answers, pattern * slope[:, None], cuts, factor)
    return found


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
        "smallest share": float(sizes.min() / np.size(draws["intercept"][..., 0])),
        "median share": float(np.median(sizes) / np.size(draws["intercept"][..., 0])),
    }  # fmt: skip


def draws(draw: int, num_people: int = 4000, num_items: int = 50) -> dict[str, Any]:
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
            "compilation": chain.compilation,
            "steps": measured.gradients / num_samples,
            "milliseconds": 1e3 * measured.seconds_of_draws / measured.gradients,
        }
    engine = AdaptiveQuadrature(two_parameter_logistic, integrate="none", progress_bar=False)
    fits = [cpu_seconds(partial(engine.run, random.key(0), answers, **sizes))[1] for _ in range(2)]
    exact, first = cpu_seconds(engine.sample_exactly, random.key(1), 1000)
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
    found["exact"] = _rates(items, seconds, whole) | {
        "fit": fits[1], "first fit": fits[0], "first": first, "whole": whole, "draws": len(fields["num_steps"]),
        "gradients": float(np.mean(fields["num_steps"])), "acceptance": float(np.mean(fields["accept_prob"])),
        "milliseconds": 1e3 * seconds / len(fields["num_steps"]), "people": 1e3 * people[1] / len(some),
    }  # fmt: skip
    return found


def _page(found: dict[str, list[Any]]) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    if scores := found.get("scored"):
        one = min(scores, key=lambda each: each["next"])
        each, floor = (1e6 * one[name] / one["people"] for name in ("next", "floor"))
        measured = f"{each:.1f} us ({1e6 * one['first'] / one['people']:.0f} with what is compiled)"
        measured += f"; {each / floor:.0f} times one product, {floor:.2f} us; {one['memory'] / 2**30:.2f} GiB"
        rows.append((f"{one['people']:,} new people scored, 40 items, 2PL", "at most 10 us each", measured))
    for name, words in (("fitted", ""), ("regressed", ", three covariates")):
        if not (fits := found.get(name)):
            continue
        one = fits[0]
        measured = f"{one['seconds']:.0f} s with what is compiled, {one['evaluations']} evaluations, converged: "
        measured += f"{one['converged']}; scores of all {one['scores']:.1f} s; {one['memory'] / 2**30:.2f} GiB"
        rows.append((f"{one['people']:,} people by 40 items, 2PL{words}", "at most 2 min", measured))
    if pairs := found.get("records"):
        one = pairs[0]
        gap = abs(one["records"]["evidence"] - one["table"]["evidence"])
        measured = (
            f"{one['records']['seconds']:.2f} s, of a table {one['table']['seconds']:.2f}; evidence {gap:.0e} off"
        )
        rows.append(("records of 1,000 people, 20 items, next fit", "as a table", measured))
    if fits := found.get("traits"):
        one = fits[0]
        words = []
        for name in ("EP", "LaplaceApproximation"):
            each = one[name]
            seconds = f"{name} {each['next']:.1f} s (first {each['first']:.1f})"
            end = f"converged: {each['converged']}, largest derivative {each['gradient']:.0e}"
            words.append(f"{seconds}, {each['evaluations']} evaluations, {end}, log evidence {each['evidence']:.2f}")
        sampled = "at the items of EP, by importance sampling {:.2f} ± {:.2f}".format(*one["sampled"])
        errors = f"EP has standard errors: {one['has errors']}"
        what = "five correlated traits, graded 1,500 x 50, EP / Laplace next"
        rows.append((what, "at most 60 / 10", "; ".join([*words, sampled, errors])))
    if chains := found.get("draws"):
        one = chains[0]
        plain, marginal, exact = (one[name] for name in ("plain", "marginal", "exact"))
        words = []
        for name, each in (("`sample_exactly`", exact), ("NUTS over the items", marginal)):
            gain = {key: each[key] / plain[key] for key in ("smallest", "median", "smallest with warm-up")}
            words.append(
                f"{name} {gain['smallest']:.0f} times by the smallest effective size ({each['smallest']:.0f} against "
                f"{plain['smallest']:.2f} a second; with warm-up {gain['smallest with warm-up']:.0f} times), "
                f"{gain['median']:.0f} times by the median ({each['median']:.0f} against {plain['median']:.1f})"
            )
        what = f"{exact['draws']} draws of {exact['milliseconds']:.1f} ms, {exact['gradients']:.2f} gradients and "
        what += f"acceptance {exact['acceptance']:.2f}, after a fit of {exact['fit']:.1f} s; NUTS over the items "
        what += f"{marginal['steps']:.0f} steps of {marginal['milliseconds']:.1f} ms a draw, plain NUTS "
        what += f"{plain['steps']:.0f} of {plain['milliseconds']:.1f}; a draw of the people {exact['people']:.0f} ms"
        rows.append((_DRAWS, "at least 50 times plain NUTS", "; ".join([*words, what])))
    return table("what | target | measured", rows)


def main() -> None:
    """Measure, each part in a process of its own, and write the rows of all parts that have run."""
    numpyro.enable_x64()
    experiments = {
        "scored": scored, "fitted": fitted, "regressed": regressed, "records": records, "traits": traits,
        "draws": draws,
    }  # fmt: skip
    study = Study(__doc__, experiments, draws=dict.fromkeys(experiments, 1), environment={})
    study.write("many-people", _page(study.run()))


if __name__ == "__main__":
    main()
