"""A NumPyro model of the hyperparameters alone, and the field given their draws."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.primitives import Messenger

from ....structure import LatentGaussianReading, ModelStructureError
from ....structure.model.running.execution import ModelCall, check_key
from ....structure.model.running.inspection import model_key
from ....structure.model.running.messages import Message
from ....structure.model.search import read_first
from ...front.answers.draws import with_predictive
from ...front.options import default_tolerance
from ...front.running.progress import warn
from ...hyper.space import UnconstrainedSpace
from ..algorithms.algorithm import Algorithm
from ..algorithms.nodes.quadrature import Quadrature
from ..algorithms.nodes.quadrature_error import WORTH_A_WORD, quadrature_error
from ..algorithms.nodes.shared_columns import SharedColumns
from ..engine import Engine
from ..runs.run import GaussianRun
from .evidence import EvidencePrograms, FieldDraws, evidence_programs
from .exact import exactly

_FACTOR = "log_evidence_of_field"
_KEPT = 4
"""Sets of arguments whose readings are kept."""


class _Prepared(NamedTuple):
    """A model read on its arguments."""

    reading: LatentGaussianReading
    algorithm: Algorithm
    """Algorithm of the programs: an exact one where all factors are Gaussian."""
    programs: EvidencePrograms
    start: Any
    """State of the algorithm where every fit begins."""
    fixed: dict[str, Array]
    """Hyperparameters that are given and not sampled."""
    sampled: tuple[str, ...]
    hidden: frozenset[str]
    """Sites that the field's evidence stands for, or that depend on the field."""
    held: dict[str, Any]
    """Values that hidden sites have while the model runs; nothing that is seen depends on them."""
    notes: tuple[str, ...]


