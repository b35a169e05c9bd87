"""The algorithms of a variational Gaussian as values: the options, with the functions that take them as methods."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from jax import Array

from ....compilation.pytree import PyTree
from ....potentials.vector_rows import has_vector_factors
from ....structure.latent_gaussian import LatentGaussian
from ...front.options import check_one_of
from ..algorithms.algorithm import Algorithm
from ..algorithms.fit_info import FitInfo
from ..algorithms.posterior import GaussianPosterior
from . import coordinate_ascent, general_optimiser, natural_gradient
from .bound_choice import SiteBound, with_bound
from .general_optimiser import Parameters

Covariance = Literal["full", "diagonal", "shared"]


@dataclass(frozen=True)
class VariationalAlgorithm(Algorithm):
    """Base of the algorithms that maximise a lower bound on the log evidence, by their steps.

    :param tuple sites: name and treatment of each observed site, in the order of the form's factors; without any,
        expectations are exact. :class:`~numpyro_ext.infer.VariationalGaussian` chooses them for a model.
    :param tuple request: words in which the treatments were asked for, by which files know the states.
    """

    sites: tuple[tuple[str, SiteBound], ...] = ()
    _: KW_ONLY
    request: tuple[str, int] = field(default=(repr("exact"), 20), repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"expectation: {name} ({site.description})" for name, site in self.sites)

    @property
    def is_lower_bound(self) -> bool:
        return all(site.is_lower_bound for _, site in self.sites)

    @property
    def is_exact_for_gaussian(self) -> bool:
        return True

    def treated(self, form: LatentGaussian) -> LatentGaussian:
        """The form with the treatments of its sites in the place of the expectations of their factors."""
        if not self.sites:
            return form
        pairs = zip(form.potentials, self.sites, strict=True)
        return form._replace(potentials=tuple(with_bound(potential, site.bound) for potential, (_, site) in pairs))

    def _key_of_method(self, method: str, covariance: Covariance = "full") -> Hashable:
        return "VariationalGaussian", method, *self.request, covariance

    def has_long_sweeps(self, form: LatentGaussian) -> bool:
        return has_vector_factors(form.potentials)

    def init(self, form: LatentGaussian) -> Any:
        return natural_gradient.init(self.treated(form))

    def log_evidence(self, form: LatentGaussian, state: PyTree) -> Array:
        return natural_gradient.log_evidence(self.treated(form), state)

    solved_evidence = log_evidence

    def posterior(self, form: LatentGaussian, state: PyTree) -> GaussianPosterior:
        return natural_gradient.posterior(self.treated(form), state)

    def update(self, form: LatentGaussian, precision: Array, shift: Array) -> tuple[Array, Array]:
        return natural_gradient.update(self.treated(form), precision, shift)


@dataclass(frozen=True)
class NaturalGradient(VariationalAlgorithm):
    """Natural gradients: all sites at once (Khan and Lin 2017), ``method="natural-gradient"``.

    :param str covariance: ``"full"``, ``"diagonal"`` or ``"shared"``; see
        :class:`~numpyro_ext.infer.VariationalGaussian`.
    :raises ValueError: if it is another word.

    >>> NaturalGradient(covariance="diagonal")
    NaturalGradient(sites=(), covariance='diagonal')
    """

    _: KW_ONLY
    covariance: Covariance = "full"

    def __post_init__(self) -> None:
        check_one_of(Covariance, covariance=self.covariance)

    @property
    def is_exact_for_gaussian(self) -> bool:
        return self.covariance != "diagonal"

    @property
    def has_cavities(self) -> bool:
        return self.covariance == "full" and all(site.bound is None for _, site in self.sites)

    @property
    def _family(self) -> dict[str, Any]:
        return {"space": "shared"} if self.covariance == "shared" else {"covariance": self.covariance}

    def _former_key(self) -> Hashable:
        return self._key_of_method("natural-gradient", self.covariance)

    def solve(
        self, form: LatentGaussian, state: natural_gradient.State, *, num_steps: int, tol: float
    ) -> tuple[natural_gradient.State, FitInfo]:
        return natural_gradient.solve(self.treated(form), state, num_steps=num_steps, tol=tol, **self._family)

    def log_evidence(self, form: LatentGaussian, state: natural_gradient.State) -> Array:
        return natural_gradient.log_evidence(self.treated(form), state, **self._family)

    solved_evidence = log_evidence

    def posterior(self, form: LatentGaussian, state: natural_gradient.State) -> GaussianPosterior:
        return natural_gradient.posterior(self.treated(form), state, **self._family)

    def update(self, form: LatentGaussian, precision: Array, shift: Array) -> tuple[Array, Array]:
        return natural_gradient.update(self.treated(form), precision, shift, **self._family)


@dataclass(frozen=True)
class CoordinateAscent(VariationalAlgorithm):
    """One variance at a time, then all means (Khan 2012, algorithm 3), ``method="coordinate"``."""

    def _former_key(self) -> Hashable:
        return self._key_of_method("coordinate")

    def solve(
        self, form: LatentGaussian, state: natural_gradient.State, *, num_steps: int, tol: float
    ) -> tuple[natural_gradient.State, FitInfo]:
        return coordinate_ascent.solve(self.treated(form), state, num_steps=num_steps, tol=tol)


@dataclass(frozen=True)
class GeneralOptimiser(VariationalAlgorithm):
    """L-BFGS, ``method="cholesky"`` or ``"opper-archambeau"``.

    :param str parameters: of the Gaussian: these two words; see :mod:`.general_optimiser`.
    """

    _: KW_ONLY
    parameters: Parameters = "cholesky"

    def _former_key(self) -> Hashable:
        return self._key_of_method(self.parameters)

    def init(self, form: LatentGaussian) -> general_optimiser.State:
        return general_optimiser.init(self.treated(form), parameters=self.parameters)

    def solve(
        self, form: LatentGaussian, state: general_optimiser.State, *, num_steps: int, tol: float
    ) -> tuple[general_optimiser.State, FitInfo]:
        form = self.treated(form)
        return general_optimiser.solve(form, state, parameters=self.parameters, num_steps=num_steps, tol=tol)
