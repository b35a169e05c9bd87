"""Data of a program, asked for while a model is read: what decides a structure, and what is carried beside it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...compilation.content import array_key
from .equations import Atom, Constant, apply_to_known
from .program import Program


class Questions:
    """A program and its data. All that is made of the program keeps the program alone, which holds no data.

    :param Program program: the program; its own data are left out.
    :param data: values of its constants.
    :param known: values of inputs, and of data that change, where these are known.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.structure.program.program import make_program
    >>> labels = jnp.array([1, 0])
    >>> program, value = make_program(lambda x: (x[labels + 1], labels + 1), jnp.ones(3))
    >>> questions = Questions(program, program.data)
    >>> questions.decide(value[1]).tolist(), questions.decide(value[0])
    ([2, 1], None)
    """

    def __init__(self, program: Program, data: Sequence[object] = (), known: Mapping[int, object] | None = None):
        self.program, self.data = program.with_data(()), tuple(data)
        pairs = zip(program.constants, data, strict=False)  # fewer, where they are in ``known``
        self._known = {number: value for number, value in pairs if number not in program.changing} | dict(known or {})
        self._answers: dict[tuple[int, bool], tuple[Any, ...]] = {}

    @property
    def content_key(self) -> Hashable:
        """Key of the program. Answers depend on data; what they decide is compared where it is kept."""
        return self.program.content_key

    @property
    def values(self) -> dict[int, object]:
        """Values of all constants of the program, by their numbers."""
        return dict(zip(self.program.constants, self.data, strict=True))

    def decide(self, atom: Atom, *, only_zeros: bool = False) -> Any:
        """The value of an atom that follows from what is known, else ``None``.

        :param bool only_zeros: to be told which of its elements are other than zero, and no more.
        """
        if isinstance(atom, Constant):
            return np.not_equal(atom.value, 0) if only_zeros else atom.value
        program = self.program
        if program.ancestors([atom], self._known) & ({*program.inputs, *program.changing} - set(self._known)):
            return None
        found = jax.device_get(program.evaluate([atom], self._known, apply_to_known)[0])
        found = np.not_equal(found, 0) if only_zeros else found
        if (atom, only_zeros) not in self._answers:
            self._answers[atom, only_zeros] = array_key(found)
        return found

    def carry(self, value: np.ndarray) -> int:
        """Take an array that was found in the data for data of the program, so that other arrays of its shape run the
        same compiled programs: the number of its value."""
        self.program, number = self.program.with_constant(jax.typeof(value))
        self.data = (*self.data, value)
        self._known[number] = value
        return number

    def without_data(self) -> Questions:
        """The same answers, without the data."""
        out = Questions(self.program)
        out._answers = dict(self._answers)
        return out

    def are_answered_alike(self, other: Questions) -> bool:
        """Tell whether all that was decided of these data is the same of other data of an equal program."""
        return all(
            array_key(other.decide(atom, only_zeros=zeros)) == key for (atom, zeros), key in self._answers.items()
        )
