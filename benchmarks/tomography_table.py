"""Adaptive tomography beside random axes, unbiased and separable bases: the error against the number of shots.

``python -m benchmarks.tomography_table`` writes ``results/<date>-tomography.md``. The protocol is that of Houlsby
(2014, Fig. 4.2): pure states drawn at random, blocks of a hundredth of the shots so far, the expected infidelity of the
posterior to the truth, and the exponent of a line through the mean curve. Candidates of adaptive axes are fixed ones,
random ones, and such near to the mean state, refined twice; the apparatus is not turned where an axis that has been
measured before tells nearly as much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_ext.design import draws_of, expected_information_gain
from numpyro_ext.infer import SMC
from numpyro_ext.models import quantum_tomography
from numpyro_ext.quantum import (
    axis_measurements,
    born_probabilities,
    density_matrix,
    fidelity,
    mutually_unbiased_bases,
    separable_bases,
    standard_separable_bases,
)

from .results_table import write_report

NUM_PARTICLES = 500
SHARE = 100
"""A block is this share of the shots so far."""
FIRST_SETTINGS = 72
"""Arrays of settings have this length and are doubled when they are full, so that few shapes are compiled."""
NEARLY_ALL = 0.98
"""Share of the information of the best axis that one measured before may tell to be taken in its place."""
MARKS = (10, 30, 100, 300, 1000, 3000, 10_000)

Choose = Callable[[SMC, np.random.Generator, np.ndarray, int], np.ndarray]
"""From particles, random numbers, the axes that have been measured and the number of the block to an axis."""


def random_axes(number: int, generator: np.random.Generator) -> np.ndarray:
    found = generator.normal(size=(number, 3))
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def fixed_axes(number: int) -> np.ndarray:
    """Even over the half sphere."""
    k = np.arange(number) + 0.5
    z, angle = k / number, np.pi * (1.0 + np.sqrt(5.0)) * k
    radius = np.sqrt(1.0 - z**2)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), z], -1)


def gains(smc: SMC, axes: np.ndarray) -> np.ndarray:
    """Information of one shot along each axis, of particles: in closed form from their Bloch vectors."""
    p = 0.5 * (1.0 + np.clip(np.asarray(smc.particles["bloch"]) @ axes.T, -1.0, 1.0))
    weights = np.asarray(smc.weights)

    def entropy(q: np.ndarray) -> np.ndarray:
        q = np.clip(q, 1e-300, 1.0)
        rest = np.clip(1.0 - q, 1e-300, 1.0)
        return -(q * np.log(q) + rest * np.log(rest))

    found: np.ndarray = entropy(weights @ p) - weights @ entropy(p)
    return found


def check_gains(smc: SMC) -> float:
    """The largest difference between these and what the package computes."""
    axes = fixed_axes(20)
    return float(
        np.abs(gains(smc, axes) - expected_information_gain(draws_of(smc), axis_measurements(axes))["shot"]).max()
    )


def adaptive(smc: SMC, generator: np.random.Generator, measured: np.ndarray, block: int) -> np.ndarray:
    bloch, weights = np.asarray(smc.particles["bloch"]), np.asarray(smc.weights)
    mean = weights @ bloch
    spread = np.sqrt(weights @ ((bloch - mean) ** 2).sum(1))
    near = mean + spread * generator.normal(size=(60, 3))
    axes = np.concatenate(
        [fixed_axes(60), random_axes(20, generator), near / np.linalg.norm(near, axis=1, keepdims=True)]
    )
    for scale in (0.3, 0.1):
        best = axes[np.argmax(gains(smc, axes))]
        around = best + scale * max(spread, 0.01) * generator.normal(size=(20, 3))
        axes = np.concatenate([best[None], around / np.linalg.norm(around, axis=1, keepdims=True)])
    found = gains(smc, np.concatenate([axes, measured]))
    again = found[len(axes) :]
    if len(again) and again.max() > NEARLY_ALL * found.max():
        axes, found = measured, again
    chosen: np.ndarray = axes[np.argmax(found[: len(axes)])]
    return chosen


def at_random(smc: SMC, generator: np.random.Generator, measured: np.ndarray, block: int) -> np.ndarray:
    return random_axes(1, generator)[0]


def unbiased(smc: SMC, generator: np.random.Generator, measured: np.ndarray, block: int) -> np.ndarray:
    found: np.ndarray = np.eye(3)[block % 3]
    return found


DESIGNS: dict[str, Choose] = {"information": adaptive, "unbiased bases": unbiased, "random": at_random}


def one_run(smc: SMC, choose: Choose, truth: np.ndarray, seed: int, num_shots: int) -> tuple[np.ndarray, int]:
    """Errors at the marks, and how many updates did not end well."""
    generator = np.random.default_rng(seed)
    axes, counts = np.tile([0.0, 0.0, 1.0], (FIRST_SETTINGS, 1)), np.zeros((FIRST_SETTINGS, 2), int)
    places: dict[tuple[float, ...], int] = {}
    smc.run(jax.random.key(seed), axis_measurements(axes), jnp.asarray(counts))
    shots, block, errors, failed = 0, 0, {}, 0
    while shots < num_shots:
        size = min(-(-max(shots, 1) // SHARE), num_shots - shots)
        size = min(size, min((mark - shots for mark in MARKS if mark > shots), default=size))
        axis = choose(smc, generator, axes[: len(places)], block)
        block += 1
        place = places.setdefault(tuple(np.round(axis, 12)), len(places))
        if place == len(axes):
            axes, counts = np.concatenate([axes, axes]), np.concatenate([counts, 0 * counts])
        axes[place] = axis
        ups = generator.binomial(size, 0.5 * (1.0 + np.clip(axis @ truth, -1.0, 1.0)))
        counts[place] += (ups, size - ups)
        shots += size
        smc.update(axis_measurements(axes), jnp.asarray(counts))
        failed += not smc.diagnostics.converged
        if shots in MARKS:
            errors[shots] = error_of(smc, truth)
    return np.array([errors[mark] for mark in MARKS if mark <= num_shots]), failed


def error_of(smc: SMC, truth: np.ndarray) -> float:
    """E[1 - F] of the posterior to a pure state, which is linear in its mean."""
    return float(0.5 * (1.0 - np.asarray(smc.weights) @ np.asarray(smc.particles["bloch"]) @ truth))


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
"""Of Houlsby (2014, Fig. 4.3), with the designs that are compared on them and the shots."""


def two_qubits(num_runs: int) -> list[str]:
    """The table of the four kinds of states."""
    lines = [
        "",
        f"{num_runs} runs each, 300 particles, blocks of 1/50 of the shots; the expected infidelity of the posterior",
        "to the truth, with standard errors over runs.",
        "",
        "| truth | design | " + " | ".join(f"N = {mark}" for mark in FAMILY_MARKS) + " | CPU-s a run |",
        "|---" * (len(FAMILY_MARKS) + 3) + "|",
    ]
    smc = SMC(quantum_tomography, num_particles=300, watch="state", progress_bar=False)
    for kind, (truth, designs, shots) in TRUTHS.items():
        for name in designs:
            make, is_adaptive = FAMILIES[name]
            start, found = time.process_time(), []
            for run in range(num_runs):
                found.append(family_run(smc, make(), is_adaptive, truth(run), run, shots))
                print(kind, name, run, found[-1].round(4), f"{time.process_time() - start:.0f} CPU-s", flush=True)
            mean, deviation = np.mean(found, 0), np.std(found, 0, ddof=1) / np.sqrt(num_runs)
            cells = [f"{m:.2g} ({d:.1g})" for m, d in zip(mean, deviation, strict=True)]
            cells += [""] * (len(FAMILY_MARKS) - len(cells))
            seconds = (time.process_time() - start) / num_runs
            lines.append(f"| {kind} | {name} | {' | '.join(cells)} | {seconds:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--shots", type=int, default=10_000)
    parser.add_argument("--qubits", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    numpyro.enable_x64()
    if options.qubits == 2:
        lines = ["# Tomography of two qubits", *two_qubits(options.runs)]
        write_report("tomography-two-qubits", lines, "tomography_table --qubits 2")
        return
    marks = [mark for mark in MARKS if mark <= options.shots]
    rows, notes = [], []
    smc = SMC(quantum_tomography, num_particles=NUM_PARTICLES, progress_bar=False)
    for name, choose in DESIGNS.items():
        start, failed, found = time.process_time(), 0, []
        for run in range(options.runs):
            truth = random_axes(1, np.random.default_rng(1000 + run))[0]
            errors, bad = one_run(smc, choose, truth, run, options.shots)
            found.append(errors)
            failed += bad
            print(name, run, errors.round(5), f"{time.process_time() - start:.0f} CPU-s", bad, flush=True)
        mean, deviation = np.mean(found, 0), np.std(found, 0, ddof=1) / np.sqrt(options.runs)
        slope = np.polyfit(np.log(marks), np.log(mean), 1)[0]
        seconds = (time.process_time() - start) / options.runs
        rows.append(
            [
                name,
                f"{slope:.3f}",
                *(f"{m:.2g} ({d:.1g})" for m, d in zip(mean, deviation, strict=True)),
                f"{seconds:.1f}",
            ]
        )
        notes.append(f"{name}: {failed} updates of {options.runs} runs did not end well")
    notes.append(f"gains against expected_information_gain of the package: {check_gains(smc):.1e}")
    lines = [
        "# Tomography of one qubit",
        "",
        f"Pure states drawn at random, {options.runs} runs, {NUM_PARTICLES} particles, blocks of 1/{SHARE} of the",
        "shots; E[1 - F] of the posterior to the truth, with standard errors over runs, and the exponent of a line",
        "through the mean curve.",
        "",
        "| design | exponent | " + " | ".join(f"N = {mark}" for mark in marks) + " | CPU-s a run |",
        "|---" * (len(marks) + 3) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *(f"- {note}" for note in notes),
    ]
    write_report("tomography", lines)


if __name__ == "__main__":
    main()
