r"""Minimax piecewise linear and quadratic upper bounds of :math:`\log(1 + e^x)`.

Marlin, Khan and Murphy (2011) choose the pieces of a bound such that its largest error is as small as possible, and
find quadratic ones by a direct search. Here both kinds are built from the outside in. The tails are the asymptotes
raised by the error; between them, every piece touches the function and is off by the whole error at its extremes, as
in Remez's algorithm. Given the error, each piece begins where the last one ended, so one root finds the error with
which they meet in the middle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

_LOG_2 = math.log(2.0)


class PiecewiseCoefficients(NamedTuple):
    """Pieces ``quadratic * x^2 + linear * x + constant``, from left to right."""

    breakpoints: np.ndarray
    """Points where pieces meet, ascending, one fewer than pieces; a piece holds at its right end."""
    quadratic: np.ndarray
    linear: np.ndarray
    constant: np.ndarray
    maximum_error: float
    """Largest difference to the function, which is the least that so many pieces can have."""


class _Piece(NamedTuple):
    """A piece on the positive half line, where ``lower`` is not positive if the piece could go beyond zero."""

    lower: float
    coefficients: tuple[float, float, float]


@functools.lru_cache(maxsize=128)
def minimax_pieces(kind: Literal["linear", "quadratic"], num_pieces: int) -> PiecewiseCoefficients:
    r"""The upper bound of :math:`\log(1 + e^x)` by ``num_pieces`` pieces with the least largest error.

    The error falls as :math:`\pi^2 / (8 R^2)` for linear pieces and as :math:`1 / R^3` for quadratic ones; odd numbers
    of quadratic pieces are the better value. Linear bounds are continuous. Quadratic ones jump at the breakpoints.

    :param str kind: ``"linear"`` or ``"quadratic"``.
    :param int num_pieces: the number :math:`R`, at least three.
    :raises ValueError: if ``kind`` is unknown, or ``num_pieces`` not an integer of three or more.

    **Example:**

    >>> minimax_pieces("linear", 3).maximum_error  # log(5/4)
    0.2231
    """
    if kind not in ("linear", "quadratic"):
        raise ValueError(f"kind must be 'linear' or 'quadratic', got {kind!r}.")
    if isinstance(num_pieces, bool) or not isinstance(num_pieces, int) or num_pieces < 3:
        raise ValueError(f"num_pieces must be an integer of at least 3, got {num_pieces!r}.")
    next_piece = _linear_piece if kind == "linear" else _quadratic_piece
    middle = _linear_middle if kind == "linear" else _quadratic_middle
    is_odd = num_pieces % 2 == 1
    num_right = (num_pieces - (3 if is_odd else 2)) // 2

    def mismatch(log_error: float) -> float:
        """Falls from positive to negative as the error passes the right one."""
        error = math.exp(log_error)
        pieces, end = _chain(next_piece, num_right, error)
        if is_odd:
            return end if end <= 0.0 or len(pieces) < num_right else middle(end)[0] - error
        return end if len(pieces) == num_right else min(end, 0.0) - 1.0

    # Three linear pieces have the error log(5/4).
    lowest = 0.05 / num_pieces ** (2 if kind == "linear" else 3)
    log_error = _root(mismatch, math.log(lowest), math.log(0.25))
    error = math.exp(log_error)
    pieces, end = _chain(next_piece, num_right, error)
    center = [middle(end)[1]] if is_odd else []
    right = [piece.coefficients for piece in reversed(pieces)] + [(0.0, 1.0, error)]
    left = [(a, 1.0 - b, c) for a, b, c in reversed(right)]
    tail = _tail(error)
    ends = [piece.lower for piece in reversed(pieces)] + [tail]
    if not is_odd:
        ends[0] = 0.0
        breakpoints = [-t for t in reversed(ends[1:])] + ends
    else:
        breakpoints = [-t for t in reversed(ends)] + ends
    a, b, c = np.array(left + center + right).T
    return PiecewiseCoefficients(np.array(breakpoints), a, b, c, error)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else math.exp(x) / (1.0 + math.exp(x))


def _root(function: Callable[[float], float], lower: float, upper: float) -> float:
    from scipy import optimize  # few need it, and it takes long to import

    return float(optimize.brentq(function, lower, upper, xtol=1e-15, rtol=4.0 * np.finfo(float).eps))


def _tail(error: float) -> float:
    """Beginning of the raised asymptote ``x + error``: it touches nothing, and at minus this point the function is
    the error."""
    return -math.log(math.expm1(error))


def _chain(next_piece: Callable[[float, float], _Piece], count: int, error: float) -> tuple[list[_Piece], float]:
    """Pieces from the right tail down, and where they end; fewer than ``count`` if they reach zero before."""
    pieces: list[_Piece] = []
    end = _tail(error)
    while len(pieces) < count and end > 0.0:
        pieces.append(next_piece(end, error))
        end = pieces[-1].lower
    return pieces, end


def _linear_piece(upper: float, error: float) -> _Piece:
    """The chord that ends on the function at ``upper`` and is ``error`` above it at its most."""

    def gap(x: float, at: float) -> float:
        """Height of the function at ``at`` above its tangent in ``x``, less the error."""
        return _softplus(at) - _softplus(x) - _sigmoid(x) * (at - x) - error

    tangent = _root(lambda x: gap(x, upper), 0.0, upper) if gap(0.0, upper) > 0.0 else 0.0
    at_zero = gap(tangent, 0.0)
    lower = _root(lambda at: gap(tangent, at), 0.0, tangent) if at_zero > 0.0 else at_zero
    slope = _sigmoid(tangent)
    return _Piece(lower, (0.0, slope, _softplus(upper) - slope * upper))


def _linear_middle(half: float) -> tuple[float, tuple[float, float, float]]:
    height = _softplus(half) - 0.5 * half
    return height - _LOG_2, (0.0, 0.5, height)


def _quadratic_piece(upper: float, error: float) -> _Piece:
    """The parabola that is ``error`` above the function at ``upper``, then touches it, then is ``error`` above it, and
    then meets it again, where it ends: on the positive half line the third derivative has one sign."""

    def parabola(touch: float) -> tuple[float, float, float]:
        value, slope, distance = _softplus(touch), _sigmoid(touch), upper - touch
        a = (_softplus(upper) + error - value - slope * distance) / distance**2
        return a, slope - 2.0 * a * touch, value - slope * touch + a * touch**2

    def excess(coefficients: tuple[float, float, float], x: float) -> float:
        a, b, c = coefficients
        return (a * x + b) * x + c - _softplus(x)

    def peak(touch: float) -> float:
        """Point where the parabola is farthest above the function, left of the point where it touches it."""
        a, b, _ = parabola(touch)
        steepest = _inverse_bell(2.0 * a)
        if steepest >= touch:
            return touch
        # The slopes differ by a concave function that vanishes where they touch and is largest at `steepest`.
        if 0.5 - b >= 0.0:
            return 0.0
        return _root(lambda x: _sigmoid(x) - 2.0 * a * x - b, 0.0, steepest)

    def too_high(touch: float) -> float:
        return excess(parabola(touch), peak(touch)) - error

    nearest = upper * (1.0 - 1e-6)
    touch = _root(too_high, 0.0, nearest)
    coefficients, highest = parabola(touch), peak(touch)
    at_zero = excess(coefficients, 0.0)
    if highest <= 0.0 or at_zero >= 0.0:
        return _Piece(-at_zero, coefficients)
    return _Piece(_root(lambda x: excess(coefficients, x), 0.0, highest), coefficients)


def _inverse_bell(height: float) -> float:
    """The positive point at which the slope of the sigmoid is ``height``, or zero if it is never so steep."""
    if height >= 0.25:
        return 0.0
    root = math.sqrt(1.0 - 4.0 * height)
    return math.log((1.0 + root) ** 2 / (4.0 * height))


def _quadratic_middle(half: float) -> tuple[float, tuple[float, float, float]]:
    r"""Bound of the even part :math:`G = \log 2\cosh(x/2)`, concave in :math:`u = x^2`: a chord raised to a tangent."""
    even = _softplus(half) - 0.5 * half
    a = (even - _LOG_2) / half**2
    touch = _root(lambda x: math.tanh(0.5 * x) / (4.0 * x) - a, 1e-9, half)
    constant = _softplus(touch) - 0.5 * touch - a * touch**2
    return constant - _LOG_2, (a, 0.5, constant)
