r"""Priors of many blocks as weighted sums of those of a few, whatever functions of the hyperparameters these are.

The location of a trait in a latent regression is :math:`z_b^T \beta`, with covariates :math:`z_b` of a person. Of so
many people as there are columns, and one, all other locations are sums with weights that know neither :math:`\beta` nor
what is a covariate: they are found from locations at random hyperparameters, and are exact where there are fewer of
them than of these (an interpolative decomposition; Cheng, Gimbutas, Martinsson and Rokhlin 2005).
"""

from __future__ import annotations

import numpy as np


class InterpolatedPriors:
    """Blocks of which all other priors are sums with weights that sum to one, found as blocks come.

    :ivar blocks: numbers of these blocks.

    :param int most: blocks of which there may be sums.
    :param float tolerance: error of a number, relative to one and the largest of its kind.
    """

    def __init__(self, most: int, tolerance: float) -> None:
        self.most, self.tolerance, self.blocks = most, tolerance, list[int]()
        self._rows = np.empty((0, 0))
        self._scale = np.empty(0)

    def weights(self, priors: np.ndarray, blocks: np.ndarray) -> np.ndarray | None:
        """Weights of some blocks, shape ``(B, r)``; later blocks may have more weights, which are zero of these.

        :param priors: locations and variances at random hyperparameters, shape ``(B, k)``.
        :param blocks: their numbers.
        :return: nothing where there are more blocks than may be.
        """
        if not np.isfinite(priors).all():
            return None
        if not self.blocks:
            self._scale = 1.0 + np.abs(priors).max(axis=0)
        rows = np.concatenate([priors / self._scale, np.ones((len(priors), 1))], axis=1)
        while True:
            if self.blocks:
                found = np.linalg.lstsq(self._rows.T, rows.T, rcond=None)[0].T
                away = np.abs(found @ self._rows - rows).max(axis=1)
                farthest = int(np.argmax(away))
                if away[farthest] <= self.tolerance:
                    return found
            else:
                farthest, self._rows = 0, rows[:0]
            if len(self.blocks) == self.most:
                return None
            self.blocks.append(int(blocks[farthest]))
            self._rows = np.concatenate([self._rows, rows[farthest : farthest + 1]])
