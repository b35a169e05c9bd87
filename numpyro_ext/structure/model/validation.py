"""Checks on the data of a model, before anything is computed from it, and on the indices that it looks up."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from numpyro.distributions import constraints

from ..errors import ModelStructureError, Reason
from ..program.equations import Atom, Equation
from ..program.program import Program
from ..program.questions import Questions
from .running.inspection import SiteInfo

_INWARDS = (
    "move such values inwards, as (y * (n - 1) + 0.5) / n does with n observations, or give them a likelihood of their "
    "own: dist.Bernoulli for whether y is one (or zero), and this site for all others under handlers.mask"
)


def check_data(sites: Mapping[str, SiteInfo], check_values: bool = True) -> None:
    """Check observed values: present, finite, inside the support, of the shape of their distribution.

    :param bool check_values: whether they have to be finite and inside the support.
    :raises ModelStructureError: naming the site, the first offending value and its place.
    """
    observed = [s for s in sites.values() if s.kind == "observed" and s.family != "Unit"]
    factors = [s for s in sites.values() if s.kind == "observed" and s.family == "Unit"]
    if not observed and not factors:
        raise ModelStructureError(
            "the model has no observed site: pass the data (obs=...), otherwise the posterior is the prior.",
            reason=Reason.DATA,
        )
    for site in observed:
        _check_site(site, check_values)


def explain_masked_data(sites: Mapping[str, SiteInfo]) -> list[str]:
    """Message for a model of which masks leave no observation, if they do."""
    observed = [site for site in sites.values() if site.kind == "observed"]
    if not observed or any(site.family == "Unit" or np.any(_mask(site)) for site in observed):
        return []
    names = " and ".join(repr(site.name) for site in observed)
    return [
        f"Every observation of {names} is masked, so that the posterior is the prior. Masks are true where data is in "
        "use."
    ]


def can_be_scored(site: SiteInfo, shape: tuple[int, ...]) -> np.ndarray:
    """Mask of the values of an observed site that are data: finite and inside the support of its distribution.

    Values under a mask need not be, as missing ones are coded by NaN or by -1.

    :param SiteInfo site: an observed site.
    :param shape: of its factors; those of a multivariate site are its coordinates.
    :return: boolean, of this shape.
    """
    value = np.asarray(site.value)
    is_data = np.isfinite(value) if np.issubdtype(value.dtype, np.inexact) else np.ones(value.shape, bool)
    if site.support is not None:
        is_inside = np.asarray(site.support(value))
        is_data = is_data.all(axis=tuple(range(is_inside.ndim, value.ndim))) & is_inside
    try:
        return np.broadcast_to(is_data, shape)
    except ValueError:  # numpyro.factor has no values, and factors that share a predictor are one
        return np.ones(shape, bool)


def _mask(site: SiteInfo) -> np.ndarray:
    value = np.asarray(site.value)
    mask = np.asarray(True if site.mask is None else site.mask)
    # Masks cover the batch shape; values may have further axes in front of it.
    event = len(site.full_shape) - len(site.batch_shape) if mask.ndim else 0
    return np.broadcast_to(
        mask.reshape(mask.shape + (1,) * event), np.broadcast_shapes(mask.shape + (1,) * event, value.shape)
    )


def _check_site(site: SiteInfo, check_values: bool) -> None:
    value = np.asarray(site.value)
    if value.size == 0:
        raise ModelStructureError(
            f"observed site '{site.name}' is empty (shape {value.shape}): nothing to learn from.",
            reason=Reason.DATA,
            site=site.name,
        )
    try:
        shape: tuple[int, ...] | None = np.broadcast_shapes(value.shape, site.full_shape)
    except ValueError:
        shape = None
    if value.ndim > 0 and shape not in (value.shape, site.full_shape):
        found = "they do not match" if shape is None else f"broadcasting them would make {shape}"
        raise ModelStructureError(
            f"observed site '{site.name}' has data of shape {value.shape}, but its distribution has shape "
            f"{site.full_shape}; {found}. Give both the same shape (y.ravel()?).",
            reason=Reason.DATA,
            site=site.name,
        )
    if not check_values:
        return
    mask = _mask(site)
    spread = np.broadcast_to(value, mask.shape)
    if np.issubdtype(value.dtype, np.inexact):
        remedy = "remove it, or mask it: handlers.mask(mask=jnp.isfinite(y)) around the site, and obs=jnp.nan_to_num(y)"
        _report(site, spread, mask & ~np.isfinite(spread), "not finite", remedy)
    if site.support is not None:
        inside = np.asarray(site.support(spread))
        axes = tuple(range(inside.ndim, mask.ndim))
        in_use = np.asarray(mask.any(axis=axes))
        if np.any(bad := in_use & ~inside):
            what = f"outside the support of {site.family} ({_describe(site.support)})"
            _report(site, spread, bad, what, _remedy(site, spread, in_use))
    if site.ends is not None:
        what = f"at an end of the support of {site.family.strip('_')}, where its density is zero or infinite"
        _report(site, spread, mask & site.ends, what, _INWARDS)
    if site.needs_integers:
        raise ModelStructureError(
            f"observed site '{site.name}' has values of dtype {value.dtype}, and {site.family} looks its categories up "
            "by integers: give y.astype(int) (columns of pandas become floats where a value is missing; missing ones "
            "need a number and a mask, jnp.nan_to_num(y).astype(int) under handlers.mask(mask=jnp.isfinite(y))).",
            reason=Reason.DATA,
            site=site.name,
        )


def _describe(support: object) -> str:
    if isinstance(support, type(constraints.multinomial(1))):
        return f"counts that add up to the total_count of {np.unique(np.asarray(support.upper_bound))}"
    with np.printoptions(threshold=6, edgeitems=1):  # bounds may be as many as the observations
        words = " ".join(str(support).split())
    return type(support).__name__.strip("_").lower() if words.startswith("<") else words


def _remedy(site: SiteInfo, value: np.ndarray, in_use: np.ndarray) -> str:
    """Advice on values outside the support of a site."""
    is_category = any(word in site.family for word in ("Categorical", "Ordered")) and value.shape == in_use.shape
    if is_category and site.support is not None and np.all(site.support(np.where(in_use, value - 1, 0))):
        return "count categories from zero, obs=y - 1"
    return "correct the data, or choose another likelihood"


def _report(site: SiteInfo, value: np.ndarray, bad: np.ndarray, what: str, remedy: str) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        count = int(bad.sum())
        raise ModelStructureError(
            f"observed site '{site.name}': {count} value{'s are' if count > 1 else ' is'} {what}; the first is "
            f"{value[where]} at index {where}. Please {remedy}.",
            reason=Reason.DATA,
            site=site.name,
        )


def check_indices(
    questions: Questions,
    values: Mapping[str, Atom],
    arguments: Mapping[str, object] | None = None,
) -> None:
    """Refuse lookups in unknown arrays at known indices that are out of range, or negative numbers of an argument.

    NumPy counts negative ones from the end. A model that makes some itself means that; who passes them has more likely
    the codes of pandas, which are -1 for labels that are missing.

    Modes that say what happens there (``x.at[i].get(mode="clip")``, or ``mode="fill"`` with a ``fill_value``) are
    left alone, and so are indices that depend on unknowns.

    :param questions: the traced model and its data.
    :param values: its unknown sites, by name.
    :param arguments: of the model, by name.
    :raises ModelStructureError: naming the site, the index and how many elements there are, or the argument.
    """
    program = questions.program
    negative = _with_negative_numbers(arguments or {})
    for equation in program.equations:
        if equation.primitive.name != "gather" or _says_what_happens(equation):
            continue
        operand, indices = equation.inputs
        if not program.ancestors([operand]) & set(program.inputs):
            continue
        found = questions.decide(indices)
        if found is None:
            continue
        shape, axes = program.shape(operand), equation.params["dimension_numbers"].start_index_map
        for position, axis in enumerate(axes):
            index, size = np.asarray(found)[..., position], shape[axis]
            is_bad = (index < 0) | (index > size - equation.params["slice_sizes"][axis])
            bad = index[is_bad]
            if not bad.size:
                if negative:
                    _check_signs(_name_of(program, values, operand), index, size, negative)
                continue
            # negative ones have had the size added: what the model wrote is that many less
            first = int(bad[0]) - size * int(bad[0] < 0)
            place = f" at {np.argwhere(is_bad)[0].tolist()} of them," if index.ndim else ""
            name = _name_of(program, values, operand)
            raise ModelStructureError(
                f"site '{name}' is indexed out of range: {bad.size} indices, the first {first},{place} along an axis "
                f"of length {size} (0 to {size - 1}); JAX would take another element in its place. Check the sizes of "
                "the plates. New members of a group need a larger number of members: give the model this number as an "
                "argument, or let it take it from the labels that it is given. Rows that stand for nothing need an "
                "index in range and a mask.",
                site=name,
            )


def _check_signs(name: str, index: np.ndarray, size: int, negative: Mapping[str, np.ndarray]) -> None:
    """Refuse indices in range that are an argument with its negative numbers counted from the end."""
    for label, array in negative.items():
        if index.size == array.size and np.array_equal(index.ravel(), np.where(array < 0, array + size, array)):
            raise ModelStructureError(
                f"site '{name}' is indexed by '{label}', of which {np.sum(array < 0)} are negative, the first "
                f"{array[array < 0][0]}: NumPy counts them from the end of an axis of length {size}. Codes of pandas "
                "are -1 where a label is missing: leave such rows out, or give them an index in range and a mask. "
                "Where the last elements are meant, add the length.",
                site=name,
            )


def _with_negative_numbers(arguments: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Arrays of integers, and lists of them, that have negative ones, flattened."""
    arrays = {}
    for label, value in arguments.items():
        leaves = [value] if isinstance(value, list | tuple) else jax.tree.leaves(value)
        for leaf in leaves:
            if getattr(getattr(leaf, "dtype", None), "kind", "i") != "i":
                continue
            try:
                array = np.asarray(leaf)
            except Exception:  # lists of unequal ones, arrays that are traced
                continue
            if array.ndim and array.dtype.kind == "i" and array.size and array.min() < 0:
                arrays[label] = array.astype(np.int64).ravel()
    return arrays


def _says_what_happens(equation: Equation) -> bool:
    mode = str(equation.params["mode"])
    return mode.endswith("CLIP") or (mode.endswith("FILL_OR_DROP") and equation.params["fill_value"] is not None)


def _name_of(program: Program, values: Mapping[str, Atom], operand: Atom) -> str:
    """The site that a value is, or is made of: of those behind it the last one, since the others are behind that."""
    behind = program.ancestors([operand])
    made = {name: program.ancestors([value]) for name, value in values.items()}
    return max((name for name in made if made[name] <= behind), key=lambda n: len(made[n]), default="")
