"""Exact draws of the posterior that an engine approximates, in its coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, print_summary, split_gelman_rubin
from numpyro.infer import MCMC

from ...compilation.quick_jit import quick_jit
from ...structure.model.running.execution import check_key
from ..front.engine import BaseEngine
from ..front.options import check_at_least, check_one_of
from ..front.running.progress import progress_bar, warn
from .agreement import Agreement, agreement_between
from .chains import Block, Drawn, block_of, draw_in_blocks
from .gaps import monte_carlo_errors
from .reparam import LATENT, PosteriorReparam, map_draws
from .rotations import Rotations

_MOST_RHAT = 1.05
_FEWEST_EFFECTIVE = 100
_MOST_DIVERGING = 0.01
_NO_SPREAD = 1e-2
_FOR_CAUSE = 64
"""Draws at which factors are compared with their approximations."""
_TOGETHER = 1024
"""Draws whose sites are computed in one call."""


class ExactSamples(MCMC):
    """A run of MCMC whose draws are those of the model's own sites; :func:`sample_exactly` makes it.

    Everything that takes an ``MCMC`` takes it: ``get_samples``, ``print_summary``, ``az.from_numpyro``. Steps are taken
    in blocks, between which Ctrl-C ends the run and keeps what was drawn; ``num_samples`` is then their number.

    :ivar agreement: the engine's marginals beside the draws, site by site.
    :ivar messages: what is to be said of the chains.
    """

    messages: tuple[str, ...] = ()
    num_samples: int
    _field_key: Array | None = None
    """Key for draws of a field that is integrated out, as long as these are not made."""
    _compiled: tuple[tuple[Any, ...], Any] = (), None
    """Functions in compiled programs, and these."""

    def __init__(self, engine: BaseEngine[Any], reparam: PosteriorReparam, kernel: Rotations, **options: Any) -> None:
        super().__init__(kernel, chain_method="vectorized", **options)
        self._posterior, self._reparam = engine.posterior, reparam

    def run(self, rng_key: Array, *args: Any, extra_fields: Sequence[str] = (), **kwargs: Any) -> None:
        """Draw, also on from ``post_warmup_state``, as ``MCMC`` does; what was said of other draws is forgotten.

        :param rng_key: random number generator key.
        :param args: of the model.
        :param extra_fields: nothing to be asked for: all fields that there are are kept.
        :param kwargs: of the model.
        :raises KeyboardInterrupt: on Ctrl-C before anything was drawn.
        :raises FloatingPointError: if no density that is a number was found.
        """
        unknown = sorted({*extra_fields} - {*self.sampler.default_fields})
        if unknown:
            raise ValueError(
                f"There are no fields {unknown}; those of each draw are {self.sampler.default_fields[1:]}."
            )
        self.__dict__.pop("agreement", None)
        number = self.num_samples // self.thinning
        drawn, is_interrupted = self._drawn(rng_key, number, args, kwargs)
        fields = drawn.fields
        if not np.all(np.isfinite(fields["potential_energy"])):
            raise FloatingPointError(
                "The model has density zero, or none that is a number, where the engine has its posterior: look at "
                "engine.diagnostics."
            )
        white = fields["z"][LATENT]
        fields["z"] = {LATENT: white, **self._all_sites(rng_key, white, args, kwargs)}
        self._states, self._states_flat, self._last_state = fields, None, drawn.state
        self._field_key = None if self._reparam.coordinates.has_field else random.fold_in(rng_key, 2)
        if is_interrupted:
            self.num_samples = white.shape[1] * self.thinning
            self.messages += (f"Interrupted after {white.shape[1]} of {number} draws of each chain.",)

    def warmup(self, rng_key: Array, *args: Any, collect_warmup: bool = False, **kwargs: Any) -> None:
        """Adapt; :meth:`run` goes on from there.

        :param rng_key: random number generator key.
        :param args: of the model.
        :param collect_warmup: must be false, as draws that adapt are none of the posterior.
        :param kwargs: of the model.
        """
        if collect_warmup:
            raise ValueError("collect_warmup=True: draws of the warm-up are not kept.")
        self.post_warmup_state = None
        drawn, _ = self._drawn(rng_key, 0, args, kwargs)
        self._last_state = self.post_warmup_state = drawn.state

    def _drawn(self, rng_key: Array, number: int, args: Any, kwargs: Any) -> tuple[Drawn, bool]:
        self._args, self._kwargs = args, kwargs  # as ``MCMC`` keeps them, for others to see
        state, num_warmup = self.post_warmup_state, 0
        if state is None:
            state, num_warmup = self.sampler.init(rng_key, self.num_warmup, None, args, kwargs), self.num_warmup
        else:
            state = state._replace(rng_key=rng_key)
        with progress_bar(num_warmup + number, "sample_exactly", enabled=self.progress_bar) as bar:
            return draw_in_blocks(self._programs(args, kwargs)[0], state, num_warmup, number, bar)

    def _programs(self, args: Any, kwargs: Any) -> tuple[Block, Callable[..., dict[str, Array]]]:
        """Compiled steps, and compiled sites of draws, made again only for other arguments or numbers."""
        holds = (self.thinning, self.num_warmup, *jax.tree.leaves((args, kwargs)))
        before, programs = self._compiled
        if programs is None or len(holds) != len(before) or any(x is not y for x, y in zip(holds, before, strict=True)):
            programs = (
                block_of(self.sampler, (args, kwargs), self.sampler.default_fields, self.thinning),
                quick_jit(partial(self._sites_of, args, kwargs)),
            )
            self._compiled = holds, programs
        return programs

    def _sites_of(self, args: Any, kwargs: Any, white: Array, keys: Array) -> dict[str, Array]:
        """Sites of draws, shape ``(draws, size)``; those on which nothing depends are drawn from the model."""

        @jax.jit
        def sites(white: Array, key: Array) -> dict[str, Array]:
            model = handlers.substitute(handlers.seed(self._reparam.reparam(), key), {LATENT: white})
            trace = handlers.trace(model).get_trace(*args, **kwargs)
            return {
                name: jnp.asarray(site["value"])
                for name, site in trace.items()
                if name != LATENT
                and (site["type"] == "deterministic" or (site["type"] == "sample" and not site["is_observed"]))
            }

        return (
            jax.lax.map(lambda pair: sites(*pair), (white, keys))
            if self.sampler.is_in_turn
            else map_draws(sites, white, keys)
        )

    def _all_sites(self, rng_key: Array, white: np.ndarray, args: Any, kwargs: Any) -> dict[str, np.ndarray]:
        """Sites of draws, shape ``(chains, draws, size)``, some at a time, so that one program serves any number."""
        flat = white.reshape(-1, white.shape[-1])
        size = min(_TOGETHER, self.num_chains * (self.num_samples // self.thinning))
        keys = random.split(random.fold_in(rng_key, 1), len(flat))
        parts = []
        for start in range(0, len(flat), size):
            rows = np.minimum(np.arange(start, start + size), len(flat) - 1)
            found = self._programs(args, kwargs)[1](flat[rows], keys[rows])
            parts.append({name: np.asarray(value)[: len(flat) - start] for name, value in found.items()})
        return {
            n: np.concatenate([part[n] for part in parts]).reshape(*white.shape[:2], *parts[0][n].shape[1:])
            for n in parts[0]
        }

    def _draw_field(self) -> None:
        """Draws of a field that is integrated out in the chains, given those of the hyperparameters, made once."""
        if self._field_key is None:
            return
        chains = {name: value for name, value in self._states[self._sample_field].items() if name != LATENT}
        shape = next(iter(chains.values())).shape[:2]
        flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in chains.items()}
        sites = self._reparam.recover(self._field_key, flat, *self._args, **self._kwargs)
        found = {name: np.asarray(value).reshape(*shape, *value.shape[1:]) for name, value in sites.items()}
        self._states[self._sample_field] |= found
        self._states_flat = self._field_key = None

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Array]:
        """Draws of the latent and deterministic sites of the model, as of ``MCMC``; those of a field that is integrated
        out in the chains are made when they are asked for first."""
        self._draw_field()
        found: dict[str, Array] = super().get_samples(group_by_chain)
        return {name: value for name, value in found.items() if name != LATENT}

    def print_summary(self, prob: float = 0.9, exclude_deterministic: bool = True) -> None:
        """Print the sites of the model, how the chains went, and whether the approximation agrees with them."""
        coordinates = self._reparam.coordinates
        shown = {*coordinates.names, *coordinates.left_out}
        draws = self.get_samples(group_by_chain=True)
        print_summary({n: v for n, v in draws.items() if n in shown or not exclude_deterministic}, prob=prob)
        print(f"Number of divergences: {self.num_diverging}")
        print(self.agreement.verdict)

    @property
    def num_diverging(self) -> int:
        """Number of divergent transitions."""
        return int(np.sum(self.get_extra_fields()["diverging"]))

    @cached_property
    def agreement(self) -> Agreement:
        """Gap between the marginals of the engine and the draws for each site, with its Monte Carlo error."""
        posterior = self._posterior
        draws = {n: np.asarray(v) for n, v in self.get_samples(group_by_chain=True).items() if n in posterior}
        found = {n: (np.asarray(posterior[n].mean), np.sqrt(np.asarray(posterior[n].variance))) for n in draws}
        exact = {n: (v.mean((0, 1)), v.std((0, 1))) for n, v in draws.items()}
        return agreement_between(found, exact, monte_carlo_errors(draws))

    def judge(self, of_fit: tuple[str, ...] = ()) -> None:
        """Say what is wrong with the chains, and which observation is farthest from its approximation.

        :param of_fit: what was said of the fit, which is kept and not said again.
        """
        white = np.asarray(self._states[self._sample_field][LATENT])
        number = white.shape[0] * white.shape[1]
        found = []
        if self.num_diverging > _MOST_DIVERGING * number:
            found.append(f"{self.num_diverging} of {number} transitions diverged")
        is_still = number > 1 and not np.any(np.ptp(white, axis=1))
        if is_still:
            found.append("no transition was accepted")
        elif white.shape[1] >= 4:
            with np.errstate(all="ignore"):
                effective, rhat = effective_sample_size(white), split_gelman_rubin(white)
            if not np.nanmin(effective) >= min(_FEWEST_EFFECTIVE, number // 4):
                found.append(f"the smallest effective sample size is {np.nanmin(effective):.0f}")
            if not np.nanmax(rhat) <= _MOST_RHAT:
                found.append(f"the largest r-hat is {np.nanmax(rhat):.2f}")
        if found and not is_still:
            found.append(self._cause(white.reshape(number, -1)))
        if found:
            self.messages += (
                f"The chains need more draws or a longer warm-up: {'; '.join(found)}. Ask for more num_warmup, "
                "num_samples or a higher target_accept_prob, or run NUTS on PosteriorReparam(engine).reparam().",
            )
        if self._reparam.coordinates.held:
            named = ", ".join(self._reparam.coordinates.held)
            self.messages += (f"Held at the values of the fit, and not sampled: {named}.",)
        for message in self.messages:
            warn(message)
        number = self._reparam.coordinates.num_replaced
        if number:
            self.messages += (
                f"{number} site approximations of the fit have a negative precision; in the coordinates their tangents "
                "at the mean stand for them, which costs steps and no exactness.",
            )
        if of_fit:
            self.messages += (
                f"Of the fit, in whose coordinates the chains are, it was said: {' '.join(of_fit)} The chains are "
                "exact all the same, but for modes that none of them has reached.",
            )

    def _cause(self, white: np.ndarray) -> str:
        some = white[:: max(1, len(white) // _FOR_CAUSE)]
        ratios = jax.jit(lambda rows: jax.lax.map(self._reparam.coordinates.log_ratios, rows))(some)
        spread = {n: np.nan_to_num(np.std(np.asarray(v), axis=0), posinf=np.inf) for n, v in ratios.items() if v.size}
        name = max(spread, key=lambda n: float(np.max(spread[n])), default=None)
        if name is None or np.max(spread[name]) < _NO_SPREAD:
            return "no factor is far from its approximation, so it is the hyperparameters that are far from normal"
        place = np.unravel_index(int(np.argmax(spread[name])), spread[name].shape)
        at = f"[{', '.join(map(str, place))}]" if place else ""
        return (
            f"the factor farthest from its approximation is {name}{at}, whose log ratio to it varies by "
            f"{float(np.max(spread[name])):.2g} (sd)"
        )


def sample_exactly(
    engine: BaseEngine[Any],
    rng_key: Array,
    num_samples: int = 1000,
    *,
    num_chains: int = 4,
    num_warmup: int = 200,
    target_accept_prob: float = 0.8,
    thinning: int = 1,
    chain_method: Literal["vectorized", "sequential"] = "vectorized",
    progress_bar: bool = False,
) -> ExactSamples:
    """Exact draws in the coordinates of an engine's posterior; see :class:`PosteriorReparam` and :class:`Rotations`."""
    check_key(rng_key, "sample_exactly(jax.random.key(0))", "comes first")
    check_at_least(1, num_samples=num_samples, num_chains=num_chains, thinning=thinning)
    check_at_least(0, num_warmup=num_warmup)
    check_one_of(Literal["vectorized", "sequential"], chain_method=chain_method)
    if not 0.0 < target_accept_prob < 1.0:
        raise ValueError(f"target_accept_prob must be between zero and one, got {target_accept_prob!r}.")
    reparam = PosteriorReparam(engine)
    run = engine._finished()
    left_out = {name: run.reading.sites.get(name) for name in reparam.coordinates.left_out}
    discrete = [name for name, site in left_out.items() if site is not None and site.is_discrete]
    if discrete:
        raise ValueError(
            f"The latent sites {discrete} are discrete, and chains move continuous ones. Nothing depends on them: "
            "leave them out of the model, and draw them by Predictive(model, samples)."
        )
    found = ExactSamples(
        engine,
        reparam,
        Rotations(reparam, num_chains, target_accept_prob, chain_method == "sequential"),
        num_samples=num_samples,
        num_chains=num_chains,
        num_warmup=num_warmup,
        thinning=thinning,
        progress_bar=progress_bar,
    )
    found.run(rng_key, *run.reading.args, **run.reading.kwargs)
    found.judge(tuple(engine.diagnostics.messages))
    return found
