"""Interface that ArviZ asks of an inference object, and scores in its type, in both of its living generations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from ..labels import Labels
from ..results import Diagnostics
from ..running.progress import warn

_FEWEST_DRAWS = 4
"""Draws of a chain at least, which ArviZ asks for."""


def num_groups(num_samples: int) -> int:
    """Number of chains in which independent draws are handed over: four or two of equal length, or one."""
    fits = (n for n in (4, 2) if num_samples % n == 0 and num_samples // n >= _FEWEST_DRAWS)
    return next(fits, 1)


def by_chain(draws: Mapping[str, Array]) -> dict[str, Array]:
    """Independent draws in groups, along an axis in front.

    :param draws: with the leading axis running over them.
    :return: of shape ``(groups, draws, ...)``.
    """
    groups = {name: num_groups(len(value)) for name, value in draws.items()}
    return {name: value.reshape(groups[name], -1, *value.shape[1:]) for name, value in draws.items()}


def _num_kept(num_samples: int) -> int:
    """Number of draws that fill several chains: up to three are left out, where there are enough."""
    return num_samples if num_samples < 2 * _FEWEST_DRAWS else num_samples - num_samples % 4


def prediction_to_arviz(draws: Mapping[str, Array], **options: Any) -> Any:
    """Draws at new arguments as the group ``predictions`` of ArviZ's data.

    :param draws: with the leading axis running over them.
    :param options: ``coords`` and ``dims``, as for ``arviz.from_dict``.
    """
    import arviz

    kept = {name: value[: _num_kept(len(value))] for name, value in draws.items()}
    group: Any = {"predictions": {name: np.asarray(value) for name, value in by_chain(kept).items()}}
    return arviz.from_dict(**group, **options) if _is_legacy(arviz) else arviz.from_dict(group, **options)


def _is_legacy(arviz: Any) -> bool:
    return bool(arviz.__version__.startswith("0."))


class _Sampler(NamedTuple):
    model: Callable[..., Any]


class ArviZInterface:
    """Lets ``arviz.from_numpyro(engine)`` work unchanged.

    ArviZ 0.x reads an object shaped like :class:`numpyro.infer.MCMC`: ``get_samples(group_by_chain=True)``,
    ``get_extra_fields(group_by_chain=True)``, ``num_chains``, ``num_samples``, ``thinning`` and ``sampler.model``.
    ArviZ 1.x reads one shaped like its ``NumPyroInferenceAdapter``: ``sample_dims``, ``sample_shape``,
    ``get_samples()``, ``get_sample_stats()`` and ``model``. Both read ``_args`` and ``_kwargs``. The draws are
    independent: the first gets them as four chains (two, if four do not divide their number, or one), which its
    summaries ask for, the second along the single dimension ``sample``.

    ``arviz.summary``, ``arviz.loo`` and ``arviz.compare`` of ArviZ 1.x look for the dimensions ``chain`` and ``draw``
    by name: give them :meth:`to_arviz`, which has these in both generations.
    """

    model: Callable[..., Any]
    num_samples: int

    @property
    def num_chains(self) -> int:
        """Groups that the draws, which are independent, are handed over in where chains are asked for."""
        return num_groups(self.num_samples)

    @property
    def thinning(self) -> int:
        """Divisor by which ArviZ 0.x makes ``num_samples`` the draws of one chain, which those of NumPyro are."""
        return self.num_chains

    @property
    @abstractmethod
    def diagnostics(self) -> Diagnostics:
        """End of the last run."""

    @property
    @abstractmethod
    def _args(self) -> tuple[object, ...]: ...

    @property
    @abstractmethod
    def _kwargs(self) -> dict[str, object]: ...

    @abstractmethod
    def get_samples(self, group_by_chain: bool = False, seed: int | None = None) -> dict[str, Array]:
        """Draws of all sites but the observed ones."""

    @abstractmethod
    def get_extra_fields(self, group_by_chain: bool = False) -> dict[str, Array]: ...

    @abstractmethod
    def _finished(self) -> Any: ...

    @property
    def sampler(self) -> _Sampler:
        """Holds the model, where ArviZ 0.x looks for it before it computes log likelihoods."""
        self._warn_of_weights()
        return _Sampler(self.model)

    def _warn_of_weights(self) -> None:
        """Lead from ``arviz.loo`` to :meth:`loo`, once a run, where weights of draws cannot leave observations out."""
        run = self._finished()
        if run.against_weights and not run.has_warned_of_weights:
            run.has_warned_of_weights = True
            warn(
                "arviz.loo weights draws by one over the likelihood of an observation, which fails here for site "
                f"{'; site '.join(run.against_weights)}. Use {type(self).__name__}.loo(), which computes the same "
                "scores from the cavities of the fit."
            )

    @property
    def sample_dims(self) -> list[str]:
        """Names of the leading dimensions of the draws, for ArviZ 1.x."""
        return ["sample"]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Their sizes, for ArviZ 1.x."""
        return (self.num_samples,)

    def to_arviz(self, *, posterior_predictive: Any = None, predictions: Any = None, **options: Any) -> Any:
        """The draws as ArviZ's data with dimensions ``chain`` and ``draw``, log likelihood included.

        Draws are independent. They come in four chains (two of fewer than 16, one of fewer than 8), as summaries of
        ArviZ ask for several; r-hat and effective sizes are those of independent draws, and say nothing of how good the
        approximation is. Up to three draws that fill no chain are left out.

        Averages over bases have no log likelihood: their draws are of the picture, and no coefficients go with them.

        :param posterior_predictive: ``True`` for draws of the observed sites at the arguments of the fit, or draws of
            your own by name.
        :param predictions: what :meth:`predict` gave at new arguments, or draws by name.
        :param options: passed on to ``arviz.from_numpyro``, such as ``pred_dims`` (of predictions), and ``coords`` and
            ``dims``, beside those of the run.
        :raises ValueError: if a log likelihood is asked for that draws of an average do not have.
        :return: an ``InferenceData`` (ArviZ 0.x) or ``DataTree`` (1.x) for ``arviz.loo`` and ``arviz.compare``. The
            attributes of its posterior name the engine, say whether it ``converged`` (0 or 1) and that its
            ``draws_are_independent``, and list the sites that it set to ``points`` and those that ended at ``edges`` of
            their support.
        """
        import arviz

        if posterior_predictive is True:
            posterior_predictive = self._finished().posterior_predictive
        if hasattr(predictions, "get_samples"):
            predictions = predictions.get_samples()
        for group, draws in (("posterior_predictive", posterior_predictive), ("predictions", predictions)):
            if draws:
                options[group] = {name: self._in_chains(np.asarray(value)) for name, value in draws.items()}
        if predictions:
            # Those that ArviZ finds in the model have the lengths of the fit.
            options.setdefault("pred_dims", {})
        options |= self._labels_for_arviz(options.pop("coords", None), options.pop("dims", None))
        reading = getattr(self._finished(), "reading", None)
        missing = [name for name in getattr(reading, "field", ()) if name not in self.get_samples()]
        if missing and options.get("log_likelihood"):
            raise ValueError(
                f"These draws are of an average over bases and have no values of {missing}, without which there is no "
                "log likelihood: leave log_likelihood out."
            )
        options.setdefault("log_likelihood", not missing)
        if options["log_likelihood"]:
            self._warn_of_weights()
        data = arviz.from_numpyro(_Chains(self), **options)
        data["posterior"].attrs |= {
            "inference_engine": type(self).__name__,
            "draws_are_independent": 1,
            "converged": int(self.diagnostics.converged),
            "points": list(self.diagnostics.points),
            "edges": list(self.diagnostics.edges),
        }
        return data

    def _labels_for_arviz(self, coords: Any, dims: Any) -> dict[str, object]:
        """Names of dimensions and places, beside those of the run."""
        run, given = self._finished(), Labels.given(coords, dims)
        labels = run.all_labels.updated(given)
        shapes = {name: value.shape[1:] for name, value in self.get_samples().items()}
        shapes |= {name: np.shape(value) for name, value in run.observed_values.items()}
        named = labels.of_arviz({name: tuple(shape) for name, shape in shapes.items()})
        if not named:
            return {}
        # ArviZ keeps labels of what it has no site for, as of new data.
        return {"coords": {**given.coords, **named["coords"]}, "dims": {**given.dims, **named["dims"]}}

    def _in_chains(self, value: np.ndarray) -> np.ndarray:
        """Draws of a person, one for each of the engine's, in chains; others as they are."""
        if value.shape[:1] != (self.num_samples,):
            return value
        number = _num_kept(self.num_samples)
        return value[:number].reshape(num_groups(number), -1, *value.shape[1:])

    def get_sample_stats(self, **kwargs: Any) -> dict[str, Array]:
        """The extra fields, under the name by which ArviZ 1.x asks for them."""
        return self.get_extra_fields(**kwargs)


