"""Base of all readings of a model: the factors behind its field, and the form that it makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.quick_jit import quick_jit
from ...display import Table
from ...linalg.gaussian.prior import CovariancePrior, LowRankPrior, PrecisionPrior, extreme_eigenvalues
from ..errors import Conflict, ModelStructureError, names_of
from ..program.degrees import Degree, Degrees, classify
from ..program.equations import Atom, Constant
from .priors import colour
from .self_comparisons import SelfComparisons, self_differences
from .traced_model import TracedModel
from .validation import can_be_scored


class Treatment(NamedTuple):
    """Treatment of the factors of a site."""

    label: str
    rows_per_observation: int
    has_family: bool

    @property
    def is_family_of_one(self) -> bool:
        """True if they are of a known family, in one predictor."""
        return self.has_family and self.rows_per_observation == 1


class ModelReading(TracedModel, ABC):
    """A model as a program of innovations and hyperparameters, with a given split into field and hyperparameters.

    The reading of a form is a subclass: it looks at what depends on the field, raises :class:`Conflict` with the sites
    of which one must leave it, and defines :meth:`form`; where unknowns are no Gaussian innovations with priors of
    :mod:`~numpyro_ext.structure.model.priors`, also :meth:`draw`. Names with an underscore are for subclasses.

    All methods that take ``hyper`` (constrained values by site name) are pure in ``hyper`` and ``data`` and can be
    passed through ``jit``, ``vmap`` and ``grad``.

    :ivar field: latent sites of the field, in the order of the model.
    :ivar hyper: all other latent and ``param`` sites.
    :ivar predictive: latent sites that nothing depends on (missing observations): left out, as they integrate to one.
    :ivar site_shapes: shapes of all latent, ``param`` and deterministic sites.
    :ivar num_columns: number of unknowns, the elements of the field.
    :ivar changing: the arguments without whose values it was read, by name; their arrays come first in :attr:`data`.
    :ivar data: the arrays that the model closed over, explicit so that forms of equal structure can be batched; behind
        them what a form has looked up in them (indices), where that is not a part of the structure.
    """

    def _classify(self, what: str, *, with_sources: bool = True) -> Degrees:
        """Degrees of the program, after checking that the field is ``what`` given everything else.

        :raises Conflict: naming the sites of which one must leave the field.
        """
        questions = self._questions if with_sources else None
        degrees = classify(self._program, {n: number for n, (number, _) in self._field.items()}, questions)
        for name in self.field:
            if degrees.of(self._trace.locations[name]) == Degree.NONLINEAR:
                self._refuse(degrees, name, self._trace.locations[name], "location", "is not affine in", what)
            for leaf in jax.tree.leaves(self._trace.priors[name]):
                if degrees.of(leaf) != Degree.CONSTANT:
                    self._refuse(degrees, name, leaf, "scale", "depends on", what)
        return degrees

    def _refuse(self, degrees: Degrees, name: str, atom: Atom, part: str, verb: str, what: str) -> None:
        sites = degrees.sites_of(atom)
        raise Conflict(
            f"the {part} of site '{name}' {verb} {names_of(sites, name)}, so they are not {what}. "
            "Choose the field with field=[...], or use NUTS.",
            sites | {name},
            name,
        )

    def _sort_factors(self, degrees: Degrees) -> None:
        """Find the factors that depend on the field, observations first; the others are kept as constants or priors."""
        self._constant_factors: list[str] = []
        self._prior_factors: list[str] = []
        found = []
        for name, traced in self._trace.factors.items():
            if name in self.predictive:
                continue
            if degrees.of(traced.log_prob) != Degree.CONSTANT:
                found.append(name)
            elif name in self.hyper:
                self._prior_factors.append(name)
            else:
                self._constant_factors.append(name)
        if all(n in self.field for n in found):
            raise ModelStructureError(
                f"no observed site depends on the field {list(self.field)}: there is nothing to infer. "
                "Pass the data (obs=...), or check that the predictor uses these sites."
            )
        # Behind observations stand priors that are factors: of hyperparameters that see the field, and of the field.
        self.observed_names = tuple(n for n in found if self.sites[n].kind == "observed")
        priors = sorted((n for n in found if n not in self.observed_names), key=lambda name: name in self.field)
        self.factor_names = (*self.observed_names, *priors)
        self.factor_shapes = tuple(self._program.shape(self._trace.factors[n].log_prob) for n in self.factor_names)

    def known_mask(self, name: str) -> np.ndarray:
        """The mask of an observed site, true where it is in use, in the shape of its observations.

        :param str name: one of ``observed_names``.
        :raises ModelStructureError: if the mask depends on anything but data.
        """
        atom = self._trace.factors[name].mask
        if not self._is_known(atom):
            raise ModelStructureError(
                f"the mask of observed site '{name}' depends on latent or param sites: masks must be known.", site=name
            )
        return self._known_value(atom)

    def equal_observations(self) -> dict[str, tuple[str, ...]]:
        """Observed sites of location and scale (Normal, Laplace, Student-t) whose values are all equal, as those are
        that write a prior as observations of zero; and the hyperparameters on which their scale depends, but no other
        observation."""
        found = {}
        for name in self.observed_names:
            site = self._trace.factors[name]
            if site.scale is not None or not {"loc", "scale"} <= set(site.parameters):
                continue
            others = [self._trace.factors[n].log_prob for n in self.factor_names if n != name]
            behind = set(self._hyper_behind([site.parameters["scale"]])) - set(self._hyper_behind(others))
            if not behind or not self._is_known(site.value):  # missing values are imputed by the field
                continue
            values = np.broadcast_to(self._known_value(site.value), self._program.shape(site.log_prob))
            values = values.reshape(-1)[self.known_mask(name).reshape(-1)]
            if values.size and np.all(values == values[0]):
                found[name] = tuple(n for n in self.hyper if n in behind)
        return found

    def has_value(self, name: str) -> np.ndarray:
        """Mask of the observations of a site that can be scored, neither NaN nor a code such as -1.

        :param str name: one of ``observed_names``.
        :return: boolean, in the shape of the observations.
        """
        return can_be_scored(self.sites[name], self.factor_shapes[self.factor_names.index(name)])

    def _observations_in_use(self, name: str, *, is_held_out: bool = False) -> np.ndarray:
        """Flat indices of the observations of a site whose mask is true; or of the others, the held-out ones.

        :raises ModelStructureError: if the mask is not known, or leaves nothing to learn from.
        """
        mask = self.known_mask(name)
        found = np.flatnonzero(~mask if is_held_out else mask)
        if found.size == 0 and not is_held_out:
            raise ModelStructureError(
                f"every observation of site '{name}' is masked: there is nothing to learn from. Masks are true where "
                "data is in use.",
                site=name,
            )
        return found

    def self_comparisons(self) -> list[SelfComparisons]:
        """Observations in use that compare an unknown with itself and depend on nothing else; those of a continuous
        value may say something of its noise, and are not counted."""
        questions, found = self._asking(self.data), []
        for name in self.observed_names:
            traced, shape = self._trace.factors[name], self._program.shape(self._trace.factors[name].log_prob)
            counts = traced.parameters.get("total_count", Constant(1))
            is_discrete = getattr(self.sites[name].support, "is_discrete", False)
            if not is_discrete or not all(map(self._is_known, (traced.mask, counts))):
                continue
            is_same = self_differences(questions, traced.log_prob, shape)
            if is_same is None:
                continue
            is_same &= ~self._sees_unknowns(traced.log_prob)
            in_use = np.broadcast_to(self._known_value(traced.mask) & (self._known_value(counts) > 0), shape)
            indices = np.argwhere(is_same & in_use)
            if len(indices):
                found.append(SelfComparisons(name, len(indices), int(in_use.sum()), tuple(indices[0].tolist())))
        return found

    def _sees_unknowns(self, log_prob: Atom) -> np.ndarray:
        """Observations whose log factor changes with the unknowns at all, in the shape of the observations.

        One derivative in an irregular direction, at a point of no special values, decides.
        """
        program = self._program
        behind = program.ancestors([log_prob]) & set(program.inputs)
        moving = sorted(n for n in behind if jnp.issubdtype(program.avals[n].dtype, jnp.inexact))
        env = self._env_at(self.initial_hyper(), 0.3 * jnp.cos(jnp.arange(self.num_columns) ** 2.0), None)
        point = [jnp.asarray(env[n]) for n in moving]
        direction = [jnp.cos(1.0 + jnp.arange(x.size) ** 2.0).reshape(x.shape).astype(x.dtype) for x in point]

        def slope(env: Mapping[int, object], point: list[Array], direction: list[Array]) -> Array:
            def value(point: list[Array]) -> Array:
                return jnp.asarray(program.evaluate([log_prob], {**env, **dict(zip(moving, point, strict=True))})[0])

            return jax.jvp(value, (point,), (direction,))[1]

        # As a difference of equal products may be rounded where they are fused.
        slopes = np.abs(np.asarray(quick_jit(slope, is_small=True)(env, point, direction)))
        return np.asarray(~(slopes <= np.sqrt(np.finfo(slopes.dtype).eps) * np.nanmax(slopes, initial=0.0)))

    def _affine_sites(self, degrees: Degrees) -> tuple[str, ...]:
        values = {n: a for n, a in self._trace.values.items() if n not in self.predictive}
        return tuple(n for n, a in values.items() if n in self.field or degrees.of(a) == Degree.AFFINE)

    def _sum_factors(self, names: Sequence[str], env: Mapping[int, object]) -> Array:
        total = jnp.zeros((), jnp.result_type(float))
        for name in names:
            traced = self._trace.factors[name]
            log_prob, mask = self._program.evaluate([traced.log_prob, traced.mask], env)
            if traced.scale is not None:
                log_prob = log_prob * self._program.evaluate([traced.scale], env)[0]
            total = total + jnp.sum(jnp.where(mask, log_prob, 0.0))
        return total

    def _log_constant(self, env: Mapping[int, object]) -> Array:
        total = self._sum_factors(self._constant_factors, env)
        for name, traced in self._trace.factors.items():
            if name not in self.predictive:
                total = total + self._program.evaluate([traced.constant], env)[0]
        return total

    def log_prior(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> Array:
        """Log prior density of the hyperparameter sample sites, in the constrained space (no Jacobian)."""
        return self._sum_factors(self._prior_factors, self._env(hyper, data))

    def log_constant(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> Array:
        """Terms of the log density that depend on no unknown and are no priors of hyperparameters."""
        return self._log_constant(self._env(hyper, data))

    def check_conditioning(self, tolerance: float) -> None:
        """Refuse a prior so close to singular that rounding alone makes two ways to compute its density differ.

        :param float tolerance: relative difference of two log densities that is no rounding.
        :raises ModelStructureError: naming the site.
        """
        env, eps = self._env(self.initial_hyper(), None), float(jnp.finfo(jnp.result_type(float)).eps)
        for name in self.field:
            prior = self._trace.priors[name]
            if not isinstance(prior, CovariancePrior | LowRankPrior | PrecisionPrior):
                continue
            smallest, largest = extreme_eigenvalues(self._evaluated(prior, env))
            ratio = float(np.max(largest / np.maximum(smallest, eps * largest)))
            if eps * ratio > 0.1 * tolerance:
                remedy = "" if eps < 1e-10 else " Or use float64 (numpyro.enable_x64())."
                raise ModelStructureError(
                    f"the covariance of site '{name}' is nearly singular{self._at_start()}: its largest eigenvalue is "
                    f"{ratio:.1g} times the smallest, too much for the digits of {jnp.result_type(float)}. Add a "
                    "jitter to its diagonal (1e-6 of its largest entry, in float32 1e-4), or leave out inputs and "
                    f"columns that are nearly the same.{remedy}",
                    site=name,
                )

    @property
    def num_closed_forms(self) -> int:
        """Number of families of factors with closed forms."""
        return 0

    @property
    def treatments(self) -> dict[str, Treatment]:
        """Treatment of each factor outside the field, by the name of its site, where forms differ in that."""
        return {}

    @property
    def unknown_pairs(self) -> frozenset[str]:
        """Observed sites whose factors are of two predictors and no known family: slow, often of several modes."""
        return frozenset()

    def _shown(self) -> list[str | Table]:
        # A structure has no model and no data to describe.
        return [type(self).__name__, *(self.describe().split("\n") if self.model is not None else ["(a structure)"])]

    @abstractmethod
    def form(self, hyper: Mapping[str, object], data: Sequence[object] | None = None) -> Any:
        """The form at given hyperparameters: arrays, and a ``log_density`` of the unknowns.

        :param hyper: constrained values of all sites in :attr:`hyper`.
        :param data: arrays to use instead of :attr:`data`; what was read of the structure stays.
        """

    def log_joint(self, hyper: Mapping[str, object], e: Array, data: Sequence[object]) -> Array:
        """Log density of the unknowns ``e``, hyperparameters and data, from the form."""
        return self.form(hyper, data).log_density(e) + self.log_prior(hyper, data)

    def draw(self, hyper: Mapping[str, object], white: Array, data: Sequence[object]) -> Array:
        """Unknowns of a plausible size, made of standard normal numbers of shape ``(num_columns,)``."""
        priors = self._evaluated({n: self._trace.priors[n] for n in self.field}, self._env(hyper, data))
        return jnp.concatenate([colour(priors[n], white[columns]) for n, columns in self._columns.items()])

    def linearity_error(self, hyper: Mapping[str, object], data: Sequence[object]) -> Array:
        """Distance of the operators of the form from their adjoints, where it has operators."""
        return jnp.zeros(())

    def reference_rounding(self, hyper: Mapping[str, object], e: Array, data: Sequence[object]) -> Array:
        """Bound on the error of log densities of binary data that are computed from probabilities; infinite where they
        are so small that NumPyro puts another in their place."""
        env, total = self._env_at(hyper, e, data), jnp.zeros(())
        for name, traced in self._trace.factors.items():
            if name in self.predictive or traced.family is None or traced.family.is_joint:
                continue
            if "probs" in traced.parameters:
                atoms = [traced.parameters["probs"], traced.parameters.get("total_count", Constant(1.0)), traced.mask]
                probability, count, mask = self._program.evaluate(atoms, env)
                limits = jnp.finfo(probability.dtype)
                left = jnp.where(mask, 1.0 - probability, 1.0)
                bound = jnp.where(mask & (probability < limits.tiny), jnp.inf, limits.eps * count / left)
                total = total + jnp.sum(bound)
        return total

    def explain_linearity_error(self, error: float) -> None:
        """Refuse operators that are too far from their adjoints.

        :raises ModelStructureError: always.
        """
        raise ModelStructureError(f"the operators of {list(self.field)} differ from their adjoints by {error:.2g}.")

    def explain_nan(self) -> None:
        """Say why the log density is not a number. Readings look for what they know before.

        :raises ModelStructureError: always.
        """
        self.check_conditioning(tolerance=0.1)
        self._check_weights()
        raise ModelStructureError(
            f"the log density of the model is NaN{self._at_start()}: give values at which it is not through "
            "init_values or hyper_values, or check the model with numpyro.validation_enabled(). What was read:\n"
            + self.describe()
        )

    def _check_weights(self) -> None:
        """Refuse weights of observations that are not finite.

        :raises ModelStructureError: naming the site and the first of them.
        """
        env = self._env(self.initial_hyper(), None)
        for name in self.observed_names:
            atom = self._trace.factors[name].scale
            weight = np.asarray(1.0 if atom is None else self._program.evaluate([atom], env)[0])
            bad = ~np.isfinite(weight)
            if bad.any():
                where = tuple(np.argwhere(bad)[0].tolist())
                raise ModelStructureError(
                    f"the weights of site '{name}' (handlers.scale) are not finite in {int(bad.sum())} places; the "
                    f"first is {weight[where]} at index {where}. Leave these observations out, or give them a mask and "
                    "a weight of one.",
                    site=name,
                )

    def describe(self) -> str:
        """The split and what was recognised, one line each."""
        return "\n".join(self._describe_sites())
