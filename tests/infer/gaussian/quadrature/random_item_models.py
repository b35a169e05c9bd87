"""Random item-response models, and what is known of them by plain sums over long grids, in NumPy alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, log_softmax, logsumexp

__all__ = ["RandomModel", "Sums", "random_model"]

_BINARY = ("rasch", "2pl", "3pl", "4pl")
_COMMON_SLOPE = ("rasch", "rating-scale", "partial-credit")
_FAMILIES = (*_BINARY, "graded", "rating-scale", "partial-credit", "generalised-partial-credit", "nominal", "gaussian")
_NODES = {1: 400, 2: 120, 3: 80}
"""Nodes an axis. Of three axes 50 are not enough: the log evidence of single models is off by 2e-6 then."""
_REACH = 8.5


class RandomModel(NamedTuple):
    """Arguments of ``item_response``, with what the sums need of them."""

    response: np.ndarray
    options: dict[str, Any]
    families: list[str]
    sizes: np.ndarray
    """Number of categories of each item, 0 of real answers."""
    num_traits: int

    def sums(self, hyper: dict[str, Any]) -> Sums:
        """Sums over long grids at given parameters of items, constrained, by the names of their sites."""
        return _sums(self, {name: np.asarray(value) for name, value in hyper.items()})


class Sums(NamedTuple):
    """Density of the traits of people on a grid."""

    log_evidence: np.ndarray
    """Log evidence of each person."""
    axis: np.ndarray
    """Distances of the nodes from the mean of each person, in standard deviations of the prior."""
    mean: np.ndarray
    """Shape ``(people, traits)``."""
    covariance: np.ndarray
    marginal: np.ndarray | None
    """Masses of the nodes of one trait, shape ``(people, nodes)``."""
    location: np.ndarray
    """Prior means, shape ``(people, traits)``."""


def random_model(seed: int) -> RandomModel:
    """A model of one to three traits, of any families, with gaps, ragged categories, covariates and signs."""
    rng = np.random.default_rng(seed)
    num_traits = int(rng.choice([1, 1, 1, 2, 3]))
    num_people, num_items = (12, int(rng.integers(3, 6))) if num_traits < 3 else (5, 4)
    kinds = rng.choice(_FAMILIES, size=int(rng.choice([1, 1, 2])), replace=False)
    families = [str(kinds[k % len(kinds)]) for k in range(num_items)]
    sizes = np.array([0 if f == "gaussian" else 2 if f in _BINARY else int(rng.integers(2, 5)) for f in families])
    response = np.where(sizes == 0, rng.normal(size=(num_people, num_items)),
                        np.floor(rng.random((num_people, num_items)) * np.maximum(sizes, 1)))  # fmt: skip
    options: dict[str, Any] = {"family": families if len(kinds) > 1 else families[0]}
    if not set(families) <= {*_BINARY, "gaussian"}:
        options["num_categories"] = np.maximum(sizes, 2).tolist()
    if rng.random() < 0.5:
        response[rng.random(response.shape) < 0.25] = np.nan
        response[0] = np.nan
    if rng.random() < 0.4:
        options["covariates"] = rng.normal(size=(num_people, 2))
    options["signed"] = bool(rng.random() < 0.4)
    options["priors"] = bool(rng.random() < 0.3)
    if num_traits > 1:
        options["num_traits"] = num_traits
        pattern = (rng.random((num_items, num_traits)) < 0.6) * rng.choice([1, 1, -1], size=(num_items, num_traits))
        pattern[np.arange(num_items), np.arange(num_items) % num_traits] = 1
        if rng.random() < 0.6 or set(families) & set(_COMMON_SLOPE):
            options["pattern"] = pattern
        options["correlated"] = bool(rng.random() < 0.5)
    return RandomModel(response, options, families, sizes, num_traits)


def _sums(model: RandomModel, hyper: dict[str, np.ndarray]) -> Sums:
    num_people, _ = model.response.shape
    axis = np.linspace(-_REACH, _REACH, _NODES[model.num_traits])
    nodes = np.stack(np.meshgrid(*[axis] * model.num_traits, indexing="ij"), -1).reshape(-1, model.num_traits)
    location = np.zeros((num_people, model.num_traits))
    if "covariates" in model.options:
        found = model.options["covariates"] @ hyper["trait_coefficients"]
        location = found.reshape(location.shape)
    factor = hyper.get("trait_cholesky", np.eye(model.num_traits))
    log_prior = -0.5 * (nodes**2).sum(1) + model.num_traits * np.log((axis[1] - axis[0]) / np.sqrt(2 * np.pi))
    log_evidence, means, covariances, marginals = [], [], [], []
    shared: np.ndarray | None = None
    for person in range(num_people):
        traits = location[person] + nodes @ factor.T
        if shared is None or "covariates" in model.options:
            shared = None
            table = _tables(model, hyper, traits)
            shared = table
        joint = log_prior.copy()
        for item, answer in enumerate(model.response[person]):
            if np.isnan(answer):
                continue
            kind = shared[item]
            joint += kind[int(answer)] if model.sizes[item] else -0.5 * ((answer - kind[0]) / kind[1]) ** 2 - kind[2]
        total = logsumexp(joint)
        weights = np.exp(joint - total)
        mean = weights @ traits
        log_evidence.append(total)
        means.append(mean)
        covariances.append((traits - mean).T @ (weights[:, None] * (traits - mean)))
        marginals.append(weights)
    marginal = np.stack(marginals) if model.num_traits == 1 else None
    return Sums(np.array(log_evidence), axis, np.stack(means), np.stack(covariances), marginal, location)


def _tables(model: RandomModel, hyper: dict[str, np.ndarray], traits: np.ndarray) -> list[Any]:
    """Log probabilities ``(K, nodes)`` of the answers to each item at traits; mean, sd and constant of real answers."""
    several = len(set(model.families)) > 1
    found: list[Any] = []
    for item, family in enumerate(model.families):
        end = f"_{family}".replace("-", "_") if several else ""
        own = [k for k, other in enumerate(model.families) if other == family]
        sizes = {int(model.sizes[k]) for k in own}
        alike = [k for k in own if model.sizes[k] == model.sizes[item]]
        full = f"{end}_{model.sizes[item]}" if len(sizes) > 1 else end
        place, place_alike = own.index(item), alike.index(item)
        z = np.zeros(len(traits)) if family == "nominal" else traits @ _slope(model, hyper, item, end, own, place)
        if family in (*_BINARY, "rating-scale", "gaussian"):
            z = z + hyper[f"intercept{end}"][place]
        if family in _BINARY:
            guess = hyper[f"guessing{end}"][place] if family in ("3pl", "4pl") else 0.0
            upper = hyper[f"upper{end}"][place] if family == "4pl" else 1.0
            yes, no = expit(z), expit(-z)
            found.append(np.log(np.stack([(1 - guess) * no + (1 - upper) * yes, guess * no + upper * yes])))
        elif family == "graded":
            cut = hyper[f"cutpoints{full}"][place_alike]
            above = expit(z - cut[:, None])
            below = expit(cut[:, None] - z)
            # between two cutpoints: the difference of two probabilities without cancelling
            inner = [above[k] * below[k + 1] * -np.expm1(cut[k] - cut[k + 1]) for k in range(len(cut) - 1)]
            found.append(np.log(np.stack([below[0], *inner, above[-1]])))
        elif family == "gaussian":
            sd = hyper[f"noise{end}"][place]
            found.append((z, sd, np.log(sd * np.sqrt(2 * np.pi))))
        elif family == "nominal":
            slopes, level = _nominal(model, hyper, full, alike, place_alike), hyper[f"intercepts{full}"][place_alike]
            logits = traits @ slopes.T + level
            found.append(log_softmax(np.concatenate([np.zeros((len(traits), 1)), logits], 1), axis=1).T)
        else:
            if family == "rating-scale":
                steps = hyper[f"steps{full}"] if model.sizes[item] > 2 else np.zeros(1)
            else:
                steps = hyper[f"steps{full}"][place_alike]
            logits = np.arange(len(steps) + 1) * z[:, None] - np.append(0.0, np.cumsum(steps))
            found.append(log_softmax(logits, axis=1).T)
    return found


def _slope(
    model: RandomModel, hyper: dict[str, np.ndarray], item: int, end: str, own: list[int], place: int
) -> np.ndarray:
    """Slopes of an item, shape ``(traits,)``."""
    pattern, family = model.options.get("pattern"), model.families[item]
    if family in _COMMON_SLOPE:
        signs = np.ones(model.num_traits) if pattern is None else pattern[item]
        return hyper[f"discrimination{end}"] * signs
    if pattern is None:
        return np.atleast_1d(hyper[f"discrimination{end}"][place])
    return _filled(pattern[own], hyper[f"free_discrimination{end}"])[place]


def _filled(signs: np.ndarray, free: np.ndarray) -> np.ndarray:
    out = np.zeros((*signs.shape, *free.shape[1:]))
    out[signs != 0] = (signs[signs != 0].T * free.T).T
    return out


def _nominal(model: RandomModel, hyper: dict[str, np.ndarray], full: str, alike: list[int], place: int) -> np.ndarray:
    """Slopes of the categories of an item after the first, shape ``(K - 1, traits)``."""
    pattern = model.options.get("pattern")
    if pattern is None:
        found = hyper[f"slopes{full}"][place]
        return found.reshape(found.shape[0], -1)
    signs = np.abs(pattern[alike])  # either sign is free
    return _filled(signs, hyper[f"free_slopes{full}"])[place].T
