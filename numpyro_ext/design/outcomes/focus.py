"""Quantities of interest of a measurement, the other unknowns being a nuisance (Houlsby 2014, section 2.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...infer.bilinear.runs.run import BilinearRun
from ...infer.gaussian.algorithms.posterior import GaussianPosterior
from ...infer.gaussian.runs.integrated_run import IntegratedRun
from ...infer.gaussian.runs.run import GaussianRun
from ...linalg.gaussian.design import DenseDesign
from ...structure import LatentGaussianReading
from ...structure.latent_gaussian import AffineMap

_MOST_JOINT = 6000
"""Predictors and elements of interest whose joint covariance is formed."""

Focus = str | Sequence[str] | Mapping[str, Any]


class Interest(NamedTuple):
    """Quantities of interest in a run, as far as the conditional entropy of outcomes depends on them."""

    elements: dict[str, np.ndarray]
    """Flat numbers of the elements of interest, by affine site; empty if all of the field is, or nothing of it."""
    is_about_hyper: bool
    """True if the hyperparameters are of interest, and nothing of the field."""
    whole: frozenset[str] = frozenset()
    """Sites all elements of which are of interest, however many there are."""

    def left(self, run: GaussianRun, posterior: object, hyper: dict[str, Array], rows: np.ndarray) -> Array:
        """Variance of predictors that remains once the elements of interest, of which there are some, are known.

        :param posterior: of the run at one point.
        :param hyper: hyperparameters there.
        :param rows: numbers of the predictors.
        """
        if not isinstance(posterior, GaussianPosterior):
            raise ValueError(f"A {type(posterior).__name__} has no joint covariance to condition: use EP.")
        self.check_joint(len(rows))
        design = jnp.concatenate([posterior.form.design.to_dense()[rows], self.design(run, hyper)])
        return variance_left(posterior, design, len(rows))

    def check_joint(self, num_rows: int) -> None:
        """Refuse a joint covariance of predictors and elements of interest that is too large to be formed."""
        num_elements = sum(map(len, self.elements.values()))
        if num_rows + num_elements > _MOST_JOINT:
            raise ValueError(
                f"{num_rows} candidates and {num_elements} elements of interest are too many for their joint "
                f"covariance (at most {_MOST_JOINT}): ask for fewer."
            )

    def moved(self, old: LatentGaussianReading, new: LatentGaussianReading) -> Interest:
        """The same in a reading in which sites have further elements behind those of each axis."""
        elements = {}
        for name, numbers in self.elements.items():
            old_shape, new_shape = tuple(old.site_shapes[name]), tuple(new.site_shapes[name])
            if name in self.whole:
                elements[name] = np.arange(int(np.prod(new_shape)))
            elif old_shape == new_shape:  # also () of a scalar, which has no indices
                elements[name] = numbers
            else:
                elements[name] = np.ravel_multi_index(np.unravel_index(numbers, old_shape), new_shape)
        return self._replace(elements=elements)

    def design(self, run: GaussianRun, hyper: dict[str, Array]) -> Array:
        """The elements of interest as rows on the unknowns, of which there has to be one."""
        return rows_of_elements(run.reading, hyper, run.reading.data, self.elements)


EVERYTHING = Interest({}, False)


@jax.jit
def joint_covariance(posterior: GaussianPosterior, design: Array) -> Array:
    """Joint covariance of the predictors of some rows of a design."""
    return posterior.covariance(AffineMap(DenseDesign(design), jnp.zeros(len(design), design.dtype)))


def rows_of_elements(
    reading: LatentGaussianReading, hyper: Mapping[str, object], data: Sequence[object], elements: Mapping[str, object]
) -> Array:
    """Elements of affine sites as rows on the unknowns.

    :param data: arrays of a reading of this structure.
    :param elements: flat numbers of elements by affine site, of which there has to be one.
    """
    maps = reading.maps(hyper, data, list(elements))
    return jnp.concatenate([maps[name].design.to_dense()[numbers] for name, numbers in elements.items()])


def variance_left(posterior: GaussianPosterior, design: Array, number: int) -> Array:
    """Variances of the first ``number`` quantities that a design makes of the unknowns, given all others."""
    joint = joint_covariance(posterior, design)
    own, cross, known = joint[:number, :number], joint[:number, number:], joint[number:, number:]
    # interest may be in quantities that determine each other
    values, vectors = jnp.linalg.eigh(known)
    rounding = max(1e-10, len(known) * float(jnp.finfo(known.dtype).eps))
    kept = values > rounding * jnp.maximum(jnp.max(values, initial=0.0), 0.0)
    explained = jnp.where(kept, jnp.square(cross @ vectors) / jnp.where(kept, values, 1.0), 0.0)
    return jnp.maximum(jnp.diagonal(own) - jnp.sum(explained, axis=1), 0.0)


def named_sites(run: GaussianRun | BilinearRun, focus: Focus) -> dict[str, Any]:
    """The sites that a focus names, and indices of elements, ``None`` for all.

    :raises ValueError: if one is none of the model's latent ones, or it names nothing.
    """
    if isinstance(focus, Mapping):
        named = dict(focus)
    else:
        try:
            named = dict.fromkeys([focus] if isinstance(focus, str) else focus)
        except TypeError as error:
            raise TypeError(
                f"focus must be names of sites, or a dictionary from them to indices of elements; got {focus!r}."
            ) from error
    if not named:
        raise ValueError("focus names no site. Leave it out where everything is of interest.")
    known = [*run.reading.affine_sites, *run.reading.hyper]
    for name in named:
        if name not in known:
            what = "an observed site" if name in run.reading.observed_names else "no latent site that is known of"
            raise ValueError(f"focus names {name!r}, which is {what}; it can be of {known}.")
    return named


def elements_in_focus(name: str, indices: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Flat numbers of the elements of a site that a focus asks for; ``None`` is all of them."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    try:
        found: np.ndarray = (numbers if indices is None else numbers[indices]).reshape(-1)
    except IndexError as error:
        raise ValueError(f"focus asks for {name!r}[{indices!r}], whose shape is {shape}.") from error
    if not found.size:
        raise ValueError(f"focus asks for no element of {name!r}: leave the site out, or name elements of it.")
    return found


def as_focus(run: GaussianRun, focus: Focus | None, drawn: Sequence[str] = ()) -> Interest:
    """Translate a user's focus into quantities of interest of a run.

    :param focus: names of sites; or a dictionary from them to indices of elements (``None`` for all).
    :param drawn: hyperparameters of which there are draws, in the place of the points of the run.
    :raises ValueError: if a site is none of the model's latent ones or fixed, if it names nothing, or if it leaves out
        hyperparameters that are integrated over.
    """
    if focus is None:
        return EVERYTHING
    named, reading = named_sites(run, focus), run.reading
    integrable = list(drawn)
    if isinstance(run, IntegratedRun):
        integrable = [name for name in run.space.names if not run.space.sites[name].is_param]
    in_focus = {name for name in named if name in reading.hyper}
    points = sorted(in_focus - set(integrable))
    if points:
        raise ValueError(
            f"focus names {points}, which this fit sets to a point: nothing can be learned of it there. Use an engine "
            "that integrates over hyperparameters, as INLA or integrate='auto' do, or hyper='mgp'."
        )
    if any(named[name] is not None for name in in_focus):
        raise ValueError(
            "focus asks for elements of a hyperparameter, and a mixture tells of all of them together: name the whole "
            "site, or ask an engine with hyper='mgp' or 'linearised'."
        )
    missing = sorted(set(integrable) - in_focus)
    if missing:
        what, instead = (
            f"Over {missing} the fit integrates",
            "fit with integrate='none'; of hyperparameters alone, take",
        )
        if drawn:
            what, instead = f"Of {missing} there are draws", "ask an engine such as EP: with integrate='none', or with"
        raise ValueError(
            f"{what}, and focus leaves it out: what is learned of one unknown while another is a nuisance has no exact "
            f"rule here. Add it to focus, or {instead} hyper='mgp' or 'linearised'."
        )
    elements = {}
    for name, indices in named.items():
        if name not in reading.hyper:
            elements[name] = elements_in_focus(name, indices, tuple(reading.site_shapes[name]))
    if not elements:
        return Interest({}, True)
    whole = frozenset(name for name, indices in named.items() if indices is None)
    return EVERYTHING if set(reading.field) <= whole else Interest(elements, False, whole)
