"""Designs of linear regressions by one number of the posterior covariance: D, A, E and G, on arrays."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jax import Array, random
from numpy.typing import ArrayLike

from ...compilation.transfer import generator_of
from ...infer.front.options import check_at_least, check_one_of
from .batches import check_size

Criterion = Literal["D", "A", "E", "G"]
_FLAT = 1e-6
"""Precision of the prior, as a share of the information in all rows, while too few have been chosen for a flat one."""
_SINGULAR = 1e-12
_NUM_SWEEPS = 100
_CHUNK = 2**22


class OptimalDesign(NamedTuple):
    """Rows to measure, and the covariance that is left then."""

    rows: list[int]
    """Their numbers, in increasing order."""
    value: float
    """Value of the criterion."""
    covariance: np.ndarray
    """Covariance of the parameters after the measurements."""


def design_criterion(covariance: ArrayLike, criterion: Criterion = "D", targets: ArrayLike | None = None) -> float:
    r"""Criterion that a design minimises, a function of the covariance :math:`S` of the parameters (Houlsby 2014, table
    2.1).

    ``"D"``: :math:`\log |S|`, twice the entropy up to a constant. ``"A"``: its trace, the expected squared error of the
    posterior mean. ``"E"``: its largest eigenvalue, the variance in the worst direction. ``"G"``: the largest variance
    :math:`x_*^T S x_*` of a prediction.

    :param covariance: shape ``(p, p)``.
    :param str criterion: see above.
    :param targets: where predictions matter, shape ``(t, p)``, for ``"G"``.
    :raises ValueError: for arrays that do not fit.

    **Example:**

    >>> from numpyro_ext.design import design_criterion
    >>> print(*[design_criterion([[4, 0], [0, 1]], kind, [[1, 1]]) for kind in "AEG"])
    5.0 4.0 5.0
    """
    S, at = _checked(covariance, criterion, targets)
    if criterion == "D":
        return float(np.linalg.slogdet(S)[1])
    if criterion == "A":
        return float(np.trace(S))
    if criterion == "E":
        return float(np.linalg.eigvalsh(S)[-1])
    return float(np.einsum("tp,pq,tq->t", at, S, at).max())


def design_scores(
    rows: ArrayLike,
    covariance: ArrayLike,
    noise_variance: ArrayLike = 1.0,
    *,
    criterion: Criterion = "D",
    targets: ArrayLike | None = None,
) -> np.ndarray:
    r"""Decrease of the criterion by each measurement :math:`x^T \theta + N(0, \sigma^2)`.

    For ``"D"`` it is :math:`\log(1 + x^T S x / \sigma^2)`, twice the information gain. Of a model that is not linear
    :math:`x` is the gradient of its predictor at a guess of the parameters.

    Cost: ``O(n p^2)`` for ``n`` rows, ``O(n p^3)`` for ``"E"``.

    :param rows: candidates :math:`x`, shape ``(n, p)``.
    :param covariance: of the parameters now, by prior or posterior, shape ``(p, p)``.
    :param noise_variance: one number, or of shape ``(n,)``.
    :param str criterion: as for :func:`design_criterion`.
    :param targets: of ``"G"``; the rows themselves by default.
    :return: shape ``(n,)``, none negative; larger is better.
    :raises ValueError: for arrays that do not fit, and noise that is not positive.

    **Example:**

    >>> from numpyro_ext.design import design_scores
    >>> print(design_scores([[1, 0], [0, 1], [1, 1]], [[4, 0], [0, 1]], criterion="A").round(3))
    [3.2   0.5   2.833]
    """
    X, noise = _checked_rows(rows, noise_variance)
    S, at = _checked(covariance, criterion, X if targets is None and criterion == "G" else targets)
    _check_width(X, len(S))
    to = X @ S
    total = noise + np.einsum("np,np->n", to, X)
    gains: np.ndarray
    if criterion == "D":
        gains = np.log(total / noise)
    elif criterion == "A":
        gains = np.square(to).sum(1) / total
    elif criterion == "E":
        largest = [
            np.linalg.eigvalsh(S - part[:, :, None] * (part / spread[:, None])[:, None, :])[:, -1]
            for part, spread in _chunks(to, total)
        ]
        gains = np.linalg.eigvalsh(S)[-1] - np.concatenate(largest)
    else:
        before = np.einsum("tp,pq,tq->t", at, S, at)
        left = [(before - np.square(part @ at.T) / spread[:, None]).max(1) for part, spread in _chunks(to, total)]
        gains = before.max() - np.concatenate(left)
    gains = np.maximum(gains, 0.0)
    return gains


def optimal_design(
    rows: ArrayLike,
    size: int,
    covariance: ArrayLike | None = None,
    noise_variance: ArrayLike = 1.0,
    *,
    criterion: Criterion = "D",
    targets: ArrayLike | None = None,
    repeat: bool = False,
    num_starts: int = 1,
    rng_key: Array | None = None,
) -> OptimalDesign:
    r"""The rows whose measurements leave the least of the criterion: chosen one by one, and then exchanged.

    A linear regression :math:`y = x^T \theta + N(0, \sigma^2)` has the posterior covariance :math:`(P^{-1} +
    \sum x x^T / \sigma^2)^{-1}` whatever is measured, so that a design is made before. From a greedy choice each row
    is exchanged for the best other one until no exchange of one row helps (Fedorov 1972), which is a local optimum;
    more starts, at random, may find better ones. ``"G"``, which has many, starts from the design of ``"D"`` as well.

    Cost: ``O(size * n * p^3)`` for a sweep over the rows; a few of them.

    >>> import numpy as np
    >>> from numpyro_ext.design import optimal_design
    >>> x = np.linspace(-1.0, 1.0, 21)
    >>> parabola = np.stack([x**0, x, x**2], axis=1)
    >>> design = optimal_design(parabola, 6, repeat=True)
    >>> print([round(float(x[k]), 3) for k in design.rows])
    [-1.0, -1.0, 0.0, 0.0, 1.0, 1.0]

    :param rows: candidates, shape ``(n, p)``.
    :param int size: how many measurements.
    :param covariance: :math:`P` of the parameters before, positive definite; without, a flat prior, which needs as many
        rows as there are parameters.
    :param noise_variance: one number, or of shape ``(n,)``.
    :param str criterion: as for :func:`design_criterion`.
    :param targets: of ``"G"``; the rows themselves by default.
    :param bool repeat: whether a row may be measured more than once.
    :param int num_starts: the greedy one and so many less one at random.
    :param rng_key: for these; a fixed key if left out.
    :return: the rows, the criterion and the covariance.
    :raises ValueError: as :func:`design_scores`; if there are fewer rows than ``size``; if those there are leave
        parameters undetermined.
    """
    check_at_least(1, num_starts=num_starts)
    check_one_of(Criterion, criterion=criterion)
    X, noise = _checked_rows(rows, noise_variance)
    number, width = X.shape
    check_size(size, max(number, 1) * (int(size) if repeat and isinstance(size, int | np.integer) else 1))
    prior = np.zeros((width, width))
    if covariance is not None:
        P, _ = _checked(covariance, "D", None)
        _check_width(X, len(P))
        if np.linalg.eigvalsh(P)[0] <= _SINGULAR * np.linalg.eigvalsh(P)[-1]:
            raise ValueError("covariance must be positive definite: leave out what is known already.")
        prior = np.linalg.inv(P)
    elif size < width:
        raise ValueError(
            f"{size} rows leave some of the {width} parameters undetermined without a prior: give covariance, or a "
            "larger size."
        )
    at = _checked(np.eye(width), criterion, X if targets is None and criterion == "G" else targets)[1]
    search = _Search(X / np.sqrt(noise)[:, None], prior, criterion, at, repeat)
    starts = [search.greedy(int(size))]
    if criterion == "G":
        # Where rows may be taken in shares, the best of D is the best of G (Kiefer and Wolfowitz 1960).
        of_d = search.by("D")
        starts.append(of_d.exchanged(of_d.greedy(int(size)))[1])
    generator = generator_of(random.key(0) if rng_key is None else rng_key)
    starts += [list(generator.choice(number, int(size), replace=repeat)) for _ in range(num_starts - 1)]
    ends = [search.exchanged(start) for start in starts]
    value, chosen = min(ends, key=lambda end: end[0])
    if not np.isfinite(value):
        raise ValueError(
            "The rows leave some parameters undetermined without a prior (their matrix has a lower rank): give "
            "covariance, or other rows."
        )
    left = np.linalg.inv(search.precision(chosen))
    return OptimalDesign(sorted(int(k) for k in chosen), design_criterion(left, criterion, at), 0.5 * (left + left.T))


class _Search:
    """Sets of rows of unit noise, by the precision that they give to the parameters."""

    def __init__(self, rows: np.ndarray, prior: np.ndarray, criterion: Criterion, at: np.ndarray, repeat: bool) -> None:
        self._rows, self._prior, self._criterion, self._at, self._repeat = rows, prior, criterion, at, repeat

    def by(self, criterion: Criterion) -> _Search:
        """The same search by another criterion."""
        return _Search(self._rows, self._prior, criterion, self._at, self._repeat)

    def precision(self, chosen: list[int]) -> np.ndarray:
        return self._prior + self._rows[chosen].T @ self._rows[chosen]

    def _after(self, precision: np.ndarray) -> np.ndarray:
        """The criterion once each row is added; infinite where parameters are undetermined."""
        found = []
        for (part,) in _chunks(self._rows):
            values, vectors = np.linalg.eigh(precision + part[:, :, None] * part[:, None, :])
            is_proper = values[:, 0] > _SINGULAR * values[:, -1]
            safe = np.where(is_proper[:, None], values, 1.0)
            if self._criterion == "D":
                value = -np.log(safe).sum(1)
            elif self._criterion == "A":
                value = (1.0 / safe).sum(1)
            elif self._criterion == "E":
                value = 1.0 / safe[:, 0]
            else:
                value = np.einsum("ntp,np->nt", np.square(self._at @ vectors), 1.0 / safe).max(1)
            found.append(np.where(is_proper, value, np.inf))
        return np.concatenate(found)

    def greedy(self, size: int) -> list[int]:
        total = np.trace(self._rows.T @ self._rows + self._prior) / len(self._prior)
        start = self._prior if self._prior.any() else _FLAT * total * np.eye(len(self._prior))
        chosen: list[int] = []
        for _ in range(size):
            after = self._after(start + self._rows[chosen].T @ self._rows[chosen])
            after[[] if self._repeat else chosen] = np.inf
            chosen.append(int(np.argmin(after)))
        return chosen

    def exchanged(self, chosen: list[int]) -> tuple[float, list[int]]:
        """A set that no exchange of one row makes better, and its criterion."""
        chosen, value = list(chosen), np.inf
        for _ in range(_NUM_SWEEPS):
            has_changed = False
            for place in range(len(chosen)):
                others = chosen[:place] + chosen[place + 1 :]
                after = self._after(self.precision(others))
                own = float(after[chosen[place]])
                after[[] if self._repeat else others] = np.inf
                best = int(np.argmin(after))
                value = own
                if after[best] < own - 1e-12 * (1.0 + abs(own)) or (np.isinf(own) and np.isfinite(after[best])):
                    chosen[place], has_changed, value = best, True, float(after[best])
            if not has_changed:
                break
        return value, chosen


def _chunks(*arrays: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Parts of arrays of rows, a matrix for each of which fits."""
    number, width = arrays[0].shape
    step = max(1, _CHUNK // max(width * width, 1))
    return [tuple(array[start : start + step] for array in arrays) for start in range(0, number, step)]


def _checked_rows(rows: ArrayLike, noise_variance: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    X = np.asarray(rows, float)
    if X.ndim != 2 or not X.size:
        raise ValueError(f"rows must have the shape (n, p), one row for each candidate; got {X.shape}.")
    if not np.isfinite(X).all():
        raise ValueError("rows must be finite; some entries are nan or infinite.")
    noise = np.asarray(noise_variance, float)
    if noise.shape not in ((), (len(X),)):
        raise ValueError(f"noise_variance has the shape {noise.shape}; it must be one number, or of shape ({len(X)},).")
    if not (np.isfinite(noise).all() and (noise > 0.0).all()):
        raise ValueError(f"noise_variance must be positive, got {noise_variance!r}.")
    return X, np.broadcast_to(noise, len(X))


def _checked(covariance: ArrayLike, criterion: Criterion, targets: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    check_one_of(Criterion, criterion=criterion)
    S = np.asarray(covariance, float)
    if S.ndim != 2 or S.shape[0] != S.shape[1] or not np.isfinite(S).all():
        raise ValueError(f"covariance must be a finite square matrix, got the shape {S.shape}.")
    if not np.allclose(S, S.T, rtol=1e-6, atol=1e-9 * np.abs(S).max(initial=0.0)):
        raise ValueError("covariance must be symmetric.")
    try:
        np.linalg.cholesky(S + 1e-8 * (np.abs(S).max(initial=0.0) + np.finfo(float).tiny) * np.eye(len(S)))
    except np.linalg.LinAlgError as error:
        least = np.linalg.eigvalsh(S)[0]
        raise ValueError(f"covariance must have no negative eigenvalue; the least is {least:.3g}.") from error
    if criterion != "G":
        return S, np.zeros((0, len(S)))
    if targets is None:
        raise ValueError("criterion='G' is of predictions: give the targets at which they matter.")
    at = np.asarray(targets, float)
    if at.ndim != 2 or at.shape[1] != len(S) or not at.size or not np.isfinite(at).all():
        raise ValueError(f"targets must be finite and of shape (t, {len(S)}), got {at.shape}.")
    return S, at


def _check_width(rows: np.ndarray, width: int) -> None:
    if rows.shape[1] != width:
        raise ValueError(f"rows have {rows.shape[1]} columns, and the covariance is that of {width} parameters.")
