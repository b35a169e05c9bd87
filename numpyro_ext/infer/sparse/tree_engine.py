"""Expectation propagation on sparse linear models, and mixtures of it over arguments of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.cholesky import LARGEST_DENSE
from ...linalg.solvers.posterior_precision import has_diagonal_gram
from ...structure import ModelStructureError, SparseLinearReading, read_sparse_linear
from ..front.draws import with_hyper
from ..front.engine import default_tolerance
from ..front.results import HyperEstimate
from ..front.run import FinishedRun, hyper_estimates
from ..front.sites import PosteriorSites, missing_sites
from ..front.state import EngineState, Fit, check_init_state
from ..hyper.space import UnconstrainedSpace
from .mean_field_programs import compiled_form
from .mixtures import Member, MixtureSite, combined_fit, label, order, shares
from .saved_members import member_from_content, member_to_content
from .tree_fitting import LARGEST_CURVATURE, fit_tree
from .tree_programs import TreeOptions, TreePrograms, compiled_tree_programs

__all__ = ["TreeFitter", "TreeRun"]


class TreeRun(FinishedRun):
    """A run on sparse coefficients: one posterior, or a mixture of several with equal weights.

    :param members: the members of the mixture.
    :param learned: those that learned hyperparameters: one for each combination of arguments other than the shift.
    :param averages: what it is a mixture over, in words; all else as in :class:`FinishedRun`.
    """

    reading: SparseLinearReading

    def __init__(
        self,
        members: Sequence[Member],
        learned: Sequence[Member],
        averages: Sequence[str],
        rng_key: Array,
        num_samples: int,
    ) -> None:
        fit = combined_fit(learned, members) if len(members) > 1 else learned[0].fit
        super().__init__(learned[0].reading, learned[0].space, fit, rng_key, num_samples)
        self._members, self.learned, self.averages = tuple(members), tuple(learned), tuple(averages)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the mixture: ``arguments``, ``fit.log_evidence``, ``fit.hyper`` of each."""
        return self._members

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate]:
        """Value and standard error of each hyperparameter; in a mixture over other arguments than shifts, of each
        combination, with its arguments in front of the name.

        Standard errors are computed for up to 20 hyperparameters.
        """
        out: dict[str, HyperEstimate] = {}
        for member in self.learned:
            prefix = "" if len(self.learned) == 1 else label(member.arguments) + ": "
            out |= {prefix + name: e for name, e in hyper_estimates(member.space, member.fit).items()}
        return out

    def describe(self) -> str:
        """How the model was read, how the posterior is found, and what it is a mixture of."""
        is_exact = self.learned[0].programs.options.is_exact
        lines = [super().describe(), f"posterior: {'exact' if is_exact else 'expectation propagation'}"]
        if len(self.members) > 1:
            lines.append(f"mixture of {len(self.members)} members ({'; '.join(self.averages)})")
        return "\n".join(lines)

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Marginals by name: of coefficient sites (not in mixtures) and deterministic sites linear in them.

        Means are exact given the hyperparameters and the approximation. So are variances of coefficients, and of other
        sites up to 2048 coefficients; elsewhere they are estimated from ``num_samples`` draws, with a relative
        standard deviation of about ``sqrt(2 / num_samples)``. Quantiles are those of the draws: the marginals are no
        Gaussians.
        """
        reading, is_mixture = self.reading, len(self.members) > 1
        names = [
            name
            for name in reading.affine_sites
            if not (is_mixture and name in reading.field)
            and all(m.reading.site_shapes.get(name) == reading.site_shapes[name] for m in self.members)
        ]
        reasons = missing_sites(reading)
        if is_mixture:
            reasons |= dict.fromkeys(reading.field, "coefficients are other quantities in each member of the mixture")
        sites = {
            name: MixtureSite(name, tuple(reading.site_shapes[name]), self.members, self.rng_key, self.num_samples)
            for name in names
        }
        return PosteriorSites(sites, reasons)

    def draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Equal shares of the draws from all members, in random order."""
        parts = []
        for key, share, member in shares(rng_key, self.members, self.num_samples):
            sites, log_density = member.programs.draws(*member.inputs, key, num_samples=share)
            if len(self.members) > 1:
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
        if len(self.members) > 1:
            raise RuntimeError(
                f"State probabilities belong to one choice of arguments; this run is a mixture of {len(self.members)}."
            )
        (member,) = self.members
        return member.programs.state_probabilities(*member.inputs)

    def typical_noise(self) -> Array:
        """The average variance of the noise."""
        return jnp.mean(self.reading.noise_variance(self.fit.hyper))

    def content(self) -> dict[str, Any]:
        """The outcome as plain containers."""
        is_learned = {id(member) for member in self.learned}
        shifted = [member_to_content(member) for member in self.members if id(member) not in is_learned]
        return {"tree": {"learned": [member_to_content(member) for member in self.learned], "shifted": shifted}}


