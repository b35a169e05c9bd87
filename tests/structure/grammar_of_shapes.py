"""Random models whose sites have their shapes, masks and scales from everywhere that NumPyro takes them from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform

SHAPE = (2, 3)


def random_model(seed: int) -> Callable[[], None]:
    """A model without arguments, whose sites and data are drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    latent, effect = _Statement(rng, "x", is_latent=True), _Statement(rng, "z", is_latent=True)
    has_effect = rng.random() < 0.6
    observed = [_Statement(rng, f"y{number}", is_latent=False) for number in range(int(rng.integers(1, 3)))]

    def model() -> None:
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        eta = _level(latent.state(0.3, spread if latent.is_scaled else 0.9))
        if has_effect:
            eta = eta + 0.5 * _level(effect.state(0.0, 0.7))
        for statement in observed:
            statement.state(eta, 0.4 + spread)

    parts = [latent, *([effect] if has_effect else []), *observed]
    model.description = "; ".join(part.description for part in parts)  # type: ignore[attr-defined]
    return model


def _level(value: Any) -> Any:
    """One number, or one for each of the last axis, made of a value of any shape."""
    value = jnp.reshape(value, (-1, np.shape(value)[-1])) if np.ndim(value) else value
    return value.sum(0) if np.ndim(value) and value.shape[-1] in (1, SHAPE[-1]) else jnp.sum(value)


class _Statement:
    """A sample statement with its handlers, drawn once; its parameters are those of each call."""

    def __init__(self, rng: np.random.Generator, name: str, is_latent: bool):
        self.name, self.is_latent = name, is_latent
        self.family = str(rng.choice(["normal", "affine", "vector"] if is_latent else list(FAMILIES)))
        self.is_scaled = bool(rng.random() < 0.5)
        self.mask = rng.random(SHAPE) < 0.7
        self.mask[0, 0] = True
        kinds = ["expand", "expand_by", "to_event"] + ["mask"] * (not is_latent)
        self.wraps = [(str(rng.choice(kinds)), _shape(rng)) for _ in range(int(rng.integers(0, 4)))]
        kinds = ["plate", "plates", "whole plate"] + ["mask", "flag", "scale", "scales", "subsample"] * (not is_latent)
        self.around = [str(rng.choice(kinds)) for _ in range(int(rng.integers(0, 3)))]
        self.mask_shapes = [_shape(rng) for _ in self.around]
        self.sample_shape = _shape(rng) if rng.random() < 0.4 else ()
        self.masks_observations = not is_latent and rng.random() < 0.15
        self.obs_mask = self.mask[tuple(slice(n) for n in SHAPE)][-1] if rng.random() < 0.5 else self.mask
        # what of the shape of a site its values have: all of it, less by broadcasting, or more
        self.fit = str(rng.choice(["as sampled", "as sampled", "whole", "ones", "last", "more"]))
        self.size = int(rng.integers(0, 1_000_000))
        self.description = (
            f"{name} {self.family} {self.wraps} in {list(zip(self.around, self.mask_shapes, strict=True))} "
            f"sample_shape={self.sample_shape} values={self.fit}{' obs_mask' * self.masks_observations}"
        )

    def state(self, eta: Any, spread: Any) -> Any:
        if self.is_latent:
            base = LATENT[self.family](eta, spread)
        else:
            base = FAMILIES[self.family][0](eta, spread)
        fn = base
        for kind, shape in self.wraps:
            fn = self._wrapped(fn, kind, shape)
        with ExitStack() as stack:
            for number, (kind, shape) in enumerate(zip(self.around, self.mask_shapes, strict=True)):
                self._enter(stack, kind, shape, number)
            if self.is_latent:
                return numpyro.sample(self.name, fn, sample_shape=self.sample_shape)
            values = self._values(fn)
            mask = self.obs_mask if self.masks_observations else None
            return numpyro.sample(self.name, fn, obs=values, sample_shape=self.sample_shape, obs_mask=mask)

    def _wrapped(self, fn: Any, kind: str, shape: tuple[int, ...]) -> Any:
        if kind == "expand":
            return fn.expand(np.broadcast_shapes(shape, fn.batch_shape))
        if kind == "expand_by":
            return fn.expand_by(shape[:1])
        if kind == "mask":
            return fn.mask(_part(self.mask, shape) if shape else True)
        return fn.to_event(min(1, len(fn.batch_shape)))

    def _enter(self, stack: ExitStack, kind: str, shape: tuple[int, ...], number: int) -> None:
        if kind == "mask":
            stack.enter_context(handlers.mask(mask=_part(self.mask, shape)))
        elif kind == "flag":
            stack.enter_context(handlers.mask(mask=jnp.asarray(True) if shape else True))
        elif kind == "scale":
            stack.enter_context(handlers.scale(scale=0.7 + number))
        elif kind == "scales":
            stack.enter_context(handlers.scale(scale=0.5 + np.arange(np.prod(shape)).reshape(shape)))
        elif kind == "plate":
            stack.enter_context(numpyro.plate(f"{self.name}_plate_{number}", SHAPE[-1], dim=-1 - number))
        elif kind == "whole plate":
            stack.enter_context(numpyro.plate(f"{self.name}_plate_{number}", SHAPE[-1], SHAPE[-1], dim=-1))
        elif kind == "subsample":
            stack.enter_context(numpyro.plate(f"{self.name}_plate_{number}", 2 * SHAPE[-1], SHAPE[-1], dim=-1))
        else:
            sizes = dict(zip(("inner", "outer"), SHAPE[::-1], strict=True))
            for place, (word, size) in enumerate(sizes.items()):
                stack.enter_context(numpyro.plate(f"{self.name}_{word}_{number}", size, dim=-1 - place))

    def _values(self, fn: Any) -> Any:
        batch, event = tuple(fn.batch_shape), tuple(fn.event_shape)
        shapes = {
            "as sampled": self.sample_shape + batch,
            "whole": np.broadcast_shapes(SHAPE, batch),
            "ones": tuple(1 for _ in batch),
            "last": batch[-1:],
            "more": (2, *batch),
        }
        shape = shapes[self.fit] + event
        draw = FAMILIES[self.family][1]
        return np.asarray(draw(np.random.default_rng(self.size), shape))


