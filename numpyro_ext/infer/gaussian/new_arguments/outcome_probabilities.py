"""Probabilities of what may be observed, where outcomes can be counted."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from ....potentials import Potential
from ....potentials.outcomes import log_predictive_probabilities, num_outcomes
from ....structure.model.priors import unwrap
from ....structure.model.reading import ModelReading
from ....structure.program.run_compiled import run_compiled
from ..algorithms.nodes.node_posterior import NodePosterior
from ..answers.prediction import ObservedPart, Slices, are_coordinates_joint, observed_parts
from ..runs.run import GaussianRun

_at_nodes = jax.jit(NodePosterior.at_nodes)


def chosen_factors(potential: Potential, chosen: np.ndarray, size: int) -> Potential:
    """The factors of chosen observations, points of the hyperparameters first.

    :param Potential potential: with the points on the first axis of its leaves.
    :param chosen: numbers of the observations.
    :param int size: of the whole site.
    """

    def part(leaf: Array) -> Array:
        leaf = leaf[:, None] if leaf.ndim == 1 else leaf
        return leaf[:, chosen] if leaf.shape[1] == size else leaf

    return jax.tree.map(part, potential)


def probabilities_by_predictors(run: GaussianRun, slices: Slices) -> dict[str, np.ndarray]:
    """Probabilities of outcomes at sites whose observations see one predictor each, by integrals over these.

    :param GaussianRun run: on the rows of all observations.
    :param slices: of a site's name and shape, the part that is asked for.
    :return: of shape ``(*observations, outcomes)`` by site; sites of real numbers, and of several predictors, are left
        out.
    """
    reading = run.reading
    wanted: list[ObservedPart] = []
    for part in observed_parts(reading, slices):
        is_single = part.rows_per_observation == 1
        known = reading.abstract_form.potentials[part.number].outcomes() if is_single else None
        if known is not None and known.width is None and not are_coordinates_joint(reading, part.name):
            wanted.append(part)
    if not wanted:
        return {}
    points = [(weight, inputs, run.programs.rows(*inputs)) for weight, inputs in run.weighted_points()]
    weights = np.asarray([weight for weight, *_ in points])
    forms = [getattr(rows[0], "form", None) or reading.compiled_form(inputs[1]) for _, inputs, rows in points]
    means, variances = (np.stack([np.asarray(rows[k]) for *_, rows in points]) for k in (1, 2))
    num_parts, masses = 1, np.broadcast_to(weights[:, None], means.shape)
    if isinstance(points[0][2][0], NodePosterior):
        # The density is a mixture of its nodes.
        predictors, masses = (
            np.concatenate(parts) for parts in zip(*(_at_nodes(r[0]) for *_, r in points), strict=True)
        )
        num_parts = len(predictors) // len(means)
        means, variances = predictors, np.zeros_like(predictors)
        masses = masses * np.repeat(weights, num_parts)[:, None]
    out = {}
    for part in wanted:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(form.potentials[part.number] for form in forms))
        rows = part.rows
        factors = chosen_factors(stacked, part.kept.reshape(-1), part.size)
        if num_parts > 1:
            factors = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_parts, axis=0), factors)
        inputs = (
            factors,
            jnp.asarray(means[:, rows]),
            jnp.asarray(np.maximum(variances[:, rows], 0.0)),
            jnp.asarray(masses[:, rows]),
        )
        count = num_outcomes(*inputs)
        assert count is not None  # as outcomes have no width
        table = np.exp(np.asarray(log_predictive_probabilities(*inputs, count)))
        out[part.name] = np.moveaxis(table, 0, -1).reshape(*part.kept.shape, count)
    return out


def probabilities_of_draws(
    reading: ModelReading, latents: Mapping[str, Array], names: list[str], slices: Slices
) -> dict[str, np.ndarray]:
    """Probabilities of outcomes by the distributions of the model at draws of its latent sites, averaged over these.

    :param ModelReading reading: of the model on all observations.
    :param latents: draws of latent and ``param`` sites, with the leading axis running over them.
    :param names: observed sites.
    :param slices: as for :func:`probabilities_by_predictors`.
    :return: by site; those without a finite number of outcomes are left out.
    """

    def run(latents: dict[str, Array]) -> dict[str, Array]:
        def at(one: dict[str, Array]) -> dict[str, Array]:
            model = handlers.seed(handlers.substitute(reading.model, one), 0)
            trace = handlers.trace(model).get_trace(*reading.args, **reading.kwargs)
            found = {}
            for name in names:
                fn = unwrap(trace[name]["fn"])
                if not getattr(fn, "has_enumerate_support", False) or fn.event_dim:
                    continue
                log_p = fn.log_prob(fn.enumerate_support(expand=False))
                shape = (log_p.shape[0], *reading.sites[name].shape)
                found[name] = jnp.exp(jnp.moveaxis(jnp.broadcast_to(log_p, shape), 0, -1))
            return found

        first = jax.tree.map(lambda leaf: leaf[0], latents)
        total = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(at, first))
        count = len(next(iter(latents.values())))

        def add(total: dict[str, Array], one: dict[str, Array]) -> tuple[dict[str, Array], None]:
            return jax.tree.map(lambda a, b: a + b / count, total, at(one)), None

        return jax.lax.scan(add, total, latents)[0]

    found: dict[str, Array] = run_compiled(run, dict(latents)) if names else {}
    return {name: np.asarray(p)[(*slices(name, p.shape[:-1]), slice(None))] for name, p in found.items()}