class MarginalModel:
    """A NumPyro model over the hyperparameters of another one, whose Gaussian field an engine integrates out.

    Made by :func:`~numpyro_ext.infer.marginalize`, and called like the model itself.

    :param Engine engine: on the model; it is not run.
    :param GaussianRun run: a run of it, whose reading and algorithm serve at its arguments.
    """

    def __init__(self, engine: Engine, run: GaussianRun | None = None) -> None:
        self.engine = engine
        self._kept: dict[Hashable, _Prepared] = {}
        self._last: _Prepared | None = None
        if run is not None:
            self._last = self._prepared_of(run.reading, run.algorithm)
            self._kept[self._key(run.reading.args, run.reading.kwargs)] = self._last

    @property
    def __name__(self) -> str:
        return f"{getattr(self.engine.model, '__name__', type(self.engine.model).__name__)}_marginal"

    def __repr__(self) -> str:
        of = f"{type(self).__name__}({getattr(self.engine.model, '__name__', self.engine.model)!s}"
        of = f"{of}, engine={type(self.engine).__name__})"
        if self._last is None:
            return f"{of}: not read yet"
        return f"{of}: samples {', '.join(self._last.sampled)}; integrates out {', '.join(self._last.reading.field)}"

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Sample the hyperparameters as the model does, and add the log evidence of everything else given them.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the engine does not take the model, or it has nothing to sample.
        """
        prepared = self._prepare(args, kwargs)
        with (
            handlers.block(hide_fn=lambda msg: msg.get("name") in prepared.hidden),
            _WithoutPrior(prepared.reading.factor_names),
            handlers.trace() as trace,
            handlers.substitute(data={**prepared.held, **prepared.fixed}),
        ):
            self.engine.model(*args, **kwargs)
        hyper = {name: trace[name]["value"] for name in prepared.sampled} | prepared.fixed
        evidence = prepared.programs.log_evidence(prepared.reading.data, prepared.start)
        numpyro.factor(_FACTOR, evidence(_as_numbers(prepared.reading, hyper)))

    def describe(self, *args: object, **kwargs: object) -> str:
        """Describe the sites that are sampled, those that are integrated out, and the reading of the model.

        :param args: arguments of the model; without any, those of the last call.
        :param kwargs: keyword arguments of the model.
        """
        prepared = self._prepared(args, kwargs)
        reading = prepared.reading
        lines = [
            f"sampled: {', '.join(prepared.sampled)}",
            f"integrated out by {type(self.engine).__name__}: {', '.join(reading.field)}",
        ]
        lines += [f"given: {name} = {np.asarray(value)}" for name, value in prepared.fixed.items()]
        return "\n".join([*lines, reading.describe(), *prepared.notes])

    def recover(
        self, rng_key: Array, samples: Mapping[str, ArrayLike], *args: object, **kwargs: object
    ) -> dict[str, Array]:
        """One draw of the field and of all deterministic sites given each draw of the hyperparameters.

        The field is fitted at each of the draws, and what did not converge there is warned of. Draws at which the model
        has density zero are drawn again; missing values are drawn by the model, given all else.

        :param rng_key: random number generator key.
        :param samples: draws of the hyperparameters, with the leading axis running over them, as
            ``mcmc.get_samples()`` or ``guide.sample_posterior(...)`` return them.
        :param args: arguments of the model; without any, those with which it was called last.
        :param kwargs: keyword arguments of the model.
        :return: draws of all latent and deterministic sites, for ``Predictive(model, draws)`` or
            ``az.from_dict({"posterior": ...})``. Cost: one fit of the field for each draw.
        :raises ValueError: if hyperparameters are missing among the samples, or have other shapes.
        """
        check_key(rng_key, "recover(jax.random.key(0), mcmc.get_samples())", "comes first")
        prepared = self._prepared(args, kwargs)
        reading, fixed = prepared.reading, prepared.fixed
        num_draws, hyper = _as_draws(reading, samples, prepared.sampled)
        hyper |= {n: jnp.broadcast_to(value, (num_draws, *jnp.shape(value))) for n, value in fixed.items()}
        keys = jax.random.split(rng_key, num_draws)
        numbers = _as_numbers(reading, hyper)
        found = prepared.programs.draws(reading.data, prepared.start, numbers, keys)
        self._judge(found)
        self._judge_nodes(prepared, {name: value[-1] for name, value in numbers.items()})
        draws = {name: jnp.asarray(value) for name, value in samples.items()} | found.sites | hyper
        return with_predictive(reading, draws, rng_key)

    def _judge(self, found: FieldDraws) -> None:
        """Warn of draws that rest on a fit that is none."""
        name, size = type(self.engine).__name__, found.converged.size
        refused = ~np.isfinite(np.asarray(found.log_evidence))
        unfinished, outside = ~np.asarray(found.converged) & ~refused, ~np.asarray(found.is_inside) & ~refused
        if refused.any():
            warn(
                f"At {refused.sum()} of {size} draws of the hyperparameters {name} finds no finite evidence: the field "
                "drawn there is not to be used. The density of the marginal model is zero there, so a Markov chain "
                "does not come to them; draws of a guide may."
            )
        if unfinished.any():
            warn(
                f"At {unfinished.sum()} of {size} draws of the hyperparameters the field did not converge in "
                f"{self.engine.num_steps} steps of {name}, so that the log evidence that led to them is not exact, "
                "either. Give more steps (num_steps), or tighter priors."
            )
        if outside.any():
            warn(
                f"{outside.sum()} of {size} draws of the field lie where the model has density zero: the Gaussian "
                "approximation hardly overlaps the support."
            )

    def _judge_nodes(self, prepared: _Prepared, hyper: dict[str, Array]) -> None:
        """Warn of sums over nodes that are not exact, at one draw."""
        reading, algorithm = prepared.reading, prepared.algorithm
        if not isinstance(algorithm, Quadrature | SharedColumns):
            return
        state = prepared.programs.start(reading.data, hyper)
        error, rounding, num_nodes = quadrature_error(reading, algorithm, hyper, state)
        if not error <= max(WORTH_A_WORD, rounding):
            warn(
                f"The quadrature is not exact: with a finer rule than {num_nodes} nodes an axis the log evidence at "
                f"the last draw changes by {error:.2g}. Give more nodes (num_nodes), and draw the hyperparameters anew."
            )

    # Reading

    def _prepared(self, args: tuple[object, ...], kwargs: dict[str, object]) -> _Prepared:
        if args or kwargs or self._last is None:
            return self._prepare(args, kwargs)
        return self._last

    def _prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> _Prepared:
        """Read the model on these arguments, unless it has been read as it is on them now."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            raise ModelStructureError(
                f"{self!r} reads the model from the values of its arguments, and was called within a jit, grad or vmap "
                "of which they are arguments. Let the function that is compiled close over the data (MCMC does so with "
                "jit_model_args=False, SVI by svi.run)."
            )

        # Nothing of this is a part of the program, or of the model, in which the marginal model is called.
        with jax.core.eval_context(), handlers.block(), handlers.seed(rng_seed=0):
            try:
                key = self._key(args, kwargs)
            except Exception:  # for which reading has words
                self._last = self._read(args, kwargs)
            else:
                self._last = self._kept.pop(key, None) or self._read(args, kwargs)
                self._kept[key] = self._last  # behind all others
                while len(self._kept) > _KEPT:
                    del self._kept[next(iter(self._kept))]
        return self._last

    def _key(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Hashable:
        return model_key(ModelCall(self.engine.model, args, dict(kwargs), jax.random.key(0)))

    def _read(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> _Prepared:
        engine = self.engine
        reading = read_first(
            # What an engine may take into its field besides is left to the sampler.
            [form.without_joining() for form in engine._forms],
            engine.model,
            args,
            kwargs,
            field=engine.field,
            init_values=engine._start_values,
            held=engine.hyper_values,
            learns_hyper=False,
        )
        if not isinstance(reading, LatentGaussianReading):
            raise ModelStructureError(
                f"a marginal model needs a Gaussian field, and {type(engine).__name__} reads this model as sparse "
                f"coefficients {list(reading.field)}: it learns their hyperparameters by itself "
                f"({type(engine).__name__}(model).run(...)), and NUTS samples all of them."
            )
        reading = engine._with_kinds(reading)
        return self._prepared_of(reading, engine.bound_algorithm(reading))

    def _prepared_of(self, reading: LatentGaussianReading, algorithm: Algorithm) -> _Prepared:
        engine = self.engine
        # Nothing is searched for: whoever samples the model moves with its supports.
        space = UnconstrainedSpace(reading.hyper, engine.hyper_values, is_searched=False)
        fixed = space.fixed
        sampled = tuple(name for name in reading.hyper if name not in fixed)
        if not sampled:
            raise ModelStructureError(
                f"there is nothing to sample: given the data, all latent sites are in the field {list(reading.field)}"
                f"{f' or given in hyper_values {sorted(fixed)}' if fixed else ''}. "
                f"{type(engine).__name__}(model).run(rng_key, ...) has their posterior without a chain."
            )
        hidden = {*reading.behind_field, *fixed}
        hidden |= {name for name, site in reading.sites.items() if site.kind == "observed"}
        # The tolerance of a fit is for its moments; errors of the evidence are of its square.
        tol = default_tolerance(engine.tol, 1e-6, 1e-4)
        programs = evidence_programs(reading, algorithm, num_steps=engine.num_steps, tol=tol)
        begin = space.unpack(space.initial(engine.init_values))
        return _Prepared(
            reading=reading,
            algorithm=exactly(algorithm, reading.abstract_form),
            programs=programs,
            start=programs.start(reading.data, _as_numbers(reading, begin)),
            fixed=fixed,
            sampled=sampled,
            hidden=frozenset(hidden),
            held={name: reading.sites[name].init for name in (*reading.field, *reading.predictive)},
            notes=algorithm.notes,
        )


class _WithoutPrior(Messenger):
    """Sample sites whose prior depends on the field without it: the evidence has it among its factors."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and not msg["is_observed"] and msg["name"] in self.names:
            msg["fn"] = msg["fn"].mask(False)


def _as_numbers(reading: LatentGaussianReading, hyper: Mapping[str, object]) -> dict[str, Array]:
    """In the order and the dtype of the reading, so that one trace serves all."""
    return {name: jnp.asarray(hyper[name], jnp.result_type(float)) for name in reading.hyper}


def _as_draws(
    reading: LatentGaussianReading, samples: Mapping[str, ArrayLike], names: tuple[str, ...]
) -> tuple[int, dict[str, Array]]:
    missing = [name for name in names if name not in samples]
    if missing:
        raise ValueError(
            f"samples lack the hyperparameters {missing}; give what mcmc.get_samples() returns for this model, "
            f"with draws of {list(names)}."
        )
    hyper = {name: jnp.asarray(samples[name]) for name in names}
    num_draws = np.shape(hyper[names[0]])[0] if np.ndim(hyper[names[0]]) else 0
    for name, value in hyper.items():
        expected = (num_draws, *reading.hyper[name].shape)
        if value.shape != expected or num_draws == 0:
            raise ValueError(
                f"samples of {name!r} have the shape {value.shape}, where draws come first and each has the shape "
                f"{tuple(reading.hyper[name].shape)} of the site. Take get_samples() without group_by_chain."
            )
    return num_draws, hyper
