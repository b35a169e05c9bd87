"""Cross-validation of an engine: the folds are masks of one model, fitted in one compiled program."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from ...display import shown
from ...structure import LatentGaussianReading, ModelStructureError
from ...structure.model.running.execution import check_key
from ...structure.model.running.messages import Message
from ..front.options import check_kind
from ..front.running.progress import progress_bar, warn
from .answers.leave_one_out import check_no_factor
from .answers.prediction import are_coordinates_joint
from .engine import Engine


@shown
class CrossValidation(NamedTuple):
    """Out-of-sample scores; the leading axis runs over draws of the folds."""

    log_predictive: Array
    """Log predictive density of each observation by the fold that did not see it, ``(num_draws, *observations)``."""
    folds: np.ndarray
    """Number of the fold that left out each observation, same shape; -1 for those that are masked."""
    hyper: dict[str, Array]
    """Hyperparameters learned on each fold, ``(num_draws, num_folds, *site)``."""
    converged: np.ndarray
    """Convergence of field and hyperparameters, ``(num_draws, num_folds)``."""

    def _shown(self) -> list[str]:
        num_draws, num_folds = self.converged.shape
        total, size = float(np.sum(self.log_predictive)) / num_draws, int(np.sum(self.folds >= 0)) // num_draws
        return [
            f"Cross-validation: {num_folds} folds of {size} observations, drawn {num_draws} times",
            f"log predictive density {total:.2f} in all, {total / size:.3f} for each observation",
            f"{int(self.converged.sum())} of {self.converged.size} fits converged",
        ]


def random_folds(rng_key: Array, shape: tuple[int, ...], num_folds: int) -> np.ndarray:
    """Assign observations to folds of equal size (up to one) by a random permutation.

    :param rng_key: random number generator key.
    :param tuple shape: of the observations.
    :param int num_folds: number of folds.
    :return: integers from 0 to ``num_folds - 1``, in ``shape``.
    """
    size = int(np.prod(shape))
    folds = np.empty(size, int)
    folds[np.asarray(jax.random.permutation(rng_key, size))] = np.arange(size) * num_folds // size
    return folds.reshape(shape)


def cross_validate(
    engine: Engine,
    rng_key: Array,
    *args: object,
    mask_argument: str = "mask",
    num_folds: int | None = None,
    num_draws: int = 1,
    folds: ArrayLike | None = None,
    batch_size: int | None = None,
    **kwargs: object,
) -> CrossValidation:
    """Score every observation by a fit that did not see it, hyperparameters learned anew on every fold.

    A model that takes no mask of its observations (an argument ``mask``, for ``handlers.mask(mask=mask)``) is masked at
    its observed site. It is read once, and one compiled program fits all folds. (A model that needs the values of its
    mask, as NumPy does, is read once per fold.)

    :param Engine engine: its model and options are used; what it has run itself is not.
    :param rng_key: random number generator key.
    :param args: arguments of the model.
    :param str mask_argument: the keyword argument of the model that takes the mask, where it has one.
    :param int num_folds: number of folds; as many as there are in ``folds``, or ten.
    :param int num_draws: how often the folds are drawn.
    :param folds: the fold of each observation, in the shape of the observations, or with a leading axis of draws;
        instead of random ones. Strings are labels, and their folds come in alphabetical order.
    :param int batch_size: how many folds to fit side by side. On a CPU one after the other (the default) is as fast,
        because folds that converge early do not wait for others; on a GPU take ``num_folds``.
    :param kwargs: keyword arguments of the model. Observations that a mask among them leaves out, or that the model
        masks by itself, are in no fold, and their score is zero.
    :return: scores, folds, hyperparameters and convergence.
    :raises TypeError: for anything but an engine on a Gaussian field.
    :raises ValueError: if the mask does not reach the observations of exactly one site, a fold is empty, or coordinates
        of an observation depend on each other.

    **Example:**

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import EP, cross_validate

    >>> def model(y):
    ...     level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    ...     with numpyro.plate("observations", 6):
    ...         numpyro.sample("y", dist.Normal(level, 1.0), obs=y)

    >>> scores = cross_validate(EP(model), jax.random.key(0), jnp.arange(6.0), num_folds=3)
    >>> scores.log_predictive.shape
    (1, 6)
    """
    wanted = "an engine on a Gaussian field (EP, VariationalGaussian, LaplaceApproximation, AdaptiveQuadrature)"
    check_kind("cross_validate", engine, Engine, wanted)
    if engine.must_integrate:
        raise ValueError(
            f"The folds are fitted at the best hyperparameters, and {type(engine).__name__} integrates over them: give "
            "the engine of the field alone (LaplaceApproximation, EP), or run and score each fold by itself."
        )
    engine = copy(engine)
    engine.integrate = "none"
    engine.model = _with_mask(engine.model, mask_argument)
    check_key(rng_key, "cross_validate(engine, jax.random.key(0), x, y)")
    key, rng_key = jax.random.split(rng_key)
    given = kwargs.get(mask_argument, True)
    given = given if isinstance(given, bool) else jnp.asarray(given, bool)
    reading = engine._read(rng_key, args, {**kwargs, mask_argument: given})
    engine.algorithm(reading)  # refuses what it cannot run on
    keep = _observations_to_fold(reading)
    if folds is not None and np.asarray(folds).dtype.kind in "OSU":  # labels, such as the group left out
        labels, numbers = np.unique(np.asarray(folds).astype(str), return_inverse=True)
        num_folds, folds = num_folds or len(labels), numbers.reshape(np.shape(folds))
    if num_folds is None:
        num_folds = 10 if folds is None else int(np.max(folds, initial=0)) + 1
    assignments = _assignments(key, keep, num_folds, num_draws, folds)

    outcomes = []
    with progress_bar(len(assignments), "cross-validation", enabled=engine.progress_bar) as bar:
        for assignment in assignments:
            masks = [keep & (assignment != k) for k in range(num_folds)]
            readings = _read_folds(partial(engine._read, rng_key, args, check=False), kwargs, mask_argument, masks)
            outcomes.append(_score_folds(engine, readings, assignment, batch_size))
            bar.update(1)
    scores, hyper, converged = zip(*outcomes, strict=True)
    converged = np.stack(converged)
    if not converged.all():
        warn(f"{int((~converged).sum())} of {converged.size} fits of the cross-validation did not converge.")
    hyper = {name: jnp.stack([draw[name] for draw in hyper]) for name in hyper[0]}
    return CrossValidation(jnp.stack(scores), assignments, hyper, converged)


def _observations_to_fold(reading: LatentGaussianReading) -> np.ndarray:
    """Mask of the observations of the one site that is scored, true for those in use.

    :raises ValueError: if they cannot be left out one by one.
    """
    if len(reading.observed_names) != 1:
        raise ValueError(
            f"Cross-validation needs one observed site, the model has {list(reading.observed_names)}. "
            "For several, fit each mask with engine.run(...) and score it with engine.log_predictive()."
        )
    site = reading.sites[reading.observed_names[0]]
    check_no_factor(reading, site.name)
    if are_coordinates_joint(reading, site.name):
        raise ValueError(
            f"The coordinates of an observation of site {site.name!r} ({site.family}) depend on each other, and "
            "predictors are scored one by one: fit each mask with engine.run(...), and score it by draws "
            "(log_likelihood of numpyro.infer)."
        )
    keep = reading.known_mask(reading.factor_names[0])
    if keep.shape != tuple(reading.factor_shapes[0]):
        raise ValueError(
            f"Observations of site {reading.factor_names[0]!r} that share a predictor are read as one factor, which "
            "cannot be folded: fit each mask with engine.run(...) and score it with engine.log_predictive()."
        )
    return keep


def _score_folds(
    engine: Engine, readings: list[LatentGaussianReading], assignment: np.ndarray, batch_size: int | None
) -> tuple[Array, dict[str, Array], np.ndarray]:
    """Log predictive densities by fits of all folds, their hyperparameters, and whether each converged.

    :param readings: of each fold.
    :param assignment: fold of each observation, -1 for those that are masked.
    """
    num_folds = len(readings)
    space, _, programs = engine._compile(readings[0])
    data = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[other.data for other in readings])
    values, search, info = programs.fold_predictive(
        data, space.fixed, space.initial(engine.init_values), batch_size=batch_size
    )
    # the rows of an observation follow each other, and those of priors stand behind
    values = values[:, : assignment.size * readings[0].rows_per_observation[0]]
    values = values.reshape(num_folds, assignment.size, -1).sum(-1)
    scores = jnp.take_along_axis(values, jnp.asarray(assignment.reshape(1, -1)), axis=0)[0]
    scores = jnp.where(assignment >= 0, scores.reshape(assignment.shape), 0.0)
    failed = np.zeros(num_folds, bool) if search is None else np.asarray(search.num_iterations == 0)
    bad = sorted({*np.flatnonzero(failed).tolist(), *assignment[np.isnan(np.asarray(scores))].tolist()})
    if bad:
        raise FloatingPointError(
            f"Evidence or predictive density is not finite in folds {bad}: run the engine with one of their masks "
            "to see why."
        )
    converged = np.asarray(info.converged)
    hyper = {name: jnp.broadcast_to(value, (num_folds, *value.shape)) for name, value in space.fixed.items()}
    if search is not None:
        converged = converged & np.asarray(search.converged)
        hyper = jax.vmap(space.unpack)(search.values)
    return scores, hyper, converged


class _Mask(Messenger):
    """Masks the observed sites of a model, and nothing else."""

    def __init__(self, model: Callable[..., object], mask: ArrayLike):
        super().__init__(model)
        self.mask = mask

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["fn"] = msg["fn"].mask(self.mask)


def _with_mask(model: Callable[..., object], mask_argument: str) -> Callable[..., object]:
    """The model with a mask of its observations as an argument, which it may have already."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # callables without one
        return model
    parameters = list(signature.parameters.values())
    if mask_argument in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return model

    def masked(*args: Any, **kwargs: Any) -> Any:
        return _Mask(model, kwargs.pop(mask_argument, True))(*args, **kwargs)

    argument = inspect.Parameter(mask_argument, inspect.Parameter.KEYWORD_ONLY, default=True)
    masked.__signature__ = signature.replace(parameters=[*parameters, argument])  # type: ignore[attr-defined]
    return masked


