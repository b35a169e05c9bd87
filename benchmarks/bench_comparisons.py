"""Comparisons of two: a league, one person's process beside BoTorch's, and many people whose shared tastes are learned.

``choix`` and BoTorch, of the extra ``benchmark``, are raced where they are installed. All are CPU-seconds.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.scipy.linalg import solve_triangular

from numpyro_ext.datasets import simulate_preferences
from numpyro_ext.infer import EP, collaborative_em
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.models import bradley_terry, preference_gp
from numpyro_ext.potentials import LogitPotential
from numpyro_ext.structure import read_latent_gaussian

from .bench_preferences import read_preferences
from .harness import at_most, compile_function, compile_sweep, cpu_seconds, in_turns, peak_bytes

NUM_TEAMS, NUM_CONTESTS = 1000, 100_000


def make_league(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Who plays whom, and whether the first wins."""
    rng = np.random.default_rng(seed)
    strength = rng.normal(size=NUM_TEAMS)
    first = rng.integers(NUM_TEAMS, size=NUM_CONTESTS)
    second = (first + rng.integers(1, NUM_TEAMS, size=NUM_CONTESTS)) % NUM_TEAMS
    won = rng.random(NUM_CONTESTS) < 1.0 / (1.0 + np.exp(strength[second] - strength[first]))
    return first, second, won.astype(int)


def test_sweep_of_a_league(results):
    first, second, won = make_league(0)
    reading = read_latent_gaussian(bradley_terry, (first, second, won), {"num_items": NUM_TEAMS}, check=False)
    sweep = compile_sweep(reading.form({"scale": jnp.array(1.0)}, reading.data))

    def floor(matrix: Any, won: Any) -> Any:
        factor = jnp.linalg.cholesky(matrix)
        inverse = solve_triangular(factor, jnp.eye(NUM_TEAMS), lower=True)
        # A pass over the contests: their variances are gathered, their factors integrated, and their sites scattered.
        variance = matrix[first, first] + matrix[second, second] - 2.0 * matrix[first, second]
        found = LogitPotential(won).tilted_moments(jnp.zeros(NUM_CONTESTS), variance)
        total = jnp.zeros(NUM_TEAMS).at[first].add(found.site_shift).at[second].add(-found.site_shift)
        sites = found.site_precision
        laplacian = jnp.zeros_like(matrix).at[first, first].add(sites).at[second, second].add(sites)
        return inverse, total, laplacian.at[first, second].add(-sites).at[second, first].add(-sites)

    least = compile_function(floor, 2.0 * jnp.eye(NUM_TEAMS) + 1e-4, jnp.asarray(won, float))
    ours, theirs = in_turns(3, sweep.run, least.run)
    results.record(
        f"EP sweep, {NUM_TEAMS} teams, {NUM_CONTESTS:,} contests",
        peer="Cholesky factor, its inverse, one pass over the contests",
        times=(ours, theirs),
        figure="ratio of CPU-seconds",
        target=at_most(3.0),
        programs=(sweep, least),
    )


@pytest.mark.parametrize("name", ["opt_pairwise", "ilsr_pairwise"])
def test_fit_of_a_league(results, name):
    choix = pytest.importorskip("choix", reason="choix comes with -e '.[benchmark]'")
    engine = EP(bradley_terry, hyper_values={"scale": 1.0}, progress_bar=False)
    leagues = [make_league(seed) for seed in range(3)]

    def fit(first: np.ndarray, second: np.ndarray, won: np.ndarray) -> Any:
        engine.run(random.key(0), first, second, won, num_items=NUM_TEAMS)
        return engine.posterior["strength"].sd

    fits = [cpu_seconds(fit, *league)[1] for league in leagues]  # the first compiles
    first, second, won = leagues[-1]
    pairs = np.stack([np.where(won, first, second), np.where(won, second, first)], axis=1)
    alpha = 1.0 if name == "opt_pairwise" else 1e-3
    _, theirs = cpu_seconds(lambda: getattr(choix, name)(NUM_TEAMS, pairs, alpha=alpha))
    results.record(
        f"Warm fit by EP with standard deviations, {NUM_TEAMS} teams, {NUM_CONTESTS:,} contests",
        peer=f"choix.{name}, a point",
        times=(min(fits), theirs),
        figure="ratio of CPU-seconds",
        target=at_most(0.1) if name == "opt_pairwise" else None,
        compile_seconds=fits[0] - min(fits),
    )


