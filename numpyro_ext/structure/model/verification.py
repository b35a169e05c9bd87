"""The independent check: what was read must have the log density that NumPyro computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.infer.util import compute_log_probs

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.store import Found, shared
from ...compilation.transfer import generator_of
from ..errors import ModelStructureError, Reason
from ..program.equations import Atom
from ..program.program import Program
from .reading import ModelReading
from .running.execution import ModelCall
from .running.plain_sites import PlainSites
from .running.recording import Recording, Sites, make_or_derive
from .running.untouched import invalid_parameter, untouched_log_densities

_SPREADS = (0.1, 0.5, 1.0)
_MOST_HALVINGS = 12
_MOST_PLAIN_NUMBERS = 1_000_000
"""Numbers of data up to which optimising the densities, which are asked for at a few points, takes longer than they."""


class Evaluated(NamedTuple):
    """Densities at random points."""

    rows: np.ndarray
    """Both log densities and the error of the operators, one row per point."""
    values: list[dict[str, Any]]
    """Values of the latent and ``param`` sites at each point."""
    key: Hashable
    """Equal where both densities are the same functions."""


def evaluate(
    reading: ModelReading,
    rng_key: Array,
    spreads: tuple[float, ...],
    changing: Sequence[object] = (),
    recording: Recording | None = None,
) -> Evaluated:
    """The densities of the form and of the model at random points.

    :param spreads: standard deviations of the innovations drawn, in units of their prior (of one, where flat).
    :param changing: leaves of the arguments that change, other than those of the reading.

    Nothing is compared at a point where a density is not finite, and little where probabilities are so near one that
    what is left has lost its digits. Such a point is brought nearer to the centre of the prior, and where that does
    not help hyperparameters to ordinary values.
    """
    compiled, reference_data, key = _compile(reading, rng_key, recording)
    data = (*changing, *reading.data[len(changing) :])
    reference_data = (*changing, *reference_data[len(changing) :])
    # NumPy draws without compiling anything.
    rng = generator_of(rng_key)
    ways = []
    for number, spread in enumerate(spreads):
        noise = _noise(reading, rng, 0.0 if number == 0 else 0.1)
        white = np.asarray(spread * rng.standard_normal(reading.num_columns), jnp.result_type(float))
        ways.append(_nearer(reading, white, noise))
    start, is_left = reading.initial_hyper(), np.ones(len(spreads), bool)
    rows = np.zeros((len(spreads), 0))
    values: list[dict[str, Any]] = [{} for _ in spreads]
    for nearer, points in enumerate(zip(*ways, strict=True)):
        white, moves = jax.tree.map(lambda *leaves: np.stack(leaves), *points)
        found, there = jax.tree.map(np.asarray, compiled(start, moves, white, data, reference_data))
        found, rounding = found[:, :-1], found[:, -1]
        is_exact = ~(rounding > 0.1 * tolerance_of_densities() * (1.0 + np.abs(found[:, 1])))
        # Rates overflow at wide priors of coefficients whose covariates are far from zero, such as years.
        is_exact &= np.isfinite(found[:, :2]).all(1)
        is_taken = is_left & is_exact if nearer else np.ones(len(spreads), bool)
        rows = np.where(is_taken[:, None], found, rows) if nearer else found
        for place in np.flatnonzero(is_taken).tolist():
            values[place] = jax.tree.map(lambda leaf, place=place: leaf[place], there)
        is_left &= ~is_exact
        if not is_left.any():
            break
    return Evaluated(rows, values, key)


def _nearer(
    reading: ModelReading, white: np.ndarray, noise: dict[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """A point and moves of the hyperparameters, then points nearer to the centre, then unconstrained hyperparameters
    nearer to zero as well: those that somebody gave may be far out."""
    for halvings in range(_MOST_HALVINGS):
        yield white * 0.5**halvings, noise
    start = reading.initial_hyper()
    given = {n: np.asarray(reading.hyper[n].transform.inv(jnp.asarray(start[n], white.dtype))) for n in noise}
    for halvings in range(1, _MOST_HALVINGS):
        share = 0.5**halvings
        yield white * share, {n: noise[n] - (1.0 - share) * given[n] for n in noise}


def tolerance_of_densities(dtype: object = None) -> float:
    """Relative difference of two log densities that is no rounding, in the dtype of the reading by default."""
    return {64: 1e-7, 32: 2e-3}.get(jnp.finfo(jnp.result_type(float) if dtype is None else dtype).bits, 0.1)


def check_form(
    reading: ModelReading, rng_key: Array, changing: Sequence[object] = (), recording: Recording | None = None
) -> None:
    """Compare the form with NumPyro's log density.

    Where a model does something for the first time, also with that of the model as it was given, which nothing of the
    reading has touched: what makes sites plain, or records them, stands on both sides of the other comparison.

    :param changing: leaves of the arguments that change, other than those of the reading.
    :param recording: of the model, whose sites NumPyro is given in the place of a further call.
    :raises ModelStructureError: if they differ by more than rounding, or are not finite anywhere for a reason that can
        be named (a covariance that is not positive definite, covariates that are not finite).
    """
    evaluated = evaluate(reading, rng_key, _SPREADS, changing, recording)
    found = evaluated.rows
    if reading.changing and not changing:
        leaves = [jnp.roll(leaf, 1, 0) if jnp.ndim(leaf) else leaf for leaf in jax.tree.leaves(reading.changing)]
        moved = evaluate(reading, rng_key, _SPREADS, leaves).rows
        # Values may not go together in other places; where they do, they are read like the given ones.
        found = np.concatenate([found, moved[np.isfinite(moved).all(1)]])
    found, linearity_error = found[:, :2], float(found[0, 2])
    if np.isnan(found).any():
        _explain_nan(reading, rng_key, evaluated.values[int(np.argmax(np.isnan(evaluated.rows[:, :2]).any(1)))])
    if not linearity_error < np.sqrt(np.finfo(found.dtype).eps):
        reading.explain_linearity_error(linearity_error)
    form, expected = found.T
    _refuse_difference(reading, form, expected, tolerance_of_densities() * (1.0 + np.abs(expected)))
    call = _call(reading, rng_key)
    if changing:
        structure = jax.tree.structure(reading.changing)
        args, kwargs = call.with_values(jax.tree.unflatten(structure, list(changing)))
        _compare_with_untouched(reading, call._replace(args=args, kwargs=kwargs), evaluated)
    else:
        # What a model does when it is called as it is, is asked where its operations are new.
        compared = shared(_Compared, call.origin, evaluated.key, str(jnp.result_type(float)))
        if not compared.value:
            _compare_with_untouched(reading, call, evaluated)
            compared.value = True


def _explain_nan(reading: ModelReading, rng_key: Array, values: Mapping[str, Any]) -> None:
    invalid = invalid_parameter(_call(reading, rng_key), values)
    if invalid is not None and not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(values)):
        site, sentence = invalid
        raise ModelStructureError(
            f"the log density of the model is NaN, as {sentence}: check what it is made of (exposures, weights, scales "
            "and shares among the data).",
            site=site,
        )
    reading.explain_nan()


class _Compared(Found[bool]):
    """True if operations were compared with the user's function."""


