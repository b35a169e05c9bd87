"""From a posterior, whatever found it, to what is known of outcomes: the most exact thing that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from ...infer.bilinear.runs.run import BilinearRun
from ...infer.front.engine import BaseEngine
from ...infer.front.running.progress import warn
from ...infer.gaussian.answers.prediction import chosen
from ...infer.gaussian.engine import Engine
from ...infer.gaussian.predictive_moments import run_at
from ...infer.gaussian.runs.run import GaussianRun
from ...infer.monte_carlo.smc import SMC
from .conditional import outlooks_given_draws
from .drawn_sites import NewMembers
from .draws import PosteriorDraws, draws_of, outlooks_of_draws
from .focus import Focus, as_focus
from .outlooks import Outlook
from .points import check_no_others, gaussian_outlooks
from .slopes import Hyper, slope_outlooks
from .vectors import Points, outlooks_on_vectors


def outlooks(
    source: object,
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    rng_key: Array | None = None,
    focus: Focus | None = None,
    hyper: Hyper = "mixture",
    *,
    points: Points = "draws",
) -> dict[str, Outlook]:
    """Predictive distributions of the observations that could be made, site by site.

    Engines on Gaussian fields are asked for their predictors; other engines, samplers and guides for draws. Without
    arguments the candidates are the masked observations of the fit, with arguments all observations of the model there.

    :param str hyper: what becomes of hyperparameters; see :func:`~numpyro_ext.design.expected_information_gain`.
    :param str points: at which vectors in focus are taken; see :func:`.vectors.outlooks_on_vectors`.
    :raises ValueError: if nothing is left to be observed, or a focus cannot be had.
    """
    run = source._finished() if isinstance(source, BaseEngine) else None
    takes_points = getattr(source, "takes_points", isinstance(run, BilinearRun) and focus is not None)
    if points != "draws" and not takes_points:
        raise ValueError(
            f"method={points!r} is for a focus on vectors of a bilinear model, after a run of BilinearVG or BilinearEP."
        )
    if hasattr(source, "outlooks"):
        takes_focus = takes_points or getattr(source, "takes_focus", False)
        if args or kwargs or (focus is not None and not takes_focus) or hyper != "mixture":
            raise ValueError(
                "A pool has the candidates that it was made with, and everything in focus. In a SequentialDesign, "
                "refit_every=1 asks the engine itself; optimise_design takes scores without a focus."
            )
        options: dict[str, Any] = {"focus": focus} if takes_focus else {}
        pool = dict(source.outlooks(**options, **({"points": points} if takes_points else {})))
        check_candidates(pool)
        return pool
    kwargs = dict(kwargs or {})
    key = jax.random.key(0) if rng_key is None else rng_key
    if isinstance(source, BaseEngine | SMC) and not source.diagnostics.converged:
        warn(f"{type(source).__name__} has not converged, and scores are of the posterior that it has.")
    found: Mapping[str, Outlook]
    if isinstance(source, Engine) and isinstance(run, GaussianRun):
        if hyper == "mixture":
            found = _of_predictors(source, run, args, kwargs, key, focus)
        else:
            found = slope_outlooks(source, run, args, kwargs, focus, hyper)
    elif hyper != "mixture":
        raise ValueError(
            f"hyper={hyper!r} needs derivatives of a posterior by its hyperparameters, which a {type(source).__name__} "
            "does not give: take an engine on a Gaussian field, such as EP."
        )
    elif focus is not None and isinstance(run, BilinearRun):
        found = outlooks_on_vectors(run, focus, args, kwargs, key, points=points)
    else:
        draws = source if isinstance(source, PosteriorDraws) else draws_of(source)
        found = _of_draws(draws, args, kwargs, focus, key)
    check_candidates(found)
    return dict(found)


def check_candidates(found: Mapping[str, Outlook]) -> None:
    if not any(outlook.is_candidate.any() for outlook in found.values()):
        raise ValueError(
            "Every observation is in use: mask those that could be observed (handlers.mask, or obs_mask=), or give the "
            "arguments of the model at which to look."
        )


def _of_draws(
    draws: PosteriorDraws, args: tuple[object, ...], kwargs: Mapping[str, object], focus: Focus | None, key: Array
) -> Mapping[str, Outlook]:
    def given_draws() -> Mapping[str, Outlook]:
        return outlooks_given_draws(draws, focus, lambda engine, run: run_at(engine, run, args, kwargs, key), key)

    if focus is not None:
        return given_draws()
    is_fit = not (args or kwargs)

    def is_candidate(name: str, mask: np.ndarray, is_observed: bool) -> np.ndarray:
        return ~mask if is_fit and is_observed else np.ones(mask.shape, bool)

    at: tuple[Any, Any] = (draws.args, draws.kwargs) if is_fit else (args, kwargs)
    try:
        return outlooks_of_draws(draws, *at, is_candidate)
    except NewMembers as refusal:
        try:
            return given_draws()
        except ValueError as reason:
            raise NewMembers(f"{refusal} They have no distribution given the draws, either: {reason}") from reason


def _of_predictors(
    engine: Engine,
    run: GaussianRun,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    key: Array,
    focus: Focus | None,
) -> dict[str, Outlook]:
    fitted, interest = run, as_focus(run, focus)
    run, slices = run_at(engine, fitted, args, kwargs, key)
    reading = run.reading
    interest = interest.moved(fitted.reading, reading)
    out: dict[str, Outlook] = {}
    found, by_draws = gaussian_outlooks(run, interest, slices)
    out |= found
    if by_draws:
        if focus is not None:
            check_no_others(by_draws)
        drawn, _ = run.draw(key)
        latents = {name: drawn[name] for name in (*reading.field, *reading.hyper) if name in drawn}
        draws = PosteriorDraws(reading.model, latents, None, None, reading.args, dict(reading.kwargs))

        def could_be(name: str, mask: np.ndarray, is_observed: bool) -> np.ndarray:
            return np.ones(mask.shape, bool) if slices is not None else ~mask

        more = outlooks_of_draws(draws, draws.args, draws.kwargs, could_be, by_draws)
        out |= {name: outlook.part(chosen(name, outlook.shape, slices)) for name, outlook in more.items()}
    return {name: out[name] for name in reading.observed_names if name in out}