def make_person(num_items: int, num_pairs: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Items in the plane, and what somebody answers about pairs of them."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(num_items, 2))
    utility = 3.0 * np.sin(4.0 * X[:, 0]) + 2.0 * np.cos(3.0 * X[:, 1])
    first = rng.integers(num_items, size=num_pairs)
    second = (first + rng.integers(1, num_items, size=num_pairs)) % num_items
    won = utility[first] - utility[second] + np.sqrt(2.0) * rng.normal(size=num_pairs) > 0.0
    return X, first, second, won.astype(int)


@pytest.mark.parametrize(("num_items", "num_pairs"), [(50, 200), (200, 2000)])
def test_one_person(results, num_items, num_pairs):
    """A process with a scale and a length, both at the maximum of the evidence."""
    reason = "BoTorch comes with -e '.[benchmark]'"
    torch = pytest.importorskip("torch", reason=reason)
    pairwise = pytest.importorskip("botorch.models.pairwise_gp", reason=reason)
    from botorch.fit import fit_gpytorch_mll

    people = [make_person(num_items, num_pairs, seed) for seed in range(3)]
    jax.clear_caches()
    engine = EP(preference_gp, integrate="none", progress_bar=False)

    def fit(*person: np.ndarray) -> Any:
        engine.run(random.key(0), *person)
        return engine.posterior["utility"].sd

    fits = [cpu_seconds(fit, *person)[1] for person in people]
    found = float(engine.log_evidence)
    fine = EP(preference_gp, integrate="none", progress_bar=False, hyper_tol=1e-8, tol=1e-10)
    fine.run(random.key(1), *people[-1])

    def theirs(X: np.ndarray, first: np.ndarray, second: np.ndarray, won: np.ndarray) -> None:
        pairs = np.where(won[:, None] == 1, np.stack([first, second], 1), np.stack([second, first], 1))
        model = pairwise.PairwiseGP(torch.tensor(X), torch.tensor(pairs))
        fit_gpytorch_mll(pairwise.PairwiseLaplaceMarginalLogLikelihood(model.likelihood, model))
        with torch.no_grad():
            model.posterior(torch.tensor(X)).variance.sum().item()

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = [cpu_seconds(theirs, *person)[1] for person in people]
    gap = float(fine.log_evidence) - found
    end = "converged" if fine.diagnostics.converged else "not converged"
    remark = (
        f"Evidence {gap:.0e} below that of a search with tight tolerances, {end}. Cold: all programs compiled anew."
    )
    size = f"{num_items} items, {num_pairs} comparisons"
    for what, ours, limit in (("warm", min(fits[1:]), 0.3), ("cold", fits[0], 4.0)):
        results.record(
            f"EP, one person's process with scale and length, {size}, {what}",
            peer="BoTorch's PairwiseGP",
            times=(ours, min(peer)),
            figure="ratio of CPU-seconds",
            target=at_most(limit),
            remark=remark,
        )


def test_learning_of_shared_tastes(results):
    """Time to the objective that 160 iterations of expectation maximisation reach."""
    data = simulate_preferences(200, 30, 15)
    kernel = np.exp(-np.sum((data.item_features[:, None] - data.item_features) ** 2, -1) / 2.0) + 0.1 * np.eye(30)
    options: dict[str, Any] = {"progress_bar": False, "num_users": data.num_users}
    plain = options | {"accelerator": "none", "num_steps": 160, "tol": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        goal = collaborative_em(data.pairs, kernel, 2, **plain).objective_trace[-1]
        trace = collaborative_em(data.pairs, kernel, 2, accelerator="lbfgs", tol=0.0, **options).objective_trace
        num_fits = int(np.argmax(trace >= goal)) + 1
        quick = options | {"accelerator": "lbfgs", "num_steps": num_fits, "tol": 0.0}
        assert trace[-1] >= goal
        ours, theirs = in_turns(
            2,
            lambda: collaborative_em(data.pairs, kernel, 2, **quick).prior,
            lambda: collaborative_em(data.pairs, kernel, 2, **plain).prior,
        )
    results.record(
        "Shared tastes of 200 people by L-BFGS, to the objective of 160 iterations of EM",
        peer="these iterations",
        times=(ours, theirs),
        figure="ratio of CPU-seconds",
        target=at_most(0.2),
        remark=f"{num_fits} fits of all people.",
    )


def test_a_million_comparisons(results):
    """Fit of 20,000 people; to be run alone, as the memory is that of the process."""
    reading, seconds = read_preferences(simulate_preferences(20_000, 1000, 50), rank=2)

    @jax.jit
    def evaluate(hyper: Any, arrays: Any) -> Any:
        form = reading.form(hyper, arrays)
        state, info = ep.solve(form, ep.init(form), tol=1e-4)
        gradient = jax.value_and_grad(lambda hyper: ep.log_evidence(reading.form(hyper, arrays), state))(hyper)
        return gradient, info.converged

    hyper = reading.initial_hyper()
    (_, converged), fit = cpu_seconds(evaluate, hyper, reading.data)
    results.record(
        "EP with gradient, a million comparisons of 20,000 people, 1000 items, from the start",
        times=(fit, None),
        peer="memory",
        figure="GiB, of the whole process",
        value=peak_bytes() / 2**30,
        target=at_most(8.0),
        remark=f"Read in {seconds:.0f} CPU-s; {'converged' if converged else 'not converged'}; CPU-seconds, with "
        "compilation.",
    )
