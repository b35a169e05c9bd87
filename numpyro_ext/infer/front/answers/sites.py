"""Exact marginals of one site under the Gaussian posterior of a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import ndtri
from jax.typing import ArrayLike, DTypeLike

from ....compilation.pickles import OfARun
from ....compilation.transfer import to_device
from ....linalg.cholesky import LARGEST_DENSE
from ....linalg.operators.operator import LinearOperator
from ....structure.model.reading import ModelReading
from ....structure.model.running.execution import check_key
from ..display import ShownSite, ShownSites
from ..labels import Labels
from ..options import nearest_name


class Marginal(OfARun, ShownSite):
    """The posterior of one site by its quantiles and its draws."""

    shape: Any
    _sample: Callable[[Array, int], Array]
    """Maps a random key and a number to draws."""

    def quantile(self, q: ArrayLike) -> Array:
        """Quantiles of each element, of shape ``q.shape + shape``."""
        raise NotImplementedError

    def interval(self, prob: float = 0.9) -> tuple[Array, Array]:
        """The central interval of each element.

        :param float prob: its probability mass.
        :return: lower and upper ends, each in the shape of the site.
        """
        lower, upper = self.quantile(np.array([0.5 * (1.0 - prob), 0.5 * (1.0 + prob)]))
        return lower, upper

    def sample(self, rng_key: Array, num_samples: int | tuple[int, ...]) -> Array:
        """Independent draws of the whole site.

        :param rng_key: random number generator key.
        :param num_samples: how many, or the shape of an array of draws.
        :return: of shape ``(num_samples,) + shape``.
        """
        check_key(rng_key, "sample(jax.random.key(0), 1000)", "comes first")
        shape = num_samples if isinstance(num_samples, tuple) else (num_samples,)
        return self._sample(rng_key, math.prod(shape)).reshape((*shape, *self.shape))


class SitePosterior(Marginal):
    """The Gaussian posterior of one site that is affine in the field; nothing here is estimated from draws.

    Obtained as ``engine.posterior[name]``.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        mean: Callable[[], ArrayLike],
        variance: Callable[[], ArrayLike],
        covariance: Callable[[], Array],
        sample: Callable[[Array, int], Array],
    ) -> None:
        self.name = name
        self.shape = shape
        self._mean = mean
        self._variance = variance
        self._covariance = covariance
        self._sample = sample

    @property
    def mean(self) -> Array:
        """Posterior mean, in the shape of the site."""
        return self._shaped(self._mean())

    @property
    def variance(self) -> Array:
        """Posterior variance of each element, in the shape of the site."""
        return self._shaped(self._variance())

    @property
    def sd(self) -> Array:
        """Posterior standard deviation of each element, in the shape of the site."""
        return self._shaped(np.sqrt(self._variance()))

    def _shaped(self, values: ArrayLike) -> Array:
        # NumPy compiles nothing.
        return to_device(np.asarray(values).reshape(self.shape))

    def covariance(self) -> Array:
        """Covariance between all elements, of shape ``shape + shape``; quadratic in their number."""
        return self._covariance().reshape(self.shape + self.shape)

    def quantile(self, q: ArrayLike) -> Array:
        """Quantiles of each element; of those that are estimated from draws, the draws that belong to the run.

        :param q: probability, or array of probabilities, inside (0, 1).
        :return: of shape ``q.shape + shape``.
        :raises ValueError: if a probability is outside (0, 1).
        """
        q = probabilities(q, self.mean.dtype)
        return self._quantile(q).reshape(q.shape + self.shape)

    def _quantile(self, q: np.ndarray) -> Array:
        return self.mean + self.sd * ndtri(q).reshape(q.shape + (1,) * len(self.shape))

    def row_variance(
        self, rows: LinearOperator | ArrayLike, *, rng_key: Array | None = None, num_samples: int = 1000
    ) -> Array:
        r"""Variance of linear functionals :math:`b^T u` of the site, one for each row :math:`b`.

        Cost: the covariance of the site, once; sites of more than 2048 elements are judged by draws, with a relative
        standard deviation of ``sqrt(2 / num_samples)``. StructuredMeanField solves a system for each row instead.

        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP
        >>> def model(y):
        ...     u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(u, 1), obs=y)
        >>> engine = EP(model)
        >>> engine.run(random.key(0), jnp.array([1.0, 2.0]))
        >>> print(engine.posterior["u"].row_variance([[1, 0], [1, -1]]).round(4))
        [0.5 1. ]

        :param rows: array or operator of shape ``(r, size)``, on the elements in C order.
        :param rng_key: of draws, where they are needed; a fixed key if left out.
        :param int num_samples: how many of these.
        :return: of shape ``(r,)``.
        :raises ValueError: if the rows do not fit the site, or are not finite.
        """
        return self._row_variance(self.checked_rows(rows), rng_key, num_samples)

    def row_covariance(
        self, rows: LinearOperator | ArrayLike, *, rng_key: Array | None = None, num_samples: int = 1000
    ) -> Array:
        """Covariance between linear functionals of the site, shape ``(r, r)``; as :meth:`row_variance`."""
        return self._row_covariance(self.checked_rows(rows), rng_key, num_samples)

    def checked_rows(self, rows: LinearOperator | ArrayLike) -> LinearOperator | Array:
        """Rows on the elements of the site, refused unless they fit and are finite."""
        if not isinstance(rows, LinearOperator):
            rows = jnp.asarray(rows, jnp.result_type(float))
            if not np.isfinite(np.asarray(rows)).all():
                raise ValueError(f"Rows on site {self.name!r} must be finite; some entries are nan or infinite.")
        if len(rows.shape) != 2 or rows.shape[1] != self.size:
            raise ValueError(
                f"Rows on site {self.name!r} have the shape {tuple(rows.shape)}; it must be (r, {self.size})."
            )
        return rows

    def _row_variance(self, rows: LinearOperator | Array, rng_key: Array | None, num_samples: int) -> Array:
        if self.size > LARGEST_DENSE:
            return jnp.mean(jnp.square(self._centred(rows, rng_key, num_samples)), axis=0)
        dense = rows.materialise() if isinstance(rows, LinearOperator) else rows
        return jnp.sum((dense @ self._matrix()) * dense, axis=1)

    def _row_covariance(self, rows: LinearOperator | Array, rng_key: Array | None, num_samples: int) -> Array:
        if self.size > LARGEST_DENSE:
            centred = self._centred(rows, rng_key, num_samples)
            return centred.T @ centred / num_samples
        dense = rows.materialise() if isinstance(rows, LinearOperator) else rows
        return dense @ self._matrix() @ dense.T

    def _matrix(self) -> Array:
        return self.covariance().reshape(self.size, self.size)

    def _centred(self, rows: LinearOperator | Array, rng_key: Array | None, num_samples: int) -> Array:
        """Rows applied to draws about the mean, shape ``(num_samples, r)``."""
        draws = self.sample(random.key(0) if rng_key is None else rng_key, num_samples).reshape(num_samples, -1)
        return jax.lax.map(lambda x: rows @ x, draws - self.mean.reshape(-1))

    def __getitem__(self, index: Any) -> SitePosterior:
        """Some of the elements as a site of their own: ``engine.posterior["utility"][[3, 7]]``.

        :param index: as of a NumPy array in the shape of the site.
        """
        return self.part(np.arange(self.size).reshape(self.shape)[index])

    def part(self, places: np.ndarray) -> SitePosterior:
        """Some of the elements as a site of their own.

        :param places: their numbers in C order, in the shape that the part is to have.
        """
        flat = np.asarray(places).reshape(-1)
        return SitePosterior(
            self.name,
            np.shape(places),
            mean=lambda: np.reshape(self._mean(), -1)[flat],
            variance=lambda: np.reshape(self._variance(), -1)[flat],
            covariance=lambda: self._covariance().reshape(self.size, self.size)[np.ix_(flat, flat)],
            sample=lambda rng_key, num_samples: self.sample(rng_key, num_samples).reshape(num_samples, -1)[:, flat],
        )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class PointPosterior(SitePosterior):
    """The posterior of a site that a run set to a point: what its draws are, without any uncertainty.

    :param str name: of the site.
    :param value: of all its draws.
    """

    note = ": a point, whose standard error, if it has one, is in engine.hyper"

    def __init__(self, name: str, value: ArrayLike) -> None:
        number = np.asarray(value)
        super().__init__(
            name,
            number.shape,
            mean=lambda: number,
            variance=lambda: np.zeros(number.shape),
            covariance=lambda: jnp.zeros((number.size, number.size)),
            sample=lambda rng_key, num_samples: jnp.broadcast_to(number, (num_samples, *number.shape)),
        )

    def part(self, places: np.ndarray) -> PointPosterior:
        """Some of the elements as a site of their own; see :meth:`SitePosterior.part`."""
        return PointPosterior(self.name, np.reshape(self._mean(), -1)[np.asarray(places)])


