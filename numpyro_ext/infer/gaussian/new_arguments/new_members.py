"""Prediction for new members of groups: draws of the fit, with those of the new members from their prior given these.

New elements of a site that are independent of the old ones given all before them, and that no observation of the fit
sees, leave the posterior of the others as it is. The model draws them itself at the new arguments alone, and nothing is
conditioned again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from ....structure import LatentGaussianReading
from ...front.answers.model_draws import draws_with_new_members, shuffled
from ..answers.prediction import Slices
from ..runs.run import GaussianRun
from .sites_of_calls import NewCall, are_part, sites_of_call

_NUM_POINTS = 2
"""Hyperparameters, each with its values of the field, at which calls of the model are compared."""


@dataclass(eq=False)
class NewMembers:
    """The posterior of a fit, and a call of its model that has new members.

    :param run: of the fit.
    :param reading: of old and new arguments together.
    :param call: of the new arguments alone.
    """

    run: GaussianRun
    reading: LatentGaussianReading
    call: NewCall
    given: tuple[str, ...]
    """Latent sites of which the call has the elements of the fit; those of rows have new ones alone."""

    def draws(self, rng_key: Array) -> dict[str, Array]:
        """Draws of all sites but ``numpyro.factor`` at the new arguments, latent ones of old and new members."""
        drawn = self.run.draws[0]
        latents = shuffled({name: drawn[name] for name in self.given}, rng_key)
        return draws_with_new_members(handlers.uncondition(self.reading.model), latents, rng_key, *self.call)


def new_members(
    run: GaussianRun, reading: LatentGaussianReading, call: NewCall, slices: Slices, points: Iterator[Any]
) -> NewMembers | None:
    """The new members of old and new arguments together, where the fit is a part of the model on both, to rounding, and
    the new arguments alone are another; ``None`` where it is not, or this is not known.

    :param GaussianRun run: of the fit.
    :param LatentGaussianReading reading: of old and new arguments together.
    :param NewCall call: of the new arguments alone.
    :param slices: from the name and the shape of a site on both, the part of it that belongs to the new arguments.
    :param points: hyperparameters at which the models are compared.
    """
    old = run.reading
    shapes = {name: tuple(reading.sites[name].shape) for name in reading.field}
    is_plain = not any(site.family == "Unit" for site in reading.sites.values()) and not reading.half_lines
    if old.field != reading.field or not is_plain:
        return None
    if shapes == {name: tuple(old.sites[name].shape) for name in old.field}:
        return None
    latents: Any = [_values(shapes, number) | dict(hyper) for number, hyper in enumerate(islice(points, _NUM_POINTS))]
    latents = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *latents)
    outcomes, old_outcomes, new_outcomes = {}, {}, {}
    number = len(next(iter(latents.values())))

    def first(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The part of a site that belongs to the fit."""
        before = old.sites[name].full_shape or old.sites[name].shape
        return tuple(slice(None) if a == b else slice(a) for a, b in zip(before, shape, strict=True))

    try:
        # Outcomes are those of the call on all, where some stand for what was left out.
        for name, site in reading.sites.items():
            if site.kind == "observed":
                outcomes[name] = np.broadcast_to(site.value, (number, *site.full_shape))
                old_outcomes[name] = outcomes[name][:, *first(name, site.full_shape)]
                new_outcomes[name] = outcomes[name][:, *slices(name, site.full_shape)]
        old_latents = {name: value[:, *first(name, value.shape[1:])] for name, value in latents.items()}
        together = sites_of_call(reading.model, NewCall(reading.args, reading.kwargs), latents, outcomes)
        fitted = sites_of_call(old.model, NewCall(old.args, old.kwargs), old_latents, old_outcomes)
        if not are_part(_random(fitted), _random(together), first, scaled=True):
            return None
        parts = {name: slices(name, value.shape[1:]) for name, value in latents.items()}
        new_latents = {name: value[:, *parts[name]] for name, value in latents.items()}
        alone = sites_of_call(reading.model, call, new_latents, new_outcomes)
        if not are_part(alone, together, slices, scaled=False):
            return None
        is_whole = {name: all(part == slice(None) for part in parts[name]) for name in latents}
        return NewMembers(run, reading, call, tuple(name for name in latents if is_whole[name]))
    except Exception:  # whatever a model does at arguments that it is not made for
        return None


def _random(sites: Mapping[str, Any]) -> dict[str, Any]:
    return {name: site for name, site in sites.items() if site.log_prob is not None}


def _values(shapes: Mapping[str, tuple[int, ...]], number: int) -> dict[str, np.ndarray]:
    """Values of the field; small ones, as likelihoods are not finite everywhere."""
    generator, dtype = np.random.default_rng(number), jnp.result_type(float)
    return {name: 0.3 * generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
