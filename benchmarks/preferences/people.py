"""People who compare, and what is found of each alone or by what they share: of the tables of Houlsby (2014).

The sushi are those of ``load_sushi``; of the seven metals of the Jura (``jura/jura.csv``) sites "prefer" that of which
they have more.
"""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.datasets import data_path, load_sushi
from numpyro_ext.infer import EP
from numpyro_ext.infer.bilinear.algorithms import hybrid
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.structure.bilinear.form import Bilinear, CoupledSide, GaussianSide

from ..harness import standardised

NUM_USERS, NUM_ITEMS = 100, 10
_METALS = ("Cd", "Co", "Cr", "Cu", "Ni", "Pb", "Zn")


class People(NamedTuple):
    """Answers of people, and what is known of these and of the items."""

    answers: np.ndarray
    """To all pairs, one where the first is preferred, shape ``(users, pairs)``."""
    kernel: np.ndarray
    """Covariance of the items."""
    user_kernel: np.ndarray


def all_pairs(num_items: int) -> np.ndarray:
    return np.array(list(itertools.combinations(range(num_items), 2)))


def kernel_of_features(features: np.ndarray, length: float | None = None) -> np.ndarray:
    """Squared exponential, by default of the median distance."""
    squares = np.sum((features[:, None] - features) ** 2, axis=-1)
    length = float(np.sqrt(np.median(squares[squares > 0]))) if length is None else length
    return np.asarray(np.exp(-0.5 * squares / length**2) + 1e-5 * np.eye(len(features)))


def _indicators(values: np.ndarray) -> np.ndarray:
    return (values[:, None] == np.unique(values)).astype(float)


def synthetic(seed: int) -> People:
    """Products of five Gaussian processes on two features of the people and two of the items, with probit choices."""
    rng = np.random.default_rng(seed)
    width = np.sqrt(3.0)  # of a uniform distribution of variance one
    items, users = (rng.uniform(-width, width, (size, 2)) for size in (NUM_ITEMS, NUM_USERS))
    roots = [np.linalg.cholesky(kernel_of_features(features, 1.0)) for features in (users, items)]
    W, H = (root @ rng.standard_normal((len(root), 5)) for root in roots)
    first, second = all_pairs(NUM_ITEMS).T
    g = (W @ H.T)[:, first] - (W @ H.T)[:, second]
    answers = (g + rng.standard_normal(g.shape) > 0).astype(int)
    return People(answers, kernel_of_features(items, 1.0), kernel_of_features(users, 1.0))


def features_of_people(known: np.ndarray) -> np.ndarray:
    """Features of who ranked sushi: gender, age, time that it took, east or west as a child and now, moved; and the
    region of now."""
    return np.hstack([standardised(known[:, [1, 2, 3, 6, 9, 10]]), _indicators(known[:, 8])])


def sushi(seed: int) -> People:
    """People who ranked ten kinds of sushi."""
    data = load_sushi("a")
    chosen = np.random.default_rng(1000 + seed).permutation(len(data.rankings))[:NUM_USERS]
    places = np.argsort(data.rankings[chosen], axis=1)
    features = features_of_people(np.loadtxt(data_path("sushi", "sushi3.udata"))[chosen])
    first, second = all_pairs(NUM_ITEMS).T
    answers = (places[:, first] < places[:, second]).astype(int)
    return People(answers, kernel_of_features(np.asarray(data.item_features)), kernel_of_features(features))


def jura(seed: int) -> People:
    """Sites that "prefer" the metal of which they have more, in standard units; 20 other sites are features."""
    with data_path("jura", "jura.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = standardised(np.array([[float(row[metal]) for metal in _METALS] for row in rows]))
    kinds = [_indicators(np.array([row[name] for row in rows])) for name in ("Landuse", "Rock")]
    known = np.hstack([standardised(np.array([[float(row[n]) for n in ("Xloc", "Yloc")] for row in rows])), *kinds])
    order = np.random.default_rng(2000 + seed).permutation(len(values))
    chosen = order[20 : 20 + NUM_USERS]
    features, sites = values[order[:20]].T, values[chosen]
    first, second = all_pairs(len(_METALS)).T
    answers = (sites[:, first] > sites[:, second]).astype(int)
    return People(answers, kernel_of_features(features), kernel_of_features(known[chosen]))


Moments = tuple[np.ndarray, np.ndarray]
"""Mean and variance of the difference of utilities, shape ``(users, pairs)``."""


def _person(mean: Array, kernel: Array, won: Array | None = None, asked: Any = True) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(mean, kernel))
    with handlers.mask(mask=asked):
        first, second = all_pairs(kernel.shape[0]).T
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[first] - f[second])), obs=won)
    with handlers.mask(mask=False):  # looked at only
        numpyro.sample("utility", dist.Normal(f, 1.0), obs=jnp.zeros(kernel.shape[0]))


@functools.cache
def _all_people(num_items: int) -> Callable[..., tuple[Array, ...]]:
    """Fits of all people, given a mean and a covariance, as one program."""
    names, no = ("mean", "kernel", "won", "asked"), jnp.zeros(len(all_pairs(num_items)), int)
    example = jnp.zeros(num_items), jnp.eye(num_items), no, no == 0
    program = EP(_person).program(*example, changing=names)

    def one(*arrays: Array) -> tuple[Array, ...]:
        given = dict(zip(names, arrays, strict=True))
        found = program.predictors(given, program.fit(given, program.init(given)))
        return *found["won"], *found["utility"]

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0)))


def alone(answers: np.ndarray, kernel: np.ndarray) -> Callable[[np.ndarray], Moments]:
    """Each person by a Gaussian process of their own."""
    fit = _all_people(len(kernel))
    return lambda asked: tuple(map(np.asarray, fit(jnp.zeros(len(kernel)), kernel, answers, asked)[:2]))


