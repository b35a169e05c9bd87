"""Structured mean field as an inference engine for NumPyro models of images and sparse signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.operators.operator import LinearOperator
from ...linalg.solvers.posterior_precision import has_diagonal_gram
from ...structure import read_sparse_linear
from ..front.chunks import run_in_chunks
from ..front.draws import finite_draws, with_hyper
from ..front.engine import BaseEngine, check_at_least, check_positive, default_tolerance
from ..front.failures import at_values
from ..front.results import Diagnostics, LogEvidence
from ..front.saved_runs import fit_from_content, fit_to_content
from ..front.sites import PosteriorSites, SitePosterior, missing_sites
from ..front.state import EngineState, Fit, check_init_state, data_digest
from ..hyper.space import UnconstrainedSpace
from . import mean_field as core
from .mean_field_programs import CHUNK, SparsePrograms, compiled_form, compiled_sparse_programs

__all__ = ["StructuredMeanField"]

Variances = Literal["auto", "exact", "perturb-and-map", "lanczos", "none"]


class _Run(NamedTuple):
    """All that the answers are computed from."""

    reading: Any
    space: UnconstrainedSpace
    programs: SparsePrograms
    workspace: core.Workspace
    fit: Fit
    rng_key: Array

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], core.Workspace, core.State]:
        """The first arguments of every program."""
        return self.reading.data, self.fit.hyper, self.workspace, self.fit.last_state.state


class StructuredMeanField(BaseEngine):
    r"""A Gaussian over sparse coefficients times a tree over their states (Ko and Seeger 2012; Ko 2017, section 2.2).

    Accepts models in which coefficients with a sparse prior (:class:`~numpyro_ext.distributions.HiddenMarkovTree`, or
    independent Laplace, Student-t and Normal sites) are seen through a linear map with Gaussian noise. The map is only
    multiplied with: images of 256 x 256 pixels take seconds to minutes. Hyperparameters of prior and noise are learned
    by raising the bound plus their log prior (expectation-maximisation), one update per step. A noise scale can be
    learned from more observations than coefficients only: the bound is the looser the larger it is, so that it is
    too small by some per cent there, and has its maximum near zero elsewhere.

    ``log_evidence`` is a lower bound: exact with exact variances, an estimate of it with others. With
    ``variances="none"`` the mean is the posterior mode given the hyperparameters (for trees, of the density with the
    states summed out), there are no variances, and no evidence. Coefficients whose components are not log-concave have
    several fixed points; the start decides.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import StructuredMeanField

        >>> def model(y):
        ...     s = numpyro.sample("s", dist.Laplace(0.0, 0.5).expand([4]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(s, 0.3), obs=y)

        >>> engine = StructuredMeanField(model)
        >>> engine.run(jax.random.key(0), jnp.array([2.0, 0.1, -0.2, 1.0]))
        >>> print(engine.posterior["s"].mean[0], engine.log_evidence.is_lower_bound)
        1.82 True

    :param model: a NumPyro model.
    :param int num_steps: steps at most; each updates the hyperparameters once. Where variances are exact every third
        step leaps ahead, and is taken back if the bound fell.
    :param float tol: the largest change in a step, of the root second moment of a coefficient in standard deviations
        of its noise, at which the iteration has converged; by default ``1e-4`` in float64 and ``1e-3`` in float32.
    :param str variances: ``"auto"``: exact where the operator has orthogonal columns or at most 1024 coefficients,
        else ``"perturb-and-map"`` (unbiased draws); ``"lanczos"`` (too small); ``"none"`` for the mode.
    :param int num_rounds: rounds of Gaussian and tree per step.
    :param bool convexified: whether components that are not log-concave are treated by their convex bound inside a
        step. The fixed points are the same.
    :param int num_variance_samples: draws from which perturb-and-MAP estimates variances during the iteration.
    :param int max_iterations: iterations of conjugate gradients per system at most.
    :param field: names of the coefficient sites, where two choices are possible.
    :param dict hyper_values: hyperparameters that are given and not learned.
    :param dict init_values: where the search for the others starts (constrained); for coefficient sites the raw
        coefficients of the data, where the iteration starts.
    :param int num_samples: draws made for :meth:`get_samples` and for variances that have no closed form.
    :param bool progress_bar: whether runs longer than a second show a bar.
    :raises ValueError: if an option is out of range.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        num_steps: int = 300,
        tol: float | None = None,
        variances: Variances = "auto",
        num_rounds: int = 3,
        convexified: bool = False,
        num_variance_samples: int = 30,
        max_iterations: int = 500,
        field: Sequence[str] | None = None,
        hyper_values: Mapping[str, Any] | None = None,
        init_values: Mapping[str, Any] | None = None,
        num_samples: int = 200,
        progress_bar: bool = True,
    ) -> None:
        super().__init__(
            model,
            field=field,
            hyper_values=hyper_values,
            init_values=init_values,
            num_samples=num_samples,
            progress_bar=progress_bar,
        )
        check_at_least(
            1,
            num_steps=num_steps,
            num_rounds=num_rounds,
            num_variance_samples=num_variance_samples,
            max_iterations=max_iterations,
        )
        check_positive(tol=tol)
        if variances not in get_args(Variances):
            raise ValueError(
                f"variances must be one of {', '.join(map(repr, get_args(Variances)))}, got {variances!r}."
            )
        self.num_steps = num_steps
        self.tol = tol
        self.variances = variances
        self.num_rounds = num_rounds
        self.convexified = convexified
        self.num_variance_samples = num_variance_samples
        self.max_iterations = max_iterations

    # Running

    def run(self, rng_key: Array, *args: Any, init_state: EngineState | None = None, **kwargs: Any) -> None:
        """Read the model on these arguments, learn its hyperparameters and fit its coefficients.

        :param rng_key: random number generator key, for the check of the reading and all draws.
        :param args: arguments of the model.
        :param EngineState init_state: ``last_state`` of an earlier run on data of the same shapes, to go on from.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the model is not of the form.
        :raises ValueError: if the bound is not finite; the message names the likely cause. Also if a noise scale would
            have to be learned from no more observations than coefficients.
        """
        self._forget()
        reading, space, programs, workspace = self._prepare(rng_key, args, kwargs)
        if init_state is None:
            values, state = space.initial(self._hyper_start(reading)), None
        else:
            shapes = programs.state_shapes(reading.data, space.unpack(space.initial()), workspace)
            check_init_state(init_state, shapes, space.size)
            values, state = init_state.values, init_state.state
        result = self._iterate(reading, space, programs, workspace, values, state, init_state)
        self._last_state = result.last_state
        result = self._report(result, space)
        self._run = _Run(reading, space, programs, workspace, result, rng_key)

    def _prepare(
        self, rng_key: Array, args: tuple, kwargs: dict[str, Any], *, check: bool = True
    ) -> tuple[Any, UnconstrainedSpace, SparsePrograms, core.Workspace]:
        reading = read_sparse_linear(
            self.model,
            args,
            kwargs,
            field=self.field,
            init_values=self._start_values,
            rng_key=rng_key,
            check=check,
        )
        unknown = set(self.init_values) - set(reading.hyper) - set(reading.field)
        if unknown:
            raise ValueError(
                f"init_values names {sorted(unknown)}, neither hyperparameters nor coefficient sites of this model."
            )
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        options = self._options(reading, space)
        programs = compiled_sparse_programs(reading, space, options, tol=self._tolerance())
        # The draws of the iteration must not be those that are reported.
        workspace = programs.make_workspace(reading.data, space.unpack(space.initial()), jax.random.fold_in(rng_key, 1))
        return reading, space, programs, workspace

    def _tolerance(self) -> float:
        return default_tolerance(self.tol, 1e-4, 1e-3)

    def _options(self, reading: Any, space: UnconstrainedSpace) -> core.Options:
        """Static choices, from the form at the start."""
        form = compiled_form(reading)(space.unpack(space.initial()), reading.data)
        is_diagonal = not reading.is_analysis and has_diagonal_gram(form.operator, form.noise_variance)
        if space.size:
            if not reading.is_design_fixed:
                raise ValueError(
                    "The linear map or the mean depends on hyperparameters, which are learned from prior and noise "
                    f"only. Give the values of those it depends on (hyper_values); free now: {', '.join(space.names)}."
                )
            learned_noise = [name for name in reading.noise_hyper() if name in space.names]
            if learned_noise and form.num_rows <= form.num_columns:
                start = space.unpack(space.initial(self._hyper_start(reading)))[learned_noise[0]]
                raise ValueError(_explain_noise(learned_noise[0], start, form))
            # With several learned noise levels the residual of each has to be known, not their sum.
            is_diagonal = is_diagonal and (jnp.ndim(form.noise_variance) == 0 or not learned_noise)
        return core.choose_options(
            form,
            variances=self.variances,
            is_diagonal=is_diagonal,
            num_rounds=self.num_rounds,
            is_convexified=self.convexified,
            num_samples=self.num_variance_samples,
            max_iterations=self.max_iterations,
            mean_tol=default_tolerance(None, 1e-6, 1e-5),
        )

    def _hyper_start(self, reading: Any) -> dict[str, Any]:
        return {name: value for name, value in self.init_values.items() if name in reading.hyper}

    def _initial_coefficients(self, reading: Any, hyper: dict[str, Array]) -> Array | None:
        given = [name for name in reading.field if name in self.init_values]
        if not given:
            return None
        if len(given) < len(reading.field):
            missing = [name for name in reading.field if name not in given]
            raise ValueError(
                f"init_values has {given[0]!r}, but not {missing[0]!r}: give all coefficient sites or none."
            )
        parts = []
        for name, (_, offset) in reading.maps(hyper, reading.data, given).items():
            value, shape = jnp.asarray(self.init_values[name], offset.dtype), tuple(reading.site_shapes[name])
            if value.shape != shape:
                raise ValueError(f"init_values[{name!r}] has the shape {value.shape}; the site has {shape}.")
            parts.append(value.reshape(-1) - offset)
        return jnp.concatenate(parts)

    def _iterate(
        self,
        reading: Any,
        space: UnconstrainedSpace,
        programs: SparsePrograms,
        workspace: core.Workspace,
        values: Array,
        state: core.State | None,
        init_state: EngineState | None,
    ) -> Fit:
        data, fixed = reading.data, space.fixed
        digest = data_digest(data, fixed)
        before = init_state.num_steps if init_state is not None and init_state.data_digest == digest else 0
        hyper = space.unpack(values)
        if state is None:
            state = programs.init_state(data, hyper, workspace, self._initial_coefficients(reading, hyper))

        def advance(carry: tuple[Array, core.State], length: int, done: int) -> tuple[Any, Any, Array]:
            values, state, info = programs.solve(data, fixed, carry[0], workspace, carry[1], length)
            return (values, state), info, info.objective

        result = run_in_chunks(
            advance,
            (values, state),
            num_steps=self.num_steps,
            chunk=CHUNK,
            before=before,
            name=type(self).__name__,
            unit="steps",
            show_bar=self.progress_bar,
        )
        values, state = result.carry
        hyper = space.unpack(values)
        log_evidence = result.objective + float(reading.log_constant(hyper, data))
        if not np.isfinite(log_evidence):
            raise ValueError(_explain(reading, hyper, log_evidence))
        diagnostics = self._diagnose(result.info, result.trace, result.num_steps, result.messages)
        last = EngineState(values, state, None, result.num_steps, digest)
        return Fit(last, hyper, None, False, log_evidence, diagnostics)

    def _diagnose(self, info: Any, trace: np.ndarray, num_steps: int, messages: list[str]) -> Diagnostics:
        converged = bool(info.converged) and not messages
        if not converged:
            messages.append(
                f"The largest change of the last of {num_steps} steps is {float(info.max_change):.2g} standard "
                f"deviations of the noise, the tolerance {self._tolerance():.2g}. Give more steps (num_steps) or go on "
                "with init_state=engine.last_state."
            )
        if float(info.residual) > 1.0:
            converged = False
            messages.append(
                f"Conjugate gradients stopped after {self.max_iterations} iterations with residuals up to "
                f"{float(info.residual):.2g} times their tolerance: give more (max_iterations)."
            )
        return Diagnostics(converged, num_steps, trace, float(info.max_change), 0, {}, None, tuple(messages))

    # Results

    @property
    def is_lower_bound(self) -> bool:
        """True: the objective is a bound. With variances that are not exact it is known up to their errors."""
        return True

    @property
    def log_evidence(self) -> LogEvidence:
        """The lower bound of the log evidence at the reported hyperparameters.

        :raises RuntimeError: without variances, where there is none.
        """
        run = self._finished()
        if self.variances == "none":
            raise RuntimeError(
                "The search for the mode (variances='none') has no log evidence; the log joint density after each step "
                "is in diagnostics.objective_trace."
            )
        return LogEvidence(run.fit.log_evidence, self.is_lower_bound)

    def describe(self) -> str:
        """How the model was read, and how the Gaussian is solved for."""
        options = self._finished().programs.options
        return "\n".join([super().describe(), f"solver: {options.solver}, variances: {options.variances}"])

    @cached_property
    def _centered_draws(self) -> Array:
        """Draws of the coefficients less their mean, for variances without closed form; ``(num_samples, n)``."""
        run = self._finished()
        return run.programs.draw_centered(*run.inputs, run.rng_key, num_samples=self.num_samples)

    def _site_moments(self, name: str) -> tuple[Array, Array]:
        run = self._finished()
        self._check_variances(name)
        mean, variance = run.programs.site_moments(*run.inputs, self._draws_for(name), name=name)
        if not bool(jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(variance))):
            raise FloatingPointError(f"The posterior of site {name!r} is not finite, although the bound is.")
        return mean, variance

    def _draws_for(self, name: str) -> Array:
        """No draws where the variance is exact."""
        run = self._finished()
        if run.programs.has_exact_variance(name):
            return jnp.zeros((0, run.reading.num_columns))
        return self._centered_draws

    def _check_variances(self, name: str) -> None:
        if self.variances == "none":
            raise RuntimeError(
                f"variances='none' finds the mode only: {name!r} has no posterior variance. Its mode is "
                "engine.posterior[...].mean."
            )

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Gaussian marginals by name, for every coefficient site and every deterministic site linear in them.

        Variances are exact with exact variances for the coefficients, and for other sites up to 2048 coefficients;
        elsewhere they are estimated from ``num_samples`` draws, with relative standard deviation
        ``sqrt(2 / num_samples)``.
        """
        run = self._finished()
        reading, programs = run.reading, run.programs
        sites = {
            name: _Site(
                name,
                tuple(reading.site_shapes[name]),
                mean=partial(programs.site_mean, *run.inputs, name=name),
                moments=partial(self._site_moments, name),
                covariance=partial(self._covariance, name),
                sample=partial(self._sample_site, name),
            )
            for name in reading.affine_sites
        }
        return PosteriorSites(sites, missing_sites(reading))

    def _covariance(self, name: str) -> Array:
        run = self._finished()
        self._check_variances(name)
        return run.programs.site_covariance(*run.inputs, name=name)

    def _sample_site(self, name: str, rng_key: Array, num_samples: int) -> Array:
        run = self._finished()
        self._check_variances(name)
        return run.programs.draw_site(*run.inputs, rng_key, name=name, num_samples=num_samples)

    def _draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        run = self._finished()
        self._check_variances(run.reading.field[0])
        centered = (
            self._centered_draws
            if rng_key is run.rng_key
            else run.programs.draw_centered(*run.inputs, rng_key, num_samples=self.num_samples)
        )
        sites, log_density = finite_draws(run.programs.draws(*run.inputs, centered))
        return with_hyper(sites, run.fit.hyper, run.reading.factor_names, self.num_samples), log_density

    def state_probabilities(self) -> Array:
        """Probability that each coefficient is in the high state, of shape ``(n,)``; zero where there are no states."""
        run = self._finished()
        return run.programs.state_probabilities(*run.inputs)

    def _measured_size(self, site: str | None) -> int:
        reading = self._finished().reading
        self._check_variances(site or reading.field[0])
        if site is None:
            return reading.num_columns
        if site not in reading.affine_sites:
            raise ValueError(f"{site!r} is not linear in the coefficients; sites: {', '.join(reading.affine_sites)}.")
        return int(np.prod(reading.site_shapes[site]))

    def _row_variance(self, rows: LinearOperator | Array, site: str | None) -> Array:
        """By one solution with the posterior precision per row; without a site, of all coefficients in order."""
        run = self._finished()
        return run.programs.row_variance(*run.inputs, rows, name=site)

    def _typical_noise(self) -> Array:
        run = self._finished()
        return jnp.mean(run.reading.noise_variance(run.fit.hyper))

    # Persistence

    def _content(self) -> dict[str, Any]:
        run = self._finished()
        return fit_to_content(run.fit, run.reading)

    def _restore(self, content: dict[str, Any], rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> _Run:
        reading, space, programs, workspace = self._prepare(rng_key, args, kwargs, check=False)
        bound: Any = programs.bound_to(workspace)
        result = fit_from_content(content, reading, bound, space)
        return _Run(reading, space, programs, workspace, result, rng_key)


class _Site(SitePosterior):
    """A site whose mean is known at less cost than its variance, or without one."""

    def __init__(self, name: str, shape: tuple[int, ...], mean: Callable[[], Array], **functions: Any) -> None:
        super().__init__(name, shape, **functions)
        self._mean = mean
        self._known: tuple[Array, Array] | None = None

    @property
    def mean(self) -> Array:
        """Posterior mean, in the shape of the site."""
        return self._mean().reshape(self.shape)

    @property
    def variance(self) -> Array:
        """Posterior variance of each element, in the shape of the site."""
        if self._known is None:
            self._known = self._moments()
        return self._known[1].reshape(self.shape)


def _explain_noise(name: str, start: Array, form: Any) -> str:
    value = f"{float(start):.4g}" if jnp.size(start) == 1 else "..."
    kept = ", the value at which its search would start" if jnp.size(start) == 1 else ""
    return (
        f"{name!r} would have to be learned, a noise scale of {form.num_rows} observations of {form.num_columns} "
        "unknowns. Without residual degrees of freedom this bound has its maximum far below the noise, because it is "
        "tight only where there is none, and the result would be the noisy data. Give "
        f"hyper_values={{{name!r}: {value}}}{kept}{'; or use EP, which learns it.' if form.analysis is None else '.'}"
    )


def _explain(reading: Any, hyper: dict[str, Array], value: float) -> str:
    form = compiled_form(reading)(hyper, reading.data)
    if not bool(jnp.all(jnp.isfinite(form.observed))):
        number = int(jnp.sum(~jnp.isfinite(form.observed)))
        return (
            f"{number} of the observations in {', '.join(map(repr, reading.factor_names))} are not finite. Mask them: "
            "handlers.mask(mask=...) around the observed site, with zeros in place of the missing values."
        )
    if not bool(jnp.all(form.noise_variance > 0.0)):
        return f"The noise variance is not positive{at_values(hyper)}."
    return (
        f"The bound is {value}{at_values(hyper)}, although data and noise are finite: the scales of the prior may be "
        "zero or not finite. Give other starting values (init_values), or use float64 (numpyro.enable_x64())."
    )
