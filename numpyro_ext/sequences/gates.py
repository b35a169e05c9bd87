"""Weights of a mixture of predictors that move with the state of a network."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

PRECISIONS = (30.0, 100.0, 300.0, 1000.0, 3000.0, np.inf)
"""Precisions of the prior of coefficients to choose from; the last leaves the weights as they were."""
NUM_FOLDS = 5
"""Parts of the users by which one is chosen."""


class Gate(NamedTuple):
    r"""Logistic regression of the log weights of a mixture on a state.

    The weight of component :math:`c` is proportional to :math:`w_c \exp(z^\top A_{:c})`, where :math:`w` are weights to
    begin with and :math:`z` is the state with mean zero and variance one over the events that were learned from.

    **Source:** Jacobs, Jordan, Nowlan and Hinton (1991), *Adaptive mixtures of local experts*, for the gate.
    """

    mean: np.ndarray
    """Mean of the states, shape ``(numbers,)``."""
    deviation: np.ndarray
    """Standard deviation of the states, shape ``(numbers,)``."""
    coefficients: np.ndarray
    """Matrix :math:`A`, shape ``(numbers, components)``."""
    precision: float
    """Precision of the normal prior of each coefficient; infinite if the state does not help."""

    @classmethod
    def learned(cls, logs: np.ndarray, log_weights: np.ndarray, states: np.ndarray, users: np.ndarray) -> Gate:
        """Gate of the greatest posterior density, with a precision that is chosen by the users left out in turn.

        :param logs: log probability of each event under each component, shape ``(events, components)``.
        :param log_weights: log weights to begin with, of the same shape.
        :param states: states before the events, shape ``(events, numbers)``.
        :param users: user of each event, shape ``(events,)``.
        :return: the gate.
        """
        mean, deviation = states.mean(axis=0), states.std(axis=0)
        deviation = np.where(deviation > 0.0, deviation, 1.0)
        z, fold = (states - mean) / deviation, users % NUM_FOLDS
        scores = np.zeros(len(PRECISIONS))
        for number in range(NUM_FOLDS):
            seen, left = fold != number, fold == number
            found = np.zeros((z.shape[1], logs.shape[1]))
            for k in reversed(range(len(PRECISIONS))):
                found = _coefficients(logs[seen], log_weights[seen], z[seen], PRECISIONS[k], found)
                scores[k] += _mixed(logs[left], log_weights[left], z[left], found).sum()
        best = PRECISIONS[int(np.argmax(scores))]
        return cls(
            mean, deviation, _coefficients(logs, log_weights, z, best, np.zeros((z.shape[1], logs.shape[1]))), best
        )

    def mixed(self, logs: np.ndarray, log_weights: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Log of the mixture of probabilities of components, which stand on the last axis.

        :param logs: log probabilities under the components, shape ``(..., components)``.
        :param log_weights: log weights to begin with, of a shape that broadcasts with it.
        :param states: states, shape ``(..., numbers)``.
        """
        return _mixed(logs, log_weights, (states - self.mean) / self.deviation, self.coefficients)


def _mixed(logs: np.ndarray, log_weights: np.ndarray, z: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(logs + log_softmax(log_weights + z @ coefficients, axis=-1), axis=-1)


def _coefficients(
    logs: np.ndarray, log_weights: np.ndarray, z: np.ndarray, precision: float, start: np.ndarray
) -> np.ndarray:
    """Coefficients of the greatest posterior density under a normal prior, from a start."""
    if np.isinf(precision):
        return np.zeros_like(start)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        coefficients = flat.reshape(start.shape)
        log_prior = log_softmax(log_weights + z @ coefficients, axis=1)
        joint = logs + log_prior
        slope = np.exp(log_prior) - softmax(joint, axis=1)
        value = -np.logaddexp.reduce(joint, axis=1).sum() + 0.5 * precision * (flat @ flat)
        return value, (z.T @ slope + precision * coefficients).ravel()

    found = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 1000})
    return np.asarray(found.x).reshape(start.shape)
