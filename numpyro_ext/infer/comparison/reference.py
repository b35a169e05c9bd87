"""Moments that engines are compared with, and their Monte Carlo errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array
from numpyro.infer import MCMC, NUTS, init_to_median

from ..exact.gaps import Errors, Moments, largest_errors, monte_carlo_errors
from .contestants import NUM_SAMPLES, NUM_WARMUP, Chain, Contestant, moments_of

_LARGEST_ERROR = 0.05
"""Relative error of a standard deviation down to which the default reference goes on."""
_MOST_PARTS = 8
"""Runs of the default reference, each of the length of the first."""


class Reference(NamedTuple):
    """Moments that gaps are measured to."""

    moments: Moments | str
    """By site, or the name of the engine whose moments these are."""
    words: str
    errors: Errors | None = None
    """Monte Carlo errors by site, where they are known."""


def known_reference(reference: object, contestants: list[Contestant]) -> Reference | None:
    """The reference that has been run, or the name of one of the engines; ``None`` if it has still to be run.

    :param reference: as given to :func:`compare_engines`.
    :param contestants: the engines that are compared.
    :raises ValueError: if it names no engine, or has no draws.
    :raises TypeError: if it is none of these.
    """
    if reference is None or reference is False:
        return None
    if isinstance(reference, str):
        names = [contestant.name for contestant in contestants]
        if reference not in names:
            raise ValueError(f"reference={reference!r} is none of the engines: {', '.join(names)}.")
        return Reference(reference, reference)
    if isinstance(reference, MCMC):
        try:
            draws = reference.get_samples(group_by_chain=True)
        except AttributeError:
            draws = None
        if not draws:
            raise ValueError("The MCMC given as reference has no draws: run it first.")
        return _of_chains(reference, [draws])
    if isinstance(reference, Mapping):
        sizes = {np.shape(value)[:1] for value in reference.values()}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError("The draws given as reference must have the samples as their first axis, as many for all.")
        draws = {name: np.asarray(value, float) for name, value in reference.items()}
        errors = monte_carlo_errors({name: value[None] for name, value in draws.items()})
        return Reference(moments_of(draws), f"{sizes.pop()[0]} given draws{_error_words(errors)}", errors)
    raise TypeError(
        "reference must be a run MCMC, a dictionary of draws, the name of an engine or False; "
        f"got {type(reference).__name__}."
    )


def _of_chains(mcmc: MCMC, parts: Sequence[Mapping[str, object]]) -> Reference:
    """The reference that runs of one sampler make, which went on from each other."""
    draws = {name: np.concatenate([np.asarray(part[name]) for part in parts], axis=1) for name in parts[0]}
    errors = monte_carlo_errors(draws)
    many = f"{mcmc.num_chains} x " if mcmc.num_chains > 1 else ""
    length = len(parts) * mcmc.num_samples
    words = (
        f"{type(mcmc.sampler).__name__} with {many}{length} draws after {mcmc.num_warmup} of warm-up"
        f"{_error_words(errors)}"
    )
    flat = {name: value.reshape((-1, *value.shape[2:])) for name, value in draws.items()}
    return Reference(moments_of(flat), words, errors)


def _error_words(errors: Errors) -> str:
    of_mean, of_sd = largest_errors(errors)
    if not np.isfinite([of_mean, of_sd]).all():
        return ""
    return f" (standard errors up to {of_mean:.2f} sd of means, {100 * of_sd:.0f} % of sds)"


def reference_by_nuts(
    rng_key: Array,
    model: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    num_warmup: int = NUM_WARMUP,
    num_samples: int = NUM_SAMPLES,
) -> Reference:
    """Run NUTS, and go on until the Monte Carlo error of its standard deviations is small or it has been long.

    :param rng_key: random number generator key.
    :param model: a NumPyro model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :param num_warmup: steps of warm-up.
    :param num_samples: draws after which the error is looked at first.
    :return: the reference, or an empty one that says why NUTS failed.
    """
    kernel = NUTS(model, init_strategy=init_to_median)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    chain = Chain("reference", mcmc)
    try:
        chain.run(rng_key, args, kwargs)
        chain.judge(rng_key)
        parts, notes = [mcmc.get_samples(group_by_chain=True)], chain.notes
        found = _of_chains(mcmc, parts)
        while largest_errors(found.errors or {})[1] > _LARGEST_ERROR and len(parts) < _MOST_PARTS:
            for _ in range(len(parts)):
                mcmc.post_warmup_state = mcmc.last_state
                chain.run(mcmc.post_warmup_state.rng_key, args, kwargs)
                parts.append(mcmc.get_samples(group_by_chain=True))
            found = _of_chains(mcmc, parts)
    except Exception as error:  # the engines have run, and their rows are worth keeping
        return Reference({}, f"nothing: NUTS failed ({type(error).__name__}: {error})")
    return found._replace(words=f"{found.words}; {', '.join(notes)}")
