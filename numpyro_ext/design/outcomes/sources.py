"""From a posterior, whatever found it, to what is known of outcomes: the most exact thing that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...infer.bilinear.run import BilinearRun
from ...infer.front.engine import BaseEngine
from ...infer.front.running.progress import warn
from ...infer.gaussian.answers.prediction import are_coordinates_joint
from ...infer.gaussian.engine import Engine
from ...infer.gaussian.programs import compiled_form
from ...infer.gaussian.run import GaussianRun
from ...infer.monte_carlo.smc import SMC
from ...potentials import Potential
from .draws import PosteriorDraws, draws_of, outlooks_of_draws
from .focus import EVERYTHING, Focus, Interest, as_focus
from .outlooks import GaussianOutlook, Outlook
from .slopes import Hyper, slope_outlooks
from .vectors import outlooks_on_vectors

__all__ = ["check_candidates", "gaussian_outlooks", "outlooks", "run_at"]

_Slices = Callable[[str, tuple[int, ...]], tuple[slice, ...]]


def outlooks(
    source: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    rng_key: Array | None = None,
    focus: Focus | None = None,
    hyper: Hyper = "mixture",
    *,
    by_points: bool = False,
) -> dict[str, Outlook]:
    """What a source knows of the observations that could be made, site by site.

    Engines on Gaussian fields are asked for their predictors; other engines, samplers and guides for draws. Without
    arguments the candidates are the masked observations of the fit, with arguments all observations of the model there.

    :param str hyper: what becomes of hyperparameters; see :func:`~numpyro_ext.design.expected_information_gain`.
    :param bool by_points: whether vectors in focus are taken at few points, and not at draws.
    :raises ValueError: if nothing is left to be observed, or a focus cannot be had.
    """
    run = source._finished() if isinstance(source, BaseEngine) else None
    if by_points and not (isinstance(run, BilinearRun) and focus is not None):
        raise ValueError(
            "method='sigma-points' is for a focus on vectors of a bilinear model, after a run of BilinearVG or "
            "BilinearEP."
        )
    if hasattr(source, "outlooks"):
        if args or kwargs or focus is not None or hyper != "mixture":
            raise ValueError(
                "A pool has the candidates that it was made with, and everything in focus. In a SequentialDesign, "
                "refit_every=1 asks the engine itself; optimise_design takes scores without a focus."
            )
        pool = dict(source.outlooks())
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
        found = outlooks_on_vectors(run, focus, args, kwargs, key, by_points=by_points)
    elif focus is not None:
        raise ValueError(
            f"A focus needs draws of the other unknowns given those of interest, which a {type(source).__name__} does "
            "not give: take an engine on a Gaussian field, such as EP, or one on a bilinear model."
        )
    else:
        found = _of_draws(source if isinstance(source, PosteriorDraws) else draws_of(source), args, kwargs)
    check_candidates(found)
    return dict(found)


def check_candidates(found: Mapping[str, Outlook]) -> None:
    if not any(outlook.is_candidate.any() for outlook in found.values()):
        raise ValueError(
            "Every observation is in use: mask those that could be observed (handlers.mask, or obs_mask=), or give the "
            "arguments of the model at which to look."
        )


def _of_draws(draws: PosteriorDraws, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Outlook]:
    is_fit = not (args or kwargs)

    def is_candidate(name: str, mask: np.ndarray, is_observed: bool) -> np.ndarray:
        return ~mask if is_fit and is_observed else np.ones(mask.shape, bool)

    return outlooks_of_draws(
        draws, draws.args if is_fit else args, draws.kwargs if is_fit else kwargs, is_candidate
    )  # fmt: skip


def _of_predictors(
    engine: Engine,
    run: GaussianRun,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    key: Array,
    focus: Focus | None,
) -> dict[str, Outlook]:
    interest = as_focus(run, focus)
    run, slices = run_at(engine, run, args, kwargs, key)
    reading = run.reading
    out: dict[str, Outlook] = {}
    found, by_draws = gaussian_outlooks(run, interest, slices)
    out |= found
    if by_draws:
        if focus is not None:
            raise ValueError(
                f"The observations of {sorted(by_draws)} have several predictors each or no known outcomes: what they "
                "tell of a part of the unknowns has no rule. Leave focus out."
            )
        drawn, _ = run.draw(key)
        latents = {name: drawn[name] for name in (*reading.field, *reading.hyper) if name in drawn}
        draws = PosteriorDraws(reading.model, latents, None, None, reading.args, dict(reading.kwargs))

        def could_be(name: str, mask: np.ndarray, is_observed: bool) -> np.ndarray:
            return np.ones(mask.shape, bool) if slices is not None else ~mask

        more = outlooks_of_draws(draws, draws.args, draws.kwargs, could_be, by_draws)
        out |= {name: outlook.part(_chosen(name, outlook.shape, slices)) for name, outlook in more.items()}
    return {name: out[name] for name in reading.observed_names if name in out}


def run_at(
    engine: Engine, run: GaussianRun, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Array
) -> tuple[GaussianRun, _Slices | None]:
    """The run that holds the observations that are looked at, and which of them these are where some are new."""
    if not (args or kwargs):
        return run, None
    prediction = engine.predict(key, *args, **kwargs)
    return prediction._run, prediction._new_slices


def gaussian_outlooks(
    run: GaussianRun, interest: Interest = EVERYTHING, slices: _Slices | None = None
) -> tuple[dict[str, GaussianOutlook], set[str]]:
    """The observations of a fit whose predictor is one Gaussian number, and the names of the other sites.

    :param GaussianRun run: of an engine.
    :param Interest interest: what is to be learned.
    :param slices: of a site's name and shape, the part of it that is looked at: candidates, all of them. Without, the
        candidates are the masked observations.
    """
    reading = run.reading
    points = []
    for weight, inputs in run.weighted_points():
        posterior, mean, variance, _ = run.programs.rows(*inputs)
        form = getattr(posterior, "form", None) or compiled_form(reading, inputs[1])
        points.append((weight, inputs[1], posterior, form, mean, variance))
    out: dict[str, GaussianOutlook] = {}
    others: set[str] = set()
    start = 0
    for number, name in enumerate(reading.observed_names):
        shape, num_rows = tuple(reading.factor_shapes[number]), reading.rows_per_observation[number]
        size = int(np.prod(shape))
        first, start = start, start + size * num_rows
        if reading.sites[name].family == "Unit":
            continue
        if are_coordinates_joint(reading, name):
            # nobody sees one of the factors of a vector: there is nothing to ask, or else draws say that they cannot
            if slices is not None or not reading.known_mask(name).all():
                others.add(name)
            continue
        potentials = [form.potentials[number] for _, _, _, form, _, _ in points]
        if num_rows != 1 or potentials[0].outcomes() is None:
            others.add(name)
            continue
        kept = _chosen(name, shape, slices)
        rows = first + kept.reshape(-1)
        left = [interest.left(run, posterior, hyper, rows) for _, hyper, posterior, *_ in points]
        mean, variance = (jnp.stack([jnp.asarray(point[k])[rows] for point in points]) for k in (4, 5))
        is_candidate = np.ones(kept.shape, bool)
        if slices is None:
            is_candidate = ~reading.known_mask(name).reshape(-1)[kept]
        out[name] = GaussianOutlook(
            name=name,
            shape=kept.shape,
            is_candidate=is_candidate,
            potential=_stacked(potentials, kept.reshape(-1), size),
            mean=mean,
            variance=jnp.maximum(variance, 0.0),
            weights=jnp.asarray([point[0] for point in points], mean.dtype),
            left=None if left[0] is None else jnp.stack([x for x in left if x is not None]),
            is_about_hyper=interest.is_about_hyper,
            rows=rows,
        )
    return out, others


def _chosen(name: str, shape: tuple[int, ...], slices: _Slices | None) -> np.ndarray:
    """The numbers of the observations that are looked at, in their shape."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return numbers if slices is None else numbers[slices(name, shape)]


def _stacked(potentials: list[Potential], at: np.ndarray, size: int) -> Potential:
    """The factors of chosen observations at several points as one potential, points first."""

    def stack(*leaves: Any) -> Array:
        rows = [jnp.reshape(leaf, (1,)) if jnp.ndim(leaf) == 0 else jnp.asarray(leaf) for leaf in leaves]
        return jnp.stack([leaf[at] if leaf.shape[0] == size else leaf for leaf in rows])

    found: Potential = jax.tree.map(stack, *potentials)
    return found