def _read_folds(
    read: Callable[..., LatentGaussianReading], kwargs: dict[str, object], mask_argument: str, masks: list[np.ndarray]
) -> list[LatentGaussianReading]:
    """Readings of all folds: one of any mask, on the data of each; one of each, if the model looks at its mask."""
    given = [{**kwargs, mask_argument: jnp.asarray(mask)} for mask in masks]
    try:
        reading = read(given[0], changing=(mask_argument,))
    except ModelStructureError:
        found = [read(arguments) for arguments in given]
    else:
        found = [copy(reading) for _ in masks]
        for fold, arguments in zip(found, given, strict=True):
            fold.data = reading.with_changing({mask_argument: arguments[mask_argument]})
    if any(other.structure != found[0].structure for other in found):
        raise ValueError(f"The structure of the model depends on the values of {mask_argument!r}: fold it by hand.")
    _check_masks(found, mask_argument, masks)
    return found


def _assignments(
    rng_key: Array, keep: np.ndarray, num_folds: int, num_draws: int, folds: ArrayLike | None
) -> np.ndarray:
    """Folds of the observations in use, ``keep``, and -1 for those that are masked; a leading axis of draws."""
    if folds is None:
        out = np.full((num_draws, *keep.shape), -1)
        for draw, key in zip(out, jax.random.split(rng_key, num_draws), strict=True):
            draw[keep] = random_folds(key, (int(keep.sum()),), num_folds)
    else:
        out = np.asarray(folds)
        out = out[None] if out.shape == keep.shape else out
        if out.shape[1:] != keep.shape:
            raise ValueError(f"folds has shape {np.shape(folds)}, the observations have shape {keep.shape}.")
        out = np.where(keep, out, -1)
    for draw in (draw[keep] for draw in out):
        missing = sorted(set(range(num_folds)) - set(np.unique(draw).tolist()))
        if missing or draw.min() < 0 or draw.max() >= num_folds:
            raise ValueError(
                f"Every fold from 0 to {num_folds - 1} needs an observation and there may be no other; "
                f"{f'folds {missing} have none' if missing else f'found fold {draw.min()} or {draw.max()}'}."
            )
    return out


def _check_masks(readings: list[Any], mask_argument: str, masks: list[np.ndarray]) -> None:
    """Refuse a model that learns from observations which a fold leaves out, or masks others besides.

    :raises ValueError: saying how many observations are concerned.
    """
    for reading, mask in zip(readings, masks, strict=True):
        name = reading.factor_names[0]
        found = reading.known_mask(name)
        seen, lost = int(np.sum(found & ~mask)), int(np.sum(~found & mask))
        if seen or lost:
            what = (
                f"{seen} observations that {mask_argument}= leaves out are still in use"
                if seen
                else f"{lost} observations that {mask_argument}= keeps are masked"
            )
            raise ValueError(
                f"The argument {mask_argument!r} is not the mask of site {name!r}: {what}. Scores would not "
                f"be out of sample. Put the site under handlers.mask(mask={mask_argument}), or say which argument is "
                "the mask with mask_argument=..."
            )
