"""Heteroscedastic ordinal matrix factorisation in plain NumPy: the messages of Houlsby (2014), section 7.1."""

import numpy as np
from scipy.special import log_ndtr, roots_legendre

_NODES, _WEIGHTS = roots_legendre(200)


def tilted_gamma(x, s, k, a, b):
    """Shape and rate of the gamma density with two moments of ``Gamma(t; a, b) N(x; 0, s + k / t)``, by quadrature."""
    center, width = np.log(a / (b + 0.3 * x**2 / k)), 9.0 / np.sqrt(a) + 2.0
    log_t = center[:, None] + width[:, None] * _NODES
    variance = s[:, None] + k[:, None] * np.exp(-log_t)
    value = a[:, None] * log_t - b[:, None] * np.exp(log_t) - 0.5 * (np.log(variance) + x[:, None] ** 2 / variance)
    weight = np.exp(value - value.max(1, keepdims=True)) * _WEIGHTS
    weight /= weight.sum(1, keepdims=True)
    mean = (weight * np.exp(log_t)).sum(1)
    spread = (weight * (np.exp(log_t) - mean[:, None]) ** 2).sum(1)
    return mean**2 / spread, mean / spread


class Ratings:
    """All messages, as pairs of a mean over a variance and of a precision.

    :param index: users and items of the cells.
    :param level: from zero.
    :param nums: number of users and of items.
    :param rank: of the products.
    :param num_levels: of the ratings.
    """

    def __init__(self, index, level, nums, rank, num_levels, damping=0.5):
        self.index, self.nums, self.rank, self.damping = index, nums, rank, damping
        self.grid = np.linspace(-6.0, 6.0, num_levels - 1)
        self.sign = np.where(level[:, None] > np.arange(num_levels - 1), 1.0, -1.0)
        n, k, items = len(level), num_levels - 1, nums[1]
        rng = np.random.default_rng(0)
        self.mean = [rng.normal(size=(num, rank)) for num in nums]
        self.variance = [np.full((num, rank), 0.5) for num in nums]
        self.step_value, self.step_cut = np.zeros((2, n, k)), np.zeros((2, n, k))
        self.cut_prior = np.stack([np.tile(self.grid / 0.2, (items, 1)), np.full((items, k), 5.0)])
        self.typical = np.zeros((2, items, k))
        self.value = np.stack([np.zeros(n), np.full(n, 0.1)])
        self.factor, self.product = np.zeros((2, n)), np.stack([np.zeros(n), np.full(n, 1.0 / rank)])
        self.prior = [np.stack([np.zeros((num, rank)), np.ones((num, rank))]) for num in nums]
        self.gammas = [np.full((2, rank), 5.0) for _ in nums]
        self.to_noise = [np.zeros((2, n)) for _ in nums]

    def move(self, old, new, is_valid=True):
        """Part of the way from an old message to a new one."""
        return np.where(is_valid, old + self.damping * (np.stack(new) - old), old)

    def cuts(self):
        """Posterior of each cut point of each item."""
        out = self.cut_prior.copy()
        for cell, item in enumerate(self.index[1]):
            out[:, item] += self.step_cut[:, cell]
        return out

    def noise(self, side):
        """Shapes and rates of the precisions of a side."""
        start = np.array([[5.0], [5.0 * np.sqrt(10.0)]])
        return start + np.stack([np.bincount(self.index[side], x, self.nums[side]) for x in self.to_noise[side]])

    def noise_without_cell(self, side):
        return self.noise(side)[:, self.index[side]] - self.to_noise[side]

    def noise_point(self):
        """Noise variance of each cell at the modes of what other cells say."""
        return np.prod([b / (a + 1.0) for a, b in (self.noise_without_cell(side) for side in (0, 1))], axis=0)

    def iterate(self):
        """One pass over all factors."""
        self.visit_steps()
        said = self.step_value.sum(2)
        has_said = said[1] > 0.0
        above_mean, above_variance = said[0] / said[1].clip(1e-300), 1.0 / said[1].clip(1e-300)
        below_mean, below_variance = self.product[0] / self.product[1], 1.0 / self.product[1]
        point = self.noise_point()
        total = above_variance + point
        self.factor = self.move(self.factor, (above_mean / total, 1.0 / total), has_said)
        cavities = [self.noise_without_cell(side) for side in (0, 1)]
        for side, (a, b) in enumerate(cavities):
            found = tilted_gamma(above_mean - below_mean, above_variance + below_variance, point * (a + 1) / b, a, b)
            self.to_noise[side] = self.move(self.to_noise[side], (found[0] - a, found[1] - b), has_said)
        for _ in range(30):
            self.sweep()
        mean, variance = self.predictor()
        new = np.stack([mean / variance, 1.0 / variance]) - self.factor
        self.product = self.move(self.product, new, new[1] > 0.0)
        total = 1.0 / self.product[1] + self.noise_point()
        self.value = self.move(self.value, (self.product[0] / self.product[1] / total, 1.0 / total))
        for side in (0, 1):
            self.visit_priors(side)

    def visit_steps(self):
        """Each comparison of a value and a cut point, and the priors of these."""
        cavity_value = (self.value + self.step_value.sum(2))[:, :, None] - self.step_value
        cavity_cut = self.cuts()[:, self.index[1]] - self.step_cut
        m_a, v_a = cavity_value[0] / cavity_value[1], 1.0 / cavity_value[1]
        m_b, v_b = cavity_cut[0] / cavity_cut[1], 1.0 / cavity_cut[1]
        root = np.sqrt(v_a + v_b)
        z = self.sign * (m_a - m_b) / root
        ratio = np.exp(-0.5 * z**2 - 0.5 * np.log(2.0 * np.pi) - log_ndtr(z))
        shift, shrink = self.sign * ratio / root, ratio * (z + ratio) / root**2
        for name, m, v, push in (("step_value", m_a, v_a, shift), ("step_cut", m_b, v_b, -shift)):
            # the quotient of N(m + v push, v - v**2 shrink) by N(m, v)
            new = np.stack([push + m * shrink, shrink]) / (1.0 - v * shrink)
            setattr(self, name, self.move(getattr(self, name), new))
        said = self.cuts() - self.cut_prior
        total = 1.0 / said[1].clip(1e-300) + 0.1
        self.typical = self.move(self.typical, (said[0] / said[1].clip(1e-300) / total, 1.0 / total), said[1] > 0.0)
        rest = np.stack([self.grid / 0.1, np.full_like(self.grid, 10.0)])[:, None] + (
            self.typical.sum(1, keepdims=True) - self.typical
        )
        total = 1.0 / rest[1] + 0.1
        self.cut_prior = self.move(self.cut_prior, (rest[0] / rest[1] / total, 1.0 / total))

    def predictor(self):
        """Moments of the product in each cell."""
        (m, w), (n, x) = ((self.mean[s][self.index[s]], self.variance[s][self.index[s]]) for s in (0, 1))
        return (m * n).sum(1), (m**2 * x + w * n**2 + w * x).sum(1)

    def sweep(self):
        """One sweep of variational Bayes over users and items."""
        for side in (0, 1):
            own, other = self.index[side], self.index[1 - side]
            for d in range(self.rank):
                partner, width = self.mean[1 - side][other, d], self.variance[1 - side][other, d]
                rest = self.predictor()[0] - self.mean[side][own, d] * partner
                shift, precision = (x[:, d].copy() for x in self.prior[side])
                np.add.at(precision, own, self.factor[1] * (partner**2 + width))
                np.add.at(shift, own, (self.factor[0] - self.factor[1] * rest) * partner)
                self.mean[side][:, d], self.variance[side][:, d] = shift / precision, 1.0 / precision

    def visit_priors(self, side):
        """Prior means and variances of a side, standard normal and InverseGamma(5, 5), by variational Bayes."""
        weight = self.gammas[side][0] / self.gammas[side][1]
        width = 1.0 / (1.0 + self.nums[side] * weight)
        center = width * weight * self.mean[side].sum(0)
        square = ((self.mean[side] - center) ** 2 + self.variance[side] + width).sum(0)
        self.gammas[side] = np.stack([np.full(self.rank, 5.0 + 0.5 * self.nums[side]), 5.0 + 0.5 * square])
        weight = np.broadcast_to(self.gammas[side][0] / self.gammas[side][1], self.mean[side].shape)
        self.prior[side] = np.stack([weight * center, weight])
