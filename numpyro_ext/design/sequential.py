"""Learning by asking: propose an observation, be told its value, go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, Self

import jax
import numpy as np
from jax import Array

from ..infer.front.engine import AnyEngine, BaseEngine
from ..infer.front.files.archive import read_archive, write_archive
from ..infer.front.options import check_at_least, check_kind, check_one_of
from ..infer.front.running.progress import warn
from ..infer.gaussian.engine import Engine
from ..infer.gaussian.runs.run import GaussianRun
from ..infer.monte_carlo.smc import SMC
from ..structure.model.running.execution import bound_arguments, check_key
from .history import History
from .observed_arguments import Observed, argument_names, with_observations
from .outcomes.pool import NoPool, Pool
from .outcomes.sources import outlooks
from .prequential import Bets, RefitRule
from .scores.pointwise import Acquisition, expected_information_gain
from .selection.places import Places, checked_value
from .selection.single import select


@jax.jit
def _keys(rng_key: Array, number: int | None) -> tuple[Array, Array]:
    """For scores, of the step of that number if one is given, and for ties."""
    key = rng_key if number is None else jax.random.fold_in(rng_key, number)
    return key, jax.random.fold_in(key, 1)


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
        self._rule, self._test = RefitRule(refit_every), test
        self._given = {"observations": observations, "mask": mask}
        self._history = History()
        self._candidates, self._enter = candidates, enter
        self._pool: Pool | None = None
        if (candidates is None) != (enter is None):
            raise TypeError("candidates and enter go together: where to look, and how what is seen enters the fit.")
        check_kind("SequentialDesign", engine, (BaseEngine, SMC), "an engine after its run")
        self._rng_key = engine._finished().rng_key
        self._places = Places({}, {}, {})
        if enter is not None:
            self._reason = "observations can be made again"
            return
        self._places = Places.of(*Observed.of(engine))
        self._reason = "its posterior is no Gaussian field"
        self._make_pool()
        if not self._places.num_left:
            outlooks(engine)  # says what to do
        if self._pool is None or refit_every is not None:
            _ = self._argument_names  # says now what cannot be told

    def _make_pool(self) -> None:
        if self._rule.every == 1:  # scores are those of the engine itself, which have more options
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
        return f"SequentialDesign({self.num_observed} observed, {self._places.num_left} candidates, {how})"

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
        return self._places.num_seen if self._enter is None else len(self._history.steps)

    def observed_places(self, site: str | None = None) -> np.ndarray:
        """Numbers of the observations that are in use, in C order.

        :param str site: of which, where there are several.
        """
        return self._places.numbers_seen(site)

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
                f"A score returns a dictionary of arrays by observed site ({list(self._places.shapes)}); "
                f"{self._acquisition!r} returned a {type(found).__name__}."
            )
        # Scores of a user's own function may know nothing of what is seen.
        return {name: self._places.without_seen(name, scores) for name, scores in found.items()}

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
            sites, numbers = {c.site for c in chosen}, [c.place for c in chosen]
        else:
            sites, numbers = set(self._places.shapes), [self._places.number(c.site, c.place) for c in chosen]
        self._history.proposed = {(c.site, number): c.score for c, number in zip(chosen, numbers, strict=True)}
        places = [c if len(sites) > 1 else c.place for c in chosen]
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
        taken = [(*self._places.candidate(one), told) for one, told in pairs]
        if len({(site, number) for site, number, _ in taken}) < len(taken):
            raise ValueError("The same observation is told twice at once.")
        before = outlooks(self.source)
        steps = [checked_value(before[site], number, told) for site, number, told in taken]
        rule = self._rule
        self._rule = rule.after([(before[site], number, float(told)) for site, number, told in taken])
        is_refit = self._rule.is_due or self._pool is None
        pool, old = self._pool, [(site, number, self._places.values[site][number]) for site, number, _ in taken]
        snapshot = () if pool is None else pool.snapshot()
        try:
            self._take(taken, is_refit)
            seconds = (time.perf_counter() - started) / len(taken)
            score = float("nan") if self._test is None else float(self._test(self.source))
        except BaseException:  # of a user who waits no longer, or a fit that fails: nothing has been told
            for site, number, value_before in old:
                self._places.put(site, number, value_before, is_seen=False)
            self._pool, self._rule = pool, rule
            if pool is not None:
                pool.restore(snapshot)
            raise
        for (site, number, told), log_predictive in zip(taken, steps, strict=True):
            self._record((site, number), float(told), log_predictive, score, seconds, is_refit)
        self._history.proposed = {}

    def _record(
        self, place: tuple[str, Any], value: float, log_predictive: float, test: float, seconds: float, is_refit: bool
    ) -> None:
        self._history.add(
            place,
            value=value,
            log_predictive=log_predictive,
            log_evidence=self.log_evidence,
            test=test,
            num_observed=self.num_observed + (self._enter is not None),
            seconds=seconds,
            is_refit=is_refit and not isinstance(self._engine, SMC),
        )

    def _take(self, taken: list[tuple[str, int, Any]], is_refit: bool) -> None:
        for site, number, told in taken:
            self._places.put(site, number, float(told))
        if self._pool is None or is_refit:
            self.refit()
            return
        self._pool.take((site, number, float(told)) for site, number, told in taken)
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
        site = next((site for site, at in self._history.proposed if at == place), "")
        told, seconds = float(value) if np.ndim(value) == 0 else np.nan, time.perf_counter() - started
        test = np.nan if self._test is None else float(self._test(self.source))
        self._record((site, place), told, self.log_evidence - before, test, seconds, True)
        self._history.proposed = {}

    def refit(self) -> AnyEngine | SMC:
        """Run the engine on all that has been observed, hyperparameters included.

        :return: the engine.
        :raises ValueError: if it cannot be told which arguments hold observations and mask.
        """
        arguments, call = self._arguments
        args, kwargs = call(with_observations(arguments, self._argument_names, *self._places.in_shapes()))
        if isinstance(self._engine, SMC):
            self._engine.update(*args, **kwargs)
            return self._engine
        self._engine.run(self._rng_key, *args, init_state=self._engine.last_state, **kwargs)
        self._make_pool()
        self._rule = RefitRule(self._rule.every)
        return self._engine

    @property
    def history(self) -> Any:
        """Observations, step by step: an ``xarray.Dataset`` over ``step``.

        ``place`` counts observations in C order; ``log_predictive`` is that of the value before it was seen, and sums
        to the gain in ``log_evidence`` where nothing was refitted and fits are exact. ``is_refit`` says after which
        observations the engine ran again.
        """
        return self._history.dataset()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine and all that has been observed to a file, for :meth:`load`.

        :param path: of the file.
        :raises TypeError: if the engine cannot be saved; its :meth:`~numpyro_ext.infer.EP.save` says why.
        """
        design = {
            "values": self._places.values,
            "seen": self._places.seen,
            **self._history.content(),
            "since": self._rule.since,
            "log_capital": self._rule.bets.log_capital,
        }
        write_archive(path, {**self._engine._file_content(), "design": design})

    @classmethod
    def load(cls, path: str | os.PathLike[str], engine: BaseEngine[Any] | SMC, *args: Any, **kwargs: Any) -> Self:
        """Go on with a design that :meth:`save` wrote.

        ``SequentialDesign.load("design.npz", EP.load("design.npz", model))``: the file is that of the engine as well.

        :param path: of the file.
        :param engine: loaded from the same file.
        :param args: further arguments of the constructor, which are not in the file: acquisition, options, functions.
        :return: the design; what was observed since the last run of the engine is fitted again.
        :raises ValueError: if the file holds no design, or the engine is that of another one.
        """
        saved = read_archive(path).get("design")
        if saved is None:
            raise ValueError(f"{os.fspath(path)!r} holds no SequentialDesign: it is the file of an engine.")
        made = cls(engine, *args, **kwargs)
        made._see(saved["values"], saved["seen"])
        made._history.restore(saved)
        made._rule = made._rule._replace(since=saved["since"], bets=Bets(saved["log_capital"]))
        return made

    def _see(self, values: Mapping[str, np.ndarray], seen: Mapping[str, np.ndarray]) -> None:
        """Fit the observations of a design that the run of the engine does not have."""
        new = self._places.restore(values, seen)
        if self._pool is not None and new:
            self._pool.take(new)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._enter is None:
            places, self._places = self._places, Places.of(*Observed.of(self._engine))
            self._make_pool()
            self._see(places.values, places.seen)

    # Which arguments hold what

    @cached_property
    def _argument_names(self) -> dict[str, tuple[str, str | None]]:
        """For each observed site the names of the arguments with its observations and its mask."""
        return argument_names(self._arguments[0], Observed.of(self._engine), **self._given)

    @property
    def _arguments(self) -> Any:
        """Arguments of the last run by name, and the function that makes a call of them."""
        engine = self._engine
        return bound_arguments(engine.model, engine._args, engine._kwargs)