def _compare_with_untouched(reading: ModelReading, call: ModelCall, evaluated: Evaluated) -> None:
    """Compare the form with the density of the model that nothing has rewritten, at the same points.

    :raises ModelStructureError: if they differ by more than rounding.
    """
    left_out = {n: reading.sites[n].init for n in reading.predictive}
    found = untouched_log_densities(call, [{**values, **left_out} for values in evaluated.values], left_out)
    tolerance = tolerance_of_densities(found.dtype) * (1.0 + np.abs(found.values)) + found.errors
    _refuse_difference(reading, evaluated.rows[:, 0], found.values, tolerance)


def _refuse_difference(reading: ModelReading, form: np.ndarray, expected: np.ndarray, tolerance: np.ndarray) -> None:
    both_finite = np.isfinite(form) & np.isfinite(expected)
    difference = np.where(both_finite, form, 0.0) - np.where(both_finite, expected, 0.0)
    # Nothing is told by a density of which NumPyro has no digit: its error has no bound.
    same = np.where(both_finite, np.abs(difference) <= tolerance, (form == expected) | (tolerance == np.inf))
    if not same.all():
        reading.check_conditioning(tolerance_of_densities())
        worst = int(np.argmax(~same))
        raise ModelStructureError(
            f"the model was misread: its log density is {expected[worst]:.10g} at a random point, the form gives "
            f"{form[worst]:.10g}. What was read:\n{reading.describe()}\nPlease report this model; NUTS is "
            "not affected.",
            reason=Reason.MISREAD,
        )


def _call(reading: ModelReading, rng_key: Array) -> ModelCall:
    return ModelCall(reading.model, reading.args, reading.kwargs, rng_key, tuple(reading.changing))


