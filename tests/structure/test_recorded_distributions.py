"""Every distribution of NumPyro that a model may state is put together again from what a recording keeps of it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer.util import log_density

from numpyro_ext.structure.model.running.calling import record
from numpyro_ext.structure.model.running.execution import ModelCall
from numpyro_ext.structure.model.running.plain_sites import PlainSites

pytestmark = pytest.mark.usefixtures("no_faults")

KEY = random.key(0)
RTOL = 1e-9 if jax.config.jax_enable_x64 else 1e-4
T = dist.transforms


def stated(t):
    """Distributions by name, whose parameters are of a positive number; most have them as arrays and as numbers."""
    tril = jnp.array([[1.0, 0.0], [0.3, 0.8]]) * t
    low, p = jnp.array([-1.0, 0.5]), t / (1.0 + t)
    shares = jnp.stack([p, 1.0 - p])
    mixing = dist.Categorical(probs=shares)
    return {
        "AsymmetricLaplace": dist.AsymmetricLaplace(0, t, 2.0),
        "Beta": dist.Beta(t, 2),
        "BetaProportion": dist.BetaProportion(p, 3.0),
        "BernoulliLogits": dist.Bernoulli(logits=jnp.log(t)),
        "BernoulliProbs": dist.Bernoulli(probs=p),
        "BetaNegativeBinomial": dist.BetaNegativeBinomial(1.0 + t, 2.0, 3.0),
        "BetaBinomial": dist.BetaBinomial(t, 2.0, total_count=7),
        "BinomialLogits": dist.Binomial(5, logits=t),
        "BinomialProbs": dist.Binomial(np.array([5, 6]), probs=p),
        "CategoricalLogits": dist.Categorical(logits=jnp.stack([t, 0.1, 1.0])),
        "CategoricalProbs": mixing,
        "Cauchy": dist.Cauchy(t, 1),
        "Chi2": dist.Chi2(1.0 + t),
        "ConditionalAutoregressive": dist.CAR(jnp.zeros(2), 0.4 * p, t, jnp.array([[0.0, 1.0], [1.0, 0.0]])),
        "CirculantNormal": dist.CirculantNormal(jnp.zeros(4), t * jnp.array([1.0, 0.2, 0.1, 0.2])),
        "Dagum": dist.Dagum(2.0, 1.0, t),
        "Delta": dist.Delta(low, log_density=0.5).to_event(1),
        "DiscreteUniform": dist.DiscreteUniform(0, 5),
        "Folded": dist.FoldedDistribution(dist.Normal(0.3, t)),
        "HurdlePoisson": dist.HurdlePoisson(p, rate=t),
        "IntervalCensored": dist.IntervalCensoredDistribution(dist.Normal(0.0, t), jnp.array(0.0), jnp.array(0.0)),
        "LeftCensored": dist.LeftCensoredDistribution(dist.Normal(0.0, t), jnp.array([0.0, 1.0])),
        "LeftTruncated": dist.LeftTruncatedDistribution(dist.Normal(0.0, t), low=0.0),
        "RightCensored": dist.RightCensoredDistribution(dist.Exponential(t), jnp.array([0, 1])),
        "RightTruncated": dist.RightTruncatedDistribution(dist.Cauchy(0.0, t), high=2.0),
        "GaussianStateSpace": dist.GaussianStateSpace(3, 0.5 * jnp.eye(2), covariance_matrix=tril @ tril.T),
        "InverseWishart": dist.InverseWishart(4.0, scale_matrix=tril @ tril.T),
        "ProjectedNormal": dist.ProjectedNormal(t * jnp.array([1.0, 0.2, 0.1])),
        "SineSkewed": dist.SineSkewed(dist.VonMises(jnp.zeros(1), t * jnp.ones(1)).to_event(1), jnp.array([0.2])),
        "ZeroInflated": dist.ZeroInflatedDistribution(dist.Poisson(t), gate=p),
        "Dirichlet": dist.Dirichlet(jnp.stack([t, 1.0, 2.0])),
        "DirichletMultinomial": dist.DirichletMultinomial(jnp.stack([t, 1.0]), 4),
        "DoublyTruncatedPowerLaw": dist.DoublyTruncatedPowerLaw(-1.5 - t, 0.5, 3.0),
        "EulerMaruyama": dist.EulerMaruyama(jnp.linspace(0.0, 1.0, 4), lambda x, s: (-x, 0.5), dist.Normal(0.0, t)),
        "Exponential": dist.Exponential(t),
        "Gamma": dist.Gamma(t, 2.0),
        "GammaPoisson": dist.GammaPoisson(t, 1.0),
        "GaussianRandomWalk": dist.GaussianRandomWalk(t, 4),
        "GeometricLogits": dist.Geometric(logits=t),
        "GeometricProbs": dist.Geometric(probs=p),
        "Gompertz": dist.Gompertz(t, 1.0),
        "Gumbel": dist.Gumbel(t, 1.0),
        "HalfCauchy": dist.HalfCauchy(t),
        "HalfNormal": dist.HalfNormal(t).expand([2]).to_event(1),
        "InverseGamma": dist.InverseGamma(2.0, t),
        "Kumaraswamy": dist.Kumaraswamy(t, 2.0),
        "Laplace": dist.Laplace(low, t).to_event(1),
        "Levy": dist.Levy(-1.0, t),
        "LKJ": dist.LKJ(3, t),
        "LKJCholesky": dist.LKJCholesky(3, t),
        "Logistic": dist.Logistic(t, 1.5),
        "LogNormal": dist.LogNormal(t, 1),
        "LogUniform": dist.LogUniform(1.0, 1.0 + t),
        "LowRankMultivariateNormal": dist.LowRankMultivariateNormal(low, t * jnp.ones((2, 1)), jnp.ones(2)),
        "LowerTruncatedPowerLaw": dist.LowerTruncatedPowerLaw(-1.5 - t, 0.5),
        "MatrixNormal": dist.MatrixNormal(jnp.zeros((2, 2)), tril, jnp.eye(2)),
        "Mixture": dist.Mixture(mixing, [dist.Normal(0.0, t), dist.Cauchy(1.0, 1.0)]),
        "MixtureSameFamily": dist.MixtureSameFamily(mixing, dist.Normal(low, t)),
        "Multinomial": dist.Multinomial(6, probs=shares),
        "MultivariateNormalByCovariance": dist.MultivariateNormal(low, covariance_matrix=tril @ tril.T),
        "MultivariateNormalByPrecision": dist.MultivariateNormal(low, precision_matrix=tril @ tril.T),
        "MultivariateNormalByFactor": dist.MultivariateNormal(low, scale_tril=tril).expand([3]),
        "MultivariateStudentT": dist.MultivariateStudentT(3.0 + t, low, tril),
        "NegativeBinomial2": dist.NegativeBinomial2(t, 2.0),
        "NegativeBinomialLogits": dist.NegativeBinomialLogits(3, t),
        "NegativeBinomialProbs": dist.NegativeBinomialProbs(3.0, p),
        "Normal": dist.Normal(t, 2),
        "OrderedLogistic": dist.OrderedLogistic(t, jnp.array([-1.0, 1.0])),
        "Pareto": dist.Pareto(0.5, t),
        "Poisson": dist.Poisson(t),
        "RelaxedBernoulli": dist.RelaxedBernoulliLogits(0.7, t),
        "SineBivariateVonMises": dist.SineBivariateVonMises(0.1, 0.2, t, 1.0, correlation=0.1),
        "SoftLaplace": dist.SoftLaplace(t, 1.0),
        "StudentT": dist.StudentT(3, t, 2.0),
        "TruncatedNormal": dist.TruncatedNormal(t, 1.0, low=-1, high=9.0),
        "TruncatedCauchy": dist.TruncatedCauchy(t, 1.0, low=0.0),
        "TwoSidedTruncatedLaplace": dist.TwoSidedTruncatedDistribution(dist.Laplace(0.0, t), -2.0, 3.0),
        "TransformedByAffine": dist.TransformedDistribution(dist.Normal(0.0, 1.0), T.AffineTransform(t, 2.0)),
        "TransformedTwice": dist.TransformedDistribution(dist.Gamma(2.0, t), [T.PowerTransform(0.5), T.ExpTransform()]),
        "Uniform": dist.Uniform(-t, 2 * t),
        "VonMises": dist.VonMises(0.1, t),
        "Weibull": dist.Weibull(t, 2.0),
        "Wishart": dist.Wishart(4.0, scale_tril=tril),
        "WishartCholesky": dist.WishartCholesky(4.0, scale_tril=tril),
        "ZeroInflatedPoisson": dist.ZeroInflatedPoisson(p, t),
        "ZeroInflatedNegativeBinomial": dist.ZeroInflatedNegativeBinomial2(2.0, 1.0, gate=p),
        "ZeroSumNormal": dist.ZeroSumNormal(t, (3,)),
    }


def model(values):
    t = numpyro.sample("t", dist.LogNormal(0.0, 0.5))
    for name, fn in stated(t).items():
        numpyro.sample(name, fn.mask(name != "Cauchy"), obs=values[name])


@pytest.fixture(scope="module")
def values():
    keys = random.split(KEY, 200)
    out = {}
    for key, (name, fn) in zip(keys, stated(jnp.array(0.7)).items(), strict=False):
        is_censored = "Censored" in name
        out[name] = (fn.base_dist if is_censored else fn).sample(key, (2,) if is_censored else ())
    return out


@pytest.mark.thorough
def test_log_densities_are_those_of_the_model(values):
    recording = record(ModelCall(model, (values,), {}, KEY))
    assert recording is not None

    def densities(t, sites=None):
        found = sites(lambda site, fn, default: t)
        return {name: site["fn"].log_prob(site["value"]) for name, site in found.items()}

    program, output = recording.derive("log densities", densities, jnp.array(1.0))
    for t in (0.7, 1.3):
        env = dict(zip((*program.inputs, *program.constants), (jnp.array(t), *program.data), strict=True))
        leaves, structure = jax.tree.flatten(output)
        found = jax.tree.unflatten(structure, program.evaluate(leaves, env))
        _, trace = log_density(PlainSites(model), (values,), {}, {"t": jnp.array(t)})
        for name, site in trace.items():
            wanted = site["fn"].log_prob(site["value"])
            assert np.all(np.isfinite(np.asarray(wanted))), name
            np.testing.assert_allclose(found[name], wanted, rtol=RTOL, atol=RTOL, err_msg=name)


def test_objects_of_which_there_is_one_stay_as_they_are():
    def improper(y):
        scale = numpyro.sample("scale", dist.ImproperUniform(dist.constraints.positive, (), ()))
        shift = numpyro.sample("shift", dist.TruncatedNormal(0.0, scale, low=0.0))
        numpyro.sample("y", dist.Normal(shift, scale), obs=y)

    recording = record(ModelCall(improper, (np.ones(3),), {}, KEY))
    assert recording is not None
    seen = []
    recording.derive("constraints", lambda sites: _note(seen, sites(lambda site, fn, default: jnp.array(2.0))))
    assert dist.constraints.positive.lower_bound == 0.0
    assert seen[0].support.base_constraint is dist.constraints.positive
    dist.Normal(0.0, 1.0, validate_args=True).log_prob(0.5)


def _note(seen, sites):
    seen.append(sites["scale"]["fn"])
    return sites["y"]["fn"].log_prob(1.0)
