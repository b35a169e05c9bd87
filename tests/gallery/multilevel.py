"""Groups whose effects are learned together: intercepts, slopes, crossed and nested, centred and not."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

from .catalogue import GAUSSIAN, published

_EFFECT = [28, 8, -3, 7, -1, 1, 18, 12]
_ERROR = [15, 10, 16, 11, 9, 11, 10, 18]
# Hits in the first 45 at bats of the season of 1970.
_HITS = [18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]
NUM_GROUPS = 4


def _schools():
    return np.array(_ERROR), np.array(_EFFECT)


def _grouped(seed=40, num_rows=40):
    rng = np.random.default_rng(seed)
    group = np.arange(num_rows) % NUM_GROUPS
    x = rng.integers(0, 2, num_rows)
    mean = rng.normal(0, 0.8, NUM_GROUPS)[group] + 0.5 * x
    return rng, group, x, mean


@published("NumPyro: eight schools", _schools, "mu theta", "tau")
def eight_schools(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", len(sigma)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


@published("NumPyro: eight schools, non-centred", _schools, "mu theta_base", "tau")
def eight_schools_noncentered(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", len(sigma)):
        with handlers.reparam(config={"theta": TransformReparam()}):
            theta = numpyro.sample(
                "theta", dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(mu, tau))
            )
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


@published("NumPyro: automatic reparameterisation", _schools, "mu theta_decentered", "tau theta_centered", GAUSSIAN)
def eight_schools_learned_centring(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", len(sigma)), handlers.reparam(config={"theta": LocScaleReparam()}):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def _at_bats():
    return np.full(len(_HITS), 45), np.array(_HITS)


@published("NumPyro: baseball batting averages", _at_bats, "loc alpha", "scale")
def baseball(at_bats, hits=None):
    loc = numpyro.sample("loc", dist.Normal(-1, 1))
    scale = numpyro.sample("scale", dist.HalfCauchy(1))
    num_players = at_bats.shape[0]
    with numpyro.plate("num_players", num_players):
        alpha = numpyro.sample("alpha", dist.Normal(loc, scale))
        return numpyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def _tadpoles():
    rng = np.random.default_rng(41)
    density = np.repeat([10, 25, 35], 4)
    return density, rng.binomial(density, 1 / (1 + np.exp(-rng.normal(1.4, 1.6, 12))))


@published("Statistical Rethinking: 13.1, multilevel tadpoles", _tadpoles, "a_bar a", "sigma")
def tadpoles(N, S=None):
    tank = np.arange(len(N))
    a_bar = numpyro.sample("a_bar", dist.Normal(0, 1.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    a = numpyro.sample("a", dist.Normal(a_bar, sigma), sample_shape=tank.shape)
    p = numpyro.deterministic("p", jnp.exp(a[tank]) / (1 + jnp.exp(a[tank])))
    numpyro.sample("S", dist.Binomial(N, probs=p), obs=S)


def _chimpanzees():
    rng, group, x, mean = _grouped(42, 48)
    block = (np.arange(48) // 5) % 3
    return group, block, rng.integers(0, 4, 48), rng.binomial(1, 1 / (1 + np.exp(-mean)))


@published(
    "Statistical Rethinking: 13.3, more than one type of cluster", _chimpanzees, "a_bar z x b", "sigma_a sigma_g"
)
def chimpanzees(actor, block_id, treatment, pulled_left=None):
    b = numpyro.sample("b", dist.Normal(0, 0.5).expand([4]))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([NUM_GROUPS]))
    x = numpyro.sample("x", dist.Normal(0, 1).expand([3]))
    a_bar = numpyro.sample("a_bar", dist.Normal(0, 1.5))
    sigma_a = numpyro.sample("sigma_a", dist.Exponential(1))
    sigma_g = numpyro.sample("sigma_g", dist.Exponential(1))
    logit_p = a_bar + z[actor] * sigma_a + x[block_id] * sigma_g + b[treatment]
    numpyro.sample("pulled_left", dist.Binomial(logits=logit_p), obs=pulled_left)


def _admissions():
    rng = np.random.default_rng(43)
    dept, male = np.repeat(np.arange(6), 2), np.tile([1, 0], 6)
    applications = rng.integers(30, 300, 12)
    return dept, male, applications, rng.binomial(applications, 1 / (1 + np.exp(rng.normal(0.5, 1, 6)[dept])))


@published("NumPyro: varying slopes in UC Berkeley admissions", _admissions, "v_mu z", "sigma L_Rho")
def admissions(dept, male, applications, admit=None):
    v_mu = numpyro.sample("v_mu", dist.Normal(0, jnp.array([4.0, 1.0])))
    sigma = numpyro.sample("sigma", dist.HalfNormal(jnp.ones(2)))
    L_Rho = numpyro.sample("L_Rho", dist.LKJCholesky(2, concentration=2))
    scale_tril = sigma[..., jnp.newaxis] * L_Rho
    num_dept = len(np.unique(dept))
    z = numpyro.sample("z", dist.Normal(jnp.zeros((num_dept, 2)), 1))
    v = jnp.dot(scale_tril, z.T).T
    logits = v_mu[0] + v[dept, 0] + (v_mu[1] + v[dept, 1]) * male
    numpyro.sample("admit", dist.Binomial(applications, logits=logits), obs=admit)


def _cafes():
    rng = np.random.default_rng(44)
    cafe, afternoon = np.repeat(np.arange(6), 6), np.tile([0, 1], 18)
    effect = rng.multivariate_normal([3.5, -1.0], [[1.0, -0.35], [-0.35, 0.25]], 6)
    return cafe, afternoon, effect[cafe, 0] + effect[cafe, 1] * afternoon + 0.5 * rng.normal(size=36)


@published(
    "Statistical Rethinking: 14.1, varying slopes of cafes",
    _cafes,
    "a b a_cafe,b_cafe",
    "sigma_cafe sigma Rho",
    is_slow=True,
)
def cafes(cafe, afternoon, wait):
    a = numpyro.sample("a", dist.Normal(5, 2))
    b = numpyro.sample("b", dist.Normal(-1, 0.5))
    sigma_cafe = numpyro.sample("sigma_cafe", dist.Exponential(1).expand([2]))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    Rho = numpyro.sample("Rho", dist.LKJ(2, 2))
    cov = jnp.outer(sigma_cafe, sigma_cafe) * Rho
    a_cafe_b_cafe = numpyro.sample("a_cafe,b_cafe", dist.MultivariateNormal(jnp.stack([a, b]), cov).expand([6]))
    a_cafe, b_cafe = a_cafe_b_cafe[:, 0], a_cafe_b_cafe[:, 1]
    numpyro.sample("wait", dist.Normal(a_cafe[cafe] + b_cafe[cafe] * afternoon, sigma), obs=wait)


def _radon():
    rng, county, floor, mean = _grouped(45)
    return county, floor, rng.normal(size=NUM_GROUPS), mean + 0.7 * rng.normal(size=40)


@published("PyMC: a primer on Bayesian multilevel modelling, radon", _radon, "g mu_b a z_b", "sd_a sd_b sigma_y")
def radon(county, floor, uranium, log_radon=None):
    g = numpyro.sample("g", dist.Normal(0.0, 10.0).expand([2]))
    sd_a = numpyro.sample("sd_a", dist.Exponential(1.0))
    mu_b = numpyro.sample("mu_b", dist.Normal(0.0, 1.0))
    sd_b = numpyro.sample("sd_b", dist.Exponential(1.0))
    sigma = numpyro.sample("sigma_y", dist.Exponential(1.0))
    with numpyro.plate("county", len(np.unique(county))):
        a = numpyro.sample("a", dist.Normal(g[0] + g[1] * uranium, sd_a))
        z_b = numpyro.sample("z_b", dist.Normal(0.0, 1.0))
    b = numpyro.deterministic("b", mu_b + z_b * sd_b)
    theta = a[county] + b[county] * floor
    with numpyro.plate("data", len(county)):
        numpyro.sample("y", dist.Normal(theta, sigma), obs=log_radon)


def _rats():
    rng = np.random.default_rng(46)
    x = np.array([8.0, 15.0, 22.0, 29.0, 36.0])
    slope, level = rng.normal(6, 0.5, (6, 1)), rng.normal(240, 15, (6, 1))
    return x, level + slope * (x - 22) + rng.normal(0, 6, (6, 5))


@published("BUGS: rats", _rats, "mu_alpha mu_beta alpha beta", "sigma_y sigma_alpha sigma_beta", is_slow=True)
def rats(x, y):
    mu_alpha = numpyro.sample("mu_alpha", dist.Normal(0.0, 100.0))
    mu_beta = numpyro.sample("mu_beta", dist.Normal(0.0, 100.0))
    sigma_y = numpyro.sample("sigma_y", dist.HalfCauchy(5.0))
    sigma_alpha = numpyro.sample("sigma_alpha", dist.HalfCauchy(5.0))
    sigma_beta = numpyro.sample("sigma_beta", dist.HalfCauchy(5.0))
    with numpyro.plate("rat", y.shape[0], dim=-2):
        alpha = numpyro.sample("alpha", dist.Normal(mu_alpha, sigma_alpha))
        beta = numpyro.sample("beta", dist.Normal(mu_beta, sigma_beta))
        with numpyro.plate("week", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(alpha + beta * (x - x.mean()), sigma_y), obs=y)


def _sleep():
    x, y = _rats()
    subject, day = np.divmod(np.arange(30), 5)
    return day, subject, y[subject, day]


@published(
    "bambi: sleep study",
    _sleep,
    "Intercept Days 1|Subject_offset Days|Subject_offset",
    "1|Subject_sigma Days|Subject_sigma sigma",
)
def sleep_study(days, subject, reaction):
    intercept = numpyro.sample("Intercept", dist.Normal(250, 140))
    slope = numpyro.sample("Days", dist.Normal(0, 50))
    sd_intercept = numpyro.sample("1|Subject_sigma", dist.HalfNormal(140))
    sd_slope = numpyro.sample("Days|Subject_sigma", dist.HalfNormal(50))
    with numpyro.plate("Subject", subject.max() + 1):
        z_intercept = numpyro.sample("1|Subject_offset", dist.Normal(0, 1))
        z_slope = numpyro.sample("Days|Subject_offset", dist.Normal(0, 1))
    mu = intercept + slope * days + sd_intercept * z_intercept[subject] + sd_slope * z_slope[subject] * days
    sigma = numpyro.sample("sigma", dist.HalfStudentT(4, 30) if hasattr(dist, "HalfStudentT") else dist.HalfCauchy(30))
    numpyro.sample("Reaction", dist.Normal(mu, sigma), obs=reaction)


def _seeds():
    rng = np.random.default_rng(47)
    total = rng.integers(10, 60, 21)
    x1, x2 = np.arange(21) % 2, (np.arange(21) // 2) % 2
    return x1, x2, total, rng.binomial(total, 1 / (1 + np.exp(0.5 - x2 - 0.3 * rng.normal(size=21))))


@published("BUGS: seeds", _seeds, "alpha b", "tau")
def seeds(x1, x2, total, germinated):
    alpha = numpyro.sample("alpha", dist.Normal(0.0, 10.0).expand([4]).to_event(1))
    tau = numpyro.sample("tau", dist.Gamma(0.5, 0.5))
    with numpyro.plate("plates", len(total)):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0 / jnp.sqrt(tau)))
        logit = alpha[0] + alpha[1] * x1 + alpha[2] * x2 + alpha[3] * x1 * x2 + b
        numpyro.sample("r", dist.Binomial(total, logits=logit), obs=germinated)


def _seizures():
    rng, subject, x, mean = _grouped(48)
    visit = (np.arange(40) // 5) % 3
    return np.column_stack([x, rng.normal(size=(40, 2))]), subject, visit, rng.poisson(np.exp(1 + mean))


@published("BUGS: epilepsy", _seizures, "beta0 beta b_subject b_visit", "sd_subject sd_visit")
def epilepsy(covariates, subject, visit, seizures):
    beta0 = numpyro.sample("beta0", dist.Normal(0.0, 10.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([covariates.shape[1]]).to_event(1))
    sd_subject = numpyro.sample("sd_subject", dist.HalfNormal(1.0))
    sd_visit = numpyro.sample("sd_visit", dist.HalfNormal(1.0))
    b_subject = numpyro.sample("b_subject", dist.Normal(0.0, sd_subject).expand([len(np.unique(subject))]).to_event(1))
    b_visit = numpyro.sample("b_visit", dist.Normal(0.0, sd_visit).expand([len(subject)]).to_event(1))
    log_mu = beta0 + covariates @ beta + b_subject[subject] + b_visit
    numpyro.sample("y", dist.Poisson(jnp.exp(log_mu)).to_event(1), obs=seizures)


def _patients():
    rng = np.random.default_rng(49)
    patient, week = np.repeat(np.arange(5), 6), np.tile(np.arange(6), 5)
    return patient, week, 2800 + rng.normal(0, 200, 5)[patient] - 5 * week + 50 * rng.normal(size=30)


@published("NumPyro: hierarchical linear regression of lungs", _patients, "μ_α μ_β α β", "σ_α σ_β σ")
def pulmonary_fibrosis(patient_code, weeks, FVC_obs=None):
    mu_a = numpyro.sample("μ_α", dist.Normal(0.0, 500.0))
    sd_a = numpyro.sample("σ_α", dist.HalfNormal(100.0))
    mu_b = numpyro.sample("μ_β", dist.Normal(0.0, 3.0))
    sd_b = numpyro.sample("σ_β", dist.HalfNormal(3.0))
    with numpyro.plate("plate_i", len(np.unique(patient_code))):
        a = numpyro.sample("α", dist.Normal(mu_a, sd_a))
        b = numpyro.sample("β", dist.Normal(mu_b, sd_b))
    sd = numpyro.sample("σ", dist.HalfNormal(100.0))
    with numpyro.plate("data", len(patient_code)):
        numpyro.sample("obs", dist.Normal(a[patient_code] + b[patient_code] * weeks, sd), obs=FVC_obs)


def _survey():
    rng, state, x, mean = _grouped(50)
    return state, x, rng.integers(0, 3, 40), rng.integers(5, 30, 40), rng.integers(0, 5, 40)


@published(
    "PyMC: multilevel regression and post-stratification", _survey, "intercept female a_state a_age", "sd_state sd_age"
)
def poststratification(state, female, age, n, yes):
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    b = numpyro.sample("female", dist.Normal(0, 1))
    sd_state = numpyro.sample("sd_state", dist.Exponential(1 / 0.5))
    sd_age = numpyro.sample("sd_age", dist.Exponential(1 / 0.5))
    a_state = numpyro.sample("a_state", dist.ZeroSumNormal(sd_state, event_shape=(NUM_GROUPS,)))
    a_age = numpyro.sample("a_age", dist.ZeroSumNormal(sd_age, event_shape=(3,)))
    numpyro.sample("yes", dist.Binomial(n, logits=intercept + b * female + a_state[state] + a_age[age]), obs=yes)


def _gifts():
    rng = np.random.default_rng(51)
    i, j = np.triu_indices(5, 1)
    a = rng.normal(0, 0.5, (2, 5))
    return i, j, *(rng.poisson(np.exp(0.5 + a[0][s] + a[1][r])) for s, r in ((i, j), (j, i)))


@published(
    "Statistical Rethinking: 14.4, social relations", _gifts, "a z_gr z_d", "sigma_gr L_gr sigma_d L_d", is_slow=True
)
def social_relations(giver, receiver, ab, ba):
    a = numpyro.sample("a", dist.Normal(0, 1))
    sigma_gr = numpyro.sample("sigma_gr", dist.Exponential(1).expand([2]))
    L_gr = numpyro.sample("L_gr", dist.LKJCholesky(2, 4))
    z_gr = numpyro.sample("z_gr", dist.Normal(0, 1).expand([5, 2]))
    gr = z_gr @ (sigma_gr[:, None] * L_gr).T
    sigma_d = numpyro.sample("sigma_d", dist.Exponential(1))
    L_d = numpyro.sample("L_d", dist.LKJCholesky(2, 8))
    z_d = numpyro.sample("z_d", dist.Normal(0, 1).expand([2, len(ab)]))
    d = ((jnp.repeat(sigma_d, 2)[..., None] * L_d) @ z_d).T
    numpyro.sample("AB", dist.Poisson(jnp.exp(a + gr[giver, 0] + gr[receiver, 1] + d[:, 0])), obs=ab)
    numpyro.sample("BA", dist.Poisson(jnp.exp(a + gr[receiver, 0] + gr[giver, 1] + d[:, 1])), obs=ba)
