"""Facts about sites from one run of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from ....compilation.content import array_key
from ...errors import ModelStructureError
from ...program.program import make_program
from ...program.run_compiled import run_compiled
from ..priors import innovation_shape, is_unweighted, mask_of, unwrap
from .control_flow import Watch
from .execution import ModelCall, check_call, execution_error, tracing_error
from .messages import Message
from .plain_sites import PlainSites, to_real
from .recording import message_without_arrays
from .start_values import initial_value


class SiteInfo(NamedTuple):
    """Facts about a site from one concrete run of the model."""

    name: str
    kind: str
    """``latent``, ``param``, ``observed`` (``numpyro.factor`` included), ``deterministic`` or ``plate``."""
    shape: tuple[int, ...]
    family: str = ""
    """Name of the distribution."""
    is_candidate: bool = False
    """True if it may join the field: of a family that the reading takes (Gaussian or flat), and not masked."""
    is_improper: bool = False
    """True if its density has no integral."""
    is_discrete: bool = False
    is_masked: bool = False
    transform: Any = None
    """Transform from unconstrained values, for latent and param sites."""
    init: Any = None
    """A central value of the prior, or the initial value of a ``param``."""
    plates: tuple[tuple[str, int], ...] = ()
    dims: tuple[tuple[str, int], ...] = ()
    """Names and sizes of its axes, as far as they have names: its plates in the order of the axes, and behind them the
    ``event_dims`` of ``infer``."""
    value: Any = None
    """The observed value."""
    support: Any = None
    """Support of an observed site whose distribution is one of numbers, or of vectors of counts."""
    ends: Any = None
    """Observations at an end of their support where their density is zero or infinite, boolean; ``None`` of
    distributions that have no such ends."""
    needs_integers: bool = False
    """True for an observed site whose distribution looks categories up by integers, and whose values are floats."""
    mask: Any = None
    batch_shape: tuple[int, ...] = ()
    """Batch shape that the mask of an observed site covers."""
    full_shape: tuple[int, ...] = ()
    """Shape of the distribution of an observed site."""
    num_unknowns: int = 0
    """Number of innovations of a latent site, should it join the field."""
    prior: Any = None
    """The distribution of a latent site, until its candidates are marked."""

    @property
    def has_joint_coordinates(self) -> bool:
        """True if an observation is a vector whose coordinates depend on each other, which whitening takes apart."""
        return self.family in (dist.MultivariateNormal.__name__, dist.LowRankMultivariateNormal.__name__)


def inspect_sites(call: ModelCall, init_values: Mapping[str, object]) -> dict[str, SiteInfo]:
    """Run the model once, with cheap central values for its latent sites, and describe its sites.

    The run is compiled as a whole, which costs less than compiling its operations one by one; a model that only runs
    with concrete values is run without. None of the sites is a candidate for a field yet: see :func:`mark_candidates`.

    :param init_values: values of latent and param sites to be used in place of central ones (constrained).
    :raises ModelStructureError: for models that fail on their arguments, subsampled plates, scaled latent sites and
        sites inside a scan.
    """
    check_call(call)
    values = {name: _given_value(name, value) for name, value in init_values.items()}
    if call.recording is not None:
        try:
            return _inspect_all(call.recording.at_central_values(values))
        except (TypeError, ValueError) as error:
            if isinstance(error, ModelStructureError):
                raise
    watch = Watch(PlainSites(call.model))
    static: dict[str, dict[str, Any]] = {}

    def run(key: Array, values: dict[str, Any]) -> dict[str, Any]:
        arrays = {}
        central = handlers.substitute(watch, substitute_fn=partial(initial_value, values))
        for name, site in handlers.trace(handlers.seed(central, key)).get_trace(*call.args, **call.kwargs).items():
            static[name] = message_without_arrays(site)
            if site["type"] in ("sample", "param", "deterministic"):
                arrays[name] = {"fn": None, "value": site["value"], "scale": None}
            if site["type"] == "sample":
                # JAX would compare what a distribution keeps beside its arrays, such as a sparse matrix
                leaves, static[name]["structure"] = jax.tree.flatten(site["fn"])
                arrays[name] |= {"fn": leaves, "scale": site["scale"]}
        return arrays

    try:
        try:
            arrays = run_compiled(run, call.rng_key, values)
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.UnexpectedTracerError,  # of a function under jit that has been traced with the model before
            TypeError,
        ):
            arrays = run(call.rng_key, values)
            _check_concrete(arrays)
    except ModelStructureError:
        raise
    # NumPyro asserts that plates are not empty.
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
            raise tracing_error(error, call) from error
        raise execution_error(error, watch.last_site, call) from error
    return _inspect_all({n: {**site, **arrays.get(n, {})} for n, site in static.items()})


def _inspect_all(sites: Mapping[str, dict[str, object]]) -> dict[str, SiteInfo]:
    kinds = ("sample", "param", "deterministic", "plate")
    return {n: _inspect(n, site) for n, site in sites.items() if site["type"] in kinds}


def _given_value(name: str, value: object) -> Array:
    try:
        return jnp.asarray(to_real(jnp.asarray(value)))
    except (TypeError, ValueError) as error:
        raise ModelStructureError(
            f"the value given for site '{name}' is a {type(value).__name__}, which is no array of numbers.", site=name
        ) from error


def model_key(call: ModelCall) -> tuple[Any, ...]:
    """Key of the model as it is now: equal where it runs the same operations on the same numbers, wherever it has these
    from.

    :raises Exception: what JAX raises for a model that needs concrete values.
    """
    central = handlers.substitute(PlainSites(call.model), substitute_fn=partial(initial_value, {}))
    names: list[tuple[str, ...]] = []

    def run(key: Array) -> list[Any]:
        found = []
        for name, site in handlers.trace(handlers.seed(central, key)).get_trace(*call.args, **call.kwargs).items():
            fn = site["fn"] if site["type"] == "sample" else None
            names.append((name, site["type"], type(fn).__name__, type(fn and unwrap(fn)).__name__))
            if site["type"] in ("sample", "param", "deterministic"):
                found.append((site["value"], jax.tree.leaves(fn), site.get("scale")))
        return found

    program, _ = make_program(run, call.rng_key, keep_literals=True)
    return program.fingerprint(), tuple(map(array_key, program.data)), tuple(names)


def _check_concrete(arrays: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse sites whose values were left behind in a function that JAX has traced."""
    for name, site in arrays.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((site["fn"], site["value"]))):
            raise ModelStructureError(
                f"site '{name}' is inside a function that JAX transforms (jax.lax.scan, cond, vmap, jit), where "
                "NumPyro does not see its value. Take numpyro.plate or scan of numpyro.contrib.control_flow for it, or "
                "sample all its elements outside, as one site.",
                site=name,
            )


