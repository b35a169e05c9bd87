"""The registry of likelihoods: what is registered outside of the package is read like what is registered inside."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_ext.potentials import Potential, potential
from numpyro_ext.potentials.bounds.super_gaussian import SuperGaussianPotential
from numpyro_ext.structure import (
    EXP,
    IDENTITY,
    PROBIT,
    ModelStructureError,
    read_bilinear,
    read_latent_gaussian,
    read_sparse_linear,
    register_family,
)

N = 5
TIMES = np.array([0.3, 1.0, 2.5, 0.1, 4.0])


class Waiting(dist.Exponential):
    """A waiting time, in a class of its own so that no other test sees its family."""


class Unknown(dist.Poisson):
    """A subclass, which nobody registered."""


@potential
class WaitingPotential(Potential):
    """Waiting times of rate ``scale * exp(eta)``."""

    time: jax.Array
    scale: jax.Array

    is_log_concave: ClassVar[bool] = True

    def log_density(self, eta: Any) -> jax.Array:
        return jnp.log(self.scale) + eta - self.time * self.scale * jnp.exp(eta)


register_family(
    Waiting,
    label="waiting",
    predictor="rate",
    links={EXP: lambda y: WaitingPotential(y.value, y.scale)},
)


def _field() -> Any:
    return numpyro.sample("f", dist.Normal(0.0, 1.0).expand([N]).to_event(1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_family_of_the_user_is_read(sign: float) -> None:
    """The check of the reading compares with NumPyro's density."""

    def model() -> None:
        numpyro.sample("y", Waiting(jnp.arange(1.0, N + 1) * jnp.exp(sign * _field())), obs=TIMES)

    reading = read_latent_gaussian(model)
    form = reading.form({})
    assert type(form.potentials[0]) is WaitingPotential
    np.testing.assert_allclose(form.potentials[0].scale, np.arange(1.0, N + 1), rtol=1e-6)
    assert "factor: y (5,) (waiting, exp link)" in reading.describe()


@pytest.mark.parametrize("missing", [np.nan, -1.0, np.inf])
def test_missing_values_are_given_one_of_the_support(missing: float) -> None:
    mask = np.array([True, False, True, True, False])

    def model() -> None:
        f = _field()
        with handlers.mask(mask=mask):
            numpyro.sample("y", Waiting(jnp.exp(f)), obs=jnp.where(mask, TIMES, missing))

    reading = read_latent_gaussian(model)
    value = reading.form({}).potentials[0].time
    np.testing.assert_allclose(value[mask], TIMES[mask])
    assert np.all(np.isfinite(value)) and np.all(np.asarray(value) >= 0.0)


def test_no_family_falls_to_another_one() -> None:
    """A subclass may have any density, and a link that is not listed is none of those that are."""
    for make in (lambda f: Unknown(jnp.exp(f)), lambda f: Waiting(jnp.logaddexp(f, 0.0))):
        reading = read_latent_gaussian(lambda make=make: numpyro.sample("y", make(_field()), obs=np.arange(1, N + 1)))
        assert "elementwise factor, by quadrature" in reading.describe()


def test_registering_again_replaces_programs_too() -> None:
    """As in a notebook, where a cell is run twice."""

    class Own(dist.Exponential):
        pass

    def model() -> None:
        numpyro.sample("y", Own(jnp.exp(_field())), obs=TIMES)

    def wrong(y: Any) -> Potential:
        return WaitingPotential(2.0 * y.value, y.scale)

    register_family(Own, label="own", predictor="rate", links={EXP: wrong})
    with pytest.raises(ModelStructureError, match="misread"):
        read_latent_gaussian(model)
    register_family(Own, label="own", predictor="rate", links={EXP: lambda y: WaitingPotential(y.value, y.scale)})
    read_latent_gaussian(model)


def test_other_engines_ask_the_potential() -> None:
    """An exponential rate has no expectation under products unless it is that of a Poisson count."""

    def model() -> None:
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([N]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([N]).to_event(1))
        numpyro.sample("y", Waiting(jnp.exp(u * v)), obs=TIMES)

    with pytest.raises(ModelStructureError, match="read as waiting, exp link: this engine takes log densities that"):
        read_bilinear(model)


