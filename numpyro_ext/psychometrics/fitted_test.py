"""A test that people have taken: their answers, their traits and the probabilities of what they could have answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .curves import Response, log_category_probabilities
from .fitted_model import FittedModel, as_answers
from .population import population_of
from .responses import response_of

_PEOPLE_AT_ONCE = 4096
_NUM_PARAMETERS: dict[str, Callable[[int], int]] = {
    "rasch": lambda k: 1,
    "2pl": lambda k: 2,
    "3pl": lambda k: 3,
    "4pl": lambda k: 4,
    "graded": lambda k: k,
    "rating-scale": lambda k: 1,
    "partial-credit": lambda k: k - 1,
    "generalised-partial-credit": lambda k: k,
    "nominal": lambda k: 2 * (k - 1),
}


@dataclass(frozen=True, eq=False)
class FittedTest:
    """Answers with the response and the traits that they are compared with."""

    response: Response
    traits: np.ndarray
    """Shape ``(people,)`` or ``(people, traits)``."""
    answers: np.ndarray
    """Shape ``(people, items)``, ``nan`` where there is none."""
    names: list[str]
    num_parameters: np.ndarray | None
    """Free parameters of each item alone; ``None`` if the model is not one of items of this project."""
    population: tuple[Any, Any] | None
    """Mean and covariance of the traits; ``None`` if they differ between people or are not normal."""

    @property
    def num_traits(self) -> int:
        return 1 if self.traits.ndim == 1 else self.traits.shape[1]

    def by_people(self, statistic: Callable[[Array, Array], Any]) -> Iterator[tuple[slice, Any]]:
        """Values of a compiled function of traits and answers, for groups of people one after the other."""
        compiled = jax.jit(statistic)
        for start in range(0, len(self.answers), _PEOPLE_AT_ONCE):
            rows = slice(start, start + _PEOPLE_AT_ONCE)
            yield rows, jax.device_get(compiled(jnp.asarray(self.traits[rows]), jnp.asarray(self.answers[rows])))

    def log_probabilities(self, traits: Array) -> Array:
        """Log probability of each answer to each item, shape ``(people, items, K)``."""
        return log_category_probabilities(self.response(traits))


def fitted_test(source: object, traits: ArrayLike | None, answers: object, trait: str) -> FittedTest:
    """The test of a fitted model, or of a response with traits and answers.

    :raises ValueError: if a response comes without traits or answers, and if shapes do not fit.
    """
    if callable(source) and not hasattr(source, "get_samples"):
        if traits is None or answers is None:
            raise ValueError("A response as a function needs the traits of the people and their answers.")
        answers = _in_items(answers, getattr(source, "names", ()))
        values = as_answers(answers)
        names = [str(n) for n in answers.columns] if hasattr(answers, "columns") else None
        return _checked(source, np.asarray(traits, float), values, names, None, (0.0, 1.0))
    fitted, response = FittedModel.of(source), response_of(source, trait=trait)
    values = fitted.observed_answers() if answers is None else fitted.answers_of(answers, same_people=traits is None)
    if traits is None:
        traits = fitted.means(trait)
    call, number = fitted.items, None
    if call is not None and all(group.num_categories is not None for group in call.groups):
        number = np.zeros(response.num_items, int)
        for group in call.groups:
            number[group.items] = _NUM_PARAMETERS[group.family](group.num_categories or 0)
    names = call.names if call is not None else None
    return _checked(response, np.asarray(traits, float), values, names, number, population_of(response))


def _in_items(answers: Any, names: Sequence[str]) -> Any:
    """A table with its items in the order of their names in the fit, where it has any of these."""
    columns = [str(name) for name in getattr(answers, "columns", ())]
    missing = [name for name in names if name not in columns]
    if not columns or len(missing) == len(names):
        return answers
    if missing or len(set(columns)) != len(columns):
        raise ValueError(f"The answers lack the items {missing} of the fit, or have an item twice; got {columns}.")
    return answers.iloc[:, [columns.index(name) for name in names]]


def _checked(
    response: Response,
    traits: np.ndarray,
    answers: np.ndarray,
    names: list[str] | None,
    number: np.ndarray | None,
    population: tuple[object, object] | None,
) -> FittedTest:
    if answers.ndim != 2 or traits.ndim not in (1, 2) or len(traits) != len(answers):
        raise ValueError(
            "Answers must have shape (people, items) and traits (people,) or (people, traits); got "
            f"{answers.shape} and {traits.shape}."
        )
    shape = jax.eval_shape(lambda t: log_category_probabilities(response(t)), jnp.asarray(traits)).shape
    if shape[:-1] != answers.shape:
        raise ValueError(f"The response is to {shape[:-1]} people and items, and the answers are {answers.shape}.")
    known = answers[np.isfinite(answers)]
    wrong = (known != np.round(known)) | (known < 0) | (known >= shape[-1])
    if wrong.any():
        raise ValueError(f"Answers must be categories 0 to {shape[-1] - 1}; got {known[wrong][0]:g}.")
    labels = names or [f"item {k}" for k in range(answers.shape[1])]
    return FittedTest(response, traits, answers, labels, number, population)
