"""The check by the function that nothing has touched finds what stands on both sides of every other comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions.transforms import AffineTransform, LowerCholeskyAffine

from numpyro_ext.compilation import store
from numpyro_ext.structure import ModelStructureError, Reason, read_latent_gaussian
from numpyro_ext.structure.model import equivalent
from numpyro_ext.structure.model.running import calling, plain_sites, recording
from numpyro_ext.structure.program import program
from tests.tiers import few

Y = np.array([0.3, -1.2, 0.8, 1.9, 0.4, -0.6])
COUNTS = np.array([0, 2, 1, 4, 3, 1])
SEEN = np.array([True, True, False, True, False, True])


def by_sample_shape(y):
    x = numpyro.sample("x", dist.Normal(0, 1))
    with handlers.mask(mask=SEEN):
        numpyro.sample("y", dist.Normal(x, 0.7), sample_shape=(6,), obs=y)


def affine(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    x = numpyro.sample("x", dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(0.4, scale)))
    numpyro.sample("y", dist.Normal(x, 0.7), obs=y)


def affine_vector(y):
    tril = jnp.array([[2.0, 0.0], [-1.0, 0.5]])
    base = dist.Normal(0, 1).expand([2]).to_event(1)
    x = numpyro.sample("x", dist.TransformedDistribution(base, LowerCholeskyAffine(jnp.ones(2), tril)))
    numpyro.sample("y", dist.Normal(x[0] + x[1] * jnp.arange(6), 0.7), obs=y)


def truncated(y):
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.TruncatedNormal(x, 0.7, low=-2.0, high=2.0), obs=y)


def beta_binomial(y):
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.BetaBinomial(jnp.exp(x), 2.0, 7), obs=y)


def proportions(y):
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Beta(jnp.exp(x), 2.0), obs=(y + 1.0) / 6.0)


def zero_inflated(y):
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.ZeroInflatedNegativeBinomial2(jnp.exp(x), 3.0, gate=0.2), obs=y)


def whole_numbers(y):
    x = numpyro.sample("x", dist.Normal(1, 2))
    numpyro.sample("y", dist.Normal(x, 1), obs=y)


def point(y):
    x = numpyro.sample("x", dist.Normal(0, 1))
    shift = numpyro.sample("shift", dist.Delta(0.5, log_density=-jnp.square(jnp.float32(1.5))))
    numpyro.sample("y", dist.Normal(x + shift, 0.7), obs=y)


def scaled(y):
    x = numpyro.sample("x", dist.Normal(0, 1))
    with handlers.scale(scale=jnp.linspace(0.5, 3.0, 6)):
        numpyro.sample("y", dist.Normal(x, 0.7), obs=y)


def random_numbers(y):
    shift = jax.random.normal(numpyro.prng_key(), (6,))
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(x + shift, 0.7), obs=y)


def walk(y):
    def step(state, now):
        state = numpyro.sample("state", dist.Normal(0.9 * state, 0.5))
        numpyro.sample("y", dist.Normal(state, 0.7), obs=now)
        return state, None

    scan(step, numpyro.sample("first", dist.Normal(0, 1)), y)


class Mutation(NamedTuple):
    model: Callable[[Any], None]
    """A model in whose reading the rewriting takes part."""
    plant: Callable[[pytest.MonkeyPatch], None]
    """Make it wrong."""
    data: Any = Y


def replaced(place: Any, name: str, change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Put ``change(what is there)`` in the place of a function."""
    return lambda patch: patch.setattr(place, name, change(getattr(place, name)))


def _wide(as_gaussian: Any) -> Any:
    def wrong(fn: Any) -> Any:
        found = as_gaussian(fn)
        return found if found is fn else dist.Normal(found.loc, 1.1 * found.scale)

    return wrong


def _moved(as_gaussian: Any) -> Any:
    def wrong(fn: Any) -> Any:
        found = as_gaussian(fn)
        return found if found is fn else dist.MultivariateNormal(-found.loc, scale_tril=found.scale_tril)

    return wrong


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda function: lambda *args: factor * function(*args)


