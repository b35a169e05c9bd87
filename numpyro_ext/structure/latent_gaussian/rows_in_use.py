"""A reading of which some rows alone are in use, whatever the masks of the model say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ModelStructureError
from ..program.program import Atom, apply_to_known
from .form import LatentGaussian
from .reading import LatentGaussianReading

__all__ = ["ReadingOfRows"]


class ReadingOfRows(LatentGaussianReading):
    """A reading whose form has a factor in the rows that are named, and in no other.

    :param LatentGaussianReading reading: of the model.
    :param in_use: boolean, shape ``(num_rows,)``.
    """

    def __init__(self, reading: LatentGaussianReading, in_use: np.ndarray):
        vars(self).update(vars(reading))
        vars(self).pop("abstract_form", None)
        # Behind the constants and in front of the indices, where programs find it in other data as well.
        self.data = (*reading.data[:-1], in_use, reading.data[-1])
        self.structure_key = (*reading.structure_key, "rows in use")

    def form(self, hyper: Mapping[str, Any], data: Sequence[Any] | None = None) -> LatentGaussian:
        """The form at given hyperparameters; see :class:`LatentGaussianReading`."""
        form = super().form(hyper, data)
        in_use = (self.data if data is None else data)[-2]
        return form._replace(observed=form.split_rows(in_use))

    def check_indices(self) -> None:
        """Refuse indices beyond what they point into, which JAX would take for the last element.

        :raises ModelStructureError: naming the site, the index and how many elements there are.
        """
        env = dict(zip(self._program.constants, self.data, strict=False))
        for equation in self._program.equations:
            if equation.primitive.name != "gather" or str(equation.params["mode"]).endswith("CLIP"):
                continue
            operand, indices = equation.inputs
            if self._is_known(operand) or not self._is_known(indices):
                continue
            found = np.asarray(self._program.evaluate([indices], env, apply_to_known)[0])
            shape, axes = self._program.shape(operand), equation.params["dimension_numbers"].start_index_map
            for k, axis in enumerate(axes):
                bad = (found[..., k] < 0) | (found[..., k] > shape[axis] - equation.params["slice_sizes"][axis])
                if not np.any(bad):
                    continue
                index, name = found[..., k][bad][0], self._name_of(operand)
                raise ModelStructureError(
                    f"the model takes element {index} of site '{name}', which has {shape[axis]} along that axis (0 to "
                    f"{shape[axis] - 1}); JAX would give the last one in its place. New members of a group need a "
                    "larger number of members: give the model this number as an argument, or let it take it from the "
                    "labels that it is given.",
                    site=name,
                )

    def _name_of(self, atom: Atom) -> str:
        """The site that a value is, or is made of."""
        behind = self._program.ancestors([atom])
        made = {name: self._program.ancestors([value]) for name, value in self._trace.values.items()}
        # Of the sites that are behind the value the last one: the others are behind that site.
        return max((n for n in made if made[n] <= behind), key=lambda n: len(made[n]), default=self.field[0])
