"""The independent check: what was read must have the log density that NumPyro computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer.util import compute_log_probs

from ..linalg.prior import CovariancePrior, DiagonalPrior, FlatPrior, PriorBlock
from .errors import ModelStructureError
from .program import make_program
from .reading import LatentGaussianReading
from .recent import Recent

__all__ = ["check_form", "log_densities"]

_COMPILED = Recent(64)
_SPREADS = (0.1, 0.5, 1.0)


def log_densities(reading: LatentGaussianReading, rng_key: Array, spreads: tuple[float, ...] = _SPREADS) -> np.ndarray:
    """Log joint densities by the form and by NumPyro at random points, shape ``(len(spreads), 2)``.

    :param spreads: standard deviations of the innovations drawn, in units of their prior (of one, where flat).
    """
    compiled, reference_data = _compile(reading, rng_key)
    rows = []
    # NumPy draws without compiling anything.
    rng = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
    for number, spread in enumerate(spreads):
        hyper = _perturb(reading, rng, 0.0 if number == 0 else 0.1)
        white = jnp.asarray(spread * rng.standard_normal(reading._rows.num_columns), jnp.result_type(float))
        rows.append(compiled(hyper, white, reading.data, reference_data)[:2])
    return np.asarray(rows)


def check_form(reading: LatentGaussianReading, rng_key: Array) -> None:
    """Compare the form with NumPyro's log density.

    :raises ModelStructureError: if they differ by more than rounding, or are not finite anywhere for a reason that can
        be named (a covariance that is not positive definite, covariates that are not finite).
    """
    found = log_densities(reading, rng_key)
    if np.isnan(found).any():
        _explain_nan(reading)
    form, numpyro_value = found.T
    tolerance = 1e-7 if found.dtype == np.float64 else 2e-3
    both_finite = np.isfinite(form) & np.isfinite(numpyro_value)
    difference = np.where(both_finite, form, 0.0) - np.where(both_finite, numpyro_value, 0.0)
    close = np.abs(difference) <= tolerance * (1.0 + np.abs(np.where(both_finite, numpyro_value, 0.0)))
    same = np.where(both_finite, close, form == numpyro_value)
    if not same.all():
        worst = int(np.argmax(~same))
        raise ModelStructureError(
            f"the model was misread: its log density is {numpyro_value[worst]:.10g} at a random point, the form gives "
            f"{form[worst]:.10g}. What was read:\n{reading.describe()}\nPlease report this model; NUTS is not affected."
        )


def _perturb(reading: LatentGaussianReading, rng: np.random.Generator, size: float) -> dict[str, Any]:
    out = {}
    for name, site in reading.hyper.items():
        if site.is_param and not hasattr(site.init, "shape"):
            out[name] = site.init
            continue
        free = site.transform.inv(jnp.asarray(site.init, jnp.result_type(float)))
        out[name] = site.transform(free + size * rng.standard_normal(jnp.shape(free)))
    return out


def _compile(reading: LatentGaussianReading, rng_key: Array) -> tuple[Any, Any]:
    """The two log densities as one compiled function of hyperparameters, whitened unknowns and both sets of data."""
    seeded = handlers.seed(reading.model, rng_key)

    def reference(values: dict[str, Any]) -> Array:
        left_out = {n: reading.sites[n].init for n in reading.predictive}
        log_joint, _ = compute_log_probs(seeded, reading.args, reading.kwargs, {**values, **left_out})
        terms = [jnp.sum(v) for n, v in log_joint.items() if n not in reading.predictive]
        return jnp.asarray(sum(terms, start=0.0))

    def latent_values(hyper: Any, e: Array, data: Any) -> dict[str, Any]:
        values = reading.values(hyper, e, data)
        return {n: values.get(n, hyper.get(n)) for n in (*reading.field, *reading.hyper)}

    zeros = jnp.zeros((reading._rows.num_columns,), jnp.result_type(float))
    example = jax.eval_shape(latent_values, reading.initial_hyper(), zeros, reading.data)
    program, output = make_program(reference, example)

    def both(hyper: Any, white: Array, data: Any, reference_data: Any) -> tuple[Array, ...]:
        form = reading.form(hyper, data)
        parts, start = [], 0
        for block in form.prior:
            parts.append(_colour(block, white[start : start + block.size]))
            start += block.size
        e = jnp.concatenate(parts)
        leaves = jax.tree.leaves(latent_values(hyper, e, data))
        env = dict(zip(program.inputs, leaves, strict=True))
        env |= dict(zip(program.constants, reference_data, strict=True))
        (expected,) = program.evaluate([output], env)
        return form.log_density(e) + reading.log_prior(hyper, data), expected

    key = (reading.structure_key, program.fingerprint())
    return _COMPILED.get(key, lambda: jax.jit(both)), program.data


def _colour(block: PriorBlock, white: Array) -> Array:
    """A draw from the prior block made of standard normal numbers (themselves, where it is flat)."""
    if isinstance(block, FlatPrior):
        return white
    if isinstance(block, DiagonalPrior):
        return jnp.sqrt(block.variance) * white
    if isinstance(block, CovariancePrior):
        factor = jnp.linalg.cholesky(block.covariance)
        return jnp.einsum("bij,bj->bi", factor, white.reshape(factor.shape[:2])).reshape(-1)
    factor = jnp.linalg.cholesky(block.precision)
    white = white.reshape(factor.shape[:2])
    solve = jax.vmap(lambda f, w: jax.scipy.linalg.solve_triangular(f, w, lower=True, trans=1))
    return solve(factor, white).reshape(-1)


def _explain_nan(reading: LatentGaussianReading) -> None:
    hyper = reading.initial_hyper()
    form = reading.form(hyper)
    at = f" at {_format(hyper)}" if hyper else ""
    for name, block in zip(reading.field, form.prior, strict=True):
        leaves = jax.tree.leaves(block)
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves):
            raise ModelStructureError(f"the prior of site '{name}' has parameters that are not finite{at}.")
        if not bool(jnp.isfinite(block.log_density(jnp.zeros((block.size,))))):
            raise ModelStructureError(
                f"the covariance of site '{name}' is not positive definite{at}: add a jitter to its diagonal "
                "(1e-6 of its largest entry, in float32 1e-4), or check the kernel for duplicate inputs."
            )
    rows = jnp.concatenate([form.offset[:, None], _rows_of(form.design)], axis=1)
    bad = ~jnp.all(jnp.isfinite(rows), axis=1)
    for name, part in zip(reading.factor_names, form.split_rows(bad), strict=True):
        if bool(jnp.any(part)):
            row = int(jnp.argmax(part))
            raise ModelStructureError(
                f"the predictor of site '{name}' is not finite in {int(part.sum())} rows (the first is {row}): "
                "check the covariates for NaN or infinity, or mask the rows and set their covariates to zero."
            )
    raise ModelStructureError(
        f"the log density of the model is NaN{at}: give better starting values through hyper_values, or check the "
        f"model with numpyro.validation_enabled(). What was read:\n{reading.describe()}"
    )


def _rows_of(design: Any) -> Array:
    return design.matrix if hasattr(design, "matrix") else design.values


def _format(hyper: dict[str, Any]) -> str:
    parts = [f"{n}={np.asarray(v):.4g}" if np.ndim(v) == 0 else f"{n}={np.asarray(v)}" for n, v in hyper.items()]
    return ", ".join(parts)