def _shape(rng: np.random.Generator) -> tuple[int, ...]:
    """The whole shape, its end, or either with ones in it."""
    shapes = [SHAPE, SHAPE[1:], (SHAPE[0], 1), (1, SHAPE[1]), (1,), ()]
    return shapes[int(rng.integers(len(shapes)))]


def _part(mask: np.ndarray, shape: tuple[int, ...]) -> Any:
    """The mask in a shape that broadcasts with its own."""
    found = mask[tuple(slice(n) for n in (1,) * (2 - len(shape)) + shape)]
    return jnp.asarray(found.reshape(shape))


LATENT: dict[str, Callable[[Any, Any], Any]] = {
    "normal": dist.Normal,
    "affine": lambda loc, scale: dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(loc, scale)),
    "vector": lambda loc, scale: dist.MultivariateNormal(loc * jnp.ones(3), jnp.eye(3) + 0.2 * scale),
}


def _counts(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.integers(0, 3, shape)


def _binary(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.integers(0, 2, shape)


def _reals(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.normal(size=shape)


def _positive(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.gamma(2.0, size=shape)


def _logits(eta: Any) -> Any:
    return jnp.stack(jnp.broadcast_arrays(eta, 0.3, -0.2 * eta), -1)


FAMILIES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, tuple[int, ...]], Any]]] = {
    "normal": (dist.Normal, _reals),
    "affine": (lambda eta, s: dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(eta, -s)), _reals),
    "student": (lambda eta, s: dist.StudentT(4, eta, s), _reals),
    "truncated": (lambda eta, s: dist.TruncatedNormal(eta, s, low=0.0), _positive),
    "gamma": (lambda eta, s: dist.Gamma(2, jnp.exp(-eta)), _positive),
    "poisson": (lambda eta, s: dist.Poisson(jnp.exp(eta)), _counts),
    "zero inflated": (lambda eta, s: dist.ZeroInflatedPoisson(0.2, jnp.exp(eta)), _counts),
    "negative binomial": (lambda eta, s: dist.NegativeBinomial2(jnp.exp(eta), 3), _counts),
    "beta binomial": (lambda eta, s: dist.BetaBinomial(jnp.exp(eta), 2.0, 5), _counts),
    "binomial": (lambda eta, s: dist.Binomial(np.array([4, 5, 6]), logits=eta), _counts),
    "bernoulli": (lambda eta, s: dist.Bernoulli(logits=eta), _binary),
    "probabilities": (lambda eta, s: dist.Bernoulli(probs=jax.nn.sigmoid(eta)), _binary),
    "ordered": (lambda eta, s: dist.OrderedLogistic(eta, jnp.array([-1.0, 1.0])), _counts),
    "categories": (lambda eta, s: dist.Categorical(logits=_logits(eta)), _counts),
    "vector": (lambda eta, s: dist.MultivariateNormal(eta * jnp.ones(3), jnp.eye(3) + 0.2 * s), _reals),
}
