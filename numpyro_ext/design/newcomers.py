"""Questions for people whom a fit does not know: few ratings of each, and which one to ask for next."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from ..infer.bilinear.engines.hybrid_engine import BilinearEP
from ..infer.bilinear.marginals.newcomers import Fitted, Newcomers, with_cells
from ..infer.bilinear.runs.noise_run import NoiseRun
from ..infer.front.engine import AnyEngine, BaseEngine
from ..infer.front.options import check_at_least, check_kind, check_one_of
from ..infer.front.running.progress import progress_bar, warn
from ..structure.bilinear.read import read_like
from ..structure.model.running.execution import bound_arguments
from .outcomes.outlooks import Outlook
from .outcomes.vectors import Points, VectorOutlook
from .scores.frequencies import empirical_entropy
from .scores.pointwise import Acquisition, expected_information_gain, predictive_entropy, random_scores

_TOL = 1e-3
Refit = Literal["new", "all"]

DEFAULT: Mapping[str, Acquisition] = {
    "expected information gain": expected_information_gain,
    "predictive entropy": predictive_entropy,
    "empirical entropy": empirical_entropy,
    "random": random_scores,
}


def cold_start(
    engine: AnyEngine,
    data: Sequence[object] | Mapping[str, object],
    *,
    new: str,
    num_queries: int = 10,
    acquisitions: Mapping[str, Acquisition] = DEFAULT,
    share: float | None = 0.25,
    num_initial: int = 1,
    num_held_out: int = 3,
    num_repeats: int = 1,
    num_draws: int = 100,
    refit: Refit = "new",
    rng_key: Array | None = None,
    show_progress: bool = True,
    **kwargs: object,
) -> Any:
    """Learning curves of strategies that ask newcomers for ratings (Houlsby 2014, section 7.4.2).

    Of each newcomer's ratings one is known at first, three are held out, and the others are the pool from which a
    strategy asks for one after the other. After each answer the vectors of the newcomers, with noise and cut points
    that are theirs, are fitted again from where they were, and the held-out ratings are scored. All newcomers are
    treated at once, and all strategies start from the same ratings.

    Newcomers are rows, or columns, of a model of ordered ratings that :class:`~numpyro_ext.infer.BilinearEP` has
    fitted, such as :func:`~numpyro_ext.models.heteroscedastic_ratings`. Their vectors have full covariances, given
    independent Gaussians for the vectors of the other side, its cut points and its noise at its mode.

    >>> import numpy as np
    >>> from jax import random
    >>> from numpyro_ext.design import cold_start
    >>> from numpyro_ext.infer import BilinearEP
    >>> from numpyro_ext.models import heteroscedastic_ratings
    >>> rng = np.random.default_rng(0)
    >>> user, item = np.divmod(np.arange(20 * 12), 12)
    >>> value = (rng.normal(size=(20, 1)) @ rng.normal(size=(1, 12)))[user, item] + 0.3 * rng.normal(size=240)
    >>> rating, known = np.digitize(value, [-0.5, 0.5]), user < 14
    >>> sizes = {"num_items": 12, "rank": 1, "num_levels": 3}
    >>> engine = BilinearEP(heteroscedastic_ratings, damping=0.9, tol=0.01, progress_bar=False)
    >>> engine.run(random.key(0), user[known], item[known], rating[known], num_users=14, **sizes)
    >>> newcomers = user[~known] - 14, item[~known], rating[~known]
    >>> options = {"num_users": 6, "num_queries": 4, "num_repeats": 2, "show_progress": False}
    >>> curves = cold_start(engine, newcomers, new="tastes", share=None, **options)
    >>> print(dict(curves["log_likelihood"].sizes))
    {'strategy': 4, 'query': 5, 'repeat': 2}

    :param engine: BilinearEP after its run on ratings.
    :param data: arguments of the model with the ratings, one entry for each: the first ones by position, or a
        dictionary by name. The others are those of the fit.
    :param str new: a site of the side that is new, such as ``"tastes"``.
    :param int num_queries: ratings that each newcomer is asked for.
    :param acquisitions: scores by names of strategies. Of :func:`~numpyro_ext.design.expected_information_gain` the
        focus is the newcomer's vector, at draws, or at few points by ``method="sigma-points"`` or ``"mode"``.
    :param float share: of the rows (columns) that are newcomers, drawn anew in each repeat; the engine's model is then
        fitted to the ratings of the others, once for each repeat. With ``None`` all of ``data`` are ratings of
        newcomers, numbered in their own right, whom the fit has not seen: it is used as it is.
    :param int num_initial: ratings of each newcomer that are known at first.
    :param int num_held_out: ratings that are scored.
    :param int num_repeats: divisions of newcomers and ratings.
    :param int num_draws: of the vectors, for the information gain.
    :param str refit: ``"new"`` fits the newcomers again after each answer while all else is held; ``"all"`` everything,
        from where it was, which needs a ``share``.
    :param rng_key: of divisions, draws and ties.
    :param bool show_progress: whether to show a bar.
    :param kwargs: keyword arguments of the model that differ from those of the fit, such as the number of newcomers.
    :return: an ``xarray.Dataset`` over strategy, query (the number of answers) and repeat with ``log_likelihood``, the
        sum over all held-out ratings, ``error``, the root mean squared error of the expected level, and ``seconds`` of
        the processor for each round; and ``area``, the mean of each curve of log likelihoods. Where Ctrl-C ended it,
        what was not done is nan.
    :raises ValueError: if there is no such side, the fit is none of ratings, an acquisition is no score, or newcomers
        have too few ratings, with what to change.
    :raises RuntimeError: before the run of the engine.

    Cost: for each strategy and query some twenty iterations over the newcomers' answers, and ``num_draws`` passes over
    all their ratings (30 nanoseconds for each pass and rating).
    """
    import xarray

    check_at_least(1, num_queries=num_queries, num_initial=num_initial, num_held_out=num_held_out)
    check_at_least(1, num_repeats=num_repeats, num_draws=num_draws)
    check_one_of(Refit, refit=refit)
    _check_acquisitions(acquisitions)
    if share is not None and not 0.0 < share < 1.0:
        raise ValueError(f"share must be above 0 and below 1, or None where all are new; got {share!r}.")
    if refit == "all" and share is None:
        raise ValueError("refit='all' fits newcomers and all others together: give the ratings of all, and a share.")
    protocol = _Protocol.of(engine, data, new, kwargs, num_initial, num_held_out, num_queries, num_draws, refit)
    curves = np.full((3, len(acquisitions), num_queries + 1, num_repeats), np.nan)
    key = random.key(0) if rng_key is None else rng_key
    try:
        with progress_bar(num_repeats * len(acquisitions), "cold_start", enabled=show_progress) as bar:
            for repeat, own_key in enumerate(random.split(key, num_repeats)):
                key_parts, key_fit, key_ask = random.split(own_key, 3)
                task = protocol.task(share, key_parts, key_fit)
                for number, score in enumerate(acquisitions.values()):
                    curves[:, number, :, repeat] = task.curves(score, key_ask)
                    bar.update()
    except KeyboardInterrupt:
        done = int(np.isfinite(curves).all((0, 1, 2)).sum())
        warn(f"cold_start: interrupted after {done} of {num_repeats} repeats; the others are nan.")
    axes = ("strategy", "query", "repeat")
    names = ("log_likelihood", "error", "seconds")
    found: dict[str, Any] = {name: (axes, values) for name, values in zip(names, curves, strict=True)}
    found["area"] = (("strategy", "repeat"), curves[0].mean(1))
    return xarray.Dataset(found, coords={"strategy": list(acquisitions), "query": np.arange(num_queries + 1)})


def _check_acquisitions(acquisitions: Mapping[str, Acquisition]) -> None:
    if not acquisitions:
        raise ValueError("acquisitions names no score.")
    for name, score in acquisitions.items():
        if not callable(score):
            raise ValueError(
                f"acquisitions[{name!r}] is {score!r}, which is no score: give a function such as "
                "expected_information_gain, predictive_entropy, empirical_entropy or random_scores."
            )


class _Protocol(NamedTuple):
    """All that is the same in every repeat."""

    engine: BilinearEP
    run: NoiseRun
    """Run of the engine."""
    ratings: Any
    """The model on all ratings."""
    arguments: dict[str, Any]
    names: tuple[str, ...]
    """Arguments with one entry for each rating."""
    side: int
    sizes: tuple[int, int, int]
    """Ratings of each newcomer that are known at first, held out, and asked for."""
    num_draws: int
    refit: Refit

    @classmethod
    def of(
        cls,
        engine: AnyEngine,
        data: Sequence[object] | Mapping[str, object],
        new: str,
        kwargs: Mapping[str, object],
        num_initial: int,
        num_held_out: int,
        num_queries: int,
        num_draws: int,
        refit: Refit,
    ) -> _Protocol:
        check_kind("cold_start", engine, BaseEngine, "a BilinearEP after its run")
        run = engine._finished()
        if not isinstance(engine, BilinearEP) or not isinstance(run, NoiseRun):
            raise ValueError(
                f"cold_start is for ratings (OrderedProbit) with latent noise, cut points or priors of vectors that "
                f"BilinearEP has fitted, and {type(engine).__name__} here has a {type(run).__name__}: fit a model such "
                "as numpyro_ext.models.heteroscedastic_ratings by BilinearEP."
            )
        reading = run.reading
        sides = [number for number, sites in enumerate(reading.sides) if new in sites]
        if not sides:
            raise ValueError(
                f"new={new!r} is a site of neither side: name one of {list(reading.sides[0])} for new rows, or of "
                f"{list(reading.sides[1])} for new columns."
            )
        fitted, call = bound_arguments(engine.model, reading.args, dict(reading.kwargs))
        given = dict(data) if isinstance(data, Mapping) else dict(zip(fitted, data, strict=False))
        unknown = sorted((set(given) | set(kwargs)) - set(fitted))
        if unknown:
            raise ValueError(f"{unknown} are no arguments of the model, which are {list(fitted)}.")
        arguments = {**fitted, **given, **kwargs}
        args, rest = call(arguments)
        found = read_like(reading, args, rest, run.rng_key, has_sizes=False)
        num = found.index[0].size
        shapes = {name: np.asarray(value).shape for name, value in given.items()}
        if {shape[:1] for shape in shapes.values()} != {(num,)}:
            raise ValueError(f"data has the shapes {shapes}, and the model {num} ratings: give one entry for each.")
        ratings = run.on(found)
        sizes = num_initial, num_held_out, num_queries
        return cls(engine, run, ratings, arguments, tuple(given), sides[0], sizes, num_draws, refit)

    def task(self, share: float | None, key_parts: Array, key_fit: Array) -> _Task:
        """Newcomers, the fit that has not seen them, and which of their ratings are what."""
        owner = np.asarray(self.ratings.reading.index[self.side])
        chosen = self._chosen(owner, share, key_parts)
        run = self.run if share is None else self._without(np.isin(owner, chosen), key_fit)
        people = Newcomers.of(run.fitted, self.ratings.form, self.side, chosen)
        person = np.asarray(people.met.person)
        order = np.lexsort((np.asarray(random.uniform(key_parts, person.shape)), person))
        first, held_out, _ = self.sizes
        rank = np.empty(person.size, int)
        rank[order] = np.arange(person.size) - np.searchsorted(person[order], person[order])
        return _Task(self, run.fitted, chosen, people, rank < first, (rank >= first) & (rank < first + held_out))

    def _chosen(self, owner: np.ndarray, share: float | None, rng_key: Array) -> np.ndarray:
        """Numbers of the newcomers."""
        least = sum(self.sizes)
        everybody, number = np.unique(owner, return_counts=True)
        able = everybody[number >= least]
        wanted = everybody.size if share is None else max(1, round(share * everybody.size))
        if able.size < wanted:
            poor = everybody[number < least]
            first, held_out, asked = self.sizes
            raise ValueError(
                f"{poor.size} of {everybody.size} {('rows', 'columns')[self.side]} have fewer than {least} ratings "
                f"({first} known, {held_out} held out, {asked} asked for), such as {poor[:5].tolist()}, so that there "
                f"are {able.size} newcomers, and {wanted} are wanted: leave these out of data, lower num_queries or "
                "num_held_out, or share."
            )
        return np.sort(np.asarray(random.permutation(rng_key, able))[:wanted])

    def _without(self, is_new: np.ndarray, rng_key: Array) -> NoiseRun:
        """A run on the ratings of all others."""
        others = {name: np.asarray(self.arguments[name])[~is_new] for name in self.names}
        engine = type(self.engine)(self.engine.model, **self.engine._options_given())
        _, call = bound_arguments(engine.model, (), self.arguments)
        args, kwargs = call({**self.arguments, **others})
        options: dict[str, Any] = kwargs
        engine.run(rng_key, *args, **options)
        run = engine._finished()
        assert isinstance(run, NoiseRun)  # as that of the same model was
        return run


class _Task(NamedTuple):
    """One repeat."""

    protocol: _Protocol
    fitted: Fitted
    chosen: np.ndarray
    people: Newcomers
    is_first: np.ndarray
    is_held_out: np.ndarray

    def curves(self, score: Acquisition, rng_key: Array) -> np.ndarray:
        """Log likelihood, error and seconds after each number of answers, shape ``(3, num_queries + 1)``."""
        first, _, num_queries = self.protocol.sizes
        people, fitted, found = self.people, self.fitted, []
        person = np.asarray(people.met.person)
        is_used, began = self.is_first.copy(), time.process_time()
        slots = np.zeros((len(self.chosen), first + num_queries), int)
        slots[:, :first] = np.flatnonzero(is_used)[np.argsort(person[is_used], kind="stable")].reshape(-1, first)
        for step in range(num_queries + 1):
            if self.protocol.refit == "new":
                people = people.learned(slots, first + step, tol=_TOL, rule=self.protocol.run.noisy.rule)
            else:
                here = slots[:, first + step - 1] if step else slots[:, :first].reshape(-1)
                fitted = with_cells(fitted, people.met.form.taken(jnp.asarray(here)), self.protocol.run.noisy.rule)
                people = people.of_all(fitted)
            found.append((*self.scored(people), time.process_time() - began))
            if step == num_queries:
                break
            began = time.process_time()
            is_candidate = ~(is_used | self.is_held_out)
            key = random.fold_in(rng_key, step)
            source = _Source(self.protocol, people, is_candidate, key)
            values = np.asarray(next(iter(score(source, rng_key=key).values())), float)
            ties = np.asarray(random.uniform(random.fold_in(key, 1), values.shape))
            order = np.lexsort((ties, np.where(is_candidate, values, -np.inf), person))
            asked = order[np.searchsorted(person[order], np.arange(len(self.chosen)), side="right") - 1]
            slots[:, first + step], is_used[asked] = asked, True
        return np.array(found).T

    def scored(self, people: Newcomers) -> tuple[float, float]:
        """Log likelihood of the ratings held out, and the root mean squared error of the expected level."""
        probabilities = people.predictive[self.is_held_out]
        level = np.asarray(people.met.form.label)[self.is_held_out]
        chance = np.take_along_axis(probabilities, level[:, None], 1)[:, 0]
        expected = probabilities @ np.arange(probabilities.shape[1])
        return float(np.sum(np.log(chance))), float(np.sqrt(np.mean((expected - level) ** 2)))


class _Source:
    """Ratings of newcomers that could be asked for, as scores see them."""

    takes_points = True

    def __init__(self, protocol: _Protocol, people: Newcomers, is_candidate: np.ndarray, rng_key: Array) -> None:
        self._protocol, self._people, self._is_candidate = protocol, people, is_candidate
        self._key = rng_key

    def outlooks(self, focus: Any = None, points: Points = "draws") -> dict[str, Outlook]:
        """Expectations of each rating; the focus is the newcomer's own vector."""
        reading, side = self._protocol.run.reading, self._protocol.side
        others = sorted(set([focus] if isinstance(focus, str) else focus or ()) - set(reading.sides[side]))
        if others:
            raise ValueError(
                f"focus names {others}, and a cold start asks about the vectors of each newcomer, "
                f"{list(reading.sides[side])}: leave focus out."
            )
        people = self._people
        size = people.met.prior.mean.shape[1]
        white = {
            "draws": lambda: random.normal(self._key, (self._protocol.num_draws, size)),
            "sigma-points": lambda: jnp.sqrt(float(size)) * jnp.concatenate([jnp.eye(size), -jnp.eye(size)]),
            "mode": lambda: jnp.zeros((1, size)),
        }[points]
        (name,) = reading.factor_names
        with np.errstate(divide="ignore"):
            log_p = np.log(people.predictive)
        return {
            name: VectorOutlook(
                name=name,
                shape=self._is_candidate.shape,
                is_candidate=self._is_candidate,
                log_p=jnp.asarray(log_p),
                gain=lambda: people.information(white()),
                frequencies=people.frequencies,
            )
        }
