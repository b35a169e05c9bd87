"""Expectation propagation on sparse linear models as an engine, and mixtures of it over arguments of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.solvers.posterior_precision import has_diagonal_gram
from ...structure import ModelStructureError, read_sparse_linear
from ..front.draws import with_hyper
from ..front.engine import BaseEngine, check_at_least, check_positive, hyper_estimates
from ..front.progress import warn
from ..front.results import HyperEstimate
from ..front.sites import PosteriorSites
from ..front.state import EngineState, Fit, check_init_state
from ..front.summary import format_summary
from ..hyper.space import UnconstrainedSpace
from .mean_field_programs import compiled_form
from .mixtures import Member, MixtureSite, check_average, combined_fit, label, order, shares
from .saved_members import member_from_content, member_to_content
from .tree_fitting import LARGEST_CURVATURE, fit_tree
from .tree_programs import LARGEST_DENSE, TreeOptions, TreePrograms, compiled_tree_programs

__all__ = ["TreeEP"]


class _Run(NamedTuple):
    members: tuple[Member, ...]
    learned: tuple[Member, ...]
    """One for each combination of arguments other than the shift."""
    fit: Fit
    rng_key: Array

    @property
    def reading(self) -> Any:
        return self.learned[0].reading

    @property
    def space(self) -> UnconstrainedSpace:
        return self.learned[0].space


class TreeEP(BaseEngine):
    r"""Expectation propagation in which the prior of all coefficients is one factor; what :class:`EP` hands over to.

    Accepts sparse linear models (:class:`~numpyro_ext.distributions.HiddenMarkovTree`, Laplace, Student-t or Normal
    coefficients behind a linear map, Gaussian noise). Where the map has orthogonal columns in the metric of the noise,
    as orthonormal transforms have, one sum-product gives the exact posterior and the exact log evidence; images of
    256 x 256 pixels take seconds. Other maps of at most 2048 coefficients are iterated with damping, and the moments
    are those of the Gaussian at the fixed point. Hyperparameters are set to the maximum of log evidence plus log prior
    by L-BFGS, in units of about their standard errors.

    With ``num_shifts`` or ``average_over`` the posterior is the mixture, with equal weights, of the posteriors under
    all combinations of these arguments of the model (averages over shifts: Coifman and Donoho 1995). Hyperparameters
    are learned once for each combination without shift. ``log_evidence`` is the log of the average evidence; that of
    each member is in ``engine.members``. Of the sites only deterministic ones are reported, as the coefficients of
    different bases are different quantities.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer.sparse.tree_engine import TreeEP

        >>> def model(y):
        ...     s = numpyro.sample("s", dist.Laplace(0.0, 0.5).expand([4]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(s, 0.3), obs=y)

        >>> engine = TreeEP(model)
        >>> engine.run(jax.random.key(0), jnp.array([2.0, 0.1, -0.2, 1.0]))
        >>> print(engine.posterior["s"].mean[0])
        1.82

    :param model: a NumPyro model.
    :param int num_steps: steps of expectation propagation at most.
    :param float tol: largest disagreement of moments, relative to the Gaussian's, at which it has converged; by default
        ``1e-8`` in float64 and ``1e-4`` in float32.
    :param float damping: least fraction of the old sites that is kept in a step.
    :param field: names of the coefficient sites, where two choices are possible.
    :param dict hyper_values: hyperparameters that are given and not learned.
    :param dict init_values: where the search for the others starts (constrained).
    :param float hyper_tol: the search ends when no hyperparameter has a derivative above this, per about one standard
        error; by default ``1e-2`` in float64 and ``1e-1`` in float32, and 0.5 for more than 20 of them.
    :param int max_hyper_steps: steps of the search at most.
    :param int num_shifts: how many random circular shifts to average over; the model gets them as ``shift``.
    :param dict average_over: further arguments of the model, each with the values to average over.
    :param int num_samples: draws made for :meth:`get_samples`, for quantiles, and for variances of sites other than
        coefficients where there are more than 1024 of these.
    :param bool progress_bar: whether runs longer than a second show a bar.
    :raises ValueError: if an option is out of range.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        num_steps: int = 100,
        tol: float | None = None,
        damping: float = 0.0,
        field: Sequence[str] | None = None,
        hyper_values: Mapping[str, Any] | None = None,
        init_values: Mapping[str, Any] | None = None,
        hyper_tol: float | None = None,
        max_hyper_steps: int = 100,
        num_shifts: int | None = None,
        average_over: Mapping[str, Sequence[Any]] | None = None,
        num_samples: int = 1000,
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
        check_at_least(1, num_steps=num_steps, max_hyper_steps=max_hyper_steps)
        check_positive(tol=tol, hyper_tol=hyper_tol)
        if not 0.0 <= damping < 1.0:
            raise ValueError(f"damping is the fraction of the old site that is kept, in [0, 1); got {damping!r}.")
        self.average_over = check_average(model, num_shifts, average_over)
        self.num_shifts = num_shifts
        self.num_steps, self.tol, self.damping = num_steps, tol, damping
        self.hyper_tol, self.max_hyper_steps = hyper_tol, max_hyper_steps

    # Running

    def run(self, rng_key: Array, *args: Any, init_state: EngineState | None = None, **kwargs: Any) -> None:
        """Read the model on these arguments, learn its hyperparameters and find the posterior.

        :param rng_key: random number generator key, for the check of the reading, the shifts and the draws.
        :param args: arguments of the model.
        :param EngineState init_state: ``last_state`` of an earlier run, where the search starts.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the model is not of the form, or has too many coefficients for its operator.
        :raises ValueError: if the evidence is not finite, or an argument is given and averaged over.
        """
        self._forget()
        twice = [name for name in self._averaged() if name in kwargs]
        if twice:
            raise ValueError(f"{twice[0]!r} is averaged over, so it cannot be an argument of run as well.")
        names = list(self.average_over)
        learned: list[Member] = []
        members: list[Member] = []
        for values in itertools.product(*self.average_over.values()):
            choice = dict(zip(names, values, strict=True))
            # A shift of zero makes a model of the same structure as all others: they share compiled functions.
            first = {**kwargs, **choice, **({} if self.num_shifts is None else {"shift": self._no_shift(args, kwargs)})}
            member = self._member(rng_key, args, first, choice, init_state)
            learned.append(member)
            if self.num_shifts is None:
                members.append(member)
                continue
            for shift in self._shifts(rng_key, member.reading, first["shift"].size):
                moved = {"shift": shift}
                members.append(self._shifted(member, rng_key, args, first | moved, choice | moved))
        fit = learned[0].fit
        if len(members) > 1:
            fit = combined_fit(learned, members)
        self._last_state = learned[0].fit.last_state
        if not fit.diagnostics.converged:
            warn("EP did not converge. " + " ".join(fit.diagnostics.messages))
        self._run = _Run(tuple(members), tuple(learned), fit, rng_key)

    def _averaged(self) -> list[str]:
        return [*self.average_over, *(() if self.num_shifts is None else ("shift",))]

    def _no_shift(self, args: tuple, kwargs: dict[str, Any]) -> Array:
        """Zeros, one per axis of the first argument of the model that is an array."""
        for value in (*args, *kwargs.values()):
            if np.ndim(value) > 0:
                return jnp.zeros((np.ndim(value),), jnp.int32)
        raise ValueError("num_shifts needs an image or signal: no argument of the model is an array.")

    def _shifts(self, rng_key: Array, reading: Any, num_axes: int) -> Array:
        """Random shifts of all sizes; the first deterministic site with as many axes says how far they go."""
        shapes = [tuple(reading.site_shapes[n]) for n in reading.affine_sites if n not in reading.field]
        sides = next((s for s in shapes if len(s) == num_axes), None)
        if sides is None:
            raise ModelStructureError(
                f"num_shifts: the model has no deterministic site with {num_axes} axes that is linear in the "
                'coefficients. Mark the image with numpyro.deterministic("image", ...).'
            )
        assert self.num_shifts is not None
        key = jax.random.fold_in(rng_key, 2)
        return jax.random.randint(key, (self.num_shifts, num_axes), 0, jnp.asarray(sides), jnp.int32)

    def _member(
        self, rng_key: Array, args: tuple, kwargs: dict, choice: dict[str, Any], init_state: EngineState | None
    ) -> Member:
        reading = read_sparse_linear(self.model, args, kwargs, field=self.field, rng_key=rng_key)
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        values = space.initial(self.init_values)
        programs = compiled_tree_programs(reading, space, self._options(reading, space))
        hyper = space.unpack(values)
        projection = programs.project(reading.data, hyper)
        if init_state is None:
            state = programs.init_state(reading.data, hyper)
        else:
            shapes = jax.eval_shape(programs.init_state, reading.data, reading.initial_hyper())
            check_init_state(init_state, shapes, space.size)
            values, state = init_state.values, init_state.state
        fit = self._fit(reading, space, programs, projection, values, state)
        return Member(choice, reading, space, programs, projection, fit)

    def _shifted(self, member: Member, rng_key: Array, args: tuple, kwargs: dict, arguments: dict) -> Member:
        """The posterior of a shifted model at the hyperparameters that were learned without shift."""
        reading = read_sparse_linear(self.model, args, kwargs, field=member.reading.field, rng_key=rng_key, check=False)
        options = member.programs.options
        space = UnconstrainedSpace(reading.hyper, member.fit.hyper)
        programs = compiled_tree_programs(reading, space, options)
        projection = programs.project(reading.data, member.fit.hyper)
        state = programs.init_state(reading.data, member.fit.hyper)
        fit = self._fit(reading, space, programs, projection, jnp.zeros((0,)), state)
        return Member(arguments, reading, space, programs, projection, fit)

    def _options(self, reading: Any, space: UnconstrainedSpace) -> TreeOptions:
        """Static choices: whether the likelihood is a product over coefficients, whatever the hyperparameters."""
        if reading.is_analysis:
            raise ModelStructureError(
                f"EP takes priors of the coefficients themselves; that of {reading.field[0]!r} is one of coefficients "
                "in a frame. Use StructuredMeanField, or one basis."
            )
        form = compiled_form(reading)(space.unpack(space.initial()), reading.data)
        is_exact = has_diagonal_gram(form.operator, form.noise_variance)
        why = "are not orthogonal"
        if is_exact and space.size:
            is_noise_fixed = not set(reading.noise_hyper()) & set(space.names)
            is_exact = reading.is_design_fixed and (jnp.ndim(form.noise_variance) == 0 or is_noise_fixed)
            why = "depend on hyperparameters, or have several noise levels that do"
        if is_exact:
            sizes = jnp.square(form.operator.rmatvec(form.operator.matvec(jnp.ones((form.num_columns,)))))
            is_exact = bool(jnp.all(sizes > 0.0))
            why = "are zero for some coefficients"
        if not is_exact and reading.num_columns > LARGEST_DENSE:
            raise ModelStructureError(
                f"EP with dense matrices takes up to {LARGEST_DENSE} coefficients, and {list(reading.field)} has "
                f"{reading.num_columns}, behind an operator whose columns {why}. Use StructuredMeanField, which only "
                "multiplies with the operator."
            )
        is_double = jnp.finfo(form.observed.dtype).bits == 64
        # Many parameters are hardly determined by the data: to follow their ridges further changes no answer.
        tolerance = 0.5 if space.size > LARGEST_CURVATURE else (1e-2 if is_double else 1e-1)
        return TreeOptions(
            is_exact=is_exact,
            num_steps=self.num_steps,
            tol=self.tol if self.tol is not None else (1e-8 if is_double else 1e-4),
            damping=self.damping,
            hyper_tol=self.hyper_tol if self.hyper_tol is not None else tolerance,
        )

    def _fit(
        self,
        reading: Any,
        space: UnconstrainedSpace,
        programs: TreePrograms,
        projection: Any,
        values: Array,
        state: Any,
    ) -> Fit:
        return fit_tree(
            reading,
            space,
            programs,
            projection,
            values,
            state,
            max_hyper_steps=self.max_hyper_steps,
            progress_bar=self.progress_bar,
        )

    # Results

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the mixture: ``arguments``, ``fit.log_evidence``, ``fit.hyper`` of each."""
        return self._finished().members

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate]:
        """Value and standard error of each hyperparameter; in a mixture over other arguments than shifts, of each
        combination, with its arguments in front of the name.

        Standard errors are computed for up to 20 hyperparameters.
        """
        run = self._finished()
        out: dict[str, HyperEstimate] = {}
        for member in run.learned:
            prefix = "" if len(run.learned) == 1 else label(member.arguments) + ": "
            out |= {prefix + name: e for name, e in hyper_estimates(member.space, member.fit).items()}
        return out

    def describe(self) -> str:
        """How the model was read, how the posterior is found, and what it is a mixture of."""
        run = self._finished()
        is_exact = run.learned[0].programs.options.is_exact
        lines = [super().describe(), f"posterior: {'exact' if is_exact else 'expectation propagation'}"]
        if len(run.members) > 1:
            over = [f"{name}: {', '.join(map(str, values))}" for name, values in self.average_over.items()]
            over += [] if self.num_shifts is None else [f"{self.num_shifts} shifts"]
            lines.append(f"mixture of {len(run.members)} members ({'; '.join(over)})")
        return "\n".join(lines)

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        """Print marginals, hyperparameters, the log evidence and how the run ended.

        :param float prob: the probability mass of the central interval.
        :param bool exclude_deterministic: whether to leave out deterministic sites (mixtures have no others).
        """
        run = self._finished()
        names = [n for n in self.posterior if not exclude_deterministic or n in run.reading.field] or [*self.posterior]
        sites = {name: self.posterior[name] for name in names}
        print(format_summary(sites, self.hyper, self.log_evidence, self.diagnostics, prob))

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Marginals by name: of coefficient sites (not in mixtures) and deterministic sites linear in them.

        Means are exact given the hyperparameters and the approximation. So are variances of coefficients, and of other
        sites up to 1024 coefficients; elsewhere they are estimated from ``num_samples`` draws, with a relative
        standard deviation of about ``sqrt(2 / num_samples)``. Quantiles are those of the draws: the marginals are no
        Gaussians.
        """
        run = self._finished()
        reading, is_mixture = run.reading, len(run.members) > 1
        names = [
            name
            for name in reading.affine_sites
            if not (is_mixture and name in reading.field)
            and all(m.reading.site_shapes.get(name) == reading.site_shapes[name] for m in run.members)
        ]
        reasons = dict.fromkeys(reading.site_shapes, "it is not affine in the coefficients; see get_samples()")
        if is_mixture:
            reasons |= dict.fromkeys(reading.field, "coefficients are other quantities in each member of the mixture")
        reasons |= dict.fromkeys(reading.hyper, "it is a hyperparameter; its estimate is in engine.hyper")
        reasons |= dict.fromkeys(reading.factor_names, "it is observed")
        sites = {
            name: MixtureSite(name, tuple(reading.site_shapes[name]), run.members, run.rng_key, self.num_samples)
            for name in names
        }
        return PosteriorSites(sites, reasons)

    def _draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Equal shares of the draws from all members, in random order."""
        run = self._finished()
        parts = []
        for key, share, member in shares(rng_key, run.members, self.num_samples):
            sites, log_density = member.programs.draws(*member.inputs, key, num_samples=share)
            if len(run.members) > 1:
                sites = {n: v for n, v in sites.items() if n in self.posterior}
            parts.append((with_hyper(sites, member.fit.hyper, member.reading.factor_names, share), log_density))
        shapes = [{n: v.shape[1:] for n, v in sites.items()} for sites, _ in parts]
        names = [n for n, shape in shapes[0].items() if all(s.get(n) == shape for s in shapes)]
        kept = order(rng_key, len(parts), self.num_samples)
        sites = {n: jnp.concatenate([s[n] for s, _ in parts])[kept] for n in names}
        return sites, jnp.concatenate([log_density for _, log_density in parts])[kept]

    def state_probabilities(self) -> Array:
        """Probability that each coefficient is in the high state, of shape ``(n,)``; zero where there are no states.

        :raises RuntimeError: in a mixture, where coefficients are different quantities.
        """
        member = self._only("State probabilities belong")
        return member.programs.state_probabilities(*member.inputs)

    def _only(self, what: str) -> Member:
        members = self._finished().members
        if len(members) > 1:
            raise RuntimeError(f"{what} to one choice of arguments; this run is a mixture of {len(members)}.")
        return members[0]

    def _typical_noise(self) -> Array:
        run = self._finished()
        return jnp.mean(run.reading.noise_variance(run.fit.hyper))

    # Persistence

    def _content(self) -> dict[str, Any]:
        run = self._finished()
        shifted = [] if self.num_shifts is None else [member_to_content(member) for member in run.members]
        return {"learned": [member_to_content(member) for member in run.learned], "shifted": shifted}

    def _restore(self, content: dict[str, Any], rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> _Run:
        def read(part: dict[str, Any], field: Any) -> Any:
            arguments = {**kwargs, **part["arguments"]}
            return read_sparse_linear(self.model, args, arguments, field=field, rng_key=rng_key, check=False)

        learned, members = [], []
        for part in content["learned"]:
            reading = read(part, self.field)
            space = UnconstrainedSpace(reading.hyper, self.hyper_values)
            learned.append(member_from_content(part, reading, space, self._options(reading, space)))
        for number, part in enumerate(content["shifted"]):
            # The shifted ones of the first choice of arguments come first.
            origin = learned[number * len(learned) // len(content["shifted"])]
            reading = read(part, origin.reading.field)
            space = UnconstrainedSpace(reading.hyper, origin.fit.hyper)
            members.append(member_from_content(part, reading, space, origin.programs.options))
        members = members or learned
        fit = combined_fit(learned, members) if len(members) > 1 else learned[0].fit
        return _Run(tuple(members), tuple(learned), fit, rng_key)