class _Chains:
    """An engine as both generations of ArviZ read it, with its independent draws in chains."""

    sample_dims = ["chain", "draw"]
    thinning = 1

    def __init__(self, engine: ArviZInterface) -> None:
        self._engine = engine
        self.model, self.sampler = engine.model, _Sampler(engine.model)
        self._args, self._kwargs = engine._args, engine._kwargs
        self._num_kept = _num_kept(engine.num_samples)
        self.num_chains = num_groups(self._num_kept)
        self.num_samples = self._num_kept // self.num_chains
        self.sample_shape = self.num_chains, self.num_samples
        # ArviZ 1.x does not say that it wants chains.
        self._is_grouped = not _is_legacy(import_module("arviz"))

    def get_samples(self, group_by_chain: bool | None = None) -> dict[str, Array]:
        return self._kept(self._engine.get_samples(), group_by_chain)

    def get_extra_fields(self, group_by_chain: bool | None = None) -> dict[str, Array]:
        return self._kept(self._engine.get_extra_fields(), group_by_chain)

    def get_sample_stats(self) -> dict[str, Array]:
        return self.get_extra_fields()

    def _kept(self, draws: Mapping[str, Array], group_by_chain: bool | None) -> dict[str, Array]:
        kept = {name: value[: self._num_kept] for name, value in draws.items()}
        return by_chain(kept) if (self._is_grouped if group_by_chain is None else group_by_chain) else kept