@dataclass(frozen=True)
class TreeFitter:
    r"""Expectation propagation in which the prior of all coefficients is one factor: what :class:`EP` runs on them.

    Takes sparse linear models (:class:`~numpyro_ext.distributions.HiddenMarkovTree`, Laplace, Student-t or Normal
    coefficients behind a linear map, Gaussian noise). Where the map has orthogonal columns in the metric of the noise,
    as orthonormal transforms have, one sum-product gives the exact posterior and the exact log evidence; images of
    256 x 256 pixels take seconds. Other maps of at most 2048 coefficients are iterated with damping, and the moments
    are those of the Gaussian at the fixed point. Hyperparameters are set to the maximum of log evidence plus log prior
    by L-BFGS, in units of about their standard errors.

    With ``num_shifts`` or ``average_over`` the posterior is the mixture, with equal weights, of the posteriors under
    all combinations of these arguments of the model (averages over shifts: Coifman and Donoho 1995). Hyperparameters
    are learned once for each combination without shift. ``log_evidence`` is the log of the average evidence; that of
    each member is in ``members``. Of the sites only deterministic ones are reported, as the coefficients of different
    bases are different quantities. Bands of the mixture are wide, because they hold what the transforms differ by:
    those of 80 % held 89 to 90 % of the pixels of three photographs.

    All options are those of :class:`EP`, but for these:

    :param float damping: least fraction of the old sites that is kept in a step.
    :param float hyper_tol: the search ends when no hyperparameter has a derivative above this, per about one standard
        error; by default ``1e-2`` in float64 and ``1e-1`` in float32, and 0.5 for more than 20 of them.
    :param int num_samples: draws made for samples, for quantiles, and for variances of sites other than coefficients
        where there are more than 2048 of these.
    """

    model: Callable[..., Any]
    num_steps: int
    tol: float | None
    damping: float
    field: Sequence[str] | None
    hyper_values: Mapping[str, Any]
    init_values: Mapping[str, Any]
    hyper_tol: float | None
    max_hyper_steps: int
    num_shifts: int | None
    average_over: Mapping[str, Sequence[Any]]
    num_samples: int
    progress_bar: bool

    def run(
        self,
        rng_key: Array,
        args: tuple,
        kwargs: dict[str, Any],
        init_state: EngineState | None = None,
        *,
        reading: Any = None,
    ) -> TreeRun:
        """Learn the hyperparameters of a model on these arguments and find the posterior.

        :param rng_key: random number generator key, for the check of the reading, the shifts and the draws.
        :param EngineState init_state: ``last_state`` of an earlier run, where the search starts.
        :param reading: of the model on these arguments, where nothing is averaged over.
        :raises ModelStructureError: if the model is not of the form, or has too many coefficients for its operator.
        :raises ValueError: if the evidence is not finite, or an argument is given and averaged over.
        """
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
            if reading is None or self._averaged():
                reading = read_sparse_linear(
                    self.model,
                    args,
                    first,
                    field=self.field,
                    init_values={**self.init_values, **self.hyper_values},
                    rng_key=rng_key,
                )
            member = self._member(rng_key, reading, choice, init_state)
            learned.append(member)
            if self.num_shifts is None:
                members.append(member)
                continue
            for shift in self._shifts(rng_key, member.reading, first["shift"].size):
                moved = {"shift": shift}
                members.append(self._shifted(member, rng_key, args, first | moved, choice | moved))
        return self._finished(members, learned, rng_key)

    def _finished(self, members: Sequence[Member], learned: Sequence[Member], rng_key: Array) -> TreeRun:
        averages = [f"{name}: {', '.join(map(str, values))}" for name, values in self.average_over.items()]
        averages += [] if self.num_shifts is None else [f"{self.num_shifts} shifts"]
        return TreeRun(members, learned, averages, rng_key, self.num_samples)

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

    def _member(self, rng_key: Array, reading: Any, choice: dict[str, Any], init_state: EngineState | None) -> Member:
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
        fit = self._fit(reading, space, programs, projection, values, state, rng_key)
        return Member(choice, reading, space, programs, projection, fit)

    def _shifted(self, member: Member, rng_key: Array, args: tuple, kwargs: dict, arguments: dict) -> Member:
        """The posterior of a shifted model at the hyperparameters that were learned without shift."""
        field, values = member.reading.field, member.fit.hyper
        reading = read_sparse_linear(
            self.model, args, kwargs, field=field, init_values=values, rng_key=rng_key, check=False
        )
        options = member.programs.options
        space = UnconstrainedSpace(reading.hyper, member.fit.hyper)
        programs = compiled_tree_programs(reading, space, options)
        projection = programs.project(reading.data, member.fit.hyper)
        state = programs.init_state(reading.data, member.fit.hyper)
        fit = self._fit(reading, space, programs, projection, jnp.zeros((0,)), state, rng_key)
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
        # Many parameters are hardly determined by the data: to follow their ridges further changes no answer.
        is_large = space.size > LARGEST_CURVATURE
        return TreeOptions(
            is_exact=is_exact,
            num_steps=self.num_steps,
            tol=default_tolerance(self.tol, 1e-8, 1e-4),
            damping=self.damping,
            hyper_tol=default_tolerance(self.hyper_tol, *((0.5, 0.5) if is_large else (1e-2, 1e-1))),
        )

    def _fit(
        self,
        reading: Any,
        space: UnconstrainedSpace,
        programs: TreePrograms,
        projection: Any,
        values: Array,
        state: Any,
        rng_key: Array,
    ) -> Fit:
        return fit_tree(
            reading,
            space,
            programs,
            projection,
            values,
            state,
            rng_key,
            max_hyper_steps=self.max_hyper_steps,
            progress_bar=self.progress_bar,
        )

    def restore(self, content: dict[str, Any], rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> TreeRun:
        """The run from the ``"tree"`` of :meth:`TreeRun.content`."""

        values = {**self.init_values, **self.hyper_values}

        def read(part: dict[str, Any], field: Any) -> Any:
            arguments = {**kwargs, **part["arguments"]}
            return read_sparse_linear(
                self.model, args, arguments, field=field, init_values=values, rng_key=rng_key, check=False
            )

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
        return self._finished(members or learned, learned, rng_key)