class LargeSite(SitePosterior):
    """The posterior of a site with so many elements that it is computed for those alone that are asked for.

    Such are the utilities of all items for all users: ``engine.posterior["utility"][[3, 7]]`` is that of two users.

    :param str name: of the site.
    :param shape: of the site.
    :param part: from the numbers of some elements to their posterior.
    """

    def __init__(self, name: str, shape: tuple[int, ...], part: Callable[[np.ndarray], SitePosterior]) -> None:
        def refuse(*args: object) -> Any:
            raise ValueError(
                f"Site {name!r} has {math.prod(shape)} elements: ask for some of them, by an index as of an array, "
                f"such as engine.posterior[{name!r}][[0, 1]].mean."
            )

        super().__init__(name, shape, refuse, refuse, refuse, refuse)
        self._part = part

    def part(self, places: np.ndarray) -> SitePosterior:
        return self._part(np.asarray(places))


def gaussian_draws(mean: ArrayLike, covariance: ArrayLike, rng_key: Array, num_samples: int) -> Array:
    """Draws from a Gaussian, whose covariance may be singular, shape ``(num_samples, n)``."""
    values, vectors = np.linalg.eigh(np.asarray(covariance))
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    noise = np.asarray(random.normal(rng_key, (num_samples, len(root)), root.dtype))
    return jnp.asarray(np.asarray(mean) + noise @ root.T)


