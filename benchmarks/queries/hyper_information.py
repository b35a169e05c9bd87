"""Observations that tell most of hyperparameters: ``python -m benchmarks.queries.hyper_information`` writes the table.

Random Gaussian processes of one input, 7 to 13 observations each and 31 candidates (Houlsby 2014, section 3.3). Of each
rule the information that is lost by taking its best candidate in the place of the best one, by sums over a fine grid of
the hyperparameters that share nothing with the package. About six minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers

from numpyro_ext.design import expected_information_gain
from numpyro_ext.infer import EP, INLA, predictive_moments

from ..harness import blocks, mean_and_error, table, write_report

NUM_PROBLEMS, NUM_LATTICES, MOST, CANDIDATES = 40, 8, 13, np.linspace(-5.0, 5.0, 31)
PRIOR_MEAN, PRIOR_SD = np.array([0.0, 0.0, -1.0]), 1.0
_REACH, _NUM_NODES = 4.5, 37
_NEGLIGIBLE = 1e-8


def process(x: Any, y: Any = None, seen: Any = True) -> None:
    """Logarithms of length, scale and noise, which are unknown."""
    log_length, log_scale, log_noise = numpyro.sample("xi", dist.Normal(PRIOR_MEAN, PRIOR_SD).to_event(1))
    kernel = jnp.exp(2.0 * log_scale - 0.5 * jnp.square((x[:, None] - x) / jnp.exp(log_length)))
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel + 1e-8 * jnp.eye(len(x))))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(f, jnp.exp(log_noise)), obs=y)


def _problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-3.0, 3.0, rng.integers(7, MOST + 1))
    covariance = np.exp(-0.5 * (x[:, None] - x) ** 2) + 0.3**2 * np.eye(len(x))
    return x, np.linalg.cholesky(covariance) @ rng.normal(size=len(x))


def exact_information(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Information of an observation at each of some inputs about the hyperparameters, in nats.

    :param x: inputs, ``y`` observations there, ``at`` inputs of the candidates.
    """
    nodes = np.linspace(-_REACH, _REACH, _NUM_NODES)
    xi = PRIOR_MEAN + np.stack(np.meshgrid(*[nodes] * 3, indexing="ij"), -1).reshape(-1, 3)
    lengths, scales, noises = np.exp(xi.T)[:, :, None, None]

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return scales**2 * np.exp(-0.5 * ((a[:, None] - b) / lengths) ** 2)

    # The noise is far above rounding wherever the density is not negligible.
    factor = np.linalg.cholesky(kernel(x, x) + (noises**2 + 1e-9 * scales**2) * np.eye(len(x)))
    white = np.linalg.solve(factor, np.broadcast_to(y[:, None], (len(xi), len(y), 1)))[..., 0]
    log_density = -0.5 * np.sum(white**2, 1) - np.sum(np.log(np.diagonal(factor, axis1=1, axis2=2)), 1)
    log_density -= 0.5 * np.sum(((xi - PRIOR_MEAN) / PRIOR_SD) ** 2, 1)
    weights = np.exp(log_density - log_density.max())
    kept = weights > _NEGLIGIBLE * weights.max()
    weights = weights[kept] / weights[kept].sum()
    across = np.linalg.solve(factor[kept], kernel(x, at)[kept])
    mean = np.einsum("kij,ki->kj", across, white[kept])
    variance = (scales[kept] ** 2)[..., 0] - np.sum(across**2, 1) + (noises[kept] ** 2)[..., 0]
    conditional = weights @ (0.5 * np.log(2.0 * np.pi * np.e * variance))
    entropy = np.zeros(len(at))
    for j in range(len(at)):
        centre, sd = weights @ mean[:, j], np.sqrt(variance[:, j])
        values = centre + np.sinh(np.linspace(-7.5, 7.5, 2001)) * 0.05
        density = np.zeros(values.size)
        for part in np.array_split(np.arange(len(sd)), 1 + len(sd) // 2000):
            z = (values - mean[part, j, None]) / sd[part, None]
            density += (weights[part] / sd[part]) @ np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
        entropy[j] = -np.trapezoid(density * np.log(np.maximum(density, 1e-300)), values)
    return entropy - conditional


def _plug_in(engine: Any) -> np.ndarray:
    return np.asarray(predictive_moments(engine, hyper="plug-in")["y"].variance)


def _gain(engine: Any, **options: Any) -> np.ndarray:
    return expected_information_gain(engine, focus="xi", **options)["y"]


RULES: Mapping[str, tuple[str, Callable[[Any], np.ndarray]]] = {
    "`hyper=\"mgp\"`": ("EP", partial(_gain, hyper="mgp")),
    "`hyper=\"linearised\"`": ("EP", partial(_gain, hyper="linearised")),
    "mixture, `integrate=\"auto\"` (central composite)": ("EP", _gain),
    "mixture, `INLA(integrate=\"grid\")`": ("lattice", _gain),
    "entropy at the optimum": ("EP", _plug_in),
}  # fmt: skip


def losses(num_problems: int = NUM_PROBLEMS) -> dict[str, np.ndarray]:
    """Information lost by each rule on each problem, in per cent of the largest; of lattices on some."""
    out: dict[str, list[float]] = {name: [] for name in RULES}
    for seed in range(num_problems):
        x, y = _problem(seed)
        exact = exact_information(x, y, CANDIDATES)
        # All problems in one shape: rows at the end are neither seen nor asked about.
        inputs = np.concatenate([x, CANDIDATES, np.full(MOST - len(x), 9.0)])
        seen = np.arange(len(inputs)) < len(x)
        engines: dict[str, Any] = {"EP": EP(process)}
        if seed < NUM_LATTICES:
            engines["lattice"] = INLA(process, integrate="grid")
        for engine in engines.values():
            engine.run(random.key(0), inputs, np.where(seen, np.resize(y, len(inputs)), 0.0), seen)
        for name, (kind, rule) in RULES.items():
            if kind in engines:
                best = int(np.argmax(rule(engines[kind])[len(x) : len(x) + len(CANDIDATES)]))
                out[name].append(100.0 * (1.0 - exact[best] / exact.max()))
    return {name: np.array(values) for name, values in out.items()}


def main() -> None:
    """Print the study, and write it beside the other results."""
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")

    def row(name: str, lost: np.ndarray) -> Iterable[Any]:
        whole = (mean_and_error(lost), f"{np.median(lost):.1f}", f"{lost.max():.1f}")
        return name, *(whole if len(lost) == NUM_PROBLEMS else ("", "", "")), f"{lost[:NUM_LATTICES].mean():.1f}"

    lines = blocks(
        "# Which observation tells most of hyperparameters",
        f"{NUM_PROBLEMS} random Gaussian processes of one input with unknown length, scale and noise, 7 to 13 "
        "observations, 31 candidates: the information about the three that is lost by taking what a rule holds for the "
        "best candidate, in per cent of the largest, which is by sums over a fine grid of them; mean ± standard error.",
        table(
            f"rule | loss | median | largest | of the first {NUM_LATTICES} problems",
            (row(*each) for each in losses().items()),
        ),
    )
    write_report("hyper_information", lines)


if __name__ == "__main__":
    main()