def test_a_sparse_prior_of_the_user_is_read() -> None:
    class Bell(dist.Logistic):
        pass

    @potential
    class BellPotential(SuperGaussianPotential):
        location: jax.Array
        scale: jax.Array

        is_log_concave: ClassVar[bool] = True

        @property
        def center(self) -> jax.Array:
            return self.location

        def log_density(self, eta: Any) -> jax.Array:
            x = (eta - self.location) / self.scale
            return -x - 2.0 * jnp.log1p(jnp.exp(-x)) - jnp.log(self.scale)

    register_family(
        Bell,
        label="bell",
        predictor="loc",
        parameters=("scale",),
        links={IDENTITY: lambda y: BellPotential(y.value, y.parameters["scale"])},
        is_sparse_prior=True,
    )
    matrix = np.random.default_rng(0).normal(size=(N, 3))

    def model() -> None:
        s = numpyro.sample("s", Bell(0.0, jnp.array([0.5, 1.0, 2.0])).to_event(1))
        numpyro.sample("y", dist.Normal(matrix @ s, 0.5).to_event(1), obs=TIMES)

    reading = read_sparse_linear(model)
    form = reading.form({})
    assert type(form.prior.low) is BellPotential and form.forest.num_groups == 3


@pytest.mark.parametrize(
    "distributions, options, error, words",
    [
        ((), {}, ValueError, "needs a distribution and a link"),
        ((Waiting,), {"links": {}}, ValueError, "needs a distribution and a link"),
        ((WaitingPotential,), {}, TypeError, "classes of NumPyro distributions"),
        ((Waiting(1.0),), {}, TypeError, "classes of NumPyro distributions"),
        ((Waiting,), {"vectors": ("cutpoints",)}, ValueError, "none of its parameters"),
        ((Waiting,), {"is_joint": True}, ValueError, "so have to have its links"),
    ],
)
def test_what_cannot_be_registered(distributions: Any, options: Any, error: Any, words: str) -> None:
    given: dict[str, Any] = {"label": "x", "predictor": "rate", "links": {EXP: lambda y: None}, **options}
    with pytest.raises(error, match=words):
        register_family(*distributions, **given)


ETA = np.array([-1.5, -0.2, 0.0, 0.7, 2.0])
MEANS = {
    "normal": lambda f: dist.Normal(f, 0.5),
    "student t": lambda f: dist.StudentT(4.0, f, 0.5),
    "laplace": lambda f: dist.Laplace(f, 0.5),
    "logistic": lambda f: dist.Logistic(f, 0.5),
    "soft laplace": lambda f: dist.SoftLaplace(f, 0.5),
    "asymmetric laplace": lambda f: dist.AsymmetricLaplace(f, 0.5, 2.0),
    "poisson, exp link": lambda f: dist.Poisson(3.0 * jnp.exp(f)),
    "poisson, softplus link": lambda f: dist.Poisson(3.0 * jnp.logaddexp(f, 0.0)),
    "poisson, rectified linear link": lambda f: dist.Poisson(3.0 * jnp.maximum(f, 0.0)),
    "negative binomial, exp link": lambda f: dist.NegativeBinomial2(3.0 * jnp.exp(f), 2.0),
    "bernoulli logits": lambda f: dist.Bernoulli(logits=f),
    "bernoulli, probit link": lambda f: dist.Bernoulli(jax.scipy.special.ndtr(f)),
    "binomial logits": lambda f: dist.Binomial(4, logits=f),
}


@pytest.mark.parametrize("label", MEANS)
def test_means_are_those_of_numpyro(label: str) -> None:
    def model() -> None:
        numpyro.sample("y", MEANS[label](_field()), obs=jnp.array([0, 1, 1, 0, 1]))

    reading = read_latent_gaussian(model, check=False)
    assert f"({label})" in reading.describe()
    np.testing.assert_allclose(reading.form({}).potentials[0].mean(ETA), MEANS[label](ETA).mean, rtol=1e-5)


def test_links_are_known_by_numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading compares them with the model, outside of all compiled functions."""
    monkeypatch.setattr(jax.scipy.stats.norm, "cdf", None)
    np.testing.assert_allclose(PROBIT.function(np.array([-1.0, 0.0])), [0.15865525393145707, 0.5], rtol=1e-14)
