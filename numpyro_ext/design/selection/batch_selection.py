"""Observations that are to be made together, chosen by what they would tell together."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import Array, random

from ...compilation.transfer import generator_of
from ...infer.front.options import check_at_least
from ...infer.front.running.progress import warn
from ...infer.hyper.density.cloud import systematic
from ...potentials import GaussianPotential
from ...potentials.outcomes import log_probabilities, num_outcomes
from ..outcomes.focus import Focus
from ..outcomes.outlooks import DrawnOutlook, GaussianOutlook, Outlook
from ..outcomes.sources import outlooks
from .batches import Batch, check_size, checked_cost, greedy, guarantee
from .joint import JointPredictors, are_joint, flattened
from .single import Candidate

_LARGEST = 2**27
"""Numbers in a table of draws, observations and outcomes: 1 GB."""
_CHUNK = 2**22
_NEARLY_ALL = 0.7
"""Share of the logarithm of the number of draws, which no information under them exceeds."""


def select_batch(
    source: object,
    size: int,
    *args: object,
    focus: Focus | None = None,
    cost: object = None,
    exclude: object = None,
    rng_key: Array | None = None,
    num_draws: int = 1000,
    num_configurations: int = 1024,
    **kwargs: object,
) -> Batch:
    r"""Observations that are to be made together, each chosen by what it adds to those before it.

    What two observations tell together is less than the sum, where both tell the same: of candidates that are alike
    :func:`~numpyro_ext.design.select` takes all, this one of them and then others (Kirsch, van Amersfoort and Gal
    2019). Gains are of the latent sites, in nats.

    With Gaussian noise they are differences of log determinants, and exact; hyperparameters that are integrated over
    add what would be told of them, by ``num_draws`` draws of the outcomes. Outcomes that can be counted have the joint
    probabilities that ``num_draws`` draws of the predictors (or the draws of the source) give them: all configurations
    of the batch up to ``num_configurations``, so many draws of them beyond. Such a batch cannot tell more than the
    logarithm of the number of draws, and a warning says when it comes close.

    The batch is no worse than :math:`1 - 1/e` of the best one of its size (Nemhauser, Wolsey and Fisher 1978), but not
    with a focus on a part of the unknowns, nor by cost: ``batch.guarantee`` says so.

    Cost: ``O(size * n^2)`` for ``n`` candidates with Gaussian noise, ``O(size * n * num_draws * num_configurations)``
    otherwise.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import select_batch
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None, seen=True):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     with numpyro.handlers.mask(mask=seen):
    ...         numpyro.sample("y", dist.Normal(x @ slope, 1.0), obs=y)
    >>> x = jnp.array([[1.0, 1.0], [3.0, 0.0], [3.1, 0.0], [0.0, 2.0]])
    >>> engine = EP(model)
    >>> engine.run(random.key(0), x, jnp.zeros(4), jnp.arange(4) < 1)
    >>> batch = select_batch(engine, 2)
    >>> print([candidate.place for candidate in batch], round(batch.information, 3))
    [2, 3] 1.6
    >>> print(batch.guarantee)
    at least 1 - 1/e = 0.63 of the information in the best choice of this size

    :param source: an engine after its run, draws of :func:`~numpyro_ext.design.draws_of`, or what
        :attr:`~numpyro_ext.design.SequentialDesign.source` is of one.
    :param int size: how many.
    :param args: arguments of the model at which to look; without, the candidates are the masked observations.
    :param focus: as for :func:`~numpyro_ext.design.expected_information_gain`, for Gaussian noise; of draws as well.
    :param cost: of each candidate, positive, in the shape of the observations (of several sites a dictionary): the gain
        per cost decides.
    :param exclude: booleans in the same shape, true for what is not to be taken.
    :param rng_key: of draws, and among equal candidates; a fixed key if left out.
    :param int num_draws: of predictors or outcomes, where they are needed; draws that the source has are all used.
    :param int num_configurations: of outcomes, up to which all are looked at.
    :param kwargs: keyword arguments of the model.
    :return: a list of ``(site, place, score)``, whose score is what it adds, with ``information``, ``gains``,
        ``method`` and ``guarantee``. ``SequentialDesign.observe`` takes it with as many values.
    :raises ValueError: if nothing is left, or fewer than ``size``; for costs that are not positive; for outcomes that
        are real numbers with a noise that is not Gaussian, or under draws; for a focus where outcomes are counted.
    """
    check_at_least(2, num_draws=num_draws, num_configurations=num_configurations)
    key = random.key(0) if rng_key is None else rng_key
    key_order, key_draws = random.split(key)
    rng = generator_of(key_draws)
    found = outlooks(source, args, kwargs, rng_key, focus)
    joint = JointPredictors(found) if are_joint(found) else None
    is_candidate = np.concatenate([outlook.is_candidate.reshape(-1) for outlook in found.values()])
    if exclude is not None:
        is_candidate &= ~flattened(exclude, found, "exclude", False)
    price = None
    if cost is not None:
        price = checked_cost(flattened(cost, found, "cost", 1.0), is_candidate.shape)
    check_size(size, int(is_candidate.sum()))
    at = np.flatnonzero(is_candidate)
    rule: _LogDeterminants | _Configurations
    if joint is not None and all(isinstance(o.potential, GaussianPotential) for o in joint.outlooks.values()):
        rule = _LogDeterminants(joint, at, num_draws, rng)
    else:
        if focus is not None:
            raise ValueError(
                "What a batch of outcomes that are counted tells of a part of the unknowns has no rule here: leave "
                "focus out, or choose one by one with expected_information_gain(focus=...)."
            )
        log_p, weights = _table_of_predictors(joint, at, num_draws, rng) if joint is not None else _table(found, at)
        rule = _Configurations(log_p, weights, num_configurations, rng)
    chosen, gains = greedy(
        rule.gains,
        rule.take,
        int(size),
        is_candidate=np.ones(len(at), bool),
        cost=None if price is None else price[at],
        rng_key=key_order,
    )
    rule.check(sum(gains))
    sites = [(name, place) for name, outlook in found.items() for place in np.ndindex(outlook.shape)]
    members = []
    for number, gain in zip(at[chosen], gains, strict=True):
        name, place = sites[number]
        members.append(Candidate(name, int(place[0]) if len(place) == 1 else tuple(map(int, place)), gain))
    return Batch(members, gains, rule.method, guarantee(rule.has_nuisance, price is not None, rule.of_draws))


class _LogDeterminants:
    """Gaussian noise: log determinants at each point of the hyperparameters, and what is told of the points.

    The outcomes of those that were taken are drawn; at each draw the other points have weights, whose entropy falls.
    """

    def __init__(self, joint: JointPredictors, at: np.ndarray, num_draws: int, rng: np.random.Generator) -> None:
        self._rng, self._weights = rng, joint.weights
        self._covariance, self._left = joint.covariances(at)
        self._covariance = self._covariance.copy()
        self._noise = np.empty((len(joint.weights), len(at)))
        for outlook, here in joint.parts(at):
            assert isinstance(outlook.potential, GaussianPotential)  # as the caller has asked
            self._noise[:, here] = np.square(np.asarray(outlook.potential.scale))
        self._is_about_hyper = joint.is_about_hyper
        self.has_nuisance = self._left is not None or self._is_about_hyper
        self.of_draws = len(joint.weights) > 1
        self.method = "log-determinants"
        if not self.of_draws:
            return
        self.method = f"log-determinants and, of the hyperparameters, {num_draws} draws"
        if num_draws * self._noise.size > _LARGEST:
            raise ValueError(
                f"{num_draws} draws of {len(at)} candidates at {len(joint.weights)} points are too many: give fewer, "
                "or fit with integrate='none'."
            )
        # Of each draw the point it comes from, as often as its weight has it.
        self._points = systematic(self._weights, num_draws, 0.5)
        self._mean = np.repeat(joint.mean[:, None, at], num_draws, axis=1)
        with np.errstate(divide="ignore"):
            self._log_shares = np.repeat(np.log(self._weights)[:, None], num_draws, axis=1)
        self._draw_noise()

    def _draw_noise(self) -> None:
        number = len(self._points)
        self._z = scipy.special.ndtri((self._rng.permutation(number) + 0.5) / number)

    def gains(self) -> np.ndarray:
        variance = np.maximum(np.diagonal(self._covariance, axis1=1, axis2=2), 0.0)
        total = np.zeros(variance.shape[1])
        if not self._is_about_hyper:
            each = np.log1p(variance / self._noise)
            if self._left is not None:
                each = each - np.log1p(np.maximum(np.diagonal(self._left, axis1=1, axis2=2), 0.0) / self._noise)
            total = total + 0.5 * self._weights @ each
        if self.of_draws:
            before = _entropy_of(self._log_shares)
            after = [_entropy_of(self._seen(number)[1]) for number in range(len(total))]
            total = total + before.mean() - np.mean(after, axis=1)
        return total

    def _seen(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws of the outcome of a candidate, and the log weights of the points given each."""
        draws = np.arange(len(self._points))
        spread = self._covariance[:, number, number] + self._noise[:, number]
        mean = self._mean[:, :, number]
        y = mean[self._points, draws] + np.sqrt(spread[self._points]) * self._z
        log_density = -0.5 * (np.square(y - mean) / spread[:, None] + np.log(spread)[:, None])
        return y, self._log_shares + log_density

    def take(self, number: int) -> None:
        spread = self._covariance[:, number, number] + self._noise[:, number]
        slope = self._covariance[:, number, :] / spread[:, None]
        if self.of_draws:
            y, log_shares = self._seen(number)
            self._log_shares = log_shares - scipy.special.logsumexp(log_shares, axis=0)
            away = y - self._mean[:, :, number]
            self._mean += away[:, :, None] * slope[:, None, :]
            self._draw_noise()
        self._covariance -= slope[:, :, None] * self._covariance[:, number, None, :]
        if self._left is not None:
            left = self._left[:, number, :]
            spread = left[:, number] + self._noise[:, number]
            self._left = self._left - left[:, :, None] * (left / spread[:, None])[:, None, :]

    def check(self, information: float) -> None:
        """Nothing can run out."""


