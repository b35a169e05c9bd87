"""The independent check: what was read must have the log density that NumPyro computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.infer.util import compute_log_probs

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.recent import Recent
from ..errors import ModelStructureError, Reason
from .reading import ModelReading
from .running.execution import ModelCall
from .running.plain_sites import PlainSites
from .running.recording import Recording, Sites, make_or_derive

__all__ = ["check_form", "log_densities"]

_COMPILED = Recent(64)
_SPREADS = (0.1, 0.5, 1.0)
_MOST_HALVINGS = 12


def log_densities(reading: ModelReading, rng_key: Array, spreads: tuple[float, ...] = _SPREADS) -> np.ndarray:
    """Log joint densities by the form and by NumPyro at random points, shape ``(len(spreads), 2)``.

    :param spreads: standard deviations of the innovations drawn, in units of their prior (of one, where flat).
    """
    return _evaluate(reading, rng_key, spreads)[:, :2]


def _evaluate(
    reading: ModelReading,
    rng_key: Array,
    spreads: tuple[float, ...],
    changing: Sequence[Any] = (),
    recording: Recording | None = None,
) -> np.ndarray:
    """Both log densities and the error of the operators, one row per point.

    :param changing: leaves of the arguments that change, other than those of the reading.

    Probabilities near one have lost the digits of the log of what is left to one, so a point at which the reference
    has is brought nearer to the centre of the prior, and where that does not help hyperparameters to ordinary values.
    """
    compiled, reference_data = _compile(reading, rng_key, recording)
    data = (*changing, *reading.data[len(changing) :])
    reference_data = (*changing, *reference_data[len(changing) :])
    # NumPy draws without compiling anything.
    rng = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
    ways = []
    for number, spread in enumerate(spreads):
        noise = _noise(reading, rng, 0.0 if number == 0 else 0.1)
        white = np.asarray(spread * rng.standard_normal(reading.num_columns), jnp.result_type(float))
        ways.append(_nearer(reading, white, noise))
    start, is_left = reading.initial_hyper(), np.ones(len(spreads), bool)
    rows = np.zeros(0)
    for nearer, points in enumerate(zip(*ways, strict=True)):
        white, moves = jax.tree.map(lambda *leaves: np.stack(leaves), *points)
        found = np.asarray(compiled(start, moves, white, data, reference_data))
        found, rounding = found[:, :-1], found[:, -1]
        is_exact = ~(rounding > 0.1 * _tolerance() * (1.0 + np.abs(found[:, 1])))
        rows = np.where((is_left & is_exact)[:, None], found, rows) if nearer else found
        is_left &= ~is_exact
        if not is_left.any():
            break
    return rows


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


def _tolerance() -> float:
    """Relative difference of two log densities that is no rounding."""
    return 1e-7 if jnp.result_type(float) == np.float64 else 2e-3


def check_form(
    reading: ModelReading, rng_key: Array, changing: Sequence[Any] = (), recording: Recording | None = None
) -> None:
    """Compare the form with NumPyro's log density.

    :param changing: leaves of the arguments that change, other than those of the reading.
    :param recording: of the model, whose sites NumPyro is given in the place of a further call.
    :raises ModelStructureError: if they differ by more than rounding, or are not finite anywhere for a reason that can
        be named (a covariance that is not positive definite, covariates that are not finite).
    """
    found = _evaluate(reading, rng_key, _SPREADS, changing, recording)
    if reading.changing and not changing:
        leaves = [jnp.roll(leaf, 1, 0) if jnp.ndim(leaf) else leaf for leaf in jax.tree.leaves(reading.changing)]
        moved = _evaluate(reading, rng_key, _SPREADS, leaves)
        # Values may not go together in other places; where they do, they are read like the given ones.
        found = np.concatenate([found, moved[np.isfinite(moved).all(1)]])
    found, linearity_error = found[:, :2], float(found[0, 2])
    if np.isnan(found).any():
        reading.explain_nan()
    if not linearity_error < np.sqrt(np.finfo(found.dtype).eps):
        reading.explain_linearity_error(linearity_error)
    form, numpyro_value = found.T
    tolerance = _tolerance()
    both_finite = np.isfinite(form) & np.isfinite(numpyro_value)
    difference = np.where(both_finite, form, 0.0) - np.where(both_finite, numpyro_value, 0.0)
    close = np.abs(difference) <= tolerance * (1.0 + np.abs(np.where(both_finite, numpyro_value, 0.0)))
    same = np.where(both_finite, close, form == numpyro_value)
    if not same.all():
        reading.check_conditioning(tolerance)
        worst = int(np.argmax(~same))
        raise ModelStructureError(
            f"the model was misread: its log density is {numpyro_value[worst]:.10g} at a random point, the form gives "
            f"{form[worst]:.10g}. What was read:\n{reading.describe()}\nPlease report this model; NUTS is "
            "not affected.",
            reason=Reason.MISREAD,
        )


def _noise(reading: ModelReading, rng: np.random.Generator, size: float) -> dict[str, np.ndarray]:
    """By which each hyperparameter moves from its start, unconstrained; a ``param`` that is no array stays there."""
    sites = {n: s for n, s in reading.hyper.items() if not s.is_param or hasattr(s.init, "shape")}
    shapes = {name: site.transform.inverse_shape(tuple(site.shape)) for name, site in sites.items()}
    return {n: np.asarray(size * rng.standard_normal(shape), jnp.result_type(float)) for n, shape in shapes.items()}


def _perturb(reading: ModelReading, hyper: dict[str, Any], noise: dict[str, Array]) -> dict[str, Any]:
    def moved(name: str) -> Any:
        transform = reading.hyper[name].transform
        return transform(transform.inv(jnp.asarray(hyper[name], jnp.result_type(float))) + noise[name])

    return {name: moved(name) if name in noise else value for name, value in hyper.items()}


def _compile(reading: ModelReading, rng_key: Array, recording: Recording | None) -> tuple[Any, Any]:
    """The two log densities and what may be wrong with them, one row for each point, as one compiled function of where
    hyperparameters start, their moves and whitened unknowns, stacked, and of both sets of data."""
    seeded = handlers.seed(PlainSites(reading.model), rng_key)

    call = ModelCall(reading.model, reading.args, reading.kwargs, rng_key, tuple(reading.changing))

    def reference(
        values: dict[str, Any], changing: dict[str, Any], left_out: dict[str, Any], recorded: Sites | None = None
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
    others = jax.tree.leaves((reading.changing, left_out))
    program.take_as_data(program.inputs[len(jax.tree.leaves(shapes)) :], others)
    reference_data = program.data
    program.release()

    def make() -> Any:
        skeleton = reading.skeleton()

        def both(start: Any, data: Any, reference_data: Any, point: tuple[Array, Any]) -> Array:
            white, noise = point
            hyper = _perturb(skeleton, start, noise)
            e = skeleton.draw(hyper, white, data)
            leaves = jax.tree.leaves(_latent_values(skeleton, hyper, e, data))
            env = dict(zip(program.inputs, leaves, strict=True))
            env |= dict(zip(program.constants, reference_data, strict=True))
            (expected,) = program.evaluate([output], env)
            errors = skeleton.linearity_error(hyper, data), skeleton.reference_rounding(hyper, e, data)
            return jnp.stack([skeleton.log_joint(hyper, e, data), expected, *errors])

        def at_points(start: Any, moves: Any, white: Array, data: Any, reference_data: Any) -> Array:
            found: Array = jax.lax.map(partial(both, start, data, reference_data), (white, moves))
            return found

        return quick_jit(at_points, is_small=holds_little((reading.data, reference_data)), is_lean=True)

    key = (reading.structure_key, program.fingerprint())
    return _COMPILED.get(key, make), reference_data


def _restated(recorded: Sites, values: Mapping[str, Any]) -> None:
    """A model that states the sites of another one at these values."""
    for name, site in recorded(lambda site, fn, default: values.get(site.name, default)).items():
        if site["type"] == "sample":
            scale = nullcontext() if site["scale"] is None else handlers.scale(scale=site["scale"])
            with scale:
                numpyro.sample(name, site["fn"], obs=site["value"])


def _latent_values(reading: ModelReading, hyper: Any, e: Array, data: Any) -> dict[str, Any]:
    values = reading.values(hyper, e, data)
    return {n: values.get(n, hyper.get(n)) for n in (*reading.field, *reading.hyper)}
