"""What ArviZ asks of an inference object, in both of its living generations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from ..results import Diagnostics
from ..running.progress import warn

__all__ = ["ArviZInterface", "prediction_to_arviz"]


def prediction_to_arviz(draws: Mapping[str, Array], **options: Any) -> Any:
    """Draws at new arguments as the group ``predictions`` of ArviZ's data.

    :param draws: with the leading axis running over them.
    :param options: ``coords`` and ``dims``, as for ``arviz.from_dict``.
    """
    import arviz

    group: Any = {"predictions": {name: np.asarray(value)[None] for name, value in draws.items()}}
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
    independent: one chain for the first, the single dimension ``sample`` for the second, and no r-hat for either.

    ``arviz.loo`` and ``arviz.compare`` of ArviZ 1.x look for the dimensions ``chain`` and ``draw`` by name: give them
    :meth:`to_arviz`, which has these in both generations.
    """

    model: Callable[..., Any]
    num_samples: int
    thinning = 1
    num_chains = 1

    @property
    @abstractmethod
    def diagnostics(self) -> Diagnostics:
        """How the last run ended."""

    @property
    @abstractmethod
    def _args(self) -> tuple[Any, ...]: ...

    @property
    @abstractmethod
    def _kwargs(self) -> dict[str, Any]: ...

    @abstractmethod
    def get_samples(self, group_by_chain: bool = False, seed: int | None = None) -> dict[str, Array]: ...

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
        """The draws as ArviZ's data with dimensions ``chain`` (of size one) and ``draw``, log likelihood included.

        Averages over bases have none: their draws are of the picture, and no coefficients go with them.

        :param posterior_predictive: ``True`` for draws of the observed sites at the arguments of the fit, or draws of
            your own by name.
        :param predictions: what :meth:`predict` gave at new arguments, or draws by name.
        :param options: passed on to ``arviz.from_numpyro``, such as ``coords``, ``dims`` and ``pred_dims`` (of
            predictions).
        :raises ValueError: if a log likelihood is asked for that draws of an average do not have.
        :return: an ``InferenceData`` (ArviZ 0.x) or ``DataTree`` (1.x) for ``arviz.loo`` and ``arviz.compare``. The
            attributes of its posterior name the engine, say whether it ``converged`` (0 or 1), and list the sites that
            it set to ``points`` and those that ended at ``edges`` of their support.
        """
        import arviz

        if posterior_predictive is True:
            posterior_predictive = self._finished().posterior_predictive
        if hasattr(predictions, "get_samples"):
            predictions = predictions.get_samples()
        for group, draws in (("posterior_predictive", posterior_predictive), ("predictions", predictions)):
            if draws:
                options[group] = {name: np.asarray(value) for name, value in draws.items()}
        if predictions:
            # Those that ArviZ finds in the model have the lengths of the fit.
            options.setdefault("pred_dims", {})
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
        data = arviz.from_numpyro(_WithoutWarning(self) if _is_legacy(arviz) else _OneChain(self), **options)
        data["posterior"].attrs |= {
            "inference_engine": type(self).__name__,
            "converged": int(self.diagnostics.converged),
            "points": list(self.diagnostics.points),
            "edges": list(self.diagnostics.edges),
        }
        return data

    def get_sample_stats(self, **kwargs: Any) -> dict[str, Array]:
        """The extra fields, under the name by which ArviZ 1.x asks for them."""
        return self.get_extra_fields(**kwargs)


class _WithoutWarning:
    """What ArviZ 0.x reads of an engine."""

    def __init__(self, engine: ArviZInterface) -> None:
        self._engine = engine
        self.sampler = _Sampler(engine.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _OneChain:
    """The interface that ArviZ 1.x reads, with a chain dimension of size one in front."""

    sample_dims = ["chain", "draw"]

    def __init__(self, engine: ArviZInterface) -> None:
        self._engine = engine
        self.model = engine.model
        self.sample_shape = (engine.num_chains, engine.num_samples)
        self._args, self._kwargs = engine._args, engine._kwargs

    def get_samples(self) -> dict[str, Array]:
        return self._engine.get_samples(group_by_chain=True)

    def get_sample_stats(self) -> dict[str, Array]:
        return self._engine.get_extra_fields(group_by_chain=True)