class _Configurations:
    """Outcomes that are counted: configurations of the batch so far, and the posterior over the draws given each.

    :param log_p: log probabilities of outcomes, shape ``(draws, candidates, outcomes)``.
    :param weights: of the draws, which sum to one.
    """

    has_nuisance, of_draws = False, True

    def __init__(self, log_p: np.ndarray, weights: np.ndarray, most: int, rng: np.random.Generator) -> None:
        self._p = np.exp(log_p)
        self._entropy = scipy.special.entr(self._p).sum(-1)
        self._masses, self._given = np.ones(1), weights[None]
        self._size = 1.0 / np.sum(weights**2)
        self._most, self._rng = most, rng
        self.method = f"all outcomes under {len(log_p)} draws"

    def gains(self) -> np.ndarray:
        found = -(self._masses @ self._given) @ self._entropy
        step = max(1, _CHUNK // (self._p.shape[2] * max(len(self._masses), len(self._p))))
        for start in range(0, len(found), step):
            part = self._p[:, start : start + step]
            mixed = (self._given @ part.reshape(len(part), -1)).reshape(len(self._masses), *part.shape[1:])
            found[start : start + step] += self._masses @ scipy.special.entr(mixed).sum(-1)
        return np.maximum(found, 0.0)

    def take(self, number: int) -> None:
        p = self._p[:, number]
        masses = self._masses[:, None] * (self._given @ p)
        kept = np.argwhere(masses > 0.0)
        if len(kept) > self._most:
            places = systematic(masses[tuple(kept.T)], self._most, self._rng.uniform())
            drawn, count = np.unique(places, return_counts=True)
            kept, total = kept[drawn], count / self._most
            self.method = f"{self._most} draws of the outcomes under {len(self._p)} draws"
        else:
            total = masses[tuple(kept.T)]
        given = self._given[kept[:, 0]] * p[:, kept[:, 1]].T
        self._given = given / given.sum(1, keepdims=True)
        self._masses = total / total.sum()

    def check(self, information: float) -> None:
        if information > _NEARLY_ALL * math.log(self._size):
            warn(
                f"The batch tells {information:.3g} nats under draws that are worth {self._size:.0f}, under which none "
                f"tells more than {math.log(self._size):.3g}: later members were chosen by little. Give more draws "
                "(num_draws) or a smaller batch."
            )


def _entropy_of(log_shares: np.ndarray) -> np.ndarray:
    """Entropies over the first axis of unnormalised log probabilities."""
    return scipy.special.entr(scipy.special.softmax(log_shares, axis=0)).sum(0)


def _table_of_predictors(
    joint: JointPredictors, at: np.ndarray, num_draws: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities of outcomes under joint draws of the predictors, and the weights of these."""
    covariance, _ = joint.covariances(at)
    points = systematic(joint.weights, num_draws, 0.5)
    eta = np.empty((num_draws, len(at)))
    for point in np.unique(points):
        values, vectors = np.linalg.eigh(covariance[point])
        here = np.flatnonzero(points == point)
        noise = rng.standard_normal((len(here), len(at)))
        eta[here] = joint.mean[point, at] + (noise * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    tables = []
    for outlook, here in joint.parts(at):
        number = num_outcomes(outlook.potential, outlook.mean, outlook.variance, outlook.weights)
        if number is None:
            raise _no_rule(outlook)
        _check_table(num_draws, len(at), number)
        potential = jax.tree.map(lambda leaf: leaf[points], outlook.potential)
        table = log_probabilities(potential, jnp.asarray(eta[:, here], outlook.mean.dtype), number)
        tables.append((np.moveaxis(np.asarray(table, float), 0, -1), here))
    return _padded(tables, num_draws, len(at)), np.full(num_draws, 1.0 / num_draws)


def _table(found: dict[str, Outlook], at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of draws that the source has."""
    tables: list[tuple[np.ndarray, np.ndarray]] = []
    start, weights = 0, np.empty(0)
    for outlook in found.values():
        if not isinstance(outlook, DrawnOutlook):
            raise _no_rule(outlook)
        size = outlook.is_candidate.size
        here = np.flatnonzero((at >= start) & (at < start + size))
        _check_table(len(outlook.log_p), len(at), outlook.log_p.shape[-1])
        tables.append((np.asarray(outlook.log_p, float)[:, at[here] - start], here))
        equal = np.full(len(outlook.log_p), 1.0 / len(outlook.log_p))
        weights = equal if outlook.weights is None else np.asarray(outlook.weights, float)
        start += size
    return _padded(tables, len(weights), len(at)), weights / weights.sum()


def _padded(tables: list[tuple[np.ndarray, np.ndarray]], num_draws: int, size: int) -> np.ndarray:
    """Tables of sites with other numbers of outcomes as one."""
    out = np.full((num_draws, size, max(table.shape[-1] for table, _ in tables)), -np.inf)
    for table, here in tables:
        out[:, here, : table.shape[-1]] = table
    return out


def _check_table(num_draws: int, size: int, number: int) -> None:
    if num_draws * size * number > _LARGEST:
        raise ValueError(
            f"{num_draws} draws, {size} candidates and {number} outcomes are too many at once: give fewer draws, or "
            "exclude candidates."
        )


def _no_rule(outlook: Outlook) -> ValueError:
    kind = "draws in the place of predictors"
    if isinstance(outlook, GaussianOutlook):
        is_gaussian = isinstance(outlook.potential, GaussianPotential)
        kind = "other sites whose outcomes are counted" if is_gaussian else "a noise that is not Gaussian"
    return ValueError(
        f"The observations of {outlook.name!r} are real numbers with {kind}: what several of them tell together has no "
        "rule here. Take an engine on a Gaussian field and Gaussian noise, or choose one by one (select)."
    )
