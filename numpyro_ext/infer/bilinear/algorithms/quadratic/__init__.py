"""Closed updates for factors whose expectation is quadratic in the predictor: Gaussian ones, and logistic bounds."""

from .iterations import ClosedUpdates, fold_closed
from .rules import Bound, has_rule
from .sweep import (
    Elsewhere,
    Options,
    Views,
    Zeros,
    bound_of,
    make_views,
    sweep,
    update_common,
    update_side,
    with_side,
    with_tangents,
)
from .updates import Update
from .visits import visit_closed

__all__ = [
    "Bound",
    "ClosedUpdates",
    "Elsewhere",
    "Options",
    "Update",
    "Views",
    "Zeros",
    "bound_of",
    "fold_closed",
    "has_rule",
    "make_views",
    "sweep",
    "update_common",
    "update_side",
    "visit_closed",
    "with_side",
    "with_tangents",
]
