"""Two-state Markov forests by enumeration of all assignments, random small forests, and the reference cases."""

import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from numpyro_ext.potentials import Forest, GaussianPotential, LaplacePotential, StudentTPotential
from numpyro_ext.potentials.trees.mixture import TreeParameters

CASES = json.loads((Path(__file__).parents[1] / "reference" / "tree_mixture_exact.json").read_text())["cases"]


def random_parents(rng, num_nodes, num_roots):
    """A forest whose nodes stand in any order."""
    parents = np.array([-1] * num_roots + [rng.integers(0, i) for i in range(num_roots, num_nodes)])
    number = rng.permutation(num_nodes)
    shuffled = np.empty(num_nodes, int)
    shuffled[number] = np.where(parents < 0, -1, number[parents])
    return shuffled


def enumerate_states(parents, log_evidence, log_root, log_transition):
    """Log partition function, marginals and pair marginals as plain sums over all ``2**n`` assignments."""
    n = len(parents)
    logs, states = [], list(itertools.product((0, 1), repeat=n))
    for state in states:
        total = 0.0
        for j, parent in enumerate(parents):
            prior = log_root[j, state[j]] if parent < 0 else log_transition[j, state[parent], state[j]]
            total += prior + log_evidence[j, state[j]]
        logs.append(total)
    log_partition = np.logaddexp.reduce(logs)
    pairs, marginals = np.zeros((n, 2, 2)), np.zeros(n)
    for probability, state in zip(np.exp(np.array(logs) - log_partition), states, strict=True):
        for j, parent in enumerate(parents):
            marginals[j] += probability * state[j]
            if parent >= 0:
                pairs[j, state[parent], state[j]] += probability
    return log_partition, marginals, pairs


def group_numbers(case):
    """Levels of a reference case as groups: the scaling coefficients first, then from coarse to fine."""
    levels = np.array(case["level"])
    coarsest = max(levels)
    has_scaling = int(levels.min() < 0)
    return np.where(levels < 0, 0, coarsest - levels + has_scaling)


def group_values(case, values, missing):
    """Entries of a table by level, in the order of the groups."""
    levels = sorted({int(level) for level in case["level"]}, key=lambda level: -level if level > 0 else -1000)
    return np.array([values.get(str(level), missing) for level in levels])


def component(kind, precision, df):
    """A family of the reference file: its ``tau`` is the rate of a Laplace and the precision of the others."""
    if kind == "laplace":
        return LaplacePotential(0.0, jnp.asarray(1.0 / precision))
    scale = jnp.asarray(precision**-0.5)
    return GaussianPotential(0.0, scale) if kind == "gauss" else StudentTPotential(0.0, scale, df)


def reference_model(case):
    """Forest and parameters of a reference case."""
    forest = Forest.from_parents(case["parent"], group_numbers(case))
    kinds, tau = case["potential"], group_values(case, case["tau"], None).astype(float)
    roots = np.full(forest.num_groups, case["theta_root"]["root"])
    if min(case["level"]) < 0:
        roots[0] = case["theta_root"]["scaling"]
    theta = group_values(case, case["theta"], [0.5, 0.5])
    low, high = (component(kinds[f"state{d}"], tau[:, d], kinds["nu"]) for d in (0, 1))
    return forest, TreeParameters(low, high, jnp.asarray(roots), jnp.asarray(theta))