def _ones(to_real: Any) -> Any:
    def wrong(value: Any) -> Any:
        found = to_real(value)
        return jnp.where(found == 2.0, 1.0, found) if isinstance(value, int) else found

    return wrong


def _without_density(deterministic: Any) -> Any:
    def wrong(msg: Any) -> None:
        msg["type"], msg["value"] = "deterministic", msg["fn"].mean

    return wrong


def _unscaled(message: Any) -> Any:
    def wrong(found: Any, site: Any, default: Any) -> Any:
        return message(found, site | {"scale": None}, default)

    return wrong


def _turned(at: Any) -> Any:
    return lambda self, *args: at(self._replace(atoms=self.atoms[::-1]), *args)


def _another_key(seed: Any) -> Any:
    return lambda fn, rng_key: seed(fn, jax.random.fold_in(rng_key, 1))


def _backwards(plain: Any) -> Any:
    def wrong(self: Any, msg: dict[str, Any]) -> None:
        plain(self, msg)
        if plain_sites.is_scan(msg):
            function, start, slices, *rest = msg["args"]
            msg["args"] = (function, start, slices[::-1], *rest)

    return wrong


def _doubled_squares(apply: Any) -> Any:
    def wrong(equation: Any, values: Any) -> Any:
        found = apply(equation, values)
        return [1.1 * value for value in found] if equation.primitive.name == "log" else found

    return wrong


MUTATIONS = {
    "sample_shape is taken twice": Mutation(
        by_sample_shape,
        replaced(plain_sites, "_with_shape_of", lambda _: lambda fn, value: fn.expand_by(np.shape(value))),
    ),
    "affine scale": Mutation(affine, replaced(plain_sites, "as_gaussian", _wide)),
    "affine sign": Mutation(affine_vector, replaced(plain_sites, "as_gaussian", _moved)),
    "truncated mass": Mutation(truncated, replaced(equivalent._TruncatedNormal, "log_mass", _times(0.9))),
    "beta-binomial": Mutation(beta_binomial, replaced(equivalent._BetaBinomial, "log_prob", _times(1.1)), COUNTS),
    "beta": Mutation(proportions, replaced(equivalent._Beta, "log_prob", _times(0.99)), COUNTS),
    "zero-inflated": Mutation(zero_inflated, replaced(equivalent._GammaPoisson, "log_prob", _times(0.99)), COUNTS),
    "numbers as reals": Mutation(whole_numbers, replaced(plain_sites, "to_real", _ones)),
    "rounded observations": Mutation(
        whole_numbers, replaced(plain_sites, "_observed", lambda f: lambda name, value: jnp.round(f(name, value)))
    ),
    "density of a point": Mutation(point, replaced(plain_sites, "_make_deterministic", _without_density)),
    "recorded scale": Mutation(scaled, replaced(calling._Found, "arrays", _unscaled)),
    "recorded order": Mutation(affine, replaced(recording.Distribution, "at", _turned)),
    "random key": Mutation(random_numbers, replaced(calling, "_Seed", _another_key)),
    "steps of a scan": Mutation(walk, replaced(plain_sites.PlainSites, "process_message", _backwards)),
    "operations": Mutation(affine, replaced(program, "apply_equation", _doubled_squares)),
}


@pytest.mark.float32
@pytest.mark.parametrize("name", few(MUTATIONS, 3))
def test_a_rewriting_that_is_wrong_is_found(name, monkeypatch):
    model, plant, data = MUTATIONS[name]
    with monkeypatch.context() as patch:
        store.clear()  # derive, read and compare everything anew
        plant(patch)
        with pytest.raises(ModelStructureError) as caught:
            read_latent_gaussian(model, (data,))
        assert caught.value.reason is Reason.MISREAD
    store.clear()
    read_latent_gaussian(model, (data,))
