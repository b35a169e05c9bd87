"""Like families of factors that follow each other are one to the algorithms, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.gaussian.algorithms.modes import laplace
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation
from numpyro_ext.infer.gaussian.variational import natural_gradient
from numpyro_ext.linalg.gaussian.design import DenseDesign
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from numpyro_ext.potentials import GaussianPotential, PoissonExpPotential
from numpyro_ext.potentials.families.ordinal import CumulativeProbitPotential
from numpyro_ext.structure.latent_gaussian import Blocks, LatentGaussian, joined
from tests.tiers import thorough

Y = (jnp.array([0.3, -1.2, 2.0]), jnp.array([1.0, 0.4]))
COUNTS = (jnp.array([3, 0]), jnp.array([5]))


def form_of_many(scale):
    """Two Gaussian families, of which one has a scale for each row, two of counts, and a correlated block between."""
    potentials = (
        GaussianPotential(Y[0], scale),
        GaussianPotential(Y[1], scale * jnp.array([1.0, 2.0])),
        PoissonExpPotential(COUNTS[0], 2.0),
        PoissonExpPotential(COUNTS[1], jnp.array(0.5)),
    )
    prior = (
        DiagonalPrior(jnp.array([1.0, 2.0]) * scale),
        DiagonalPrior(jnp.array([0.7])),
        CovariancePrior(jnp.array([[[1.0, 0.4], [0.4, 1.5]]])),
        DiagonalPrior(jnp.array([3.0])),
    )
    design = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)))
    observed = tuple(jnp.array(mask) for mask in ([True, False, True], [True, True], [True, True], [True]))
    blocks = Blocks(jnp.arange(8)[None], jnp.arange(6)[None])
    return LatentGaussian(
        prior, DenseDesign(design), jnp.linspace(-0.5, 0.5, 8), potentials, observed, jnp.zeros(()), blocks
    )


def test_what_is_put_together():
    form = form_of_many(0.8)
    one = joined(form)
    assert [type(p) for p in one.potentials] == [GaussianPotential, PoissonExpPotential]
    assert [block.size for block in one.prior] == [3, 2, 1]
    assert [mask.shape for mask in one.observed] == [(5,), (3,)]
    e = jnp.asarray(np.random.default_rng(1).normal(size=6))
    assert one.log_density(e) == pytest.approx(float(form.log_density(e)), rel=1e-12)
    assert jax.tree.structure(joined(one)) == jax.tree.structure(one)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [*thorough(expectation_propagation, natural_gradient), laplace])
def test_evidence_and_gradient_are_those_of_the_separate_families(algorithm, monkeypatch):
    def found(scale):
        form = form_of_many(scale)
        state, _ = algorithm.solve(form, algorithm.init(form), tol=1e-10)
        return algorithm.log_evidence(form, jax.lax.stop_gradient(state))

    together = jax.value_and_grad(found)(0.8)
    monkeypatch.setattr(algorithm, "joined", lambda form: form)
    separate = jax.value_and_grad(found)(0.8)
    np.testing.assert_allclose(together, separate, rtol=1e-9)


def test_thresholds_are_not_taken_for_numbers_of_rows():
    # As many thresholds as rows: put one after the other they would be other thresholds.
    thresholds = jnp.array([-1.0, 1.0])
    ordinal = CumulativeProbitPotential(jnp.array([0, 2]), thresholds)
    form = form_of_many(0.8)._replace(
        potentials=(ordinal, ordinal), observed=(jnp.ones(2, bool),) * 2, offset=jnp.zeros(4)
    )
    assert joined(form).potentials == (ordinal, ordinal)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [EP, LaplaceApproximation, VariationalGaussian])
def test_sites_of_a_loop_are_those_of_a_plate(kind):
    rng = np.random.default_rng(0)
    counts = [list(rng.poisson(3.0, 4)) for _ in range(5)]

    def loop(counts):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        for j, count in enumerate(counts):
            shift = numpyro.sample(f"shift_{j}", dist.Normal(1, scale))
            with numpyro.plate(f"of_{j}", len(count)):
                numpyro.sample(f"count_{j}", dist.Poisson(jnp.exp(shift)), obs=jnp.array(count))

    def plates(counts):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("groups", 5):
            shift = numpyro.sample("shift", dist.Normal(1, scale))
        numpyro.sample("count", dist.Poisson(jnp.exp(shift)[:, None]).to_event(1), obs=jnp.array(counts))

    engines = [kind(model, progress_bar=False) for model in (loop, plates)]
    for engine in engines:
        engine.run(jax.random.key(0), counts)
    assert engines[0].log_evidence == pytest.approx(engines[1].log_evidence, abs=1e-6)
    means = [engines[0].posterior[f"shift_{j}"].mean for j in range(5)]
    np.testing.assert_allclose(jnp.stack(means), engines[1].posterior["shift"].mean, atol=1e-6)
