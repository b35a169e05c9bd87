"""Runs of EP on trees: posteriors under several values of arguments of the model, mixed or averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...front.answers.sites import PointPosterior, SitePosterior
from ...front.files.content import Content
from ...front.options import check_at_least
from ...front.results import HyperEstimate
from ...front.run import hyper_estimates
from ...front.state import Fit
from ..run import Member, SparseRun, SparseSite
from .programs import TreePrograms
from .risk import Risk, estimated_risk, seen_elements

TreeMember = Member[TreePrograms]
Pooling = Literal["mixture", "average", "risk"]
"""Use of several posteriors: as a mixture, or with the error of their averaged mean, by themselves or by the data."""


class TreeSite(SparseSite):
    """A site under exact posteriors or those of EP, whose quantiles are those of draws: they are no Gaussians."""

    _run: TreeRun

    def __init__(self, name: str, run: TreeRun, noise_variance: np.ndarray | None = None) -> None:
        super().__init__(name, run)
        self._noise_variance = noise_variance

    @cached_property
    def risk(self) -> Risk:
        """Squared error of the mean by the data: Stein's unbiased estimate, and the deviations that follow from it.

        :raises ValueError: unless each element of the site is observed.
        """
        seen = seen_elements(self._run.members, self.name)
        return estimated_risk(seen, self._mixed_mean(), self._within, self._between, self._noise_variance)

    def with_noise_variance(self, noise_variance: ArrayLike) -> TreeSite:
        """The same posterior, its risk estimated for data whose noise is known to have another variance.

        A model of one noise for all data may be off by little for its mean and by much for a small risk: square roots
        of photon counts have the variance one where photons are many, and less in the dark. The deviations, intervals
        and draws of what is returned are those of the new risk; those of the engine stay.

        :param noise_variance: of the data of each element, in the shape of the site, or the average over all.
        :raises ValueError: if it is negative, zero everywhere, not finite or of another shape, or the pooling another.
        """
        if self._run.pooling != "risk":
            raise ValueError(f"The noise is compared with for pooling='risk'; this run has {self._run.pooling!r}.")
        given = np.asarray(noise_variance)
        variance = given.astype(float) if given.dtype.kind in "iuf" else np.array(np.nan)
        if variance.shape not in ((), self.shape) or not np.all((variance >= 0.0) & np.isfinite(variance)):
            raise ValueError(
                f"noise_variance must be a number, or an array of shape {self.shape}, finite and at least zero; got "
                f"{noise_variance!r}."
            )
        if not variance.any():
            raise ValueError("noise_variance is zero everywhere: without noise the data are the truth.")
        site = TreeSite(self.name, self._run, variance.reshape(-1))
        # What was found of the members is the same; draws above all, if the variances took some.
        found = {"_within": self._within, **self.__dict__}
        site.__dict__.update({name: found[name] for name in ("_means", "_own_draws", "_within") if name in found})
        return site

    @cached_property
    def shrinkage(self) -> float:
        """Factor of the mixture's variances: one, or another number where means are averaged.

        By the identity of Krogh and Vedelsby (1995), the squared error of an average of means is the average of their
        squared errors, less the variance between them. The first is what each member says its variance is; in a mixture
        the second adds to it. The ratio is that of sums over all elements, because single differences may be negative.
        :attr:`risk` is the same squared error as the data have it.
        """
        pooling = self._run.pooling
        if pooling == "mixture" or len(self._run.members) == 1:
            return 1.0
        within, between = float(np.mean(self._within)), float(np.mean(self._between))
        if pooling == "risk":
            return self.risk.value / (within + between)
        if within <= between:
            raise FloatingPointError(
                f"The means of site {self.name!r} differ between members by a variance of {between:.3g}, and members "
                f"give themselves one of {within:.3g}: these are too small to say how wrong the average is. Ask for "
                "the mixture (pooling='mixture')."
            )
        return (within - between) / (within + between)

    def _mixed_variance(self) -> np.ndarray:
        return self.shrinkage * super()._mixed_variance()

    def _mixed_covariance(self) -> Array:
        return self.shrinkage * super()._mixed_covariance()

    def _mix(self, rng_key: Array, num_samples: int) -> Array:
        return self.drawn_in(super()._mix(rng_key, num_samples))

    def _quantile(self, q: np.ndarray) -> Array:
        return self.drawn_in(np.quantile(np.concatenate(self._own_draws), q, axis=0)).astype(self.mean.dtype)

    def drawn_in(self, values: ArrayLike) -> Array:
        """Values of the mixture, with elements in C order behind the first axes, brought nearer to the mean."""
        if self.shrinkage == 1.0:
            return jnp.asarray(values)
        mean = self._mixed_mean()
        return jnp.asarray(mean + self.shrinkage**0.5 * (np.asarray(values) - mean), mean.dtype)


class TreeRun(SparseRun[TreePrograms]):
    """A run of EP on sparse coefficients: one posterior, or several with equal weights.

    :param members: the posteriors.
    :param learned: those that learned hyperparameters: one for each combination of arguments other than the shift.
    :param averages: what they are taken over, in words; all else as in :class:`FinishedRun`.
    :param pooling: whether they are mixed, or their means averaged, and by what the error of these is judged.
    """

    site_class = TreeSite

    def __init__(
        self,
        members: Sequence[TreeMember],
        learned: Sequence[TreeMember],
        averages: Sequence[str],
        rng_key: Array,
        num_samples: int,
        pooling: Pooling = "mixture",
    ) -> None:
        self.pooling = pooling
        fit = _combined_fit(learned, members) if len(members) > 1 else learned[0].fit
        super().__init__(members, fit, rng_key, num_samples)
        self.reading, self.space = learned[0].reading, learned[0].space
        self.learned, self.averages = tuple(learned), tuple(averages)

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate]:
        """Value and standard error of each hyperparameter; in a mixture over other arguments than shifts, of each
        combination, with its arguments in front of the name.

        Standard errors are computed for up to 20 hyperparameters.
        """
        found = [hyper_estimates(member.space, member.fit) for member in self.learned]
        return self._of_each(found)

    @property
    def hyper_posterior(self) -> dict[str, SitePosterior]:
        """Points, named as in :attr:`hyper`."""
        return self._of_each(
            [{n: PointPosterior(n, value) for n, value in member.fit.hyper.items()} for member in self.learned]
        )

    def _of_each(self, found: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        """Findings of each member that learned, with its arguments in front of the names where there are several."""
        out: dict[str, Any] = {}
        for member, values in zip(self.learned, found, strict=True):
            prefix = "" if len(self.learned) == 1 else _label(member.arguments) + ": "
            out |= {prefix + name: value for name, value in values.items()}
        return out

    def describe(self) -> str:
        """Describe the reading of the model, the algorithm, and the members of the mixture."""
        is_exact = self.learned[0].programs.options.is_exact
        lines = [super().describe(), f"posterior: {'exact' if is_exact else 'expectation propagation'}"]
        if len(self.members) > 1:
            pooled = "average, its deviations by estimated risk," if self.pooling == "risk" else self.pooling
            lines.append(f"{pooled} of {len(self.members)} members ({'; '.join(self.averages)})")
        return "\n".join(lines)

    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array]:
        sites, log_density = super().draw(rng_key, num_samples)
        for name in sites.keys() & self.posterior.keys():
            site = self.posterior[name]
            assert isinstance(site, TreeSite)
            if site.shrinkage != 1.0:
                flat = np.reshape(sites[name], (len(sites[name]), -1))
                sites[name] = site.drawn_in(flat).reshape(sites[name].shape)
        return sites, log_density

    def content(self) -> Content:
        is_learned = {id(member) for member in self.learned}
        shifted = [member.content() for member in self.members if id(member) not in is_learned]
        return {"tree": {"learned": [member.content() for member in self.learned], "shifted": shifted}}


def _label(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={np.asarray(value).tolist()!r}" for name, value in arguments.items())


def check_average(
    model: Callable[..., object],
    num_shifts: int | None,
    average_over: Mapping[str, Sequence[object]] | None,
    pooling: Pooling,
    num_learning_shifts: int = 1,
) -> dict[str, tuple[object, ...]]:
    """Refuse averages over arguments that the model does not have, and unknown ways to pool them.

    :return: the values of each argument.
    :raises ValueError: saying which.
    """
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be 'mixture', 'average' or 'risk', got {pooling!r}.")
    if num_shifts is not None:
        check_at_least(1, num_shifts=num_shifts)
    check_at_least(1, num_learning_shifts=num_learning_shifts)
    if num_learning_shifts > 1 + (num_shifts or 0):
        raise ValueError(
            f"num_learning_shifts={num_learning_shifts}, but num_shifts={num_shifts}: hyperparameters are learned "
            "without shift and from some of those."
        )
    average = {name: tuple(values) for name, values in dict(average_over or {}).items()}
    empty = [name for name, values in average.items() if not values]
    if empty:
        raise ValueError(f"average_over[{empty[0]!r}] holds no values.")
    if "shift" in average and num_shifts is not None:
        raise ValueError("Give either num_shifts or average_over={'shift': [...]}, not both.")
    names = [*average, *(() if num_shifts is None else ("shift",))]
    parameters = inspect.signature(model).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return average
    for name in names:
        if name not in parameters:
            option = "num_shifts" if name == "shift" and num_shifts is not None else "average_over"
            raise ValueError(
                f"{option} needs a model with an argument {name!r}; {getattr(model, '__name__', 'this one')} has "
                f"{', '.join(parameters) or 'none'}. A shift rolls the image: jnp.roll(image, shift, axes)."
            )
    return average


def _combined_fit(learned: Sequence[TreeMember], members: Sequence[TreeMember]) -> Fit:
    """The fit of the mixture: hyperparameters of each combination, and the average of the evidences."""
    values = np.array([member.fit.log_evidence for member in members])
    log_evidence = float(np.logaddexp.reduce(values) - np.log(values.size))
    messages: list[str] = []
    seen: dict[int, TreeMember] = {id(member): member for member in (*learned, *members)}
    for member in seen.values():
        prefix = _label(member.arguments)
        messages += [f"{prefix}: {m}" if prefix else m for m in member.fit.diagnostics.messages]
    first = learned[0].fit
    diagnostics = first.diagnostics._replace(
        converged=all(m.fit.diagnostics.converged for m in seen.values()),
        objective_trace=values,
        max_change=max(m.fit.diagnostics.max_change for m in seen.values()),
        messages=tuple(messages),
        edges=tuple(dict.fromkeys(name for member in learned for name in member.fit.diagnostics.edges)),
    )
    return first._replace(log_evidence=log_evidence, diagnostics=diagnostics)
