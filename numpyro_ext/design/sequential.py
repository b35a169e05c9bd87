"""Learning by asking: propose an observation, be told its value, go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax import Array

from ..infer.front.engine import AnyEngine, BaseEngine
from ..infer.front.options import check_at_least, check_one_of
from ..infer.front.running.progress import warn
from ..infer.gaussian.engine import Engine
from ..infer.gaussian.run import GaussianRun
from ..infer.monte_carlo.run import SMCRun
from ..infer.monte_carlo.smc import SMC
from ..structure.model.running.execution import bound_arguments, check_key
from .outcomes.outlooks import Outlook
from .outcomes.pool import NoPool, Pool
from .outcomes.sources import outlooks
from .prequential import Bets, log_gains
from .scores.pointwise import Acquisition, expected_information_gain
from .selection.single import Candidate, select
from .told_arguments import Observed, argument_names, with_told

__all__ = ["SequentialDesign"]


@jax.jit
def _keys(rng_key: Array, number: int | None) -> tuple[Array, Array]:
    """For scores, of the step of that number if one is given, and for ties."""
    key = rng_key if number is None else jax.random.fold_in(rng_key, number)
    return key, jax.random.fold_in(key, 1)


def _observed(engine: AnyEngine | SMC) -> Observed:
    run = engine._finished()
    if isinstance(run, SMCRun):
        shapes = {n: tuple(site.batch_shape) for n, site in run.observations.items()}
        masks = {n: np.broadcast_to(np.asarray(run.observations[n].mask), shape) for n, shape in shapes.items()}
        return Observed(shapes, {n: site.value for n, site in run.observations.items()}, masks)
    reading = run.reading
    shapes = {n: tuple(s) for n, s in zip(reading.observed_names, reading.factor_shapes, strict=False)}
    return Observed(
        shapes, {n: reading.sites[n].value for n in shapes}, {n: np.asarray(reading.known_mask(n)) for n in shapes}
    )


class SequentialDesign:
    """Observations one by one, each chosen by what it would tell after the others.

    The engine has run on a pool in which what is not yet observed is masked. On Gaussian fields (EP,
    VariationalGaussian, LaplaceApproximation, INLA) an observation then costs a fit of the observations that are seen,
    from where the last one ended, and a look at the pool: ``M^3 + N M^2`` for M of N. Nothing is compiled but once for
    each doubling of M. Hyperparameters stay where the fit has them, or are weighted anew at the points over which it
    integrates; :meth:`refit` learns them again. :class:`~numpyro_ext.infer.SMC` is updated; others run
    again after each observation.

    Experiments that can be made again and again (counts that grow, series that go on) have no mask: ``candidates`` are
    then arguments of the model at which to look, and ``enter`` says how an observation enters the arguments of the fit.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from jax.scipy.stats import norm
    >>> from numpyro_ext.design import SequentialDesign
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None, seen=True):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     with numpyro.handlers.mask(mask=seen):
    ...         numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(x @ slope)), obs=y)
    >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [2.0, 0.0]])
    >>> engine = EP(model)
    >>> engine.run(random.key(0), x, jnp.array([1, 0, 0, 0]), jnp.array([True, False, False, False]))
    >>> design = SequentialDesign(engine)
    >>> place = design.propose(random.key(1))
    >>> design.observe(place, 1)
    >>> print(place, design.num_observed, design.history["value"].values)
    2 2 [1.]

    :param engine: after its run, with the observations that could be made masked.
    :param acquisition: the score, such as :func:`~numpyro_ext.design.expected_information_gain`, or any function with
        its signature.
    :param observations: which argument of the model holds the observations, or of several sites a dictionary; found by
        its values if left out.
    :param mask: which argument says what has been observed, true where it has; found by its values if left out. There
        need be none where observations that are missing are nan, which the model masks itself.
    :param refit_every: run the engine again on all data after so many observations, so that hyperparameters are
        learned anew; never by default. After each one, scores are asked of the engine itself, with all their options
        (``focus``, ``hyper``). With ``"evidence"`` when the data call for it: when outcomes since the last fit are so
        much wilder, or tamer, than it predicted that a bet against its predictions has won twenty times its stake
        (Dawid 1984). Where predictions are right, that happens between two fits with a probability of one in twenty at
        most, however many observations there are. Engines that run again after each observation anyway, and
        :class:`~numpyro_ext.infer.SMC`, which is updated with all that it learns, do as they do without.
    :param candidates: a tuple of arguments of the model at which an observation could be made, whatever has been
        observed, or a dictionary of keyword arguments; needs ``enter``.
    :param enter: a function of the arguments of the fit by name, a place and a value, which returns the arguments with
        that observation.
    :param test: a function of a source of scores, called after each observation and kept in the history, such as a
        held-out score.
    :param options: further keyword arguments of the acquisition.
    :raises RuntimeError: if the engine has not run.
    :raises ValueError: if nothing is masked, or the arguments cannot be told and are needed.
    """

    def __init__(
        self,
        engine: BaseEngine[Any] | SMC,
        acquisition: Acquisition = expected_information_gain,
        *,
        observations: str | Mapping[str, str] | None = None,
        mask: str | Mapping[str, str] | None = None,
        refit_every: int | Literal["evidence"] | None = None,
        candidates: tuple[object, ...] | Mapping[str, object] | None = None,
        enter: Callable[[dict[str, Any], object, object], Mapping[str, object]] | None = None,
        test: Callable[[object], float] | None = None,
        **options: object,
    ) -> None:
        if not isinstance(engine, BaseEngine | SMC):
            raise TypeError(f"SequentialDesign takes an engine of this package after its run, not {engine!r}.")
        if not callable(acquisition):
            raise TypeError(f"acquisition must be a function such as expected_information_gain, not {acquisition!r}.")
        if isinstance(refit_every, str):
            check_one_of(Literal["evidence"], refit_every=refit_every)
        elif refit_every is not None:
            check_at_least(1, refit_every=refit_every)
        self._engine, self._acquisition, self._options = engine, acquisition, options
        self._refit_every, self._test = refit_every, test
        self._since, self._bets = 0, Bets()  # observations since the last fit, and how bets against it have done
        self._given = {"observations": observations, "mask": mask}
        self._steps: list[dict[str, Any]] = []
        self._proposed: dict[tuple[str, Any], float] = {}
        self._candidates, self._enter = candidates, enter
        self._pool: Pool | None = None
        if (candidates is None) != (enter is None):
            raise TypeError("candidates and enter go together: where to look, and how what is seen enters the fit.")
        self._rng_key = engine._finished().rng_key
        if enter is not None:
            self._shapes, self._values, self._seen = {}, {}, {}
            self._reason = "observations can be made again"
            return
        found = _observed(engine)
        self._shapes = found.shapes
        self._values = {n: np.array(value, float).reshape(-1) for n, value in found.values.items()}
        self._seen = {n: np.array(mask).reshape(-1) for n, mask in found.masks.items()}
        self._reason = "its posterior is no Gaussian field"
        self._make_pool()
        if all(seen.all() for seen in self._seen.values()):
            outlooks(engine)  # says what to do
        if self._pool is None or refit_every is not None:
            _ = self._argument_names  # says now what cannot be told

    def _make_pool(self) -> None:
        if self._refit_every == 1:  # scores are those of the engine itself, which have more options
            self._reason = "it is refitted after each observation"
            return
        run = self._engine._finished()
        if isinstance(self._engine, Engine) and isinstance(run, GaussianRun):
            try:
                self._pool = Pool(run, self._engine.num_steps)
            except NoPool as reason:
                self._pool, self._reason = None, str(reason)

    def __repr__(self) -> str:
        how = "incremental fits" if self._pool is not None else f"runs of {type(self._engine).__name__}: {self._reason}"
        if self._enter is not None:
            return f"SequentialDesign({self.num_observed} observed, {type(self._engine).__name__})"
        left = sum(int((~seen).sum()) for seen in self._seen.values())
        return f"SequentialDesign({self.num_observed} observed, {left} candidates, {how})"

    @property
    def source(self) -> Any:
        """Source from which scores are computed now; every score takes it."""
        return self._engine if self._pool is None else self._pool

    @property
    def engine(self) -> AnyEngine | SMC:
        """The engine as it ran last; see :meth:`refit`."""
        return self._engine

    @property
    def num_observed(self) -> int:
        """Observations that are in use."""
        if self._enter is not None:
            return len(self._steps)
        return sum(int(seen.sum()) for seen in self._seen.values())

    def observed_places(self, site: str | None = None) -> np.ndarray:
        """Numbers of the observations that are in use, in C order.

        :param str site: of which, where there are several.
        """
        if site is None and len(self._seen) > 1:
            raise ValueError(f"Name one of the sites {list(self._seen)}.")
        return np.flatnonzero(self._seen[site or next(iter(self._seen))])

    @property
    def log_evidence(self) -> float:
        """Log evidence of the observations so far."""
        return self._pool.log_evidence if self._pool is not None else float(self._engine.log_evidence)

    def predictors(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Mean and variance of the predictor of every observation of the pool, seen or not, by site.

        :raises ValueError: if the posterior is not of that kind.
        """
        if self._pool is None:
            raise ValueError(f"There are no predictors, as {self._reason}: ask engine.posterior.")
        return self._pool.predictors()

    def scores(self, rng_key: Array | None = None) -> dict[str, np.ndarray]:
        """The acquisition of every observation, minus infinity for those that are seen."""
        looked: Any = () if self._candidates is None else self._candidates
        args, kwargs = ((), looked) if isinstance(looked, Mapping) else (looked, {})
        found = self._acquisition(self.source, *args, rng_key=rng_key, **kwargs, **self._options)
        if not isinstance(found, Mapping):
            raise TypeError(
                f"A score returns a dictionary of arrays by observed site ({list(self._shapes)}); "
                f"{self._acquisition!r} returned a {type(found).__name__}."
            )
        return {name: self._of_candidates(name, scores) for name, scores in found.items()}

    def _of_candidates(self, name: str, scores: Any) -> Any:
        """Scores of a user's own function may know nothing of what is seen."""
        if self._enter is not None or np.shape(scores) != self._shapes.get(name):
            return scores
        return np.where(self._seen[name].reshape(self._shapes[name]), -np.inf, np.asarray(scores))

    def propose(self, rng_key: Array | None = None, *, size: int | None = None, **selection: Any) -> Any:
        """Choose the observation to make next. Nothing changes until it is told: see :meth:`observe`.

        :param rng_key: for scores that draw, and among equal ones.
        :param int size: a list of so many, of the largest scores each for itself; ``select_batch(design.source, size)``
            is of those that tell the most together.
        :param selection: ``cost``, ``budget`` and ``exclude``, as for :func:`~numpyro_ext.design.select`.
        :return: the place of the observation, a number where they have one axis; of several sites ``(site, place,
            score)``.
        :raises ValueError: if nothing is left.
        """
        if rng_key is not None:
            check_key(rng_key, "propose(jax.random.key(0))")
        key, tie_key = _keys(self._rng_key, self.num_observed) if rng_key is None else _keys(rng_key, None)
        found = select(self.scores(key), size, rng_key=tie_key, **selection)
        chosen = found if isinstance(found, list) else [found]
        if self._enter is not None:
            self._proposed = {(c.site, c.place): c.score for c in chosen}
            places = [c if len({each.site for each in chosen}) > 1 else c.place for c in chosen]
            return places if isinstance(found, list) else places[0]
        self._proposed = {(c.site, self._number(c.site, c.place)): c.score for c in chosen}
        places = [c if len(self._shapes) > 1 else c.place for c in chosen]
        return places if isinstance(found, list) else places[0]

    def observe(self, place: Any, value: Any) -> None:
        """Take one observation, or several, into the fit.

        :param place: as :meth:`propose` returns it, or a list of these; any candidate will do, proposed or not.
        :param value: what was observed there, or as many values.
        :raises ValueError: if there is no such candidate, it has a value already, or the value is none of the support.
        """
        started = time.perf_counter()
        if self._enter is not None:
            self._take_again(place, value, started)
            return
        if isinstance(place, list) and len(place) != np.size(value):
            raise ValueError(f"{len(place)} places are told, and {np.size(value)} values.")
        pairs = list(zip(place, value, strict=True)) if isinstance(place, list) else [(place, value)]
        taken = [(*self._candidate(one), told) for one, told in pairs]
        if len({(site, number) for site, number, _ in taken}) < len(taken):
            raise ValueError("The same observation is told twice at once.")
        before = outlooks(self.source)
        steps = [self._checked(before[site], number, told) for site, number, told in taken]
        state = self._since, self._bets
        is_refit = self._calls_for_refit(before, taken) or self._pool is None
        pool, old = self._pool, [(site, number, self._values[site][number]) for site, number, _ in taken]
        snapshot = () if pool is None else pool.snapshot()
        try:
            self._take(taken, is_refit)
            seconds = (time.perf_counter() - started) / len(taken)
            score = float("nan") if self._test is None else float(self._test(self.source))
        except BaseException:  # of a user who waits no longer, or a fit that fails: nothing has been told
            for site, number, value_before in old:
                self._values[site][number], self._seen[site][number] = value_before, False
            self._pool, (self._since, self._bets) = pool, state
            if pool is not None:
                pool.restore(snapshot)
            raise
        for (site, number, told), log_predictive in zip(taken, steps, strict=True):
            self._steps.append(
                {
                    "site": site,
                    "place": number,
                    "value": float(told),
                    "score": self._proposed.get((site, number), float("nan")),
                    "log_predictive": log_predictive,
                    "log_evidence": self.log_evidence,
                    "test": score,
                    "num_observed": self.num_observed,
                    "seconds": seconds,
                    "is_refit": is_refit and not isinstance(self._engine, SMC),
                }
            )
        self._proposed = {}

    def _calls_for_refit(self, before: Mapping[str, Outlook], taken: list[tuple[str, int, Any]]) -> bool:
        """Count observations, and say whether hyperparameters are to be learned anew."""
        if self._refit_every == "evidence" and self._pool is not None:
            gains = [log_gains(before[site], number, float(told)) for site, number, told in taken]
            self._bets = self._bets.after(gains)
        self._since += len(taken)
        if isinstance(self._refit_every, int):
            return self._since >= self._refit_every
        return self._bets.are_won

    def _take(self, taken: list[tuple[str, int, Any]], is_refit: bool) -> None:
        for site, number, told in taken:
            self._values[site][number], self._seen[site][number] = float(told), True
        if self._pool is None or is_refit:
            self.refit()
            return
        for site, number, told in taken:
            self._pool.add(site, number, float(told))
        self._pool.update()
        if not self._pool.converged:
            warn(f"The fit of {self.num_observed} observations did not converge; refit() runs the engine on them.")

    def _take_again(self, place: Any, value: Any, started: float) -> None:
        """An observation that enters the arguments of the fit as the user says."""
        assert self._enter is not None
        arguments, call = self._arguments
        before = self.log_evidence
        args, kwargs = call(self._enter(dict(arguments), place, value))
        if isinstance(self._engine, SMC):
            self._engine.update(*args, **kwargs)
        else:
            self._engine.run(self._rng_key, *args, **kwargs)
        site, score = next(((s, c) for (s, at), c in self._proposed.items() if at == place), ("", float("nan")))
        seconds = time.perf_counter() - started
        self._steps.append(
            {
                "site": site,
                "place": int(place) if np.ndim(place) == 0 else -1,
                "value": float(value) if np.ndim(value) == 0 else float("nan"),
                "score": score,
                "log_predictive": self.log_evidence - before,
                "log_evidence": self.log_evidence,
                "test": float("nan") if self._test is None else float(self._test(self.source)),
                "num_observed": len(self._steps) + 1,
                "seconds": seconds,
                "is_refit": not isinstance(self._engine, SMC),
            }
        )
        self._proposed = {}

    def refit(self) -> AnyEngine | SMC:
        """Run the engine on all that has been observed, hyperparameters included.

        :return: the engine.
        :raises ValueError: if it cannot be told which arguments hold observations and mask.
        """
        arguments, call = self._arguments
        values, seen = (
            {site: part[site].reshape(shape) for site, shape in self._shapes.items()}
            for part in (self._values, self._seen)
        )
        args, kwargs = call(with_told(arguments, self._argument_names, values, seen))
        if isinstance(self._engine, SMC):
            self._engine.update(*args, **kwargs)
            return self._engine
        self._engine.run(self._rng_key, *args, init_state=self._engine.last_state, **kwargs)
        self._make_pool()
        self._since, self._bets = 0, Bets()
        return self._engine

    @property
    def history(self) -> Any:
        """Observations, step by step: an ``xarray.Dataset`` over ``step``.

        ``place`` counts observations in C order; ``log_predictive`` is that of the value before it was seen, and sums
        to the gain in ``log_evidence`` where nothing was refitted and fits are exact. ``is_refit`` says after which
        observations the engine ran again.
        """
        import xarray

        names = "site place value score log_predictive log_evidence test num_observed seconds is_refit".split()
        columns = {name: ("step", np.array([step[name] for step in self._steps])) for name in names}
        return xarray.Dataset(columns, coords={"step": np.arange(1, len(self._steps) + 1)})

    # Which arguments hold what

    @cached_property
    def _argument_names(self) -> dict[str, tuple[str, str | None]]:
        """For each observed site the names of the arguments with its observations and its mask."""
        return argument_names(self._arguments[0], _observed(self._engine), **self._given)

    @property
    def _arguments(self) -> Any:
        """Arguments of the last run by name, and the function that makes a call of them."""
        engine = self._engine
        return bound_arguments(engine.model, engine._args, engine._kwargs)

    # Candidates

    def _number(self, site: str, place: object) -> int:
        return int(np.ravel_multi_index(place if isinstance(place, tuple) else (place,), self._shapes[site]))

    def _candidate(self, place: object) -> tuple[str, int]:
        if isinstance(place, Candidate):
            site, place = place.site, place.place
        elif len(self._shapes) == 1:
            (site,) = self._shapes
        elif isinstance(place, tuple) and place and place[0] in self._shapes:
            site, place = place[0], place[1]
        else:
            raise ValueError(f"Observations belong to one of {list(self._shapes)}: tell (site, place), got {place!r}.")
        index = place if isinstance(place, tuple) else (place,)
        try:
            index = tuple(int(i) for i in index if int(i) == i)
            number = self._number(site, index)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place!r} is no place in site {site!r} of shape {self._shapes[site]}.") from error
        if self._seen[site][number]:
            raise ValueError(f"The observation at {place!r} of site {site!r} has a value already.")
        return site, number

    def _checked(self, outlook: Outlook, number: int, value: object) -> float:
        """Log predictive density of a value, which has to be one of the support."""
        try:
            told = np.asarray(value, float)
        except (TypeError, ValueError):
            told = np.asarray(np.nan)
        if told.ndim != 0 or not np.isfinite(told):
            raise ValueError(f"The value of {outlook.name!r} must be one finite number, got {value!r}.")
        found = float(outlook.log_predictive(np.array([number]), told[None])[0])
        if found == -np.inf:
            raise ValueError(f"{value!r} is no value that observation {number} of site {outlook.name!r} could have.")
        return found
