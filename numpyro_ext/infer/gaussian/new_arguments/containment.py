"""Check that a model read on old and new arguments together contains the one that was fitted, and find its rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....structure import LatentGaussianReading
from ...front.answers.joint_arguments import NotJoined

_ESTIMATED = 0.5
"""Share of a variance by which an estimate with other probes may differ from it."""

ADVICE = "Give the model all inputs at once in run(...), and mask the observations that are to be predicted."


def row_places(old: LatentGaussianReading, new: LatentGaussianReading) -> np.ndarray:
    """For each row of the fit its row in the reading of old and new arguments, where old rows come first.

    :raises NotJoined: if the sites of the fit have no place there.
    """
    starts, start, shapes = {}, 0, {}
    for name, shape, rows in zip(new.factor_names, new.factor_shapes, new.rows_per_observation, strict=True):
        starts[name], shapes[name] = start, (tuple(shape), rows)
        start += int(np.prod(shape)) * rows
    out = [np.zeros(0, int)]
    for name, shape, rows in zip(old.factor_names, old.factor_shapes, old.rows_per_observation, strict=True):
        is_prior = name not in old.observed_names
        found, now = shapes.get(name, ((), 0))
        fits = rows == now and len(found) == len(shape) and all(a <= b for a, b in zip(shape, found, strict=True))
        if not fits:
            raise NotJoined(
                f"With old and new arguments together the site {name!r} is not what it is in the fit: it has factors "
                f"of the shape {tuple(shape)} and {rows} predictors each there, and "
                f"{f'of the shape {found} and {now} here' if now else 'none here'}. {ADVICE}"
            )
        _check_new_members(old, name, tuple(shape), found, is_prior)
        numbers = np.arange(int(np.prod(found))).reshape(found)[tuple(slice(n) for n in shape)].reshape(-1)
        out.append(starts[name] + (numbers[:, None] * rows + np.arange(rows)).reshape(-1))
    unknown = [name for name in new.factor_names if name not in old.factor_names and name not in new.observed_names]
    if unknown:
        raise NotJoined(f"The prior of {unknown[0]!r}, which the fit does not have, is not Gaussian. {ADVICE}")
    return np.concatenate(out)


def _check_new_members(
    old: LatentGaussianReading, name: str, shape: tuple[int, ...], found: tuple[int, ...], is_prior: bool
) -> None:
    """Refuse new elements of a site whose distribution needs a fit, or depends on the observations of old ones."""
    if is_prior and shape != found:
        raise NotJoined(
            f"The prior of site {name!r} ({old.sites[name].family}) is not Gaussian, so its new elements (shape "
            f"{found}, in the fit {shape}) need a fit. {ADVICE}"
        )
    num_batch = len(old.sites[name].batch_shape)
    if old.sites[name].has_joint_coordinates and shape[num_batch:] != found[num_batch:]:
        raise NotJoined(
            f"New coordinates of the observed site {name!r} ({old.sites[name].family}) depend on the old ones through "
            f"its covariance, which predictions do not follow. Write what they share as a latent site. {ADVICE}"
        )


def check_contained(reading: LatentGaussianReading, before: Any, after: Any) -> None:
    """Refuse a model on all rows in which the old predictors or their factors are others than in the fit.

    :param before: mean, variance and log factors of the predictors in the fit.
    :param after: the same of these rows in the model on all rows.
    """
    mean, variance, factors = (np.asarray(part) for part in before)
    new_mean, new_variance, new_factors = after
    # What moves predictors by less than a thousandth of their deviation is of no concern.
    tolerance = float(np.finfo(mean.dtype).eps ** 0.25)
    deviation, rounding = np.sqrt(np.maximum(variance, 0.0)), 1e3 * np.finfo(mean.dtype).eps * np.abs(mean)
    with np.errstate(invalid="ignore"):
        moved = np.abs(new_mean - mean) / (deviation + rounding + np.finfo(mean.dtype).tiny)
        is_moved = ~(np.abs(new_mean - mean) <= tolerance * deviation + rounding)
        share = _ESTIMATED if reading.has_estimates else tolerance
        is_other = ~(np.abs(new_variance - variance) <= share * variance + rounding**2)
    is_changed = ~np.isclose(new_factors, factors, rtol=tolerance, atol=tolerance, equal_nan=True).all(0)
    bad = np.flatnonzero(is_moved | is_other | is_changed)
    if not bad.size:
        return
    what = (
        f"The model on old and new arguments together is not the one that was fitted: {bad.size} of the {mean.size} "
        f"predictors of the fit have changed (the first belongs to {_site_of(reading, int(bad[0]))!r}), and "
    )
    if not np.all(np.isfinite(new_mean) & np.isfinite(new_variance)):
        raise NotJoined(
            f"{what}the posterior is not finite. The causes are NaN in the new arguments, and inputs that are in both, "
            "which make a covariance singular: leave them out, or add a jitter to its diagonal."
        )
    if np.any(is_moved | is_other):
        ratio = np.sqrt(np.max(new_variance[bad] / np.maximum(variance[bad], np.finfo(mean.dtype).tiny)))
        what += f"their means differ by up to {np.max(moved):.2g} standard deviations"
        what += f", which are {ratio:.2g} times as large" if np.any(is_other) else ""
    else:
        what += "their likelihoods are others"
    raise NotJoined(
        f"{what}. The model computes something from all rows, such as x - x.mean(), the ends of a basis or the scale "
        f"of a kernel: compute it outside and give the model the result. {ADVICE}"
    )


def _site_of(reading: LatentGaussianReading, row: int) -> str:
    sizes = [int(np.prod(s)) * k for s, k in zip(reading.factor_shapes, reading.rows_per_observation, strict=True)]
    names: tuple[str, ...] = reading.factor_names
    return names[int(np.searchsorted(np.cumsum(sizes), row, side="right"))]
