"""Costs of gradients in the coordinates of a fit, and of long chains: a part of :mod:`benchmarks.evidence.exact`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer.util import initialize_model, log_density

from numpyro_ext.infer import EP, PosteriorReparam
from numpyro_ext.infer.exact.reparam import LATENT
from numpyro_ext.infer.gaussian.algorithms.held_sites import field_given

from ..harness import cpu_seconds, in_turns, peak_bytes, table

Make = Callable[[], tuple[Callable[..., None], tuple[Any, ...]]]
_NUMBERS = 1e7
"""Unknowns times repeats of a timing, at most."""


def effects(name: str, center: Any, scale: Any, number: int, is_centred: bool) -> Any:
    """Independent normal effects, as one site or as a location and scale of standard ones."""
    if is_centred:
        return numpyro.sample(name, dist.Normal(center, scale).expand([number]).to_event(1))
    return center + scale * numpyro.sample(name, dist.Normal(0, 1).expand([number]).to_event(1))


def intercepts(num_groups: int, is_centred: bool = True) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Four Poisson counts in each of some groups."""
    rng, group = np.random.default_rng(1), np.arange(4 * num_groups) % num_groups

    def model(group: Any, counts: Any) -> None:
        level, scale = numpyro.sample("level", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
        effect = effects("effect", level, scale, num_groups, is_centred)
        numpyro.sample("counts", dist.Poisson(jnp.exp(effect[group])), obs=counts)

    return model, (group, rng.poisson(np.exp(0.3 + 0.8 * rng.normal(size=num_groups))[group]))


def series(num_steps: int) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Counts whose log rate is an autoregression, by scan."""
    rng = np.random.default_rng(0)
    state, counts = 0.0, np.zeros(num_steps, int)
    for step in range(num_steps):
        state = 0.98 * state + 0.1 * rng.normal()
        counts[step] = rng.poisson(np.exp(state))

    def model(counts: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(0.5))

        def go_on(state: Any, count: Any) -> tuple[Any, None]:
            state = numpyro.sample("state", dist.Normal(0.98 * state, scale))
            numpyro.sample("counts", dist.Poisson(jnp.exp(state)), obs=count)
            return state, None

        scan(go_on, 0.0, counts)

    return model, (jnp.asarray(counts),)


def cox_process(num_points: int, is_centred: bool = True) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Counts at points, the length and the scale of their log rate learned."""
    t = np.arange(float(num_points))

    def model(t: Any, counts: Any) -> None:
        scale, length = numpyro.sample("scale", dist.HalfNormal(1)), numpyro.sample("length", dist.LogNormal(2, 0.5))
        kernel = scale**2 * jnp.exp(-0.5 * ((t[:, None] - t) / length) ** 2) + 1e-6 * jnp.eye(t.size)
        if is_centred:
            f = numpyro.sample("f", dist.MultivariateNormal(jnp.full(t.size, 0.5), kernel))
        else:
            white = numpyro.sample("f", dist.Normal(0, 1).expand([t.size]).to_event(1))
            f = 0.5 + jnp.linalg.cholesky(kernel) @ white
        numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    return model, (t, np.random.default_rng(3).poisson(np.exp(0.5 + np.sin(t / 8))))


def _fitted(model: Callable[..., None], args: tuple[Any, ...]) -> EP:
    engine = EP(model, progress_bar=False)
    engine.run(random.key(0), *args)
    return engine


def _repeated(function: Callable[[Any], Any], start: Any, number: int) -> Callable[[], Any]:
    """Calls in one compiled loop, as a chain makes them."""

    @jax.jit
    def run(start: Any) -> Any:
        def again(i: Any, total: Any) -> Any:
            return total + sum(jnp.sum(x) for x in jax.tree.leaves(function(start * (1.0 + 1e-9 * i))))

        return jax.lax.fori_loop(0, number, again, 0.0)

    return partial(run, start)


def gradient(draw: int, make: Make) -> dict[str, Any]:
    """Microseconds of one conditioning, of a gradient in the coordinates, and of one of the model as written."""
    model, args = make()
    reparam = PosteriorReparam(_fitted(model, args))
    coordinates = reparam.coordinates
    size = len(coordinates.scale)
    white = 0.3 * random.normal(random.key(1), (coordinates.size,))

    def condition(white: Any) -> Any:
        vector = coordinates.mode.at[coordinates.space.integrable].add(coordinates.scale @ white[:size])
        form = coordinates.reading.form(coordinates.space.unpack(vector), coordinates.reading.data)
        field = field_given(form, coordinates.sites)
        return field.mean, field.log_partition

    def target(white: Any) -> Any:
        return log_density(reparam.reparam(), args, {}, {LATENT: white})[0]

    info = initialize_model(random.key(0), model, model_args=args)
    flat, unflatten = jax.flatten_util.ravel_pytree(info.param_info.z)
    number = int(np.clip(_NUMBERS / coordinates.size**2, 5, 200))
    functions = {
        "conditioning": (condition, white),
        "of coordinates": (jax.value_and_grad(target), white),
        "of the model": (jax.value_and_grad(lambda z: info.potential_fn(unflatten(z))), flat),
    }
    times = in_turns(3, *(_repeated(function, start, number) for function, start in functions.values()))
    space = type(coordinates._given(white)[1].posterior).__name__.removesuffix("Posterior").lower()
    return {"space": space, "unknowns": coordinates.reading.num_columns} | {
        name: 1e6 * seconds / number for name, seconds in zip(functions, times, strict=True)
    }


def chain(draw: int, make: Make) -> dict[str, Any]:
    """CPU-seconds and memory of a fit and of 1000 draws after 200 of warm-up, compilation included."""
    engine, first = cpu_seconds(_fitted, *make())
    exact, seconds = cpu_seconds(engine.sample_exactly, random.key(1), 1000, num_chains=1)
    draws = exact.get_samples(group_by_chain=True)
    smallest = min(float(np.nanmin(effective_sample_size(np.asarray(draws[name])))) for name in exact.agreement)
    found = {"fit": first, "chain": seconds, "effective": smallest, "divergences": exact.num_diverging}
    return found | {"bytes": peak_bytes(), "word": exact.agreement.word, "messages": list(exact.messages)}


_SMALL, _MANY, _LONG = partial(intercepts, 60), partial(intercepts, 20_000), partial(series, 10_000)
_GRADIENTS = {
    "Poisson intercepts, 60 groups": _SMALL,
    "Poisson intercepts, 20,000 groups": _MANY,
    "Cox process, 40 points": partial(cox_process, 40),
    "Cox process, 100 points": partial(cox_process, 100),
    "series of 500 counts": partial(series, 500),
    "series of 10,000 counts": _LONG,
}
_CHAINS = {"Poisson intercepts, 20,000 groups": _MANY, "series of 10,000 counts": _LONG}
COSTS: dict[str, Callable[[int], Any]] = {
    f"{kind}: {name}": partial(measure, make=make)
    for kind, measure, cases in (("gradient", gradient, _GRADIENTS), ("chain", chain, _CHAINS))
    for name, make in cases.items()
}
"""Experiments by name."""


_OF_GRADIENT = ("conditioning", "of coordinates", "of the model")


def _ratios(one: Mapping[str, float]) -> list[str]:
    return [f"{one['of coordinates'] / one[key]:.1f}" for key in ("conditioning", "of the model")]


def cost_lines(found: Mapping[str, Sequence[Any]]) -> list[str]:
    """Sections of the report on what :data:`COSTS` found."""
    rows = (
        (name, one["space"], one["unknowns"], *(f"{one[key]:.1f}" for key in _OF_GRADIENT), *_ratios(one))
        for name in _GRADIENTS
        for one in found[f"gradient: {name}"]
    )
    chains = (
        (
            name,
            *(f"{one[key]:.0f}" for key in ("fit", "chain", "effective")),
            *(one["divergences"], f"{one['bytes'] / 2**30:.1f}", one["word"]),
        )
        for name in _CHAINS
        for one in found[f"chain: {name}"]
    )
    missing = [name for name in COSTS if not found[name]]
    return [
        "## What a gradient costs",
        "CPU-microseconds in a compiled loop, after the compilation: of one conditioning of the field with the sites "
        "of the fit held, its mean and its log integral; of value and gradient in the coordinates of EP; and of the "
        "model as written.",
        table(
            "model | space | unknowns | conditioning | gradient in coordinates | gradient of the model | "
            "gradient over conditioning | over that of the model",
            rows,
        ),
        "## Long chains",
        "`sample_exactly` with one chain, 200 + 1000 steps, in a process that has fitted the model; compilation and "
        "all answers included. At most 60 CPU-seconds are asked for.",
        table("model | fit, s | chain, s | smallest ESS | divergences | peak memory, GiB | agreement", chains),
        *([f"Not measured: {', '.join(missing)}."] if missing else []),
    ]
