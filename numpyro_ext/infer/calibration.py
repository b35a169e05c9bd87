"""Simulation-based calibration: whether the posteriors of an engine are as wide as they should be, on average."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer import Predictive

from ..optional import optional
from ..structure.model.running.execution import ModelCall, check_key
from ..structure.model.running.messages import Message
from ..structure.model.running.pandas_arguments import run_or_with_arrays
from .front.engine import AnyEngine, BaseEngine
from .front.many import Dataset, collect_fits
from .front.options import check_at_least, check_kind
from .front.running.chunks import Interruption
from .front.running.progress import progress_bar, warn
from .monte_carlo.smc import SMC


class Calibration:
    """The outcome of :func:`calibrate`, about the simulations that could be fitted.

    :ivar ranks: by site, how many of the draws are below the true value, of shape ``(num_fitted, ...)``; uniform on
        ``0, ..., num_draws`` where the posteriors are exact. Ties are broken at random.
    :ivar int num_draws: from each posterior.
    :ivar converged: which of the fits converged; the others are among the ranks, too.
    :ivar errors: by the number of the simulation, why it could not be fitted.
    """

    def __init__(
        self, ranks: dict[str, np.ndarray], num_draws: int, converged: np.ndarray, errors: dict[int, Exception]
    ) -> None:
        self.ranks, self.num_draws, self.converged, self.errors = ranks, num_draws, converged, errors

    def __repr__(self) -> str:
        return (
            f"<Calibration of {', '.join(self.ranks)}: {len(self.converged)} simulations fitted, "
            f"{int((~self.converged).sum())} of them not converged; {len(self.errors)} failed>"
        )

    @property
    def places(self) -> dict[str, np.ndarray]:
        """The ranks as places in the unit interval, by site."""
        return {name: (ranks + 0.5) / (self.num_draws + 1) for name, ranks in self.ranks.items()}

    def to_arviz(self) -> Any:
        """:attr:`places` as the group ``prior_sbc`` of ArviZ's data, one draw for each simulation.

        ``arviz_plots.plot_ecdf_pit(found.to_arviz())`` of ArviZ 1.x draws what :meth:`plot` does, by distribution
        functions.

        :return: an ``InferenceData`` (ArviZ 0.x) or ``DataTree`` (1.x).
        """
        import arviz

        groups = {"prior_sbc": {name: values[None] for name, values in self.places.items()}}
        if not arviz.__version__.startswith("0."):
            return arviz.from_dict(groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="prior_sbc group is not defined")
            return arviz.InferenceData(prior_sbc=arviz.dict_to_dataset(groups["prior_sbc"]))

    def plot(self, num_bins: int = 10, axes: Any = None) -> Any:
        """Histograms of the ranks, a panel for each site, with the band that holds 99 % of the bars if they are exact.

        Bars that are high at both ends say that posteriors are too narrow, high in the middle that they are too wide.
        Elements of a site are drawn together; they depend on each other, so that bars of several spread more than the
        band.

        :param int num_bins: bars in a panel.
        :param axes: of matplotlib, one for each site; a new figure by default.
        :return: the axes.
        """
        from scipy.stats import binom  # takes as long to import as JAX

        if axes is None:
            plt = optional("matplotlib.pyplot", "demo")
            size = len(self.ranks)
            _, axes = plt.subplots(1, size, figsize=(3.0 * size, 2.6), layout="constrained", squeeze=False)
        axes = np.ravel(axes)
        for axis, (name, places) in zip(axes, self.places.items(), strict=True):
            axis.hist(places.ravel(), np.linspace(0, 1, num_bins + 1), color="#1b6ca8", alpha=0.8, edgecolor="white")
            low, high = binom.ppf((0.005, 0.995), places.size, 1.0 / num_bins)
            axis.axhspan(low, high, color="#777777", alpha=0.25, lw=0)
            axis.axhline(places.size / num_bins, color="#777777", lw=1)
            axis.set(title=name, xlabel="rank of the true value", yticks=[], xlim=(0, 1))
            axis.spines[["top", "right", "left"]].set_visible(False)
        return axes

    def coverage(self, probs: Sequence[float] = (0.5, 0.8, 0.95)) -> dict[str, dict[float, tuple[float, float]]]:
        """Frequency with which central intervals hold the true value.

        :param probs: the masses of the intervals.
        :return: by site and mass the share, over the elements of the site and the simulations, and its standard
            error. Elements of one simulation are not independent: the error is that of the mean over simulations, one
            hit and one miss added, so that it is not zero where all hit.
        """
        out: dict[str, dict[float, tuple[float, float]]] = {}
        for name, places in self.places.items():
            distance = np.abs(places.reshape(len(places), -1) - 0.5)
            out[name] = {}
            for prob in probs:
                hits = np.mean(distance <= prob / 2, axis=1)
                error = np.std([*hits, 0.0, 1.0]) / np.sqrt(len(hits) + 2)
                out[name][prob] = float(np.mean(hits)), float(error)
        return out


def calibrate(
    engine: AnyEngine,
    rng_key: Array,
    *args: object,
    num_simulations: int = 200,
    observed: Sequence[str] | str | None = None,
    quantities: Sequence[str] | str = (),
    **kwargs: object,
) -> Calibration:
    """Ranks of true values among the draws of an engine, on data simulated from the prior of its model.

    Over parameters from the prior and data given them, an exact posterior holds the true value with its own probability
    (Talts, Betancourt, Simpson, Vehtari and Gelman 2018): ranks are uniform. Posteriors that are too narrow make ranks
    at both ends, those that are too wide in the middle. Cost: ``num_simulations`` fits.

    :param engine: with its model and options; it stays as it is.
    :param rng_key: random number generator key.
    :param args: arguments of the model, as for ``engine.run``; those with observations are ``None`` or left out.
    :param int num_simulations: data sets to fit.
    :param observed: names of the arguments that hold observations, each that of its site; by default all arguments
        that are ``None`` and bear the name of a site.
    :param quantities: names of deterministic sites whose values are ranked beside those of the latent sites, such as
        probabilities of events.
    :param kwargs: keyword arguments of the model.
    :return: ranks and coverage. Fits that did not converge count; those that failed are in ``errors``. Ctrl-C leaves
        what was done.
    :raises ValueError: if no argument holds observations, a site has data all the same, or the prior cannot be drawn
        from: ``param`` sites, improper priors, ``numpyro.factor``; the site is named.
    """
    check_kind("calibrate", engine, (BaseEngine, SMC), "an engine, or SMC")
    check_key(rng_key)
    check_at_least(1, num_simulations=num_simulations)
    asked = [observed] if isinstance(observed, str) else list(observed or ())
    wanted = [quantities] if isinstance(quantities, str) else list(quantities)
    model = handlers.condition(engine.model, data=engine.hyper_values)
    bound, names, latent = _sites_to_rank(engine, model, rng_key, args, kwargs, asked, wanted)
    key_prior, key_fits, key_ties = jax.random.split(rng_key, 3)
    simulated = Predictive(model, num_samples=num_simulations)(key_prior, *bound.args, **bound.kwargs)
    datasets = []
    for i in range(num_simulations):
        bound.arguments.update({name: np.asarray(simulated[name][i]) for name in names})
        datasets.append(Dataset(jax.random.fold_in(key_fits, i), tuple(bound.args), dict(bound.kwargs)))
    fits = collect_fits(engine, datasets)
    generator = np.random.default_rng(np.asarray(jax.random.bits(key_ties, (2,))))
    fitted = [i for i in range(len(fits)) if i not in fits.errors]
    ranks: dict[str, list[np.ndarray]] = {name: [] for name in latent}
    converged: list[bool] = []
    with (
        progress_bar(len(fitted), f"{type(engine).__name__}, ranks", enabled=engine.progress_bar) as bar,
        Interruption() as interruption,
    ):
        for i in fitted:
            draws = fits[i].get_samples()
            for name in latent:
                drawn, truth = np.asarray(draws[name]), np.asarray(simulated[name][i])
                ties = np.sum(drawn == truth, axis=0)
                ranks[name].append(np.sum(drawn < truth, axis=0) + generator.integers(0, ties + 1))
            converged.append(bool(fits[i].diagnostics.converged))
            bar.update()
            if interruption:
                warn(f"Interrupted: {len(converged)} of {num_simulations} simulations have ranks.")
                break
    stacked = {name: np.stack(values) for name, values in ranks.items()}
    return Calibration(stacked, engine.num_samples, np.array(converged), fits.errors)


def _sites_to_rank(
    engine: AnyEngine,
    model: Callable[..., object],
    rng_key: Array,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    asked: Sequence[str],
    wanted: Sequence[str],
) -> tuple[inspect.BoundArguments, list[str], list[str]]:
    """Arguments without observations, names of those that hold them, and of the sites that are ranked.

    :param model: that of the engine, with given hyperparameters.
    :param asked: names of the arguments that hold observations; where there are none, all that can.
    :param wanted: names of deterministic sites.
    :raises ValueError: as :func:`calibrate`.
    """
    signature = inspect.signature(engine.model)
    bound = signature.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    unknown = sorted(set(asked) - set(signature.parameters))
    if unknown:
        raise ValueError(f"observed names no argument of the model: {', '.join(map(repr, unknown))}.")
    for name in asked:
        bound.arguments[name] = None
    drawable = handlers.substitute(model, substitute_fn=_in_place_of_improper)
    look = handlers.trace(handlers.seed(drawable, jax.random.key(0))).get_trace
    # Engines give a model that does not run on columns of pandas the arrays that JAX would make of them.
    call = ModelCall(engine.model, bound.args, bound.kwargs, rng_key)
    ran, trace = run_or_with_arrays(call, lambda tried: look(*tried.args, **tried.kwargs))
    if ran is not call:
        bound.arguments = inspect.signature(engine.model).bind(*ran.args, **ran.kwargs).arguments
    sites = {name: site for name, site in trace.items() if site["type"] in ("sample", "param")}
    names = [n for n in asked or signature.parameters if bound.arguments.get(n, 0) is None and n in sites]
    if not names or set(asked) - set(names):
        raise ValueError(
            "The arguments with the observations are given as None, or named by observed=[...]; each has the name of "
            f"its site. Sites of the model: {', '.join(sites)}."
        )
    latent = [name for name in sites if name not in names and name not in engine.hyper_values]
    for name in latent:
        _check_prior(name, sites[name])
    computed = [name for name, site in trace.items() if site["type"] == "deterministic"]
    if unknown := [name for name in wanted if name not in computed]:
        raise ValueError(
            f"quantities names no deterministic site: {', '.join(map(repr, unknown))}. The model has "
            f"{', '.join(map(repr, computed)) or 'none'}."
        )
    latent += wanted
    return bound, names, latent


def _is_improper(site: Mapping[str, object]) -> bool:
    return isinstance(getattr(site["fn"], "base_dist", site["fn"]), dist.ImproperUniform)


def _in_place_of_improper(site: Message) -> Array | None:
    """A value with which the model can be traced, so that the site is refused by name."""
    return jnp.zeros(site["fn"].shape()) if site["type"] == "sample" and _is_improper(site) else None


def _check_prior(name: str, site: Mapping[str, object]) -> None:
    if site["type"] == "param":
        found = "is a param site without a prior: give its value in hyper_values, or a prior"
    elif site["is_observed"]:
        found = "has data, or is a numpyro.factor: parameters from the prior know nothing of it. Name its argument"
    elif _is_improper(site):
        found = "has an improper prior, from which nothing can be drawn: give it a proper one"
    else:
        return
    raise ValueError(f"Calibration draws from the prior, but site {name!r} {found}.")
