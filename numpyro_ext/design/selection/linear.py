"""Information of linear measurements of a site: rows whose noise is Gaussian, of any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...infer.front.engine import AnyEngine, BaseEngine
from ...infer.front.run import FinishedRun
from ...infer.front.running.progress import warn
from ...linalg.operators.operator import LinearOperator, stack
from ...linalg.operators.operator import select as elements_of
from .batches import Batch, checked_cost, conditional_covariance, greedy_information, guarantee, joint_information

_Elements = str | Sequence[str] | Mapping[str, Any]
_MOST_JOINT = 8192
"""Rows whose joint covariance is formed: 512 MiB."""


def linear_information_gain(
    engine: AnyEngine,
    rows: LinearOperator | ArrayLike,
    noise_variance: ArrayLike | None = None,
    site: str | None = None,
    focus: _Elements | None = None,
    joint: bool = False,
) -> float | np.ndarray:
    r"""Information of further measurements :math:`b^T u + N(0, \sigma^2)` of a site about it, in nats.

    :math:`\tfrac12 \log(1 + b^T \operatorname{Cov}(u) b / \sigma^2)` for each, the fall of the entropy of a Gaussian
    posterior (Seeger and Nickisch 2008); it does not depend on what is measured. With ``focus`` the fall of the entropy
    of some elements alone (Houlsby 2014, section 2.3), the others being a nuisance. Posteriors that are no Gaussians
    (mixtures over hyperparameters) are judged by the Gaussian with their moments.

    Cost: one product with the covariance of the site per row; sites of more than 2048 elements are judged by
    ``num_samples`` draws, with a relative standard deviation of the variance of ``sqrt(2 / num_samples)``, those of
    StructuredMeanField by one solution per row.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import linear_information_gain
    >>> from numpyro_ext.infer import EP
    >>> def model(y):
    ...     u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(u, 1), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([1.0, 2.0]))
    >>> rows = [[1, 0], [1, 0], [1, 1]]
    >>> print(linear_information_gain(engine, rows).round(3))
    [0.203 0.203 0.347]
    >>> print(round(linear_information_gain(engine, rows, joint=True), 3))
    0.626
    >>> print(linear_information_gain(engine, rows, focus={"u": [0]}).round(3))
    [0.203 0.203 0.144]

    :param engine: after its run.
    :param rows: one row :math:`b` per measurement: an operator or array of shape ``(r, size)``, on the elements of the
        site in C order.
    :param noise_variance: of these measurements, a scalar or of shape ``(r,)``; may be left out where the model has
        Gaussian noise, whose average variance it then is.
    :param str site: what is measured, one of those in ``engine.posterior``; by default the field, if that is one site.
    :param focus: names of the sites the measurement is made for, or a dictionary from them to indices of elements;
        by default all.
    :param bool joint: what all of them tell together, one number; it needs the covariance of all rows.
    :return: of shape ``(r,)``.
    :raises ValueError: if the rows do not fit the site, a noise variance is missing or not positive, or a focus cannot
        be had.
    :raises KeyError: if there is no such site.
    """
    run, name = _measured(engine, site)
    noise = _noise(run, noise_variance, rows)
    if joint or focus is not None:
        covariance, left = _covariances(run, name, rows, focus)
        if joint:
            return joint_information(covariance, noise, left)
        variance = np.diag(covariance)
    else:
        left = None
        found = run.posterior[name].row_variance(rows, rng_key=run.rng_key, num_samples=run.num_samples)
        variance = np.asarray(found, float)
    if not np.isfinite(variance).all():
        raise FloatingPointError(f"The variance of some rows on site {name!r} is not finite: are their entries?")
    gain: np.ndarray = 0.5 * np.log1p(np.maximum(variance, 0.0) / noise)
    if left is not None:
        gain = gain - 0.5 * np.log1p(np.maximum(np.diag(left), 0.0) / noise)
    return gain


def select_rows(
    engine: AnyEngine,
    rows: LinearOperator | ArrayLike,
    size: int,
    noise_variance: ArrayLike | None = None,
    site: str | None = None,
    focus: _Elements | None = None,
    *,
    cost: ArrayLike | None = None,
    rng_key: Array | None = None,
) -> Batch:
    """Linear measurements that are to be made together, chosen one after the other by what each adds.

    Two rows that would tell the same are not taken as if they told something else. Cost: the covariance of all rows,
    and a matrix of rank one for each that is taken.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import select_rows
    >>> from numpyro_ext.infer import EP
    >>> def model(y):
    ...     u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(u, 1), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([1.0, 2.0]))
    >>> print(select_rows(engine, [[3, 0], [3, 0], [0, 2]], 2))
    Batch([0, 2], 1.402 nats by log-determinants)

    :param int size: how many.
    :param cost: of each, positive: the gain per cost decides.
    :param rng_key: among equal ones; a fixed key if left out. The others as for :func:`linear_information_gain`.
    :return: the numbers of the rows, a list with ``gains``, ``information`` and ``guarantee``.
    :raises ValueError: as :func:`linear_information_gain`, if there are fewer rows, or costs are not positive.
    """
    run, name = _measured(engine, site)
    noise = _noise(run, noise_variance, rows)
    price = checked_cost(cost, noise.shape)
    covariance, left = _covariances(run, name, rows, focus)
    chosen, gains = greedy_information(covariance, noise, size, left=left, cost=price, rng_key=rng_key)
    return Batch(chosen, gains, "log-determinants", guarantee(left is not None, price is not None))


def _measured(engine: object, site: str | None) -> tuple[FinishedRun, str]:
    if not isinstance(engine, BaseEngine):
        raise TypeError(f"Linear measurements are asked of an engine of this package after its run, not of {engine!r}.")
    if not engine.diagnostics.converged:
        warn(f"{type(engine).__name__} has not converged, and gains are of the posterior that it has.")
    run = engine._finished()
    field = run.reading.field
    if site is None and len(field) > 1:
        raise ValueError(f"Several sites can be measured: give site, one of {', '.join(map(repr, field))}.")
    return run, field[0] if site is None else site


def _noise(run: FinishedRun, noise_variance: ArrayLike | None, rows: object) -> np.ndarray:
    number = rows.shape[0] if isinstance(rows, LinearOperator) else len(np.atleast_1d(np.asarray(rows)))
    noise = np.asarray(run.typical_noise() if noise_variance is None else noise_variance, float)
    if noise.shape not in ((), (1,), (number,)):
        raise ValueError(f"noise_variance has the shape {noise.shape}; it must be one number, or of shape ({number},).")
    if not (np.isfinite(noise).all() and (noise > 0.0).all()):
        raise ValueError(f"noise_variance must be positive, got {noise_variance}.")
    return np.broadcast_to(noise, number)


def _covariances(
    run: FinishedRun, name: str, rows: LinearOperator | ArrayLike, focus: _Elements | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Joint covariance of the rows, and what is left of it once the elements in focus are known."""
    rows = run.posterior[name].checked_rows(rows)
    number = rows.shape[0]
    elements = {} if focus is None else _elements(run, name, focus)
    total = number + sum(len(numbers) for numbers in elements.values())
    if total > _MOST_JOINT:
        raise ValueError(f"{total} rows and elements in focus have a joint covariance too large: give fewer at once.")
    size = run.posterior[name].size
    if all(len(np.unique(numbers)) == size for numbers in elements.values()):
        elements = {}  # all of it
    if elements:
        (numbers,) = elements.values()
        unit = elements_of(numbers, size)
        rows = stack([rows, unit]) if isinstance(rows, LinearOperator) else jnp.concatenate([rows, unit.materialise()])
    joint = run.posterior[name].row_covariance(rows, rng_key=run.rng_key, num_samples=run.num_samples)
    found = np.asarray(joint, float)
    if not np.isfinite(found).all():
        raise FloatingPointError(f"The covariance of rows on site {name!r} is not finite: are their entries?")
    return found[:number, :number], conditional_covariance(found, number) if elements else None


def _elements(run: FinishedRun, site: str, focus: _Elements) -> dict[str, np.ndarray]:
    """Numbers of the elements in focus, which have to be those of the measured site."""
    named = dict(focus) if isinstance(focus, Mapping) else dict.fromkeys([focus] if isinstance(focus, str) else focus)
    if not named:
        raise ValueError("focus names no site. Leave it out where everything is of interest.")
    out = {}
    for name, indices in named.items():
        shape = run.posterior[name].shape  # says which sites there are
        if name != site:
            raise ValueError(
                f"focus names {name!r}, and the rows measure {site!r}: both have to be in one site. Write "
                f"numpyro.deterministic('both', jnp.concatenate([...])) into the model and measure that."
            )
        numbers = np.arange(run.posterior[name].size).reshape(shape)
        try:
            chosen = np.array(indices, dtype=None if len(indices) else int) if isinstance(indices, list) else indices
            out[name] = (numbers if indices is None else numbers[chosen]).reshape(-1)
        except IndexError as error:
            raise ValueError(f"focus asks for {name!r}[{indices!r}], whose shape is {shape}.") from error
        if not len(out[name]):
            raise ValueError(f"focus asks for no element of {name!r}. Leave it out where everything is of interest.")
    return out
