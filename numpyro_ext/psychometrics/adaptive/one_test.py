"""An adaptive test of one person: which item is next, and what the answers say."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ...design.scores.pointwise import Acquisition, expected_information_gain
from ...infer.front.files.archive import read_archive, write_archive
from ...structure.model.running.execution import check_key
from ..curves import item_numbers
from .administration import Administration, StepKeys, Stop, generator
from .bank import Items, make_bank
from .examinees import SITE, Examinees, make_beliefs


class AdaptiveTest:
    """A test that asks one person the item that tells most, given the answers so far.

    The state is the density of the traits on nodes (of up to three traits; of more, or where the table of the bank
    would be too large, a Gaussian at the mode). An answer adds one row of a table of log probabilities to its
    logarithm. So answers may come in any order and be taken back, and nothing is compiled after the first item. Items
    are known as well as the calibration knows them: with ``items="posterior"`` the density is that of the traits and
    of draws of the items together, and scores have the items integrated out (Houlsby 2014, eq. 3.7).

    Cost: the table has ``draws * items * categories * nodes`` numbers. A proposal reads it once, an answer one row.

    Tests are pickled and copied with their table, for other processes. For ``pickle`` a response or an acquisition of
    your own has to be a function of a module; ``cloudpickle``, which joblib and Ray use, takes any.

    **Example:** a bank of Rasch items that is given as a function.

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.psychometrics import AdaptiveTest
    >>> difficulty = jnp.array([-2.0, 0.1, 1.0, 3.0])
    >>> def response(theta):
    ...     return dist.Bernoulli(logits=theta[..., None] - difficulty)
    >>> test = AdaptiveTest(response, prior=(0.0, 1.0), stop={"num_items": 2})
    >>> item = test.propose()
    >>> test.answer(item, 1)
    >>> print(item, round(float(test.mean), 3), test.propose(), test.is_over)
    1 0.43 2 False

    :param source: an engine or sampler after its run, whose model has people by items; or a function from traits,
        shape ``(...,)`` or ``(..., D)``, to a distribution of batch shape ``(..., items)``, or of
        ``(draws, ..., items)`` for items that are not known exactly.
    :param acquisition: score of the items: one of :mod:`numpyro_ext.design` or any function ``(test, rng_key=) ->
        {"response": scores}``, larger is better.
    :param stop: the test is over at ``{"standard_error": 0.3, "num_items": 30}``, whichever comes first; of several
        traits all must be known so well.
    :param exposure: ``{"randomesque": k}`` asks one of the ``k`` best items; ``{"sympson_hetter": rates}`` asks a
        chosen item with its probability, see :func:`~numpyro_ext.psychometrics.exposure_rates`.
    :param content: the area of each item and a dictionary of shares: ``(areas, {"algebra": 0.6, "geometry": 0.4})``.
    :param str items: ``"posterior"`` for draws of the items, ``"point"`` for the estimates, both of a fitted model.
    :param int num_draws: number of draws of the items.
    :param rng_key: for the draws of the items, equal scores and exposure; a fixed key if left out.
    :param prior: mean and covariance of the person's traits; read off the model if left out.
    :param answers: what is known before the first item, a dictionary from items to answers.
    :param str trait: name of the site of the traits.
    :param int num_nodes: nodes along each trait, in the place of as many as the sharpest posterior needs.
    :param person: arguments of the model for this person, one row each, such as covariates.
    :raises ValueError: if the bank is empty, the prior is missing, answers are real numbers, or the test is over before
        its first item.
    """

    takes_focus = True

    def __init__(
        self,
        source: object,
        acquisition: Acquisition = expected_information_gain,
        *,
        stop: Mapping[str, object] | None = None,
        exposure: Mapping[str, object] | None = None,
        content: object = None,
        items: Items = "posterior",
        num_draws: int = 100,
        rng_key: Array | None = None,
        prior: tuple[ArrayLike, ArrayLike] | None = None,
        answers: Mapping[int, object] | None = None,
        trait: str = "trait",
        num_nodes: int | None = None,
        **person: object,
    ) -> None:
        if rng_key is not None:
            check_key(rng_key, "AdaptiveTest(..., rng_key=jax.random.key(0))")
        self._key = jax.random.key(0) if rng_key is None else rng_key
        known = {} if answers is None else dict(answers.items())  # a dictionary, or a column of pandas
        key_items, key_exposure, key_propose = jax.random.split(self._key, 3)
        self._steps = StepKeys(key_propose)
        self._bank = bank = make_bank(
            source, items=items, num_draws=num_draws, rng_key=key_items, prior=prior, trait=trait, person=person
        )
        self._acquisition = acquisition
        self._stop = Stop.of(stop, bank.num_items)
        self._administration = Administration.of(exposure, content, bank.num_items)
        self._barred = np.zeros((1, bank.num_items), bool)
        if self._administration.rates is not None:
            self._barred = self._administration.barred(1, generator(key_exposure))
        longest = None if self._stop.num_items is None else self._stop.num_items + len(known)
        self._people = Examinees(make_beliefs(bank, longest, self._stop.standard_error, num_nodes), 1)
        self._is_category = self._people.categories()
        self._history: list[tuple[int, int]] = []
        if not known and self.is_over:
            raise ValueError(
                f"The test is over before its first item, because {self.reason}: the prior standard deviation is no "
                f"larger than stop['standard_error']={self._stop.standard_error:g}."
            )
        for item, value in known.items():
            self.answer(item, value)

    def __repr__(self) -> str:
        state = f"over, because {self.reason}" if self.is_over else "goes on"
        return f"AdaptiveTest({len(self._history)} of {self._bank.num_items} items answered, {state})"

    # What is known

    @property
    def mean(self) -> Any:
        """Posterior mean of the trait; of several traits shape ``(D,)``."""
        return self._of_traits(self._people.mean[0])

    @property
    def standard_error(self) -> Any:
        """Posterior standard deviation of the trait; of several traits shape ``(D,)``."""
        return self._of_traits(self._people.standard_deviation[0])

    @property
    def covariance(self) -> np.ndarray:
        """Posterior covariance of the traits, shape ``(D, D)``."""
        return np.array(self._people.covariance[0])

    def _of_traits(self, values: np.ndarray) -> Any:
        return float(values[0]) if self._bank.is_scalar else values.copy()

    @property
    def answers(self) -> dict[int, int]:
        """Answers so far by item, in the order in which they came."""
        return dict(self._history)

    @property
    def asked(self) -> np.ndarray:
        """Items that have an answer, shape ``(items,)``."""
        return np.array(self._people.asked[0])

    @property
    def reason(self) -> str | None:
        """Reason why the test is over; ``None`` while it goes on."""
        error = float(self._people.standard_deviation.max())
        return self._stop.reason(len(self._history), error, int(self._people.is_candidate.sum()))

    @property
    def is_over(self) -> bool:
        """True if one of the conditions of ``stop`` holds, or no item is left."""
        return self.reason is not None

    def category_probabilities(self) -> np.ndarray:
        """Predictive probability of each answer to each item, shape ``(items, categories)``."""
        return np.array(self._people.predictive()[0])

    # What a score sees

    def outlooks(self, focus: Any = None) -> dict[str, Any]:
        """Predictive distribution of the answers, for scores of :mod:`numpyro_ext.design`."""
        return self._people.outlooks(focus, (self._bank.num_items,))

    def scores(self, rng_key: Array | None = None) -> np.ndarray:
        """The acquisition of every item, minus infinity for those that have an answer.

        :param rng_key: for scores that draw.
        """
        found = self._acquisition(self, rng_key=rng_key)
        if not (isinstance(found, Mapping) and SITE in found and found[SITE].shape == (self._bank.num_items,)):
            raise TypeError(f"A score must return {{{SITE!r}: array of {self._bank.num_items} scores}}; got {found!r}.")
        return np.where(self._people.is_candidate[0], np.asarray(found[SITE], float), -np.inf)

    # The course of the test

    def propose(self, rng_key: Array | None = None) -> int:
        """Choose the next item. Nothing changes until it is answered.

        :param rng_key: for scores that draw, equal scores, and exposure by randomesque; by default one that follows
            from that of the test and the number of answers.
        :return: number of the item.
        :raises ValueError: if the test is over.
        """
        if self.is_over:
            raise ValueError(f"The test is over, because {self.reason}; answer() takes further answers all the same.")
        if rng_key is None:
            rng_key, rng = self._steps.at(len(self._history))
        else:
            check_key(rng_key, "propose(jax.random.key(0))")
            rng = generator(rng_key)
        scores = self.scores(rng_key)[None]
        allowed = np.where(self._barred, -np.inf, scores)
        # Where exposure control has left nothing, the best of what it bars is better than no test.
        scores = allowed if (allowed > -np.inf).any() else scores
        item = int(self._administration.chosen(scores, self._people.asked, rng)[0])
        if item < 0:
            raise ValueError("No item is left: every score is minus infinity.")
        return item

    def answer(self, item: object, value: object) -> None:
        """Take in the answer to an item, proposed or not.

        :param item: number of the item, or its name in the fit.
        :param value: the answer: the number of its category, from zero.
        :raises ValueError: if there is no such item, it has an answer already, or none of its categories is ``value``.
        """
        number, told = self._item(item), self._value(item, value)
        if self._people.asked[0, number]:
            raise ValueError(f"Item {number} has been answered already: take_back({number}) comes first.")
        self._people.answer(np.array([number]), np.array([told]))
        self._history.append((number, told))

    def take_back(self, item: object) -> None:
        """Forget the answer to an item; the density is then what it would be without it.

        :param item: number of the item, or its name in the fit.
        :raises ValueError: if the item has no answer.
        """
        number = self._item(item)
        if not self._people.asked[0, number]:
            raise ValueError(f"Item {number} has no answer to take back.")
        self._history = [(old, value) for old, value in self._history if old != number]
        self._people.restart([old for old, _ in self._history], [value for _, value in self._history])

    def _item(self, item: object) -> int:
        return int(item_numbers(self._bank.response, [item], self._bank.num_items)[0])

    def _value(self, item: object, value: object) -> int:
        told = np.asarray(value)
        categories = np.flatnonzero(self._is_category[self._item(item)]).tolist()
        if told.ndim or told.dtype.kind not in "biuf" or told != np.floor(told) or int(told) not in categories:
            raise ValueError(f"{value!r} is no answer to item {item}: its categories are {categories}.")
        return int(told)

    def for_another_person(
        self, *, answers: Mapping[int, object] | None = None, rng_key: Array | None = None
    ) -> AdaptiveTest:
        """A test of another person with the same items, rules and prior; nothing is computed or compiled again.

        :param answers: what is known before the first item.
        :param rng_key: for equal scores and exposure; by default that of this test, so that equal answers lead to equal
            tests.
        """
        test = copy.copy(self)
        if rng_key is not None:
            check_key(rng_key, "for_another_person(rng_key=jax.random.key(1))")
            _, key_exposure, key_propose = jax.random.split(rng_key, 3)
            test._steps = StepKeys(key_propose)
            if self._administration.rates is not None:
                test._barred = self._administration.barred(1, generator(key_exposure))
        test._people, test._history = Examinees(self._people.beliefs, 1), []
        for item, value in ({} if answers is None else answers).items():
            test.answer(item, value)
        return test

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the answers and the state of the test, to be read by :meth:`load` with the same source and options.

        :param path: of the file.
        """
        write_archive(path, {"adaptive_test": {"history": list(self._history), "bank": self._reference()}})

    @classmethod
    def load(cls, path: str | os.PathLike[str], source: Any, *args: Any, **options: Any) -> AdaptiveTest:
        """A test that goes on where :meth:`save` has left it.

        :param path: of the file.
        :param source: and all that follows: as the test was made, without ``answers``.
        :raises ValueError: if the file holds no test, or one of other items.
        """
        found = read_archive(path).get("adaptive_test")
        if not isinstance(found, Mapping):
            raise ValueError(f"{os.fspath(path)!r} holds no adaptive test.")
        test = cls(source, *args, **options)
        if not all(
            now.shape == np.shape(then) and np.allclose(now, then, rtol=1e-5, atol=1e-8)
            for now, then in zip(test._reference(), found["bank"], strict=True)
        ):
            raise ValueError("The test in the file has other items, draws of them or another prior than this source.")
        for item, value in found["history"]:
            if item not in test.answers:
                test.answer(item, value)
        return test

    def _reference(self) -> list[np.ndarray]:
        """Arrays by which the items and the prior are known again: mean probabilities at two points, and the prior."""
        bank = self._bank
        points = np.stack([bank.mean - 1.0, bank.mean + 0.5])
        return [np.exp(bank.table(points)).mean(0), bank.mean, bank.covariance]
