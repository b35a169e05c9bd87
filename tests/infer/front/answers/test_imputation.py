"""Missing covariates: the idiom of a masked prior joined to what was seen, against the same model written plainly."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from tests.tiers import thorough

RNG = np.random.default_rng(0)
NEOCORTEX = RNG.normal(size=10)
ENERGY = 0.5 * NEOCORTEX + 0.6 * RNG.normal(size=10)
MISSING = np.array([1, 4, 7])
SEEN = np.setdiff1d(np.arange(10), MISSING)


def joined(slope, covariate, y):
    center = numpyro.sample("center", dist.Normal(0, 1))
    missing = np.flatnonzero(np.isnan(covariate))
    imputed = numpyro.sample("imputed", dist.Normal(center, 2).expand([len(missing)]).mask(False))
    covariate = jnp.asarray(covariate).at[missing].set(imputed)
    numpyro.sample("covariate", dist.Normal(center, 2), obs=covariate)
    numpyro.sample("y", dist.Normal(slope * covariate, 1), obs=y)


def plain(slope, covariate, y):
    center = numpyro.sample("center", dist.Normal(0, 1))
    imputed = numpyro.sample("imputed", dist.Normal(center, 2).expand([len(MISSING)]))
    numpyro.sample("seen", dist.Normal(center, 2), obs=covariate[SEEN])
    numpyro.sample("y_seen", dist.Normal(slope * covariate[SEEN], 1), obs=y[SEEN])
    numpyro.sample("y", dist.Normal(slope * imputed, 1), obs=y[MISSING])


@pytest.mark.parametrize("slope", [0, 0.7])
@pytest.mark.parametrize("engine", [EP, *thorough(LaplaceApproximation, VariationalGaussian)])
def test_imputed_values_have_their_prior(engine, slope):
    covariate = NEOCORTEX.copy()
    covariate[MISSING] = np.nan
    fits = []
    for model in (joined, plain):
        fit = engine(model)
        fit.run(jax.random.key(0), slope, covariate, ENERGY)
        assert fit.diagnostics.converged
        fits.append(fit)
    idiom, reference = fits
    np.testing.assert_allclose(float(idiom.log_evidence), float(reference.log_evidence), rtol=1e-6)
    for name in ("center", "imputed"):
        np.testing.assert_allclose(idiom.posterior[name].mean, reference.posterior[name].mean, atol=1e-6)
        np.testing.assert_allclose(idiom.posterior[name].sd, reference.posterior[name].sd, rtol=1e-6)
    assert "covariate (10,) (normal, imputed)" in idiom.describe()
