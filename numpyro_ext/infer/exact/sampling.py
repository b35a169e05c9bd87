"""Exact draws of the posterior that an engine approximates, by NUTS in its coordinates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.diagnostics import effective_sample_size, print_summary, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_sample

from ...structure.model.running.execution import check_key
from ..front.engine import BaseEngine
from ..front.options import check_at_least
from ..front.running.progress import warn
from .agreement import Agreement, agreement_between
from .gaps import monte_carlo_errors
from .reparam import LATENT, PosteriorReparam

_MOST_RHAT = 1.05
_FEWEST_EFFECTIVE = 100
_MOST_DIVERGING = 0.01
_NO_SPREAD = 1e-2
_FOR_CAUSE = 64
"""Draws at which factors are compared with their approximations."""


class ExactSamples(MCMC):
    """A run of MCMC whose draws are those of the model's own sites; :func:`sample_exactly` makes it.

    Everything that takes an ``MCMC`` takes it: ``get_samples``, ``print_summary``, ``az.from_numpyro``.

    :ivar agreement: the engine's marginals beside the draws, site by site.
    :ivar messages: what is to be said of the chains.
    """

    messages: tuple[str, ...] = ()

    def __init__(self, engine: BaseEngine[Any], reparam: PosteriorReparam, kernel: NUTS, **options: Any) -> None:
        super().__init__(kernel, **options)
        self._posterior, self._reparam = engine.posterior, reparam

    def run(self, *args: Any, **options: Any) -> None:
        """Draw, also on from ``post_warmup_state``, as ``MCMC`` does; what was said of other draws is forgotten."""
        self.__dict__.pop("agreement", None)
        super().run(*args, **options)

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Array]:
        """Draws of the latent and deterministic sites of the model, as of ``MCMC``."""
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
        if white.shape[1] >= 4:
            with np.errstate(all="ignore"):
                effective, rhat = effective_sample_size(white), split_gelman_rubin(white)
            if not np.nanmin(effective) >= min(_FEWEST_EFFECTIVE, number // 4):
                found.append(f"the smallest effective sample size is {np.nanmin(effective):.0f}")
            if not np.nanmax(rhat) <= _MOST_RHAT:
                found.append(f"the largest r-hat is {np.nanmax(rhat):.2f}")
        if found:
            found.append(self._cause(white.reshape(number, -1)))
            self.messages += (
                f"The chains need more draws or a longer warm-up: {'; '.join(found)}. Ask for more num_warmup, "
                "num_samples or a higher target_accept_prob.",
            )
        if self._reparam.coordinates.held:
            named = ", ".join(self._reparam.coordinates.held)
            self.messages += (f"Held at the values of the fit, and not sampled: {named}.",)
        for message in self.messages:
            warn(message)
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
            return "the factors are Gaussian, so it is the hyperparameters that are far from normal"
        place = np.unravel_index(int(np.argmax(spread[name])), spread[name].shape)
        at = f"[{', '.join(map(str, place))}]" if place else ""
        return (
            f"the factor farthest from its approximation is {name}{at}, whose log ratio to it varies by "
            f"{float(np.max(spread[name])):.2g} (sd)"
        )


class _NUTS(NUTS):
    """NUTS on a reparameterised model that names the model as it is, which ArviZ asks for log likelihoods."""

    def __init__(self, reparam: PosteriorReparam, **options: Any) -> None:
        super().__init__(reparam.reparam(), init_strategy=init_to_sample, **options)
        self._shown_model = reparam.model

    @property
    def model(self) -> Callable[..., Any]:
        return self._shown_model


def sample_exactly(
    engine: BaseEngine[Any],
    rng_key: Array,
    num_samples: int = 1000,
    *,
    num_chains: int = 4,
    num_warmup: int = 200,
    target_accept_prob: float = 0.8,
    progress_bar: bool = False,
    **options: Any,
) -> ExactSamples:
    """Exact draws by NUTS in the coordinates of an engine's posterior; see :class:`PosteriorReparam`."""
    check_key(rng_key, "sample_exactly(jax.random.key(0))", "comes first")
    check_at_least(1, num_samples=num_samples, num_chains=num_chains)
    check_at_least(0, num_warmup=num_warmup)
    if not 0.0 < target_accept_prob < 1.0:
        raise ValueError(f"target_accept_prob must be between zero and one, got {target_accept_prob!r}.")
    reparam = PosteriorReparam(engine)
    run = engine._finished()
    left_out = {name: run.reading.sites.get(name) for name in reparam.coordinates.left_out}
    discrete = [name for name, site in left_out.items() if site is not None and site.is_discrete]
    if discrete:
        raise ValueError(
            f"The latent sites {discrete} are discrete, and NUTS moves continuous ones. Nothing depends on them: leave "
            "them out of the model, and draw them by Predictive(model, samples)."
        )
    if jax.local_device_count() >= num_chains:
        options.setdefault("chain_method", "parallel")
    options.setdefault("chain_method", "sequential" if progress_bar else _in_turn)
    found = ExactSamples(
        engine,
        reparam,
        _NUTS(reparam, target_accept_prob=target_accept_prob, adapt_mass_matrix=False),
        num_samples=num_samples,
        num_chains=num_chains,
        num_warmup=num_warmup,
        progress_bar=progress_bar,
        **options,
    )
    found.run(rng_key, *run.reading.args, **run.reading.kwargs)
    found.judge(tuple(engine.diagnostics.messages))
    return found


def _in_turn(one_chain: Callable[..., Any]) -> Callable[..., Any]:
    """Chains one after the other in one program; NumPyro's own way compiles one for each of them."""
    return partial(jax.lax.map, one_chain)