def mark_candidates(sites: Mapping[str, SiteInfo], is_candidate: Callable[[object], bool]) -> dict[str, SiteInfo]:
    """The sites, with those latent ones marked that may join the field of a form: of a family that it takes, and not
    masked (or wholly, as imputation does: then they are flat).

    :param is_candidate: which distributions the form takes.
    """
    # A prior may hold a large covariance: a reading keeps its sites, so it is let go.
    return {
        name: site._replace(
            is_candidate=site.kind == "latent"
            and (not site.is_masked or is_unweighted(site.prior))
            and is_candidate(site.prior),
            prior=None,
        )
        for name, site in sites.items()
    }


def _inspect(name: str, site: Message) -> SiteInfo:
    value = site.get("value")
    shape = () if value is None else np.shape(value)
    info = SiteInfo(name, site["type"], shape, dims=_dims(site, shape))
    if site["type"] == "plate":
        size, subsample = site["args"]
        if subsample is not None and subsample != size:
            raise ModelStructureError(
                f"plate '{name}' draws a random subsample of {subsample} out of {size}: this engine needs all the data "
                "at once. Call the model with subsample_size=None, or use SVI for minibatches."
            )
    if site["type"] == "param":
        constraint = site["kwargs"].get("constraint", dist.constraints.real)
        _check_constraint(name, constraint)
        return info._replace(family="param", transform=biject_to(constraint), init=to_real(value))
    if site["type"] != "sample":
        return info
    fn = jax.tree.unflatten(site["structure"], site["fn"])
    base, mask = unwrap(fn), mask_of(fn)
    _check_arrays(name, base)
    plates = tuple((frame.name, frame.size) for frame in site["cond_indep_stack"])
    is_improper = isinstance(base, dist.ImproperUniform) or not getattr(base, "is_proper", True)
    info = info._replace(family=type(base).__name__, is_improper=is_improper, plates=plates, mask=mask)
    if site["is_observed"]:
        _check_order(name, base)
        shape = fn.batch_shape + fn.event_shape
        return info._replace(
            kind="observed",
            value=value,
            support=_support(base),
            ends=_at_ends(base, value),
            needs_integers=_needs_integers(base, value),
            full_shape=shape,
            batch_shape=shape[: len(shape) - base.event_dim],
        )
    if site["scale"] is not None and not bool(np.all(np.asarray(site["scale"]) == 1.0)):
        raise ModelStructureError(
            f"latent site '{name}' is inside a scale of {np.ravel(site['scale'])[0]:g}: only observed sites may be "
            "scaled. Move the sample statement out of the handler.",
            site=name,
        )
    is_masked = not (mask is True or bool(np.all(mask)))
    is_discrete = bool(fn.support.is_discrete)
    return info._replace(
        kind="latent",
        prior=fn,
        is_discrete=is_discrete,
        is_masked=is_masked,
        transform=None if is_discrete else biject_to(fn.support),
        init=value,
        num_unknowns=math.prod(innovation_shape(fn)),
    )