def probabilities(q: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """Probabilities at which quantiles are asked, as an array.

    :raises ValueError: unless all of them are inside (0, 1).
    """
    found = np.asarray(q, dtype)
    if not np.all((found > 0.0) & (found < 1.0)):
        raise ValueError(f"Quantiles need probabilities inside (0, 1), got {found}.")
    return found


class PosteriorSites(OfARun, ShownSites, Mapping[str, SitePosterior]):
    """The sites with an exact posterior, by name; a wrong name says which there are and why others are not.

    :param sites: the posteriors.
    :param reasons: for the other names of the model, why they have none.
    :param large: sites that are found under their names, and left out where all are shown.
    """

    def __init__(
        self,
        sites: Mapping[str, SitePosterior],
        reasons: Mapping[str, str],
        large: Mapping[str, LargeSite] | None = None,
    ) -> None:
        self._sites: dict[str, SitePosterior] = {**sites, **(large or {})}
        self._small = tuple(sites)
        self._reasons = dict(reasons)

    @property
    def large(self) -> list[str]:
        """Names of sites of which only chosen elements can be computed."""
        return [name for name in self._sites if name not in self._small]

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons for which the other sites of the model have none."""
        return dict(self._reasons)

    def __getitem__(self, name: str) -> SitePosterior:
        if name in self._sites:
            return self._sites[name]
        reason = self._reasons.get(name, "the model has no site of this name")
        meant = nearest_name(name, self._sites) if name not in self._reasons else None
        hint = "" if meant is None else f" Did you mean {meant!r}?"
        raise PosteriorKeyError(
            f"No exact posterior for {name!r}: {reason}. Available: {', '.join(sorted(self._sites))}.{hint}"
        )

    def with_hyper(self, hyper: Mapping[str, Any], labels: Labels) -> PosteriorSites:
        """These sites behind the hyperparameters, all of them with their labels.

        :param hyper: posteriors of the hyperparameters.
        :param Labels labels: of the places of sites.
        """
        small = {**hyper, **{name: self._sites[name] for name in self._small}}
        for name, site in small.items():
            site.coordinates = labels.along(name, tuple(site.shape))
        large: Any = {name: self._sites[name] for name in self.large}
        return PosteriorSites(small, {n: reason for n, reason in self._reasons.items() if n not in small}, large)

    def changed(self, change: Callable[[SitePosterior], SitePosterior]) -> PosteriorSites:
        """The same names, each site but the large ones replaced by what a function makes of it."""
        out = copy.copy(self)
        out._sites = {**self._sites, **{name: change(self._sites[name]) for name in self._small}}
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._small)

    def __len__(self) -> int:
        return len(self._small)


def missing_sites(
    reading: ModelReading,
    otherwise: str = "it is not affine in the field, or sees several steps of a long series; draws of it are in "
    "get_samples()",
) -> dict[str, str]:
    """Reasons for which sites of a model have no exact posterior, for :class:`PosteriorSites`.

    :param ModelReading reading: of the model.
    :param str otherwise: the reason of latent and deterministic sites that are neither observed nor hyperparameters.
    """
    return (
        dict.fromkeys(reading.site_shapes, otherwise)
        | dict.fromkeys(reading.hyper, "it is a hyperparameter")
        | dict.fromkeys(reading.observed_names, "it is observed")
    )


class PosteriorKeyError(KeyError):
    """A ``KeyError`` whose text is shown as a sentence."""

    def __str__(self) -> str:
        return str(self.args[0])