def elpd_data(name: str, values: np.ndarray, within: np.ndarray, keep: np.ndarray, num_samples: int) -> Any:
    """Result in the type of ``arviz.loo``, from scores that were computed without importance weights.

    There are no Pareto shapes in it, as there was no sampling.

    :param str name: of the observed site.
    :param values: log predictive density of each observation without it, in the shape of the site.
    :param within: the same with it.
    :param keep: false for observations that are masked, which are no data points; same shape.
    :param int num_samples: draws of the engine, which ``arviz.compare`` looks at.
    """
    import arviz
    import xarray

    total, size = float(values[keep].sum()), int(keep.sum())
    error = float(np.sqrt(size * np.var(values[keep])))
    num_parameters = float(within[keep].sum() - total)
    dims = [f"{name}_dim_{axis}" for axis in range(values.ndim)]
    places: dict[str, Any] = {d: np.arange(n) for d, n in zip(dims, values.shape, strict=True)}
    if not keep.all():
        values, in_a_row = values[keep], dims if keep.ndim == 1 else [f"{name}_observation"]
        places = {d: (in_a_row, place) for d, place in zip(dims, np.nonzero(keep), strict=True)}
        dims = in_a_row
    pointwise = xarray.DataArray(values, dims=dims, name="loo_i", coords=places)
    if arviz.__version__.startswith("0."):
        content = {
            "elpd_loo": total,
            "se": error,
            "p_loo": num_parameters,
            "n_samples": num_samples,
            "n_data_points": size,
            "warning": False,
            "loo_i": pointwise,
            "scale": "log",
        }
        return arviz.ELPDData(data=list(content.values()), index=list(content))
    # Later releases have a class for each estimator, earlier ones say which it is.
    kind = getattr(arviz, "ELPDDataLOO", None)
    options = {} if kind is not None else {"kind": "loo"}
    return (kind or arviz.ELPDData)(
        elpd=total,
        se=error,
        p=num_parameters,
        n_samples=num_samples,
        n_data_points=size,
        scale="log",
        warning=False,
        good_k=None,
        elpd_i=pointwise,
        **options,
    )
