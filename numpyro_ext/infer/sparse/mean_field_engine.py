"""Structured mean field as an inference engine for NumPyro models of images and sparse signals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from ...compilation.store import shared
from ...linalg.solvers.posterior_precision import has_diagonal_gram
from ...structure import SparseLinearReading
from ...structure.sparse_linear.read import SPARSE_LINEAR
from ..front.engine import BaseEngine
from ..front.files.saved_runs import fit_from_content
from ..front.options import EngineOptions, check_at_least, check_one_of, check_positive, default_tolerance
from ..front.results import at_values
from ..front.running.iterations import Iterations, Parts, fit_in_chunks, judge
from ..front.state import EngineState, check_init_state, data_digest
from ..hyper.space import UnconstrainedSpace
from . import mean_field as core
from .gaussian_solver import SOLVER_COSTS, SolverCosts
from .mean_field_programs import CHUNK, MeanFieldPrograms
from .mean_field_run import MeanFieldRun
from .programs import compiled_form
from .run import Member

_ROUNDING = 1e3
"""Errors of the bound, in units of the last place."""

Variances = Literal["auto", "exact", "perturb-and-map", "lanczos", "none"]


class StructuredMeanField(BaseEngine[MeanFieldRun]):
    r"""A Gaussian over sparse coefficients times a tree over their states (Ko and Seeger 2012; Ko 2017, section 2.2).

    Accepts models in which coefficients with a sparse prior (:class:`~numpyro_ext.distributions.HiddenMarkovTree`, or
    independent Laplace, Student-t and Normal sites) are seen through a linear map with Gaussian noise. The map is only
    multiplied with: images of 256 x 256 pixels take seconds to minutes. Hyperparameters of prior and noise are learned
    by raising the bound plus their log prior (expectation-maximisation), one update per step. A noise scale can be
    learned from more observations than coefficients only: the bound is the looser the larger it is, so that it is
    too small there, by up to a third with few residual degrees of freedom and by a few per cent with twice as many
    observations as coefficients, and has its maximum near zero elsewhere.

    ``log_evidence`` is a lower bound: exact with exact variances, an estimate of it with others. With
    ``variances="none"`` the mean is the posterior mode given the hyperparameters (for trees, of the density with the
    states summed out), there are no variances, and no evidence. Coefficients whose components are not log-concave have
    several fixed points; the start decides.

    **Example:**

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
    :param options: those of every engine, see :class:`~numpyro_ext.infer.front.engine.BaseEngine`: ``field``,
        ``hyper_values``, ``init_values`` (for coefficient sites the raw coefficients of the data, where the iteration
        starts), ``num_samples`` (200 by default; also for variances that have no closed form) and ``progress_bar``.
    :raises ValueError: if an option is out of range. At :meth:`run` also if a noise scale would have to be learned from
        no more observations than coefficients.
    """

    forms = (SPARSE_LINEAR,)
    _costs: ClassVar[SolverCosts] = SOLVER_COSTS

    def __init__(
        self,
        model: Callable[..., object],
        *,
        num_steps: int = 300,
        tol: float | None = None,
        variances: Variances = "auto",
        num_rounds: int = 3,
        convexified: bool = False,
        num_variance_samples: int = 30,
        max_iterations: int = 500,
        **options: Unpack[EngineOptions],
    ) -> None:
        options.setdefault("num_samples", 200)
        super().__init__(model, **options)
        check_at_least(
            1,
            num_steps=num_steps,
            num_rounds=num_rounds,
            num_variance_samples=num_variance_samples,
            max_iterations=max_iterations,
        )
        check_positive(tol=tol)
        check_one_of(Variances, variances=variances)
        self.num_steps = num_steps
        self.tol = tol
        self.variances = variances
        self.num_rounds = num_rounds
        self.convexified = convexified
        self.num_variance_samples = num_variance_samples
        self.max_iterations = max_iterations

    # Running

    def _start(
        self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], init_state: EngineState | None
    ) -> MeanFieldRun:
        reading, space, programs, workspace = self._prepare(rng_key, args, kwargs)
        data, fixed, before = reading.data, space.fixed, 0
        digest = data_digest(reading.written_data, fixed, reading.key)
        if init_state is None:
            values = space.initial(self._hyper_start(reading))
            hyper = space.unpack(values)
            state = programs.init_state(data, hyper, workspace, self._initial_coefficients(reading, hyper))
        else:
            shapes = programs.state_shapes(data, space.unpack(space.initial()), workspace)
            check_init_state(init_state, shapes, space.size)
            values, state = init_state.values, init_state.state
            before = init_state.num_steps if init_state.data_digest == digest else 0
        is_exact = programs.options.variances in ("exact", "none")
        problem = Iterations(
            solve=lambda values, state, *limits: programs.solve(data, fixed, values, workspace, state, *limits),
            space=space,
            parts=lambda state: Parts((jnp.log(state.second_moment),), (), (1.0,)),
            with_parts=lambda state, free, _: state._replace(second_moment=jnp.exp(free[0])),
            digest=digest,
            tol=self._tolerance(),
            gain=1e-6 if is_exact else 1e-3,
            rounding=_ROUNDING * float(jnp.finfo(values.dtype).eps) if is_exact else 1e-4,
            change="The largest change, in standard deviations of the noise,",
            explain=partial(_explain, reading),
            num_steps=self.num_steps,
            chunk=CHUNK,
            name=type(self).__name__,
            unit="steps",
            show_bar=self.progress_bar,
            most_escapes=self._most_escapes,
        )
        found, info = fit_in_chunks(problem, values, state, before=before)
        found = judge(problem, found, info, rng_key)
        if float(info.solved.residual) > 1.0:
            message = (
                f"Conjugate gradients stopped after {self.max_iterations} iterations with residuals up to "
                f"{float(info.solved.residual):.2g} times their tolerance: give more (max_iterations)."
            )
            messages = (*found.diagnostics.messages, message)
            found = found._replace(diagnostics=found.diagnostics._replace(converged=False, messages=messages))
        return MeanFieldRun([Member({}, reading, space, programs, workspace, found)], found, rng_key, self.num_samples)

    def _prepare(
        self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], *, check: bool = True
    ) -> tuple[SparseLinearReading, UnconstrainedSpace, MeanFieldPrograms, core.Workspace]:
        reading = self._read(rng_key, args, kwargs, check=check)
        unknown = set(self.init_values) - set(reading.hyper) - set(reading.field)
        if unknown:
            raise ValueError(
                f"init_values names {sorted(unknown)}, neither hyperparameters nor coefficient sites of this model."
            )
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        options = self._options(reading, space)
        programs = shared(MeanFieldPrograms, reading, space, options, self._tolerance())
        # The draws of the iteration must not be those that are reported.
        workspace = programs.make_workspace(reading.data, space.unpack(space.initial()), jax.random.fold_in(rng_key, 1))
        return reading, space, programs, workspace

    def _tolerance(self) -> float:
        return default_tolerance(self.tol, 1e-4, 1e-3)

    def _options(self, reading: SparseLinearReading, space: UnconstrainedSpace) -> core.Options:
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
            costs=self._costs,
            num_rounds=self.num_rounds,
            is_convexified=self.convexified,
            num_samples=self.num_variance_samples,
            max_iterations=self.max_iterations,
            mean_tol=default_tolerance(None, 1e-6, 1e-5),
        )

    def _hyper_start(self, reading: SparseLinearReading) -> dict[str, object]:
        return {name: value for name, value in self.init_values.items() if name in reading.hyper}

    def _initial_coefficients(self, reading: SparseLinearReading, hyper: dict[str, Array]) -> Array | None:
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

    def _restore(
        self, content: dict[str, object], rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> MeanFieldRun:
        reading, space, programs, workspace = self._prepare(rng_key, args, kwargs, check=False)
        result = fit_from_content(content, reading, space, partial(programs.state_shapes, workspace=workspace))
        return MeanFieldRun(
            [Member({}, reading, space, programs, workspace, result)], result, rng_key, self.num_samples
        )

    def state_probabilities(self) -> Array:
        """Probability that each coefficient is in the high state, of shape ``(n,)``; zero where there are no states."""
        return self._finished().state_probabilities()


def _explain_noise(name: str, start: Array, form: Any) -> str:
    value = f"{float(start):.4g}" if jnp.size(start) == 1 else "..."
    kept = ", the value at which its search would start" if jnp.size(start) == 1 else ""
    return (
        f"{name!r} would have to be learned, a noise scale of {form.num_rows} observations of {form.num_columns} "
        "unknowns. Without residual degrees of freedom this bound has its maximum far below the noise, because it is "
        "tight only where there is none, and the result would be the noisy data. Give "
        f"hyper_values={{{name!r}: {value}}}{kept}{'; or use EP, which learns it.' if form.analysis is None else '.'}"
    )


def _explain(reading: SparseLinearReading, hyper: dict[str, Array], value: float) -> str:
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
