"""Small runs of every engine that can be saved, and the archives in ``tests/reference/archives`` that they made.

``python -m tests.infer.front.files.saved_runs FOLDER``
writes the archives of the release that is installed.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.distributions import HiddenMarkovTree
from numpyro_ext.infer import EP, INLA, BilinearVG, LaplaceApproximation, StructuredMeanField, VariationalGaussian
from numpyro_ext.linalg import (
    convolution,
    diagonal,
    finite_differences,
    fourier,
    from_matrix,
    identity,
    masked_fourier,
    select,
    shifted_transforms,
    stack,
    total_variation,
    wavelet_transform,
)
from numpyro_ext.potentials import Forest, LaplacePotential

SIDES = (4, 4)


def regression(x, y=None, *, mask=True):
    """Counts with a slope and groups; a scale is learned."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, scale).expand([2]).to_event(1))
    with numpyro.plate("observations", x.shape[0]), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ slopes)), obs=y)


def sparse(operator, y=None):
    """Coefficients with a Laplace prior behind a linear operator, which is an argument."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    s = numpyro.sample("s", dist.Laplace(0.0, scale).expand([operator.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(operator @ s, 0.3), obs=y)


def picture(noisy, noise=0.3, *, wavelet="haar", shift=(0, 0)):
    """Wavelet coefficients of a picture with a tree of states."""
    transform = wavelet_transform(SIDES, wavelet, 1)
    forest = Forest.from_parents(np.r_[np.full(4, -1), np.arange(12) // 4])
    low = numpyro.sample("low", dist.LogNormal(-1.0, 0.3))
    prior = HiddenMarkovTree(forest, dist.Laplace(0.0, low), dist.Laplace(0.0, 2.0), 0.4, jnp.array([[0.1, 0.8]]))
    s = numpyro.sample("s", prior)
    image = numpyro.deterministic("image", jnp.roll((transform.T @ s).reshape(SIDES), shift, (0, 1)))
    numpyro.sample("y", dist.Normal(image, noise).to_event(2), obs=noisy)


def factors(rows, cols, counts=None):
    """A matrix of counts of rank one."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("row", 4):
        w = numpyro.sample("w", dist.Normal(0.0, scale).expand([1]).to_event(1))
    with numpyro.plate("col", 3):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    numpyro.sample("counts", dist.Poisson(jnp.exp((w[rows] * z[cols]).sum(-1))), obs=counts)


class SavedRun(NamedTuple):
    """An engine on a model, and the arguments that it was run on."""

    engine: Any
    model: Any
    options: dict[str, Any]
    args: tuple
    kwargs: dict[str, Any]


def runs() -> dict[str, SavedRun]:
    """By the names of their files."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 2)))
    counted = x, rng.poisson(np.exp(x @ np.array([0.6, -0.4])))
    masked = {"mask": np.arange(8) != 3}
    operator = (
        diagonal(jnp.linspace(1.0, 2.0, 8)) @ select(np.arange(16) % 2 == 0) @ convolution(SIDES, np.ones((2, 2)))
    )
    sums = operator @ rng.laplace(size=16)
    noisy = jnp.asarray(rng.laplace(size=SIDES))
    rows, cols = np.divmod(np.arange(12), 3)
    cells = rows, cols, rng.poisson(2.0, size=12)
    quick = {"num_samples": 10, "progress_bar": False}
    return {
        "ep": SavedRun(EP, regression, {**quick, "damping": 0.1}, counted, masked),
        "ep_given": SavedRun(EP, regression, {**quick, "hyper_values": {"scale": jnp.asarray(0.7)}}, counted, masked),
        "variational_gaussian": SavedRun(VariationalGaussian, regression, quick, counted, masked),
        "laplace": SavedRun(LaplaceApproximation, regression, quick, counted, masked),
        "inla": SavedRun(INLA, regression, quick, counted, masked),
        "structured_mean_field": SavedRun(
            StructuredMeanField, sparse, {**quick, "num_steps": 1000}, (operator, sums), {}
        ),
        "ep_tree": SavedRun(EP, picture, quick, (noisy, 0.2), {"wavelet": "db2"}),
        "ep_mixture": SavedRun(EP, picture, {**quick, "num_shifts": 2}, (noisy,), {}),
        "bilinear": SavedRun(BilinearVG, factors, quick, cells, {}),
    }


def operators() -> dict[str, Any]:
    """One object of every class that an argument of a model may hold."""
    image = (4, 6)
    blur = convolution(image, np.ones((3, 3)) / 9.0, boundary="reflect")
    return {
        "composed": select(np.arange(24) % 3 == 0) @ (2.0 * blur + wavelet_transform(image, "db2", 1).T),
        "stacked": stack([identity(24), from_matrix(np.eye(24)), diagonal(np.arange(24.0))]),
        "differences": finite_differences(image, 1),
        "variation": total_variation(image),
        "fourier": fourier(image),
        "masked": masked_fourier(np.arange(24).reshape(image) % 3 == 0),
        "long": convolution(2050, np.eye(2050)[1025]),  # by Fourier transforms
        "shifted": shifted_transforms(wavelet_transform(image, "haar", 1), [[0, 0], [1, 2]]),
    }


def description(engine: Any) -> dict[str, Any]:
    """The results that a loaded engine must have again."""
    return {
        "log_evidence": float(engine.log_evidence),
        "means": {name: np.asarray(engine.posterior[name].mean).tolist() for name in engine.posterior},
        "hyper": {name: np.asarray(estimate.value).tolist() for name, estimate in engine.hyper.items()},
    }


def main(folder: Path) -> None:
    from numpyro_ext.infer.persistence import write_archive

    folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    for name, run in runs().items():
        engine = run.engine(run.model, **run.options)
        engine.run(jax.random.key(0), *run.args, **run.kwargs)
        engine.save(folder / f"{name}.npz")
        expected[name] = description(engine)
    (folder / "results.json").write_text(json.dumps(expected, indent=1) + "\n")
    given = {**operators(), "forest": Forest.from_parents([-1, 0, 0, 1]), "potential": LaplacePotential(0.0, 2.0)}
    write_archive(folder / "operators.npz", given)


if __name__ == "__main__":
    numpyro.enable_x64()
    main(Path(sys.argv[1]))
