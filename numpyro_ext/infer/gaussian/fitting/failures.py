"""Explanation of an evidence that is not finite, in words that name the site."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....linalg.gaussian.design import AnyDesign, OperatorRows
from ....potentials import ElementwisePotential, PairPotential
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from ...front.results import at_values
from ..algorithms.algorithm import Algorithm
from ..algorithms.modes import laplace
from ..algorithms.values import ExpectationPropagation, Laplace
from .flat_directions import flat_direction, names_of_blocks

_LARGEST_WEIGHT = 1e4
"""Second derivative of a log factor, beside which sums over hundreds of them leave a prior of variance one two digits
in single precision."""


def not_finite_error(
    reading: LatentGaussianReading, hyper: dict[str, Array], algorithm: Algorithm | None = None
) -> ValueError:
    """The error for a log evidence that is not finite: where it happened, and the likely cause.

    :param LatentGaussianReading reading: of the model.
    :param dict hyper: all hyperparameters, constrained.
    :param Algorithm algorithm: what has failed, where that says more.
    :return: the exception, to be raised by the caller.
    """
    return ValueError(f"The log evidence is not finite{at_values(hyper)}. {explain_failure(reading, hyper, algorithm)}")


def explain_failure(reading: LatentGaussianReading, hyper: dict[str, Array], algorithm: Algorithm | None = None) -> str:
    """The likely reason why a form cannot be evaluated, in a sentence that names the site."""
    form = reading.compiled_form(hyper)
    for name, block in zip(names_of_blocks(reading, form), form.prior, strict=True):
        for kind in ("variance", "covariance", "precision"):
            value = getattr(block, kind, None)
            if value is None:
                continue
            if not bool(jnp.all(jnp.isfinite(value))):
                return f"The prior {kind} of site {name!r} has entries that are not finite."
            if kind == "variance" and not bool(jnp.all(value > 0.0)):
                return f"The prior variance of site {name!r} is not positive everywhere."
            if kind != "variance" and not bool(jnp.all(jnp.isfinite(jnp.linalg.cholesky(value)))):
                return (
                    f"The prior {kind} of site {name!r} is not positive definite to working precision: "
                    f"add a small jitter to its diagonal, or use float64 (numpyro.enable_x64())."
                )
    for name, offset in zip(reading.factor_names, form.split_rows(jnp.asarray(form.offset)), strict=True):
        k = int(np.argmin(np.isfinite(np.append(offset, np.nan))))
        if k < len(offset):
            return (
                f"The predictor of factor {k} of site {name!r} is {float(offset[k])} whatever the field is, as the "
                "logarithm of an exposure of zero is: leave such observations out (handlers.mask), write the exposure "
                "as a factor of the rate (exposure * jnp.exp(...)), or check the model's arguments for nan and inf."
            )
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(_numbers(form.design))):
        return "The linear predictor has coefficients that are not finite: check the model's arguments for nan and inf."
    for name, potential in zip(reading.factor_names, form.potentials, strict=True):
        # Those known as functions alone hold whatever stands in the model, such as log densities outside of a support.
        is_known = not isinstance(getattr(potential, "base", potential), ElementwisePotential | PairPotential)
        leaves = jax.tree.leaves(potential) if is_known else []
        leaves = [leaf for leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves):
            return f"The observations or parameters of site {name!r} are not all finite."
        if name in reading.field and not bool(jnp.all(potential.has_finite_variance())):
            return (
                f"The prior of site {name!r} has no variance (Cauchy, or Student-t with two degrees of freedom or "
                "fewer), which matching moments needs for every element of which the data say nothing: leave these "
                "out, give more degrees of freedom, or use VariationalGaussian, which needs no variance."
            )
    undetermined = flat_direction(reading, form)
    if undetermined is not None:
        return undetermined
    broken = _broken_factor(reading, form)
    if broken is not None:
        return broken
    if isinstance(algorithm, Laplace):
        saddle = _no_maximum(reading, form)
        if saddle is not None:
            return saddle
    if isinstance(algorithm, ExpectationPropagation):
        alone = _without_cavity(reading, form, algorithm)
        if alone is not None:
            return alone
    digits = _few_digits(reading, form)
    if digits is not None:
        return digits
    return (
        "Prior and data are finite, so the algorithm itself failed: try damping, other starting values (init_values) "
        "or float64 (numpyro.enable_x64())."
    )


def _no_maximum(reading: LatentGaussianReading, form: LatentGaussian) -> str | None:
    """A factor that bends upwards where the search for the mode has ended, and where that is."""
    end = jax.jit(laplace.solve)(form, laplace.init(form))[0].predictor + form.offset
    for name, potential, rows, observed in zip(
        reading.factor_names, form.potentials, form.split_rows(end), form.observed, strict=True
    ):
        bends = np.where(np.asarray(observed), np.asarray(potential.derivatives(rows)[2]), 0.0)
        if potential.is_log_concave or not np.max(bends, initial=0.0) > 0.0:
            continue
        k = int(np.argmax(bends))
        return (
            f"The factors of site {name!r} are not log-concave, and the search for the mode ended where the posterior "
            f"has no maximum: factor {k} has the second derivative {bends[k]:.4g} there, at the predictor "
            f"{float(rows[k]):.4g}, more than the prior holds. So it goes where factors are even in their predictor, "
            "and the search starts between two modes that mirror each other: give the field a prior mean on the side "
            "of one of them, or use NUTS, which draws from both."
        )
    return None


def _without_cavity(reading: LatentGaussianReading, form: LatentGaussian, algorithm: Algorithm) -> str | None:
    """A factor without which its predictor has no variance to working precision."""
    state = jax.jit(lambda form: algorithm.solve(form, algorithm.init(form), num_steps=2, tol=1e-6)[0])(form)
    ratios, variances = (form.split_rows(x) for x in (state.marginals.cavity_ratio, state.marginals.variance))
    for name, ratio, variance, observed in zip(reading.factor_names, ratios, variances, form.observed, strict=True):
        is_alone = np.asarray(observed) & (np.asarray(variance) > 0.0) & ~(np.asarray(ratio) > 0.0)
        if is_alone.any():
            return (
                f"To working precision factor {int(np.argmax(is_alone))} of site {name!r} alone holds its predictor, "
                "as a soft constraint on the sum of a flat field does: EP, which looks at the posterior without it, "
                "finds none. Use LaplaceApproximation, float64 (numpyro.enable_x64()), a wider factor, or a field "
                "that adds up to zero (dist.ZeroSumNormal)."
            )
    return None


def _broken_factor(reading: LatentGaussianReading, form: LatentGaussian) -> str | None:
    """A factor of one predictor that is not a number, or infinite, at predictors that are not far."""
    for name, potential, rows in zip(
        reading.factor_names, form.potentials, form.split_rows(jnp.asarray(form.offset)), strict=True
    ):
        if jax.eval_shape(potential.log_density, rows).shape != rows.shape:
            continue  # of several predictors
        distances = np.array([0.0, 3.0, -3.0, 10.0, -10.0, 30.0, -30.0])
        found = np.stack([np.asarray(potential.log_density(rows + distance)) for distance in distances])
        is_impossible = np.all(found == -np.inf, axis=0)
        if is_impossible.any():
            return (
                f"Factor {int(np.argmax(is_impossible))} of site {name!r} has the density zero at every predictor that "
                f"was tried{_as_others(int(is_impossible.sum()) - 1)}: the model cannot make these observations "
                "(a count above zero where the exposure is zero, for one). Correct them, or leave them out."
            )
        for distance, values in zip(distances, found, strict=True):
            if np.all(np.isfinite(values)):
                continue
            k = int(np.argmin(np.isfinite(values)))
            return (
                f"The log density of factor {k} of site {name!r} is {values[k]} at the predictor "
                f"{float(rows[k]) + distance:.4g}. If it has digits there, write it so that they are kept "
                "(jax.scipy.special.log_ndtr for log(norm.cdf), jax.nn.log_sigmoid, jax.nn.softplus, "
                "jnp.log1p, the logarithm of a survival function and not of one minus the distribution function); if "
                "truly zero, use EP, which integrates over it, or a prior that stays within its support."
            )
    return None


def _as_others(number: int) -> str:
    return f", as {'has' if number == 1 else 'have'} {number} other{'s' * (number > 1)}" if number else ""


def _few_digits(reading: LatentGaussianReading, form: LatentGaussian) -> str | None:
    """An observation that weighs so much where a fit starts that single precision does not keep the prior beside it."""
    if jnp.result_type(form.offset) != jnp.float32:
        return None
    for name, potential, rows in zip(
        reading.factor_names, form.potentials, form.split_rows(jnp.asarray(form.offset)), strict=True
    ):
        if jax.eval_shape(potential.log_density, rows).shape != rows.shape:
            continue  # of several predictors

        def slope(eta: Array, log_density: Callable[[Array], Array] = potential.log_density) -> Array:
            return jax.jvp(log_density, (eta,), (jnp.ones_like(eta),))[1]

        weights = -np.asarray(jax.jvp(slope, (rows,), (jnp.ones_like(rows),))[1])
        k = int(np.argmax(np.where(np.isfinite(weights), weights, -np.inf)))
        if weights[k] > _LARGEST_WEIGHT:
            return (
                f"Single precision has too few digits: where the fit starts observation {k} of site {name!r}, whose "
                f"predictor has the offset {float(rows[k]):.3g}, weighs {weights[k]:.2g} times a standard normal "
                "prior, which is lost beside it. Use float64 (numpyro.enable_x64() at the start of the program), or "
                "take the offset out of the field: give exposures in units in which predictors are near zero."
            )
    return None


def _numbers(design: AnyDesign) -> AnyDesign | Array:
    """Arrays of which none is finite where an entry is not."""
    return design.matvec(jnp.ones((design.num_columns,))) if isinstance(design, OperatorRows) else design
