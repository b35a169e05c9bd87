"""Runs by quadrature whose members are taken a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.store import shared
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.like_another import PartsDiffer
from ...front.answers.draws import with_hyper
from ...front.answers.sites import PosteriorSites, missing_sites
from ...front.results import Diagnostics
from ...front.state import Fit
from ...hyper.space import UnconstrainedSpace
from ..algorithms.nodes.shared_columns import SharedColumns
from .quadrature_parts import Members, Scores
from .quadrature_run import NodeSite, QuadratureRun, node_quantiles
from .run import GaussianRun

_OF_ALL = ("reading", "algorithm", "programs", "costs")


class MembersRun(QuadratureRun):
    """Posterior of the members of a large model, of which parts are looked at in turn.

    Moments, quantiles and draws are those of the parts. What else may be asked of a run needs the model to be read on
    all members at once, which is done when it is asked for.

    :param Members members: in parts.
    :param UnconstrainedSpace space: of the hyperparameters.
    :param Fit fit: the outcome.
    :param rng_key: of the run.
    :param int num_samples: draws made for samples.
    :param whole: makes the run of all members at once, at the hyperparameters of the fit.
    :param Scores scores: of the members there, if they are known.
    """

    def __init__(
        self,
        members: Members,
        space: UnconstrainedSpace,
        fit: Fit,
        rng_key: Array,
        num_samples: int,
        whole: Callable[[], GaussianRun],
        scores: Scores | None = None,
    ) -> None:
        self.in_parts, self.space, self.fit, self.rng_key, self.num_samples = members, space, fit, rng_key, num_samples
        self._make_whole = whole
        if scores is not None:
            vars(self)["scores"] = scores

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ALL:
            return getattr(self.whole, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @cached_property
    def whole(self) -> GaussianRun:
        """The run of all members at once."""
        return self._make_whole()

    @cached_property
    def scores(self) -> Scores:
        """Posteriors of the members."""
        try:
            return self.in_parts.scores(self.fit.hyper)
        except PartsDiffer:  # at these hyperparameters
            moments = self.whole.programs.moments(*self.inputs)
            shapes = {name: self._shape(name, self._of_part(name)) for name in moments}
            found = {n: (np.reshape(m, shapes[n]), np.reshape(v, shapes[n])) for n, (m, v) in moments.items()}
            return Scores(self.fit.log_evidence, 0.0, 0.0, found)

    @property
    def judged(self) -> LatentGaussianReading:
        """The reading of a part of the members, in which are all sites."""
        return self.in_parts.reading

    @property
    def inputs(self) -> Any:
        """Data, hyperparameters and state of all members at once."""
        return self.whole.inputs

    @property
    def is_lower_bound(self) -> bool:
        """False: sums over nodes are exact."""
        return False

    @property
    def full_diagnostics(self) -> Diagnostics:
        """End of the run."""
        return self.diagnostics

    @cached_property
    def flat_sites(self) -> tuple[str, ...]:
        """No sites: unknowns of all members have proper priors."""
        return ()

    @property
    def labelled_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all sites."""
        reading = self.judged
        found = {**reading.site_shapes, **{n: s.shape for n, s in reading.sites.items()}}
        return {name: self._shape(name, tuple(shape)) for name, shape in found.items()}

    def _of_part(self, name: str) -> tuple[int, ...]:
        return tuple(self.judged.site_shapes[name])

    def _shape(self, name: str, of_part: tuple[int, ...]) -> tuple[int, ...]:
        parts = self.in_parts.parts
        if name not in self.judged.sites or not parts.has_members(name):
            return of_part
        return (of_part[0] // parts.size * parts.number, *of_part[1:])

    @cached_property
    def posterior(self) -> PosteriorSites:
        reading = self.judged

        def site(name: str) -> NodeSite:
            found = NodeSite(
                name,
                self._shape(name, self._of_part(name)),
                mean=lambda: self.scores.moments[name][0],
                variance=lambda: self.scores.moments[name][1],
                covariance=lambda: self.whole.programs.covariance(*self.inputs, name=name),
                sample=partial(self._draw_site, name),
            )
            found.quantile_fn = partial(self._quantiles, name)
            return found

        return PosteriorSites({name: site(name) for name in reading.affine_sites}, missing_sites(reading), {})

    def _quantiles(self, name: str, q: np.ndarray) -> Array | None:
        if self.judged.abstract_form.blocks.columns.shape[1] > 1:
            return None
        program, shape = (
            shared(node_quantiles, self.judged, self.in_parts.algorithm, name),
            self.judged.site_shapes[name],
        )

        def of_part(data: Sequence[Any]) -> dict[str, Any]:
            found = program(data, self.fit.hyper, self._state(data), jnp.asarray(q))
            return {} if found is None else {"": np.asarray(found).reshape(len(q), *shape)}

        found = self.in_parts.joined(of_part, axis=1)
        return jnp.asarray(found[""].reshape(len(q), -1)) if found else None

    def _state(self, data: Sequence[Any]) -> Any:
        return shared(_first_state, self.judged, self.in_parts.algorithm)(data, self.fit.hyper)

    def _draw_site(self, name: str, rng_key: Array, num_samples: int) -> Array:
        return self._drawn(rng_key, num_samples, lambda sites: {name: sites[name]})[name]

    def _drawn(
        self, rng_key: Array, num_samples: int, choose: Callable[[dict[str, Array]], Mapping[str, Array]]
    ) -> dict[str, Array]:
        """Draws of chosen sites, by those of each part."""
        program = shared(_draws, self.judged, self.in_parts.algorithm, num_samples)
        keys, common = iter(jax.random.split(rng_key, len(self.in_parts.parts.starts))), {}

        def of_part(data: Sequence[Any]) -> dict[str, Array]:
            chosen = choose(program(data, self.fit.hyper, next(keys)))
            of_members = {name: x for name, x in chosen.items() if self.in_parts.parts.has_members(name)}
            common.update({name: x for name, x in chosen.items() if name not in of_members})
            return of_members

        return common | {name: jnp.asarray(x) for name, x in self.in_parts.joined(of_part, axis=1).items()}

    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array | None]:
        """Draws of all sites but the observed ones, without their log densities."""
        number = self.num_samples if num_samples is None else num_samples
        sites = self._drawn(rng_key, number, lambda found: found)
        return with_hyper(sites, self.fit.hyper, self.judged.observed_names, number), None

    def draw_all(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array | None]:
        """Draws of all sites but the observed ones; those that nothing depends on need all members at once."""
        return super().draw_all(rng_key, num_samples) if self.judged.predictive else self.draw(rng_key, num_samples)


def _first_state(reading: LatentGaussianReading, algorithm: SharedColumns) -> Callable[..., Any]:
    return jax.jit(lambda data, hyper: algorithm.init(reading.form(hyper, data)))


def _draws(reading: LatentGaussianReading, algorithm: SharedColumns, num_samples: int) -> Callable[..., Any]:
    def compute(data: Sequence[Any], hyper: dict[str, Array], rng_key: Array) -> dict[str, Array]:
        form = reading.form(hyper, data)
        unknowns = algorithm.posterior(form, algorithm.init(form)).sample(rng_key, num_samples)
        found = jax.lax.map(lambda e: reading.values(hyper, e, data), unknowns)
        return {name: value for name, value in found.items() if name not in reading.observed_names}

    return jax.jit(compute)
