"""Many adaptive tests at once: what each rule would have asked people whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ...design.scores.pointwise import Acquisition
from ...infer.front.options import check_at_least
from ...infer.front.running.progress import progress_bar
from ...structure.model.running.execution import check_key
from ..fitted_model import FittedModel, as_answers
from ..responses import FittedResponse
from .administration import Administration, generator
from .bank import Floats, Items, make_bank
from .beliefs import Beliefs, Ints
from .examinees import SITE, Examinees, make_beliefs


def simulate_tests(
    source: Any,
    answers: ArrayLike,
    acquisitions: Mapping[str, Acquisition] | Sequence[Acquisition],
    *,
    num_items: int = 30,
    held_out: ArrayLike | None = None,
    exposure: Mapping[str, Any] | None = None,
    content: Any = None,
    items: Items = "posterior",
    num_draws: int = 100,
    rng_key: Array | None = None,
    prior: tuple[ArrayLike, ArrayLike] | None = None,
    trait: str = "trait",
    num_nodes: int | None = None,
    show_progress: bool = True,
) -> Any:
    """Adaptive tests of people whose answers to all items are known, for each acquisition.

    All people are asked at once, each the item that is best for that person. Cost of a step: a matrix product of people
    by nodes with nodes by answers, and as many products as there are nodes where items are drawn.

    **Example:**

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.design import expected_information_gain, random_scores
    >>> from numpyro_ext.psychometrics import simulate_tests
    >>> difficulty = jnp.linspace(-3.0, 3.0, 40)
    >>> def response(theta):
    ...     return dist.Bernoulli(logits=2.0 * (theta[..., None] - difficulty))
    >>> rng = np.random.default_rng(0)
    >>> theta = rng.normal(size=200)
    >>> answers = rng.random((200, 40)) < response(theta).probs
    >>> rules = {"information": expected_information_gain, "random": random_scores}
    >>> paths = simulate_tests(response, answers, rules, num_items=10, prior=(0.0, 1.0))
    >>> print(dict(paths["mean"].sizes))
    {'acquisition': 2, 'person': 200, 'step': 10}
    >>> sd = paths["sd"].mean("person").isel(step=-1)
    >>> bool(sd.sel(acquisition="information") < 0.8 * sd.sel(acquisition="random"))
    True

    :param source: as for :class:`~numpyro_ext.psychometrics.AdaptiveTest`.
    :param answers: shape ``(people, items)``, nan where a person has none; such items are not asked.
    :param acquisitions: scores by name, or a sequence of them. A score is called once for all people; its source has
        ``answers``, ``asked``, ``mean`` and ``covariance`` of all of them, and it returns
        ``{"response": scores of shape (people, items)}``.
    :param int num_items: number of items that each person is asked.
    :param held_out: items that are never asked and score the predictions.
    :param exposure: as for :class:`~numpyro_ext.psychometrics.AdaptiveTest`, like the options that follow.
    :param bool show_progress: whether to show a bar.
    :return: an ``xarray.Dataset`` over acquisition, person and step: ``item`` (minus one if no item was left),
        ``answer``, ``mean`` and ``sd`` of the trait after the answer (with an axis ``trait`` if there are several), and
        ``score``, the mean log probability of the person's held-out answers.
    :raises ValueError: if answers are none of the items', or fewer than ``num_items`` items may be asked.
    """
    import xarray

    if rng_key is not None:
        check_key(rng_key, "simulate_tests(..., rng_key=jax.random.key(0))")
    key_items, key_tests = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    bank = make_bank(source, items=items, num_draws=num_draws, rng_key=key_items, prior=prior, trait=trait, person={})
    rules = _named(acquisitions)
    is_pool = np.ones(bank.num_items, bool)
    if held_out is not None:
        is_pool[_numbers(held_out, bank.num_items)] = False
    check_at_least(1, num_items=num_items)
    if num_items > is_pool.sum():
        raise ValueError(f"{num_items} items are to be asked, and {int(is_pool.sum())} of the bank are not held out.")
    administration = Administration.of(exposure, content, bank.num_items)
    beliefs = make_beliefs(bank, num_items, num_nodes=num_nodes)
    is_function = isinstance(source, FittedResponse) or (callable(source) and not hasattr(source, "get_samples"))
    told = _checked(
        as_answers(answers) if is_function else FittedModel.of(source).answers_of(answers),
        Examinees(beliefs, 1).categories(),
    )
    paths = []
    with progress_bar(num_items * len(rules), "simulate_tests", enabled=show_progress) as bar:
        for number, score in enumerate(rules.values()):
            key = jax.random.fold_in(key_tests, number)
            paths.append(_path(beliefs, told, is_pool, score, administration, num_items, key, bar.update))
    steps = np.arange(1, num_items + 1)
    axes: tuple[str, ...] = ("acquisition", "person", "step")
    columns: dict[str, Any] = {}
    for name in paths[0]:
        values = np.stack([path[name] for path in paths])
        if name in ("mean", "sd") and bank.is_scalar:
            values = values[..., 0]
        columns[name] = (axes if values.ndim == 3 else (*axes, "trait"), values)
    return xarray.Dataset(columns, coords={"acquisition": list(rules), "step": steps})


def _path(
    beliefs: Beliefs,
    told: Ints,
    is_pool: np.ndarray,
    acquisition: Acquisition,
    administration: Administration,
    num_items: int,
    rng_key: Array,
    update: Callable[[], object],
) -> dict[str, Floats | Ints]:
    """Items, answers and what is known after them, people first and steps second."""
    people = Examinees(beliefs, len(told))
    people.is_candidate &= is_pool & (told >= 0)
    key_bars, key_steps = jax.random.split(rng_key)
    barred: Any = False
    if administration.rates is not None:
        barred = administration.barred(len(told), generator(key_bars))
    found: dict[str, list[Any]] = {name: [] for name in ("item", "answer", "mean", "sd", "score")}
    held_out = np.flatnonzero(~is_pool)
    for step in range(num_items):
        if people.is_candidate.any():
            key = jax.random.fold_in(key_steps, step)
            scores = acquisition(people, rng_key=key)[SITE]
            scores = np.where(people.is_candidate, np.asarray(scores, float), -np.inf)
            allowed = np.where(barred, -np.inf, scores)
            scores = np.where((allowed > -np.inf).any(1, keepdims=True), allowed, scores)
            items = administration.chosen(scores, people.asked, generator(key))
        else:
            items = np.full(len(told), -1)
        if step and held_out.size:
            # Of the item before: here, as predictions that the rule has just made are at hand.
            found["score"].append(_score(people, told, held_out))
        values = np.where(items >= 0, told[np.arange(len(told)), np.maximum(items, 0)], -1)
        people.answer(items, values)
        found["item"].append(items)
        found["answer"].append(np.where(values >= 0, values, np.nan))
        found["mean"].append(people.mean)
        found["sd"].append(people.standard_deviation)
        update()
    if held_out.size:
        found["score"].append(_score(people, told, held_out))
    return {name: np.stack(column, 1) for name, column in found.items() if column}


def _score(people: Examinees, told: Ints, held_out: Ints) -> Floats:
    """Mean log probability of the held-out answers of each person; nan for people without any."""
    values = told[:, held_out]
    p = people.predictive(held_out)
    p = np.take_along_axis(p, np.maximum(values, 0)[..., None], -1)[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        score: Floats = np.where(values >= 0, np.log(p), 0.0).sum(1) / (values >= 0).sum(1)
    return score


def exposure_rates(
    source: Any,
    max_rate: float,
    *,
    num_items: int,
    acquisition: Acquisition,
    num_people: int = 2000,
    num_rounds: int = 10,
    rng_key: Array | None = None,
    **options: Any,
) -> Floats:
    """Probabilities with which chosen items are to be asked, so that no item is seen by too many people.

    Tests of simulated people are repeated: an item that was chosen for more than ``max_rate`` of them is next asked
    with the probability that would have brought it to ``max_rate`` (Sympson and Hetter 1985). In each round as many
    items as a test has stay at probability one, so that every test can be filled.

    :param source: as for :class:`~numpyro_ext.psychometrics.AdaptiveTest`.
    :param float max_rate: largest share of people that an item is to be asked of.
    :param int num_items: number of items of a test.
    :param acquisition: score of the items.
    :param int num_people: number of simulated people, drawn from the prior.
    :param int num_rounds: number of times that all of them are tested.
    :param rng_key: for people and answers.
    :param options: of :func:`simulate_tests`: ``items``, ``num_draws``, ``prior``, ``content``.
    :return: for ``exposure={"sympson_hetter": rates}``, shape ``(items,)``.
    :raises ValueError: if ``max_rate`` is none, or too small for the bank.
    """
    key = jax.random.key(0) if rng_key is None else rng_key
    key_bank, key_people, key_tests = jax.random.split(key, 3)
    names = {name: options[name] for name in ("items", "num_draws", "prior", "trait") if name in options}
    given: dict[str, Any] = {"items": "posterior", "num_draws": 100, "prior": None, "trait": "trait"} | names
    bank = make_bank(source, rng_key=key_bank, person={}, **given)
    if not num_items / bank.num_items <= max_rate <= 1.0:
        raise ValueError(
            f"max_rate must be between {num_items / bank.num_items:.3g}, the share of {num_items} of {bank.num_items} "
            f"items, and one; got {max_rate!r}."
        )
    rng = generator(key_people)
    theta = rng.multivariate_normal(bank.mean, bank.covariance, num_people)
    p = np.exp(bank.table(theta))
    draws = rng.integers(bank.num_draws, size=num_people)
    below = np.cumsum(p[draws, np.arange(num_people)], -1)
    answers = (rng.random((*below.shape[:2], 1)) > below[..., :-1]).sum(-1)
    rates = np.ones(bank.num_items)
    for number in range(num_rounds):
        paths = simulate_tests(
            source, answers, {"rule": acquisition}, num_items=num_items, exposure={"sympson_hetter": rates},
            rng_key=jax.random.fold_in(key_tests, number), show_progress=False, **options,
        )  # fmt: skip
        asked = np.bincount(paths["item"].values.reshape(-1), minlength=bank.num_items) / num_people
        # Asked is chosen times the probability of being asked.
        chosen = asked / np.maximum(rates, 1e-12)
        rates = np.where(chosen > max_rate, max_rate / np.maximum(chosen, max_rate), 1.0)
    rates[np.argsort(-rates, kind="stable")[:num_items]] = 1.0
    return rates


def _named(acquisitions: Mapping[str, Acquisition] | Sequence[Acquisition]) -> dict[str, Acquisition]:
    if callable(acquisitions):
        acquisitions = [acquisitions]
    if not isinstance(acquisitions, Mapping):
        named: dict[str, Acquisition] = {}
        for number, score in enumerate(acquisitions):
            name = getattr(score, "__name__", f"acquisition {number + 1}")
            named[name if name not in named else f"{name} {number + 1}"] = score
        acquisitions = named
    if not acquisitions:
        raise ValueError("acquisitions names no score.")
    return dict(acquisitions)


def _numbers(items: ArrayLike, number: int) -> Ints:
    found = np.atleast_1d(np.asarray(items))
    if found.dtype.kind not in "iu" or found.ndim != 1 or found.size == 0 or found.min() < 0 or found.max() >= number:
        raise ValueError(f"held_out must hold numbers of items from 0 to {number - 1}, got {items!r}.")
    return found


def _checked(values: Floats, is_category: np.ndarray) -> Ints:
    """Answers as whole numbers, minus one for none."""
    if values.ndim != 2 or values.shape[1] != len(is_category) or len(values) == 0:
        raise ValueError(f"answers must have shape (people, {len(is_category)}), got {values.shape}.")
    is_told = ~np.isnan(values)
    whole = np.where(is_told, values, 0.0)
    is_one = (whole == np.floor(whole)) & (whole >= 0.0) & (whole < is_category.shape[1])
    numbers = np.where(is_one, whole, 0.0).astype(int)
    is_one &= np.take_along_axis(
        np.broadcast_to(is_category, (len(values), *is_category.shape)), numbers[..., None], -1
    )[..., 0]
    if (is_told & ~is_one).any():
        person, item = np.argwhere(is_told & ~is_one)[0]
        raise ValueError(
            f"Person {person} answers {values[person, item]:g} to item {item}, whose categories are "
            f"{np.flatnonzero(is_category[item]).tolist()}; {int((is_told & ~is_one).sum())} answers have no category."
        )
    return np.where(is_told, numbers, -1)
