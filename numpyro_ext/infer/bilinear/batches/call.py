"""Options of a fit to batches, and refusals of those that it does not take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from jax import Array

from ....structure.bilinear.form import Bilinear, GaussianSide
from ....structure.bilinear.reading import BilinearReading
from ....structure.model.running.execution import check_key
from ...front.state import EngineState
from ...hyper.space import UnconstrainedSpace
from ..algorithms import sweeps as core
from ..algorithms.cells import Block
from ..algorithms.schedules.visits import SharedSelection, SharedVectors, start_shared
from ..engines.engine import BilinearVG

Batch: TypeAlias = tuple[object, ...] | Mapping[str, object]
_Part = TypeVar("_Part")


class Call(NamedTuple):
    """Arguments of :func:`~numpyro_ext.infer.fit_batches` that all processes share."""

    engine: BilinearVG
    rng_key: Array
    over: str
    num_epochs: int
    init_state: EngineState | None
    kwargs: dict[str, Any]

    def check(self) -> None:
        """Refuse what batches cannot do."""
        check_key(self.rng_key)
        engine = self.engine
        if self.num_epochs < 1:
            raise ValueError(f"num_epochs must be at least 1, got {self.num_epochs}.")
        if engine.solver != "natural-gradient":
            raise ValueError("Batches are fitted by natural gradients or closed updates: leave solver at its default.")
        if engine.unlisted_cells == "zero" and engine.zeros in ("exact", "sampled"):
            raise ValueError(
                f"zeros={engine.zeros!r} visits cells of the whole matrix, or draws them, and batches hold some rows: "
                "take zeros='by_row' or 'shared'."
            )

    def check_reading(self, reading: BilinearReading, space: UnconstrainedSpace) -> None:
        """Refuse a model that cannot be fitted in batches.

        :param BilinearReading reading: of the first batch.
        :param UnconstrainedSpace space: of what would have to be learned.
        """
        if space.names:
            raise ValueError(
                f"{list(space.names)} would have to be learned, which batches cannot: fit some of the data with "
                "engine.run, and give BilinearVG(..., hyper_values=...) what it learned."
            )
        sides = reading.sides
        if any(reading.is_coupled):
            raise ValueError(
                "Batches share vectors that are independent, and covariance='component' is for vectors that depend on "
                "each other: fit with engine.run, and add rows to the fit by fold_in."
            )
        if self.over not in reading.field:
            raise ValueError(f"over must be a site of one of the sides, {sides[0]} or {sides[1]}; got {self.over!r}.")
        own, elements = (self.sides(reading, *both)[0] for both in (sides, reading.elements))
        unclear = [name for name in own if len(elements) == 1 and 1 not in reading.site_shapes[name]]
        if unclear:
            raise ValueError(
                f"The first batch has one vector of {list(own)}, and whether all batches share {unclear} cannot be "
                "told from it: begin with a batch of two or more, or name the vectors of both sides (field=[...])."
            )
        if reading.unlisted_cells == "zero" and not self.is_over_rows(reading) and not self.has_shared_tangent(reading):
            can_share = ", or zeros='shared'" if self.engine.bound == "jaakkola" else ""
            raise ValueError(
                f"Unlisted zeros have a tangent for each row, and batches over {self.over!r} are of columns: take "
                f"batches over one of {list(sides[0])}{can_share}."
            )

    def is_over_rows(self, reading: BilinearReading) -> bool:
        """True if rows come in batches, and columns are shared."""
        return self.over in reading.sides[0]

    def has_shared_tangent(self, reading: BilinearReading) -> bool:
        """True if the zeros in unlisted pairs of all batches share a tangent."""
        engine = self.engine
        is_shared = engine.unlisted_cells == "zero" and engine.zeros == "shared" and engine.bound == "jaakkola"
        return is_shared or reading.pair_sites is not None

    def sides(self, reading: BilinearReading, rows: _Part, columns: _Part) -> tuple[_Part, _Part]:
        """Own and shared of two parts; or, the other way, those of rows and of columns."""
        return (rows, columns) if self.is_over_rows(reading) else (columns, rows)

    def first_shared(self, reading: BilinearReading, form: Bilinear, start: core.State) -> SharedVectors:
        """Start of what is shared: at random, or where an earlier fit left it.

        :param Bilinear form: of the first batch, whose own vectors are the rows.
        :param State start: at random.
        """
        selection = None
        if form.background is not None and form.background.selection is not None:
            selection = SharedSelection.first(form.background.selection.columns)

        def blocks(state: core.State) -> tuple[Block, Block | None]:
            shared = self.sides(reading, state.rows, state.columns)[1]
            assert isinstance(shared, Block)
            return shared, state.common

        block, common = blocks(start)
        if self.init_state is not None:
            state = self.init_state.state
            block, common = blocks(state)
            found, expected = (
                [None if x is None else x.shape for b in parts if b is not None for x in b]
                for parts in ((block, common), blocks(start))
            )
            if found != expected:
                raise ValueError(
                    f"init_state has shared vectors with means and covariances of the shapes {found}; on these batches "
                    f"they have {expected}."
                )
            if selection is not None and state.selected is not None:
                shares = self.sides(reading, state.selected.log_rows, state.selected.log_columns)[1]
                selection = selection._replace(log_shares=shares, tangent=state.selected.tangent)
        assert isinstance(form.columns, GaussianSide)
        common_prior = None if form.common is None else form.common.prior
        return start_shared(block, form.columns, common, common_prior)._replace(selection=selection)