def _noise(reading: ModelReading, rng: np.random.Generator, size: float) -> dict[str, np.ndarray]:
    """By which each hyperparameter moves from its start, unconstrained; a ``param`` that is no array stays there."""
    sites = {n: s for n, s in reading.hyper.items() if not s.is_param or hasattr(s.init, "shape")}
    shapes = {name: site.transform.inverse_shape(tuple(site.shape)) for name, site in sites.items()}
    return {n: np.asarray(size * rng.standard_normal(shape), jnp.result_type(float)) for n, shape in shapes.items()}


def _perturb(reading: ModelReading, hyper: Mapping[str, object], noise: dict[str, Array]) -> dict[str, object]:
    def moved(name: str) -> Any:
        transform = reading.hyper[name].transform
        return transform(transform.inv(jnp.asarray(hyper[name], jnp.result_type(float))) + noise[name])

    return {name: moved(name) if name in noise else value for name, value in hyper.items()}


def _compile(reading: ModelReading, rng_key: Array, recording: Recording | None) -> tuple[Any, Any, Hashable]:
    """The two log densities and what may be wrong with them, one row for each point, as one compiled function of where
    hyperparameters start, their moves and whitened unknowns, stacked, and of both sets of data."""
    seeded = handlers.seed(PlainSites(reading.model), rng_key)

    call = _call(reading, rng_key)

    def reference(
        values: Mapping[str, object],
        changing: Mapping[str, object],
        left_out: Mapping[str, object],
        recorded: Sites | None = None,
    ) -> Array:
        values = {**values, **left_out}
        if recorded is None:
            log_joint, _ = compute_log_probs(seeded, *call.with_values(changing), values)
        else:
            log_joint, _ = compute_log_probs(partial(_restated, recorded, values), (), {}, {})
        terms = [jnp.sum(v) for n, v in log_joint.items() if n not in reading.predictive]
        return jnp.asarray(sum(terms, start=0.0))

    shapes = reading.latent_shapes()
    left_out = {n: reading.sites[n].init for n in reading.predictive}
    asked = "log density", reading.predictive
    program, output = make_or_derive(recording, asked, reference, shapes, reading.changing, left_out)
    changing, others = jax.tree.leaves(reading.changing), jax.tree.leaves(left_out)
    inputs = program.inputs[len(jax.tree.leaves(shapes)) :]
    program = program.with_inputs_as_data(inputs[len(changing) :], others)
    # All of them, also those of no use, and in front: other values take their places.
    program = program.with_inputs_as_data(inputs[: len(changing)], changing, may_change=True)
    is_small = holds_little((reading.data, program.data), _MOST_PLAIN_NUMBERS)
    key = reading.structure, program.fingerprint()
    return shared(_both_densities, reading, program, output, is_small), program.data, key


def _both_densities(reading: ModelReading, program: Program, output: Atom, is_small: bool) -> Callable[..., Any]:
    """The function to the log densities by the form and by NumPyro at points, with two errors, and the sites there."""

    def both(start: Any, data: Any, reference_data: Any, point: tuple[Array, Any]) -> tuple[Array, object]:
        white, noise = point
        hyper = _perturb(reading, start, noise)
        e = reading.draw(hyper, white, data)
        values = _latent_values(reading, hyper, e, data)
        env = dict(zip(program.inputs, jax.tree.leaves(values), strict=True))
        env |= dict(zip(program.constants, reference_data, strict=True))
        (expected,) = program.evaluate([output], env)
        errors = reading.linearity_error(hyper, data), reading.reference_rounding(hyper, e, data)
        return jnp.stack([reading.log_joint(hyper, e, data), expected, *errors]), values

    def at_points(
        start: object, moves: object, white: Array, data: object, reference_data: object
    ) -> tuple[Array, object]:
        return jax.lax.map(partial(both, start, data, reference_data), (white, moves))

    return quick_jit(at_points, is_small=is_small, is_lean=True)


def _restated(recorded: Sites, values: Mapping[str, object]) -> None:
    """A model that states the sites of another one at these values."""
    for name, site in recorded(lambda site, fn, default: values.get(site.name, default)).items():
        if site["type"] == "sample":
            scale = nullcontext() if site["scale"] is None else handlers.scale(scale=site["scale"])
            with scale:
                numpyro.sample(name, site["fn"], obs=site["value"])


def _latent_values(reading: ModelReading, hyper: Any, e: Array, data: Sequence[object]) -> dict[str, object]:
    values = reading.values(hyper, e, data)
    return {n: values.get(n, hyper.get(n)) for n in (*reading.field, *reading.hyper)}
