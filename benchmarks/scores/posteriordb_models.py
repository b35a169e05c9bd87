"""Posteriors of posteriordb that have a Gaussian part, written as NumPyro functions from their published Stan programs.

Sites have the names of the Stan parameters, so that marginals can be laid beside the reference draws. Priors that a
program leaves out are flat. Data come from ``posteriordb`` in the folder that ``NUMPYRO_EXT_DATA`` names.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.datasets import data_path

_POSITIVE, _REAL = dist.constraints.positive, dist.constraints.real


class Posterior(NamedTuple):
    """A model with the function that lays out its data."""

    model: Callable[..., None]
    arguments: Callable[[dict[str, Any]], tuple[Any, ...]]
    field: tuple[str, ...] | None = None
    """Sites to treat as the Gaussian field, where the engine cannot know."""

    def data(self, name: str) -> tuple[Any, ...]:
        """Arguments of the model, from the data of a posterior."""
        with zipfile.ZipFile(data_path("posteriordb", "data", f"{name.split('-', maxsplit=1)[0]}.json.zip")) as archive:
            found = json.loads(archive.read(archive.namelist()[0]))
        return self.arguments({key: np.asarray(value) for key, value in found.items()})


def reference_moments() -> dict[str, dict[str, dict[str, float]]]:
    """Mean, standard deviation and Monte Carlo error of each parameter, by posterior, of 10 x 1000 draws of NUTS."""
    with gzip.open(data_path("posteriordb", "reference_summaries.json.gz")) as file:
        known = json.load(io.TextIOWrapper(file))
    return {name: known[known[name].get("reference", name)]["summary"] for name in POSTERIORS}


def _flat(support: Any, *shape: int) -> dist.Distribution:
    return dist.ImproperUniform(support, (), shape)


def _regression(scale_prior: Any = None, coefficient_prior: Any = None) -> Callable[..., None]:
    """Linear regression on a design that has its column of ones."""

    def model(design: Any, y: Any) -> None:
        number = design.shape[1]
        prior = _flat(_REAL, number) if coefficient_prior is None else coefficient_prior.expand([number]).to_event(1)
        beta = numpyro.sample("beta", prior)
        sigma = numpyro.sample("sigma", _flat(_POSITIVE) if scale_prior is None else scale_prior)
        numpyro.sample("y", dist.Normal(design @ beta, sigma), obs=y)

    return model


def _columns(*columns: Any) -> np.ndarray:
    """Design of a column of ones and the given ones."""
    return np.column_stack([np.ones(len(columns[0])), *columns])


def _standardised(x: Any) -> Any:
    return (x - x.mean()) / x.std(ddof=1)


def _autoregression(lags: Any, y: Any) -> None:
    alpha = numpyro.sample("alpha", dist.Normal(0, 10))
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([lags.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    numpyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y)


def _lags(d: dict[str, Any]) -> tuple[Any, ...]:
    y, order = d["y"], int(d["K"])
    return np.column_stack([y[order - k : len(y) - k] for k in range(1, order + 1)]), y[order:]


def _moving_average(y: Any) -> None:
    mu, phi = numpyro.sample("mu", dist.Normal(0, 10)), numpyro.sample("phi", dist.Normal(0, 2))
    theta, sigma = numpyro.sample("theta", dist.Normal(0, 2)), numpyro.sample("sigma", dist.HalfCauchy(2.5))
    # The errors solve error[t] = y[t] - mu - phi y[t-1] - theta error[t-1], which is affine in mu.
    free, of_mu = _errors(y, phi, theta)
    numpyro.sample("y", dist.Normal(y - free - of_mu * mu, sigma), obs=y)


def _errors(y: Any, phi: Any, theta: Any) -> tuple[Any, Any]:
    """Errors at a mean of zero, and their change per unit of the mean."""
    before = jnp.concatenate([jnp.zeros(1), y[:-1]])
    of_mean = jnp.where(jnp.arange(y.size) == 0, -1.0 - phi, -1.0)

    def step(error: Any, row: Any) -> tuple[Any, Any]:
        error = row - theta * error
        return error, error

    rows = jnp.stack([y - phi * before, of_mean], 1)
    found = jax.lax.scan(step, jnp.zeros(2), rows)[1]
    return found[:, 0], found[:, 1]


def _diamonds(design: Any, y: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([design.shape[1]]).to_event(1))
    intercept = numpyro.sample("Intercept", dist.StudentT(3, 8, 10))
    sigma = numpyro.sample("sigma", dist.TruncatedDistribution(dist.StudentT(3.0, 0.0, 10.0), low=0.0))
    numpyro.sample("Y", dist.Normal(intercept + design @ b, sigma), obs=y)


def _schools(is_centred: bool) -> Callable[..., None]:
    def model(error: Any, y: Any) -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            if is_centred:
                theta = numpyro.sample("theta", dist.Normal(mu, tau))
            else:
                white = numpyro.sample("theta_trans", dist.Normal(0, 1))
                theta = numpyro.deterministic("theta", mu + tau * white)
            numpyro.sample("y", dist.Normal(theta, error), obs=y)

    return model


def _kernel(x: Any, jitter: float) -> Any:
    rho, alpha = numpyro.sample("rho", dist.Gamma(25, 4)), numpyro.sample("alpha", dist.HalfNormal(2))
    return alpha**2 * jnp.exp(-0.5 * jnp.square((x[:, None] - x) / rho)) + jitter * jnp.eye(x.size)


def _process_of_counts(x: Any, k: Any) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.size), _kernel(x, 1e-10)))
    numpyro.sample("k", dist.Poisson(jnp.exp(f)), obs=k)


def _process_with_noise(x: Any, y: Any) -> None:
    """Gaussian process whose noise has the variance ``sigma``, as published; its function is integrated out there."""
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.size), _kernel(x, 1e-10)))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(f, jnp.sqrt(sigma)), obs=y)


def _trend(x: Any, y: Any, mean_alpha: Any, sd_alpha: Any, mean_beta: Any, sd_beta: Any) -> None:
    alpha, beta = (
        numpyro.sample("alpha", dist.Normal(mean_alpha, sd_alpha)),
        numpyro.sample("beta", dist.Normal(mean_beta, sd_beta)),
    )
    sigma = numpyro.sample("sigma", _flat(_POSITIVE))
    numpyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def _mesquite(*terms: str, has_logarithms: bool = True) -> Posterior:
    """Regression of the weight of bushes on functions of their size."""

    def arguments(d: dict[str, Any]) -> tuple[Any, ...]:
        named = d | {
            "volume": d["diam1"] * d["diam2"] * d["canopy_height"],
            "area": d["diam1"] * d["diam2"],
            "shape": d["diam1"] / d["diam2"],
        }
        logs = np.log if has_logarithms else np.asarray
        return _columns(*(named[t] if t == "group" else logs(named[t]) for t in terms)), logs(d["weight"])

    return Posterior(_regression(), arguments)


def _earnings(y: Callable[[np.ndarray], np.ndarray], columns: Callable[[Any, Any], tuple[Any, ...]]) -> Posterior:
    return Posterior(_regression(), lambda d: (_columns(*columns(d["height"], d["male"])), y(d["earn"])))


def _children(columns: Callable[[Any, Any], tuple[Any, ...]], has_prior: bool = False) -> Posterior:
    prior = dist.HalfCauchy(2.5) if has_prior else None
    return Posterior(_regression(prior), lambda d: (_columns(*columns(d["mom_hs"], d["mom_iq"])), d["kid_score"]))


def _with_product(x: Any, z: Any) -> tuple[Any, ...]:
    return x, z, x * z


def _voters(d: dict[str, Any]) -> tuple[Any, ...]:
    ages = [1.0 * (d["age_discrete"] == group) for group in (2, 3, 4)]
    return _columns(d["real_ideo"], d["race_adj"], *ages, d["educ1"], d["gender"], d["income"]), d["partyid7"]


_SIZES = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
_BAYESIAN = Posterior(_regression(dist.HalfNormal(10), dist.Normal(0, 10)), lambda d: (d["X"], d["y"]))

POSTERIORS: dict[str, Posterior] = {
    "arK-arK": Posterior(_autoregression, _lags),
    "arma-arma11": Posterior(_moving_average, lambda d: (d["y"],), field=("mu",)),
    "diamonds-diamonds": Posterior(_diamonds, lambda d: (d["X"][:, 1:] - d["X"][:, 1:].mean(0), d["Y"])),
    "earnings-earn_height": _earnings(np.asarray, lambda height, male: (height,)),
    "earnings-log10earn_height": _earnings(np.log10, lambda height, male: (height,)),
    "earnings-logearn_height": _earnings(np.log, lambda height, male: (height,)),
    "earnings-logearn_height_male": _earnings(np.log, lambda height, male: (height, male)),
    "earnings-logearn_interaction": _earnings(np.log, _with_product),
    "earnings-logearn_interaction_z": _earnings(
        np.log, lambda height, male: _with_product(_standardised(height), male)
    ),
    "earnings-logearn_logheight_male": _earnings(np.log, lambda height, male: (np.log(height), male)),
    "eight_schools-eight_schools_centered": Posterior(_schools(True), lambda d: (d["sigma"], d["y"])),
    "eight_schools-eight_schools_noncentered": Posterior(_schools(False), lambda d: (d["sigma"], d["y"])),
    "gp_pois_regr-gp_pois_regr": Posterior(_process_of_counts, lambda d: (d["x"], d["k"])),
    "gp_pois_regr-gp_regr": Posterior(_process_with_noise, lambda d: (d["x"], d["y"])),
    "kidiq-kidscore_interaction": _children(_with_product, has_prior=True),
    "kidiq-kidscore_momhs": _children(lambda school, iq: (school,), has_prior=True),
    "kidiq-kidscore_momhsiq": _children(lambda school, iq: (school, iq), has_prior=True),
    "kidiq-kidscore_momiq": _children(lambda school, iq: (iq,), has_prior=True),
    "kidiq_with_mom_work-kidscore_interaction_c": _children(
        lambda school, iq: _with_product(school - school.mean(), iq - iq.mean())
    ),
    "kidiq_with_mom_work-kidscore_interaction_c2": _children(lambda school, iq: _with_product(school - 0.5, iq - 100)),
    "kidiq_with_mom_work-kidscore_interaction_z": _children(
        lambda school, iq: _with_product(_standardised(school) / 2, _standardised(iq) / 2)
    ),
    "kidiq_with_mom_work-kidscore_mom_work": Posterior(
        _regression(),
        lambda d: (_columns(*(1.0 * (d["mom_work"] == kind) for kind in (2, 3, 4))), d["kid_score"]),
    ),
    "kilpisjarvi_mod-kilpisjarvi": Posterior(
        _trend, lambda d: tuple(d[key] for key in ("x", "y", "pmualpha", "psalpha", "pmubeta", "psbeta"))
    ),
    "mesquite-logmesquite": _mesquite(*_SIZES),
    "mesquite-logmesquite_logva": _mesquite("volume", "area", "group"),
    "mesquite-logmesquite_logvas": _mesquite("volume", "area", "shape", "total_height", "density", "group"),
    "mesquite-logmesquite_logvash": _mesquite("volume", "area", "shape", "total_height", "group"),
    "mesquite-logmesquite_logvolume": _mesquite("volume"),
    "mesquite-mesquite": _mesquite(*_SIZES, has_logarithms=False),
    **{f"nes{year}-nes": Posterior(_regression(), _voters) for year in range(1972, 2001, 4)},
    "sblrc-blr": _BAYESIAN,
    "sblri-blr": _BAYESIAN,
}
"""Posteriors by the names that posteriordb gives them."""
