"""Adaptive tomography beside random axes, unbiased and separable bases: the error against the number of shots.

``python -m benchmarks.queries.tomography`` writes ``results/<date>-tomography.md``. The protocol is that of Houlsby
(2014, Fig. 4.2): pure states drawn at random, blocks of a hundredth of the shots so far, the expected infidelity of the
posterior to the truth, and the exponent of a line through the mean curve. Candidates of adaptive axes are fixed ones,
random ones, and such near to the mean state, refined twice; the apparatus is not turned where an axis that has been
measured before tells nearly as much.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.scipy.special import xlogy

from numpyro_ext.design import draws_of, expected_information_gain
from numpyro_ext.infer import SMC
from numpyro_ext.models import quantum_tomography
from numpyro_ext.quantum import (
    axis_measurements,
    born_probabilities,
    density_matrix,
    fidelity,
    mutually_unbiased_bases,
    pauli_bases,
    separable_bases,
    standard_separable_bases,
)

from ..harness import blocks, cpu_seconds, table, write_report

NUM_PARTICLES = 500
SHARE = 100
"""A block is this share of the shots so far."""
SETTINGS = {"information": 40, "unbiased bases": 3}
"""Axes that a run may measure; at random each block has one of its own."""
NEARLY_ALL = 0.98
"""Share of the information of the best axis that one measured before may tell to be taken in its place."""
MARKS = (10, 30, 100, 300, 1000, 3000, 10_000)


def random_axes(rng_key: jax.Array, number: int) -> jax.Array:
    return unit(jax.random.normal(rng_key, (number, 3)))


def unit(vectors: jax.Array) -> jax.Array:
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)


def fixed_axes(number: int) -> np.ndarray:
    """Even over the half sphere."""
    k = np.arange(number) + 0.5
    z, angle = k / number, np.pi * (1.0 + np.sqrt(5.0)) * k
    radius = np.sqrt(1.0 - z**2)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), z], -1)


def gains(bloch: jax.Array, weights: jax.Array, axes: jax.Array) -> jax.Array:
    """Information of one shot along each axis, of particles: in closed form from their Bloch vectors."""
    p = 0.5 * (1.0 + jnp.clip(bloch @ axes.T, -1.0, 1.0))

    def entropy(q: jax.Array) -> jax.Array:
        return -(xlogy(q, q) + xlogy(1.0 - q, 1.0 - q))

    return entropy(weights @ p) - weights @ entropy(p)


def check_gains() -> float:
    """The largest difference between these and what the package computes."""
    smc = SMC(quantum_tomography, num_particles=NUM_PARTICLES, progress_bar=False)
    smc.run(jax.random.key(0), pauli_bases(), jnp.array([[5, 5], [12, 3], [0, 0]]))
    axes = fixed_axes(20)
    theirs = expected_information_gain(draws_of(smc), axis_measurements(axes))["shot"]
    return float(np.abs(np.asarray(gains(smc.particles["bloch"], smc.weights, axes)) - theirs).max())


class Measured(NamedTuple):
    """Axes and counts that a run has measured."""

    axes: jax.Array
    counts: jax.Array
    number: jax.Array
    """Axes in use, the first ones."""

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """Arguments of the model."""
        return {"measurements": axis_measurements(self.axes), "counts": self.counts}


Choose = Callable[[jax.Array, jax.Array, jax.Array, Measured, jax.Array], tuple[jax.Array, jax.Array]]
"""From a key, Bloch vectors of particles, their weights, what was measured and the number of the block to an axis and
its place."""


def adaptive(
    key: jax.Array, bloch: jax.Array, weights: jax.Array, measured: Measured, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key, 4)
    mean = weights @ bloch
    spread = jnp.sqrt(weights @ jnp.sum(jnp.square(bloch - mean), 1))
    near = unit(mean + spread * jax.random.normal(keys[0], (60, 3)))
    axes = jnp.concatenate([fixed_axes(60), random_axes(keys[1], 20), near])
    for scale, at in ((0.3, keys[2]), (0.1, keys[3])):
        best = axes[jnp.argmax(gains(bloch, weights, axes))]
        around = unit(best + scale * jnp.maximum(spread, 0.01) * jax.random.normal(at, (20, 3)))
        axes = jnp.concatenate([best[None], around])
    new, again = jnp.split(gains(bloch, weights, jnp.concatenate([axes, measured.axes])), [len(axes)])
    again = jnp.where(jnp.arange(len(again)) < measured.number, again, -jnp.inf)
    is_again = (jnp.max(again) > NEARLY_ALL * jnp.max(new)) | (measured.number == len(again))
    place = jnp.where(is_again, jnp.argmax(again), measured.number)
    return jnp.where(is_again, measured.axes[place], axes[jnp.argmax(new)]), place


def at_random(
    key: jax.Array, bloch: jax.Array, weights: jax.Array, measured: Measured, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return random_axes(key, 1)[0], block


def unbiased(
    key: jax.Array, bloch: jax.Array, weights: jax.Array, measured: Measured, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jnp.eye(3)[block % 3], block % 3


DESIGNS: dict[str, Choose] = {"information": adaptive, "unbiased bases": unbiased, "random": at_random}


def block_sizes(num_shots: int) -> list[int]:
    """So that there is an end of a block at each mark."""
    found: list[int] = []
    while (shots := sum(found)) < num_shots:
        size = min(-(-max(shots, 1) // SHARE), num_shots - shots)
        found.append(min(size, *(mark - shots for mark in MARKS if mark > shots), num_shots))
    return found


class Outcome(NamedTuple):
    """Result of one run."""

    errors: jax.Array
    """E[1 - F] of the posterior to the truth after each block; linear in its mean, as the truth is pure."""
    failed: jax.Array
    """Updates that did not end well."""
    num_axes: jax.Array


def experiments(name: str, sizes: list[int]) -> Any:
    """Compiled runs of a design, as many as there are keys, each on a pure state of its own drawn at random."""
    choose, room = DESIGNS[name], SETTINGS.get(name, len(sizes))
    start = Measured(jnp.tile(jnp.eye(3)[2], (room, 1)), jnp.zeros((room, 2), int), jnp.zeros((), int))
    smc = SMC(quantum_tomography, num_particles=NUM_PARTICLES, progress_bar=False)
    program = smc.program(*start.arrays.values(), changing=tuple(start.arrays))

    def run(key: jax.Array) -> Outcome:
        truth_key, smc_key, key = jax.random.split(key, 3)
        truth = random_axes(truth_key, 1)[0]

        def measure(carry: Any, block: Any) -> Any:
            (state, measured), (number, size) = carry, block
            choose_key, shot_key = jax.random.split(jax.random.fold_in(key, number))
            axis, place = choose(choose_key, program.particles(state)["bloch"], state.weights, measured, number)
            ups = jax.random.binomial(shot_key, size, 0.5 * (1.0 + jnp.clip(axis @ truth, -1.0, 1.0))).astype(int)
            measured = Measured(
                measured.axes.at[place].set(axis),
                measured.counts.at[place].add(jnp.stack([ups, size - ups])),
                jnp.maximum(measured.number, place + 1),
            )
            state = program.update(measured.arrays, state)
            error = 0.5 * (1.0 - state.weights @ program.particles(state)["bloch"] @ truth)
            return (state, measured), (error, ~state.converged)

        blocks = jnp.arange(len(sizes)), jnp.asarray(sizes)
        (_, measured), (errors, failed) = jax.lax.scan(measure, (program.init(smc_key), start), blocks)
        return Outcome(errors, jnp.sum(failed), measured.number)

    return jax.jit(lambda keys: jax.lax.map(run, keys))


def side_by_side(run: Callable[[jax.Array], Outcome], keys: jax.Array) -> Outcome:
    """A part of the keys on each core: programs of JAX on small arrays use one."""
    with ThreadPoolExecutor(len(keys)) as pool:
        found = list(pool.map(lambda part: jax.block_until_ready(run(part)), keys))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)


# Two qubits: families of settings, of which each is measured in turn or the one that tells the most


def family_run(
    smc: SMC, settings: jax.Array, is_adaptive: bool, truth: np.ndarray, seed: int, shots: int
) -> np.ndarray:
    """Errors at the marks, of a state."""
    generator = np.random.default_rng(seed)
    p = np.asarray(born_probabilities(settings, truth))
    p = p / p.sum(-1, keepdims=True)
    counts, total, errors = np.zeros(p.shape, int), 0, {}
    smc.run(jax.random.key(seed), settings, jnp.asarray(counts))
    block = 0
    while total < shots:
        size = min(-(-max(total, 1) // 50), *(mark - total for mark in FAMILY_MARKS if mark > total))
        place = block % len(p)
        if is_adaptive:
            place = int(np.argmax(expected_information_gain(smc, settings)["shot"]))
        counts[place] += generator.multinomial(size, p[place])
        total, block = total + size, block + 1
        smc.update(settings, jnp.asarray(counts))
        if total in FAMILY_MARKS:
            parts = smc.particles["state"]
            fidelities = fidelity(parts[:, 0] + 1j * parts[:, 1], truth)
            errors[total] = 1.0 - float(np.asarray(smc.weights) @ np.asarray(fidelities))
    return np.array([errors[mark] for mark in FAMILY_MARKS if mark <= shots])


def entangled(run: int) -> np.ndarray:
    """A pure state drawn at random."""
    parts = np.random.default_rng(2000 + run).normal(size=(2, 4))
    return np.asarray(density_matrix(amplitudes=parts[0] + 1j * parts[1]))


FAMILY_MARKS = (300, 1000, 3000, 10_000)
FAMILIES = {
    "unbiased bases in turn": (lambda: mutually_unbiased_bases(4), False),
    "separable bases in turn": (lambda: standard_separable_bases(2), False),
    "unbiased bases, information": (lambda: mutually_unbiased_bases(4), True),
    "separable bases, information": (lambda: standard_separable_bases(2), True),
    "81 separable bases, information": (lambda: separable_bases(2), True),
}
TRUTHS: dict[str, tuple[Callable[[int], np.ndarray], tuple[str, ...], int]] = {
    "the mixed state": (lambda _: np.eye(4) / 4.0, tuple(FAMILIES)[:4], 3000),
    "a Bell state": (lambda _: np.asarray(density_matrix(amplitudes=[1, 0, 0, 1])), tuple(FAMILIES)[:4], 3000),
    "a product state": (lambda _: np.asarray(density_matrix(amplitudes=[0, 1, 0, 0])), tuple(FAMILIES)[:4], 3000),
    "pure states drawn at random": (entangled, (tuple(FAMILIES)[0], tuple(FAMILIES)[-1]), 10_000),
}
"""States of Houlsby (2014, Fig. 4.3), with the designs that are compared on them and the shots."""


def means_and_errors(errors: Any, width: int) -> list[str]:
    """Cells of the means over runs with their standard errors in brackets, and empty ones up to a width."""
    mean, deviation = np.mean(errors, 0), np.std(errors, 0, ddof=1) / np.sqrt(len(errors))
    return [f"{m:.2g} ({d:.1g})" for m, d in zip(mean, deviation, strict=True)] + [""] * (width - len(mean))


def two_qubits(num_runs: int) -> list[str]:
    """The table of the four kinds of states."""
    smc = SMC(quantum_tomography, num_particles=300, watch="state", progress_bar=False)

    def rows() -> Iterator[Iterable[Any]]:
        for kind, (truth, designs, shots) in TRUTHS.items():
            for name in designs:
                make, is_adaptive = FAMILIES[name]
                found, seconds = cpu_seconds(
                    lambda: [
                        family_run(smc, make(), is_adaptive, truth(run), run, shots)  # noqa: B023
                        for run in range(num_runs)
                    ]
                )
                yield kind, name, *means_and_errors(found, len(FAMILY_MARKS)), f"{seconds / num_runs:.1f}"

    return blocks(
        f"{num_runs} runs each, 300 particles, blocks of 1/50 of the shots; the expected infidelity of the posterior "
        "to the truth, with standard errors over runs.",
        table(f"truth | design | {' | '.join(f'N = {mark}' for mark in FAMILY_MARKS)} | CPU-s a run", rows()),
    )


def one_qubit(num_runs: int, num_shots: int) -> list[str]:
    """The table of the three designs, and notes on their runs."""
    marks, sizes = [mark for mark in MARKS if mark <= num_shots], block_sizes(num_shots)
    ends = np.searchsorted(np.cumsum(sizes), marks)
    cores = math.gcd(os.cpu_count() or 1, num_runs)
    keys = jax.random.split(jax.random.key(0), (cores, num_runs // cores))
    notes = []

    def rows() -> Iterator[Iterable[Any]]:
        for name in DESIGNS:
            run, compiling = cpu_seconds(lambda: experiments(name, sizes).lower(keys[0]).compile())  # noqa: B023
            start = time.perf_counter()
            found, seconds = cpu_seconds(side_by_side, run, keys)
            wall, errors = time.perf_counter() - start, found.errors[:, ends]
            notes.append(
                f"{name}: {found.failed.sum()} updates did not end well; up to {found.num_axes.max()} axes a run"
            )
            notes.append(f"{name}: {compiling:.1f} CPU-s to compile")
            slope = np.polyfit(np.log(marks), np.log(np.mean(errors, 0)), 1)[0]
            times = f"{seconds / num_runs:.2f}", f"{wall:.1f}"
            yield name, f"{slope:.3f}", *means_and_errors(errors, len(marks)), *times

    lines = table(f"design | exponent | {' | '.join(f'N = {mark}' for mark in marks)} | CPU-s a run | all, s", rows())
    notes.append(f"gains against expected_information_gain of the package: {check_gains():.1e}")
    notes.append(
        f"load of the machine over the last quarter of an hour: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores"
    )
    return blocks(
        f"Pure states drawn at random, {num_runs} runs, {NUM_PARTICLES} particles, blocks of 1/{SHARE} of the "
        "shots; E[1 - F] of the posterior to the truth, with standard errors over runs, and the exponent of a line "
        "through the mean curve. All runs of a design are one compiled program, in as many threads as there are cores: "
        "CPU-seconds of each run, and seconds of wall time of all of them.",
        lines,
        (f"- {note}" for note in notes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--shots", type=int, default=10_000)
    parser.add_argument("--qubits", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    numpyro.enable_x64()
    if options.qubits == 2:
        lines = blocks("# Tomography of two qubits", two_qubits(options.runs))
        write_report("tomography-two-qubits", lines, "queries.tomography --qubits 2")
    else:
        write_report("tomography", blocks("# Tomography of one qubit", one_qubit(options.runs, options.shots)))


if __name__ == "__main__":
    main()
