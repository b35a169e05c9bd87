"""Means and variances of predictors and observations when hyperparameters are uncertain: the marginal Gaussian process
of Garnett, Osborne and Hennig (2014), as Houlsby (2014, section 3.2) has it, and what stands on either side of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...compilation.pytree import PyTree
from ...compilation.quick_jit import quick_jit
from ...compilation.store import shared
from ...potentials import GaussianPotential
from ...structure import LatentGaussianReading
from ...structure.latent_gaussian import LatentGaussian
from ..front.engine import BaseEngine
from ..front.options import check_one_of, wrong_kind
from ..front.running.progress import warn
from ..hyper.curvature import curvature
from ..hyper.space import UnconstrainedSpace
from .algorithms.algorithm import Algorithm
from .answers.prediction import Slices, are_coordinates_joint, observed_parts
from .marginal.exact import exactly
from .programs import Programs
from .runs.integrated_run import IntegratedRun
from .runs.run import GaussianRun

if TYPE_CHECKING:
    from .engine import Engine

Hyper = Literal["plug-in", "linearised", "mgp", "mixture"]
Target = Literal["f", "f_plus_noise", "y"]


class PredictiveMoments(NamedTuple):
    """Predictive moments of each observation of a site, in its shape."""

    mean: Array
    variance: Array

    @property
    def sd(self) -> Array:
        """Standard deviations."""
        return jnp.sqrt(self.variance)


class LocalMoments(NamedTuple):
    """Predictors of a site at the optimum of the hyperparameters, in the shape of its observations, and derivatives by
    these, unconstrained, along a last axis."""

    mean: Array
    variance: Array
    noise: Array
    """Its variance."""
    mean_slopes: Array
    variance_slopes: Array
    noise_slopes: Array

    def at_optimum(self, target: Target) -> Array:
        """Variance of the target, were the hyperparameters known."""
        return self.variance if target == "f" else self.variance + self.noise

    def widened(self, covariance: ArrayLike, hyper: Hyper, target: Target) -> Array:
        """Variance of the target; see :func:`predictive_moments`.

        :param covariance: of the hyperparameters, shape ``(d, d)``.
        """
        covariance = jnp.asarray(covariance, self.variance.dtype)

        def spread(slopes: Array) -> Array:
            return jnp.maximum(jnp.einsum("...i,ij,...j->...", slopes, covariance, slopes), 0.0)

        variance, slopes, added = self.variance, self.variance_slopes, jnp.zeros(())
        if target == "y":
            variance, slopes = variance + self.noise, slopes + self.noise_slopes
        elif target == "f_plus_noise":
            added = self.noise
        linear = variance + spread(self.mean_slopes)
        if hyper == "linearised":
            return linear + added
        # A variance of zero is at its minimum, and has no slope.
        is_positive = variance > 0.0
        of_variance = jnp.where(is_positive, spread(slopes) / jnp.where(is_positive, variance, 1.0), 0.0)
        return linear + (variance + of_variance) / 3.0 + added


def predictive_moments(
    engine: Engine,
    *args: object,
    hyper: Hyper | None = None,
    target: Target = "f_plus_noise",
    **kwargs: object,
) -> dict[str, PredictiveMoments]:
    r"""Mean and variance of predictors or observations, with or without the uncertainty of hyperparameters.

    At the optimum :math:`\hat\xi` of the hyperparameters (unconstrained, of the density that the engine maximises) the
    target has the mean :math:`\hat\mu` and the variance :math:`\hat V`. With gradients by :math:`\xi` there, and
    :math:`\Sigma` the inverse of the curvature:

    ================ ==================================================================================================
    ``hyper``        variance; the mean is :math:`\hat\mu`, except of ``"mixture"``
    ================ ==================================================================================================
    ``"plug-in"``    :math:`\hat V`
    ``"linearised"`` :math:`\hat V + \nabla\mu^T \Sigma \nabla\mu`: the law of total variance to first order
    ``"mgp"``        :math:`\tfrac43 \hat V + \nabla\mu^T \Sigma \nabla\mu + \nabla V^T \Sigma \nabla V / (3 \hat V)`
                     (Houlsby 2014, eq. 3.11)
    ``"mixture"``    mean and variance of the mixture over the points at which the engine integrates
    ================ ==================================================================================================

    ``target`` says whose variance it is: ``"f"`` of the predictor; ``"y"`` of the observation, whose noise is then as
    uncertain as the other hyperparameters; ``"f_plus_noise"`` of the predictor, to which the noise at the optimum is
    added afterwards. A mixture converges to the exact moments with its lattice (``INLA(model, integrate="grid")``);
    the design that is the default for three and more hyperparameters misses their tails. ``"mgp"`` takes a single fit;
    it adds a third of :math:`\hat V` even where nothing is uncertain.

    Derivatives are in forward mode, of the posterior that each value of the hyperparameters has. Where all factors are
    Gaussian and the engine is exact for these (EP, LaplaceApproximation, INLA, VariationalGaussian with its full
    covariance), site approximations are functions of the hyperparameters in closed form, and nothing flows through an
    iteration. Elsewhere ``"linearised"`` and ``"mgp"`` are refused.

    Cost: of the derivatives ``O(d (M^3 + N M^2))`` for ``d`` hyperparameters, ``M`` observations and ``N`` looked at.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import EP, predictive_moments

    >>> def model(x, y=None):
    ...     scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    ...     numpyro.sample("y", dist.Normal(slope * x, noise), obs=y)

    >>> x = jnp.array([-1.0, 0.5, 1.0, 2.0])
    >>> engine = EP(model)
    >>> engine.run(jax.random.key(0), x, jnp.array([-0.7, 0.6, 0.8, 2.3]))
    >>> for hyper in ("plug-in", "linearised", "mgp", "mixture"):
    ...     moments = predictive_moments(engine, jnp.array([0.0, 3.0]), hyper=hyper, target="y")["y"]
    ...     print(f"{hyper:10}", *(f"{mean:.2f} ({sd:.2f})" for mean, sd in zip(moments.mean, moments.sd)))
    plug-in    0.00 (0.31) 3.03 (0.48)
    linearised 0.00 (0.31) 3.03 (0.49)
    mgp        0.00 (0.38) 3.03 (0.59)
    mixture    0.00 (0.38) 2.99 (0.60)

    :param engine: one on Gaussian fields, after its run.
    :param args: arguments of the model at which to look, without observations; by default those of the fit, with all
        of its observations, masked or not.
    :param str hyper: what becomes of the uncertainty of hyperparameters; see above. By default ``"mgp"``, or
        ``"plug-in"`` where none were learned.
    :param str target: of what; see above. Observations whose noise is not Gaussian have ``"f"`` alone.
    :param kwargs: keyword arguments of the model.
    :return: for each observed site mean and variance, in the shape of its observations.
    :raises ValueError: if this engine or this model does not have what is asked for; the message names the site.
    :warns UserWarning: if the run did not converge, or hyperparameters do not curve in every direction.
    """
    check_one_of(Target, target=target)
    fitted = fitted_run(engine)
    if hyper is None:
        hyper = "mgp" if fitted.space.size else "plug-in"
    check_one_of(Hyper, hyper=hyper)
    if hyper in ("linearised", "mgp"):
        covariance = hyper_covariance(engine, hyper)
        found = local_moments(engine, args, kwargs)
        return {name: PredictiveMoments(o.mean, o.widened(covariance, hyper, target)) for name, o in found.items()}
    if hyper == "mixture" and fitted.space.size and not isinstance(fitted, IntegratedRun):
        raise ValueError(
            f"This fit of {type(engine).__name__} sets its hyperparameters to their optimum, so there is no mixture "
            "over them. Fit with integrate='auto' or 'grid', or take hyper='mgp'."
        )
    run, slices = _looked_at(engine, fitted, args, kwargs)
    points = [(1.0, run.inputs)] if hyper == "plug-in" else list(run.weighted_points())
    return _mixture(run, points, slices, target)


def fitted_run(engine: object) -> GaussianRun:
    """The run of an engine on Gaussian fields.

    :raises TypeError: if it is none.
    """
    wanted = "an engine on a Gaussian field (EP, INLA, LaplaceApproximation, VariationalGaussian)"
    run = engine._finished() if isinstance(engine, BaseEngine) else None
    if not isinstance(run, GaussianRun):
        raise wrong_kind("A question on moments of predictors", engine, wanted)
    return run


def hyper_covariance(engine: Engine, hyper: str) -> np.ndarray:
    """The covariance of the unconstrained hyperparameters that were learned, from the curvature at their optimum.

    By derivatives of the exact evidence: the differences in which a search tells its curvature are good to some digits.

    :param str hyper: what it is for, for messages.
    :raises ValueError: if there are none, or the evidence is not known in closed form.
    """
    fitted = fitted_run(engine)
    if not fitted.space.size:
        raise ValueError(
            f"hyper={hyper!r} is about hyperparameters that were learned, and this fit has none: hyper='plug-in' has "
            "all the uncertainty that there is."
        )
    exact, values = _exact(engine, fitted), fitted.fit.last_state.values
    program = shared(_hessian, fitted.reading, fitted.space, exact, fitted.programs)
    hessian = np.asarray(program(fitted.reading.data, fitted.space.fixed, values), float)
    if not np.isfinite(hessian).all():
        raise FloatingPointError(
            "The second derivatives of the evidence by the hyperparameters are not finite at their optimum: is a "
            "covariance close to singular there? Add jitter, or take hyper='plug-in'."
        )
    found = curvature(hessian, tol=float(np.finfo(np.asarray(values).dtype).eps))
    if not found.is_peak:
        warn(
            f"hyper={hyper!r}: the density of the hyperparameters does not curve downwards in every direction. In the "
            "others they are held at their optimum."
        )
    return found.covariance


def local_moments(engine: Engine, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, LocalMoments]:
    """Predictors at the optimum of the hyperparameters with their derivatives, by observed site.

    :param args: of the model, as for :func:`predictive_moments`.
    :raises ValueError: if the posterior is not known as a function of the hyperparameters.
    """
    fitted = fitted_run(engine)
    exact = _exact(engine, fitted)
    run, slices = _looked_at(engine, fitted, args, kwargs)
    reading, space = run.reading, run.space
    moments, slopes = shared(_slopes, reading, space, exact)(reading.data, space.fixed, run.fit.last_state.values)
    moments = (moments[0], jnp.maximum(moments[1], 0.0), moments[2])
    by_row = (*moments, *(jnp.moveaxis(slope, 0, -1) for slope in slopes))
    return {name: LocalMoments(*(x[rows] for x in by_row)) for name, rows in _rows(reading, slices).items()}


def _slopes(reading: LatentGaussianReading, space: UnconstrainedSpace, exact: Algorithm) -> Callable[..., Any]:
    """A program for mean, variance and noise of all rows, and their derivatives, an axis of these in front."""

    def at(data: PyTree, fixed: dict[str, Array], values: Array) -> tuple[Array, Array, Array]:
        form = reading.form(space.unpack(values, fixed), data)
        return *exact.posterior(form, exact.init(form)).predictor_moments(), _noise(form)

    def with_slopes(data: object, fixed: dict[str, Array], values: Array) -> object:
        moments, push = jax.linearize(lambda v: at(data, fixed, v), values)
        # One after the other: each has the size of the prior's covariance on its way.
        return moments, jax.lax.map(push, jnp.eye(values.size, dtype=values.dtype))

    return quick_jit(with_slopes)


def _hessian(
    reading: LatentGaussianReading, space: UnconstrainedSpace, exact: Algorithm, programs: Programs
) -> Callable[..., object]:
    """A program for the second derivatives of the objective by the hyperparameters."""

    def hessian(data: Sequence[object], fixed: dict[str, Array], values: Array) -> Array:
        def objective(values: Array) -> Array:
            form = reading.form(space.unpack(values, fixed), data)
            return exact.log_evidence(form, ()) + programs.log_prior(data, fixed, values)

        _, push = jax.linearize(jax.grad(objective), values)
        rows: Array = jax.lax.map(push, jnp.eye(values.size, dtype=values.dtype))
        return 0.5 * (rows + rows.T)

    return quick_jit(hessian)


def _exact(engine: Engine, fitted: GaussianRun) -> Algorithm:
    """The algorithm of a fit with its posterior in closed form."""
    reading = fitted.reading
    form = reading.abstract_form
    for name, potential in zip(reading.factor_names, form.potentials, strict=True):
        if type(potential) is not GaussianPotential:
            raise ValueError(
                f"Derivatives of the posterior by its hyperparameters are known where all factors are Gaussian, and "
                f"that of site {name!r} is not ({type(potential).__name__}): its site approximations follow the "
                "hyperparameters through a fixed point. Take hyper='mixture', or 'plug-in'."
            )
    exact = exactly(fitted.algorithm, form)
    if exact is fitted.algorithm:
        raise ValueError(
            f"Derivatives of the posterior by its hyperparameters are those of the exact one, and this "
            f"{type(engine).__name__} approximates it even where all factors are Gaussian. Take hyper='mixture' or "
            "'plug-in', or another engine (EP)."
        )
    return exact


def _looked_at(
    engine: Engine, fitted: GaussianRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[GaussianRun, Slices | None]:
    """The run at the arguments at which to look, and the part of each site that is theirs."""
    if not fitted.fit.diagnostics.converged:
        warn(f"{type(engine).__name__} has not converged, and moments are of the posterior that it has.")
    return run_at(engine, fitted, args, kwargs, jax.random.key(0))  # the key is of draws, of which there are none


def run_at(
    engine: Engine, run: GaussianRun, args: tuple[Any, ...], kwargs: Mapping[str, Any], rng_key: Array
) -> tuple[GaussianRun, Slices | None]:
    """The run that holds the observations that are looked at, and which of them these are where some are new."""
    if not (args or kwargs):
        return run, None
    prediction = engine.predict(rng_key, *args, **kwargs)
    return prediction._run, prediction._new_slices


def _rows(reading: LatentGaussianReading, slices: Slices | None) -> dict[str, np.ndarray]:
    """The numbers of the rows of each observed site, in the shape of its observations.

    :raises ValueError: if a site has several rows for each.
    """
    out = {}
    for part in observed_parts(reading, slices):
        name = part.name
        if part.rows_per_observation != 1:
            raise ValueError(
                f"The observations of site {name!r} have several predictors each, and moments are of one: see "
                "engine.posterior for those of the field."
            )
        if are_coordinates_joint(reading, name):
            raise ValueError(
                f"The coordinates of an observation of site {name!r} ({reading.sites[name].family}) depend on each "
                "other, and moments are of single predictors: see engine.posterior for those of the field."
            )
        out[name] = part.rows.reshape(part.kept.shape)
    return out


def _mixture(
    run: GaussianRun, points: list[tuple[float, Any]], slices: Slices | None, target: Target
) -> dict[str, PredictiveMoments]:
    reading = run.reading
    chosen = _rows(reading, slices)
    if target != "f":
        for name, potential in zip(reading.observed_names, reading.abstract_form.potentials, strict=False):
            if name in chosen and type(potential) is not GaussianPotential:
                raise ValueError(
                    f"Observations of site {name!r} have no Gaussian noise ({type(potential).__name__}): target='f' is "
                    "the predictor, and draws of them are in engine.predict(...).get_samples()."
                )
    weights = np.array([weight for weight, _ in points])
    means, variances = [], []
    for _, inputs in points:
        _, mean, variance, _ = run.programs.rows(*inputs)
        means.append(np.asarray(mean))
        noise = _noise(reading.compiled_form(inputs[1])) if target == "y" else 0.0
        variances.append(np.maximum(variance, 0.0) + noise)
    mean = weights @ np.array(means)
    variance = weights @ (np.array(variances) + np.square(np.array(means) - mean))
    if target == "f_plus_noise":
        variance = variance + np.asarray(_noise(reading.compiled_form(run.fit.hyper)))
    return {name: PredictiveMoments(jnp.asarray(mean[at]), jnp.asarray(variance[at])) for name, at in chosen.items()}


def _noise(form: LatentGaussian) -> Array:
    """Variance of the noise of each row; nan where it is not Gaussian."""
    parts = []
    for potential, mask in zip(form.potentials, form.observed, strict=True):
        scale = potential.scale if isinstance(potential, GaussianPotential) else jnp.nan
        parts.append(jnp.broadcast_to(jnp.square(jnp.asarray(scale, form.offset.dtype)), mask.shape))
    return jnp.concatenate(parts) if parts else jnp.zeros((0,), form.offset.dtype)
