"""Points that cover a space more evenly than independent draws."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri

_DIGITS = 30


def even_draws(rng: np.random.Generator, number: int, size: int) -> np.ndarray:
    """Uniform draws from the unit cube that leave few gaps together, shape ``(number, size)``.

    They are the points of a Sobol sequence with all binary digits of a coordinate turned where those of a random number
    are one. Averages over them are unbiased, and those of smooth functions have errors of a larger number of
    independent draws. No coordinate is 0 or 1.

    :param rng: of the random number of each coordinate.

    **Source:** L'Ecuyer and Lemieux (2002), Recent advances in randomized quasi-Monte Carlo methods, in *Modeling
    uncertainty*, section 2.3.
    """
    from scipy.stats.qmc import Sobol  # which takes a second to import

    points = Sobol(size, scramble=False, bits=_DIGITS).random_base2(max(number - 1, 0).bit_length())[:number]
    digits = (points * 2.0**_DIGITS).astype(np.int64) ^ rng.integers(2**_DIGITS, size=size)
    draws: np.ndarray = (digits + 0.5) / 2.0**_DIGITS
    return draws


def spread_points(number: int, size: int) -> np.ndarray:
    """The mean of a standard normal prior, and other points that are spread as it is, shape ``(number, size)``."""
    first = np.zeros((1, size))
    if number == 1:
        return first
    from scipy.stats.qmc import Halton

    return np.concatenate([first, ndtri(Halton(size, scramble=False).random(number)[1:])])
