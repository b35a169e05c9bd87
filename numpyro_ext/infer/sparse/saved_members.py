"""Members of a run of EP on trees as plain containers, to be written to a file, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...structure import SparseLinearReading
from ..front.saved_runs import diagnostics_from_content, outcome_to_content, state_from_content
from ..front.state import EngineState, Fit, data_digest
from ..hyper.space import UnconstrainedSpace
from .run import Member
from .tree_programs import TreeOptions, TreePrograms, compiled_tree_programs

__all__ = ["member_from_content", "member_to_content"]


def member_to_content(member: Member[TreePrograms]) -> dict[str, Any]:
    """Take a member apart into dictionaries, lists, numbers and arrays.

    :param Member member: of a run.
    :return: what :func:`member_from_content` understands.
    """
    return {"arguments": member.arguments, **outcome_to_content(member.fit)}


def member_from_content(
    content: dict[str, Any], reading: SparseLinearReading, space: UnconstrainedSpace, options: TreeOptions
) -> Member[TreePrograms]:
    """Put a member together again.

    :param dict content: from :func:`member_to_content`.
    :param SparseLinearReading reading: of the model on the arguments of the member.
    :param UnconstrainedSpace space: of its hyperparameters.
    :param TreeOptions options: of its run.
    :raises ValueError: if the model is not the one that was run.
    """
    programs = compiled_tree_programs(reading, space, options)
    values, state = state_from_content(content, reading, space, programs.init_state)
    hyper = space.unpack(values)
    projection = programs.project(reading.data, hyper)
    found = float(programs.evaluate(reading.data, space.fixed, projection, state, values).log_evidence)
    if not np.isclose(found, content["log_evidence"], rtol=1e-4):
        raise ValueError("On the saved arguments this model has another density than the one that was run.")
    diagnostics = diagnostics_from_content(content)
    last = EngineState(values, state, None, diagnostics.num_steps, data_digest(reading.data, space.fixed))
    fit = Fit(last, hyper, content["covariance"], content["has_curvature"], content["log_evidence"], diagnostics)
    return Member(dict(content["arguments"]), reading, space, programs, projection, fit)
