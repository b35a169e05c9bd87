"""Observations of a design in the order in which they were told, with the scores for which they were proposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_NAMES = "site place value score log_predictive log_evidence test num_observed seconds is_refit".split()


class History:
    """Steps of a design, and the proposals that wait for their values.

    :ivar steps: one dictionary for each observation, of the names that :meth:`dataset` has.
    :ivar proposed: scores by site and place of what was proposed and not yet told.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.proposed: dict[tuple[str, Any], float] = {}

    def add(self, place: tuple[str, Any], **figures: float) -> None:
        """Append an observation.

        :param place: its site and its place there, a number or what the user gave.
        :param figures: what else the step is to say.
        """
        site, number = place
        score = float(self.proposed.get(place, np.nan))
        at = int(number) if np.ndim(number) == 0 else -1
        self.steps.append({"site": site, "place": at, "score": score, **figures})

    def dataset(self) -> Any:
        """All steps, an ``xarray.Dataset`` over ``step``."""
        import xarray

        columns = {name: ("step", np.array([step[name] for step in self.steps])) for name in _NAMES}
        return xarray.Dataset(columns, coords={"step": np.arange(1, len(self.steps) + 1)})

    def content(self) -> dict[str, Any]:
        """Entries of a saved design, for :meth:`restore`."""
        return {"steps": self.steps, "proposed": [(*place, float(score)) for place, score in self.proposed.items()]}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Take the steps and proposals of a saved design."""
        self.steps = content["steps"]
        self.proposed = {(site, place): score for site, place, score in content["proposed"]}