def shared_moments(answers: np.ndarray, kernel: np.ndarray) -> Callable[[np.ndarray], Moments]:
    """Utilities whose mean and covariance all people share, by expectation maximisation (Birlutiu et al. 2013)."""
    fit = _all_people(len(kernel))
    mean, covariance, is_first = np.zeros(len(kernel)), kernel, True
    first, second = all_pairs(len(kernel)).T

    def moments(asked: np.ndarray) -> Moments:
        nonlocal mean, covariance, is_first
        for _ in range(20 if is_first else 5):
            _, of_pairs, means, variances = map(np.asarray, fit(mean, covariance, answers, asked))
            each = np.zeros((*means.shape, means.shape[1]))
            each[:, first, second] = 0.5 * (variances[:, first] + variances[:, second] - of_pairs)
            each += np.swapaxes(each, 1, 2) + variances[:, :, None] * np.eye(means.shape[1])
            mean = means.mean(axis=0)
            away = means - mean
            covariance = np.mean(each + away[:, :, None] * away[:, None], axis=0)
        is_first = False
        return tuple(map(np.asarray, fit(mean, covariance, answers, asked)[:2]))

    return moments


DATA: dict[str, Callable[[int], People]] = {"synthetic": synthetic, "sushi": sushi, "jura": jura}


_RANK, _NUM_AT_FIRST, _NUM_ITERATIONS, _DAMPING = 20, 100, 30, 0.5
"""Rank in :func:`products`, iterations before the first question and after each, which go on from the last."""


@functools.cache
def _product_programs(num_items: int) -> tuple[Callable[..., Any], ...]:
    """Starts, iterations, and moments of the differences of all pairs, for all data of as many items.

    Of arrays that begin with the kernel of the items and that of the people, ``None`` where these are independent.
    """
    first, second = all_pairs(num_items).T
    num_pairs, none = len(first), jnp.zeros((1, 0))
    zeros = jnp.zeros((num_items, _RANK))
    places = jnp.stack([jnp.append(first, 0), jnp.append(second, 0)], 1)
    weight = jnp.append(jnp.ones(num_pairs), 0.0)[:, None] * jnp.array([1.0, -1.0])  # the last sees nothing
    blank, own = jnp.zeros((NUM_USERS, _RANK)), jnp.arange(NUM_USERS)[:, None]

    def form_of(kernel: Array, user_kernel: Array | None, user: Array, pair: Array, won: Array) -> Bilinear:
        root, same = jnp.linalg.cholesky(kernel)[None], jnp.zeros(_RANK, int)
        items = CoupledSide(zeros, zeros + 1.0, root, same, places, weight)
        users: GaussianSide | CoupledSide = GaussianSide(blank, blank + 1.0)
        if user_kernel is not None:
            ones = jnp.ones((NUM_USERS, 1))
            users = CoupledSide(blank, blank + 1.0, jnp.linalg.cholesky(user_kernel)[None], same, own, ones)
        num, order = user.size, jnp.arange(user.size)
        coefficients = jnp.ones((1, _RANK)), none, none, jnp.zeros(num), ProbitPotential(won), jnp.ones(num)
        return Bilinear(users, items, user, pair, *coefficients, jnp.zeros(()), order, order)

    @jax.jit
    def start(*arrays: Array) -> Any:
        return hybrid.spectral_start(form_of(*arrays), jax.random.key(0))

    @jax.jit
    def iterate(state: Any, number: Array, *arrays: Array) -> Any:
        form = form_of(*arrays)
        return jax.lax.fori_loop(0, number, lambda _, state: hybrid.step(form, state, _DAMPING)[0], state)

    @jax.jit
    def moments(state: Any, kernel: Array, user_kernel: Array | None) -> Any:
        user, pair = (x.reshape(-1) for x in jnp.meshgrid(jnp.arange(NUM_USERS), jnp.arange(num_pairs), indexing="ij"))
        found = hybrid.predictive_moments(form_of(kernel, user_kernel, user, pair, jnp.ones(user.size)), state)
        return jax.tree.map(lambda x: x.reshape(NUM_USERS, num_pairs), found)

    return start, iterate, moments


def products(most: int) -> Callable[..., Callable[[np.ndarray], Moments]]:
    """Products of weights of the people and processes on the items (Houlsby et al. 2012), by what BilinearEP iterates;
    with a kernel of the people their weights are processes as well.

    :param most: questions to a person at most; what is not asked yet is a cell that sees nothing, so that the shapes of
        all fits are the same.
    """

    def of_people(
        answers: np.ndarray, kernel: np.ndarray, user_kernel: np.ndarray | None = None
    ) -> Callable[[np.ndarray], Moments]:
        start, iterate, all_moments = _product_programs(len(kernel))
        kernels = jnp.asarray(kernel), None if user_kernel is None else jnp.asarray(user_kernel)
        user, num_pairs = np.repeat(np.arange(NUM_USERS), most), answers.shape[1]
        state: Any = None

        def moments(asked: np.ndarray) -> Moments:
            nonlocal state
            pair = np.argsort(~asked, axis=1, kind="stable")[:, :most].reshape(-1)
            seen = np.where(asked[user, pair], pair, num_pairs)
            arrays = *kernels, *map(jnp.asarray, (user, seen, answers[user, pair]))
            number = _NUM_AT_FIRST if state is None else _NUM_ITERATIONS
            state = iterate(start(*arrays) if state is None else state, jnp.asarray(number), *arrays)
            mean, variance = map(np.asarray, all_moments(state, *kernels))
            assert np.isfinite(mean).all() and (variance > 0.0).all()
            return mean, variance

        return moments

    return of_people