def _dims(site: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the axes of a site, where these are those of its plates and ``event_dims``."""
    plates = sorted(site.get("cond_indep_stack", ()), key=lambda frame: frame.dim)
    events = site.get("event_dims", ())
    named = [(frame.name, frame.size) for frame in plates]
    sizes, rest = tuple(size for _, size in named), shape[len(named) :]
    if sizes != shape[: len(named)] or len(events) > len(rest):
        return ()
    return (*named, *zip(events, rest, strict=False))


def _check_constraint(name: str, constraint: object) -> None:
    """Refuse bounds of a ``param`` that are not numbers, of which its transform would be made once."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(constraint)):
        raise ModelStructureError(
            f"the constraint of param site '{name}' is computed in the model. Of data, compute it with NumPy; of "
            f"another site, take a param on a fixed support and move it there, as {name} = upper * share with share in "
            "constraints.unit_interval.",
            site=name,
        )


def _support(base: dist.Distribution) -> Any:
    """Support of observations (numbers, vectors of counts), where each can be held against it and bounds are known."""
    support: Any = getattr(base, "support", None)
    is_known = not any(isinstance(bound, jax.core.Tracer) for bound in getattr(support, "__dict__", {}).values())
    return support if is_known and (base.event_dim == 0 or (base.event_dim == 1 and support.is_discrete)) else None


def _at_ends(base: dist.Distribution, value: Any) -> np.ndarray | None:
    """Zeros and ones of a distribution on the closed unit interval whose density vanishes there, or has no bound, as it
    does but where a concentration is one."""
    numbers: Any = base
    if getattr(base, "support", None) is not dist.constraints.unit_interval or not hasattr(base, "concentration1"):
        return None
    low, high = numbers.concentration1 != 1.0, numbers.concentration0 != 1.0
    return np.asarray(((value == 0.0) & low) | ((value == 1.0) & high))


def _needs_integers(base: dist.Distribution, value: object) -> bool:
    """Tell whether a distribution has a density of these values as integers, and fails on them as floats."""
    value = np.asarray(value)
    if value.dtype.kind != "f" or not getattr(base.support, "is_discrete", False):
        return False
    try:
        jax.eval_shape(base.log_prob, jax.ShapeDtypeStruct(value.shape, jnp.result_type(int)))
    except Exception:  # of another shape, perhaps, of which others speak
        return False
    try:
        jax.eval_shape(base.log_prob, jax.ShapeDtypeStruct(value.shape, jnp.result_type(float)))
    except TypeError:
        return True
    return False


def _check_arrays(name: str, base: dist.Distribution) -> None:
    """Refuse lists for parameters, which NumPyro keeps as they are until it computes with them."""
    for parameter in base.arg_constraints:
        value = vars(base).get(parameter)  # others, such as the precision to a covariance, are computed when asked for
        if isinstance(value, list | tuple) and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(value)):
            raise ModelStructureError(
                f"site '{name}': the {parameter} of {type(base).__name__} is a {type(value).__name__}, with which "
                f"NumPyro does not compute. Make it an array: {parameter}=jnp.array([...]).",
                site=name,
            )


def _check_order(name: str, base: dist.Distribution) -> None:
    """Refuse thresholds that do not increase: the probabilities of the categories would not add up to one."""
    for parameter, constraint in base.arg_constraints.items():
        if constraint is not dist.constraints.ordered_vector:
            continue
        value = np.asarray(getattr(base, parameter))
        if np.any(np.diff(value, axis=-1) <= 0.0):
            raise ModelStructureError(
                f"site '{name}': the {parameter} of {type(base).__name__} must increase strictly, and here they are "
                f"{value}. Sort given ones and merge categories between equal ones; for unknown ones take a prior that "
                "orders them (dist.TransformedDistribution(prior, dist.transforms.OrderedTransform())).",
                site=name,
            )
