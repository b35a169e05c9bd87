"""A model as a program of innovations in place of its field, and of hyperparameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.content import Structure, shapes_of
from ...display import Shown
from ..errors import Conflict, ModelStructureError
from ..program.equations import Atom, Constant
from ..program.program import Program
from ..program.questions import Questions
from .hyper_site import HyperSite
from .running.changing import check_supports, needs_value, other_values
from .running.execution import ModelCall, bound_arguments, tracing_error
from .running.inspection import SiteInfo
from .running.recording import make_or_derive
from .tracing import ModelTrace, is_used, trace_with_innovations, unused_sites
from .validation import check_indices

_NOTHING_LOOKED_UP = "cae66941d9efbd404e4d88758ea67670"
"""Digest of no arrays, which keys of states hold since they were written to files."""


@dataclass(frozen=True)
class _LeftOut:
    """Sites that nothing depends on: any values serve, so that structures with other ones are equal."""

    values: dict[str, Any] = dataclass_field(compare=False)


class TracedModel(Shown):
    """A model traced with innovations in place of its field, and what its program says at given values.

    What is made of it is the business of :class:`~numpyro_ext.structure.model.reading.ModelReading`, which has the
    documentation of both.
    """

    opens_scans: ClassVar[bool] = False
    """True if scans over unknowns are taken apart, for forms that know recurrences."""
    common_sites: tuple[str, ...] = ()
    """Sites of :attr:`hyper` that are Gaussian unknowns of the form nevertheless."""

    def __init__(
        self, call: ModelCall, sites: Mapping[str, SiteInfo], field: Iterable[str], prior: Callable[[object], object]
    ):
        self.model: Any = call.model
        self.args, self.kwargs = call.args, call.kwargs
        self.sites = dict(sites)
        self.field = tuple(n for n in sites if n in field)
        self._prior = prior
        free, sizes = self._free_sites(), {n: sites[n].num_unknowns for n in self.field}
        self.changing = call.changing_values()
        program, self._trace, arguments = self._traced(call)
        self._trace = self._trace.in_order(sites)
        for name, atom in self._trace.values.items():
            if not isinstance(atom, Atom):
                raise ModelStructureError(
                    f"deterministic site '{name}' is a {type(atom).__name__}, and draws of a site are one array: make "
                    "a site of each of its arrays, or stack them.",
                    site=name,
                )
        inputs, self._given, changing = jax.tree.unflatten(jax.tree.structure(arguments), program.inputs)
        given = arguments[1]
        if self.changing:
            leaves = jax.tree.leaves(changing), jax.tree.leaves(self.changing)
            program = program.with_inputs_as_data(*leaves, may_change=True)
            check_supports(call, sites, list(given))
        self._field = {n: (inputs[n], sizes[n]) for n in self.field}
        ends = dict(zip(self.field, np.cumsum(list(sizes.values())).tolist(), strict=True))
        self._columns = {n: slice(end - sizes[n], end) for n, end in ends.items()}
        self._questions = Questions(program, program.data)
        self.data: Sequence[Any] = self._questions.data
        self.predictive = unused_sites(self._program, self._trace, self._given, free)
        self._left_out = _LeftOut({n: sites[n].init for n in self.predictive})
        for name in self.field:
            has_no_prior_block = sites[name].is_masked or name in self._trace.factors
            if has_no_prior_block and not is_used(self._program, self._trace, name, [inputs[name]]):
                raise Conflict(f"nothing depends on site '{name}' but its own density.", frozenset([name]), name)
        self.hyper = {
            s.name: HyperSite(
                s.shape, s.transform, s.kind == "param", s.init, *self._sites_behind_bounds(s.name), s.family
            )
            for s in free
            if s.name not in self.predictive
        }
        values = {n: a for n, a in self._trace.values.items() if n not in self.predictive}
        self.site_shapes = {n: self._program.shape(a) for n, a in values.items()}
        self.site_shapes |= {n: h.shape for n, h in self.hyper.items() if h.is_param}
        self.num_columns = sum(sizes.values())
        unknowns = {n: jax.tree.leaves(self._given[n])[0] for n in self.hyper} | {n: inputs[n] for n in self.field}
        self._indexed = unknowns | values
        self._check_indices(self._questions, {})

    @property
    def _program(self) -> Program:
        """The program without its data, and with what is carried beside these."""
        return self._questions.program

    def _free_sites(self) -> list[SiteInfo]:
        return [s for s in self.sites.values() if s.kind in ("latent", "param") and s.name not in self.field]

    def _traced(self, call: ModelCall) -> tuple[Program, ModelTrace, tuple[dict[str, Any], ...]]:
        """The program of a call, what it says of the sites, and the arguments that it is a program of."""
        dtype = jnp.result_type(float)
        innovations = {n: np.zeros((self.sites[n].num_unknowns,), dtype) for n in self.field}
        given = {s.name: s.init for s in self._free_sites()}
        arguments = innovations, given, self.changing
        function = trace_with_innovations(call, self.field, self._prior)
        num_unknowns = len(innovations) if self.opens_scans else 0
        try:
            key = "innovations", self.field, self._prior
            return *make_or_derive(call.recording, key, function, *arguments, num_unknowns=num_unknowns), arguments
        except ModelStructureError:
            raise
        except Exception as error:
            # The model has run on its values before.
            if self.changing:
                raise needs_value(call, error, lambda values: function(innovations, given, values)) from error
            if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
                raise tracing_error(error, call) from error
            raise

    def on_data_of(self, call: ModelCall, sites: Mapping[str, SiteInfo]) -> Self | None:
        """This reading with the data of another call of a model that does the same; ``None`` where something that was
        looked up in the data when it was read is another.

        :param call: whose recording has the key of that which was read.
        :param sites: of that call.
        """
        out = self._copy()
        out.model, out.args, out.kwargs, out.sites = call.model, call.args, call.kwargs, dict(sites)
        program, _, _ = out._traced(call)
        if program.fingerprint() != self._program.fingerprint():
            return None
        out._questions = Questions(program, program.data)
        if not self._questions.are_answered_alike(out._questions):
            return None
        out.data, out._left_out = out._questions.data, _LeftOut({n: sites[n].init for n in out.predictive})
        out.hyper = {n: h._replace(init=sites[n].init, transform=sites[n].transform) for n, h in self.hyper.items()}
        if any(site.key != self.hyper[n].key for n, site in out.hyper.items()):
            return None
        out._check_indices(out._questions, {})
        return out

    def _check_indices(self, questions: Questions, changed: Mapping[str, object]) -> None:
        """Refuse indices that are out of range or negative, as far as they are known."""
        arguments, _ = bound_arguments(self.model, self.args, self.kwargs)
        check_indices(questions, self._indexed, {**arguments, **changed})

    def with_changing(self, arrays: Mapping[str, object]) -> tuple[Any, ...]:
        """:attr:`data` with other values of the arguments that change.

        :param arrays: by name, of the shapes of :attr:`changing`; what is left out stays as it is.
        :raises ValueError: for other names and shapes, naming the argument.
        :raises ModelStructureError: for indices that are out of range or negative, where they are known.
        """
        leaves = other_values(self.changing, arrays)
        data = (*leaves, *self.data[len(leaves) :])
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            self._check_indices(self._asking(data), arrays)
        return data

    def _is_known(self, atom: Atom) -> bool:
        """True if a value of the program depends on nothing but data."""
        return not self._program.ancestors([atom]) & set(self._program.inputs)

    def _known_value(self, atom: Atom) -> np.ndarray:
        """A value of the program that depends on nothing but data."""
        return np.asarray(self._asking(self.data).decide(atom))

    def _asking(self, data: Sequence[object]) -> Questions:
        """Questions about all data, those that may change too."""
        return Questions(self._program, known=dict(zip(self._program.constants, data, strict=False)))

    def _hyper_behind(self, atoms: Sequence[Atom]) -> list[str]:
        """Names of the hyperparameters on which values of the program depend."""
        found = self._program.ancestors(atoms)
        return [n for n in self.hyper if found & set(jax.tree.leaves(self._given[n]))]

    def _sites_behind_bounds(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Sites that move the bounds of a support wherever others are, and where others stay where they start: a bound
        of zero times a scale is computed from it, and stays."""
        bounds = self._trace.bounds.get(name, [])
        found = self._program.ancestors(bounds)
        inputs = self._given | {n: atom for n, (atom, _) in self._field.items()}
        behind = [n for n in self.sites if n in inputs and found & set(jax.tree.leaves(inputs[n]))]
        known = dict(zip(self._program.constants, self.data, strict=False))

        def bounds_at(moves: Mapping[str, float]) -> list[np.ndarray]:
            env = dict(known)
            for site, move in moves.items():
                env |= zip(jax.tree.leaves(inputs[site]), self._moved(site, move), strict=True)
            return [np.asarray(bound) for bound in self._program.evaluate(bounds, env)]

        def is_moved_by(site: str, elsewhere: Mapping[str, float]) -> bool:
            before = bounds_at(elsewhere)
            # Several, as a bound may be the larger of a number and a site.
            after = [bounds_at({**elsewhere, site: move}) for move in (-3.1, 0.9, 4.3)]
            return not all(
                np.allclose(x, y, rtol=1e-6, atol=0.0, equal_nan=True)
                for bound in after
                for x, y in zip(before, bound, strict=True)
            )

        anywhere = {n: 0.3 + 0.1 * number for number, n in enumerate(behind)}
        moving = tuple(n for n in behind if is_moved_by(n, anywhere))
        return moving, tuple(n for n in moving if is_moved_by(n, dict.fromkeys(behind, 0.0)))

    def _moved(self, name: str, move: float) -> list[Any]:
        """Leaves of a site, or of its innovation, at so much from where it starts, unconstrained."""
        if name in self._field:
            number, _ = self._field[name]
            return [jnp.full(self._program.shape(number), move, jnp.result_type(float))]
        site = self.sites[name]
        if site.transform is None or not hasattr(site.init, "shape"):
            return [leaf + move for leaf in jax.tree.leaves(site.init)]
        start = jnp.asarray(site.init, jnp.result_type(float))
        return [site.transform(site.transform.inv(start) + move)]

    def _evaluated(self, tree: object, env: Mapping[int, object]) -> Any:
        """A tree of atoms, such as the prior of a site, with their values."""
        atoms, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, self._program.evaluate(atoms, env))

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of states: that of the model without its :attr:`written_data`, equal where it computes the same, by the
        same numbers."""
        hyper = tuple((n, h.key) for n, h in self.hyper.items())
        # A program knows the arrays of a prior or a site, not what they are the parameters of.
        return (self._program.as_written, self.field, hyper, jax.tree.structure(self._trace), _NOTHING_LOOKED_UP)

    @property
    def written_data(self) -> tuple[Any, ...]:
        """:attr:`data` without the numbers of the model that turned out to change: those are in :attr:`key`."""
        constants, literals = self._program.constants, self._program.literals
        numbers = [*constants, *(None for _ in self.data[len(constants) :])]
        return tuple(d for number, d in zip(numbers, self.data, strict=True) if number not in literals)

    def _role_of(self, name: str) -> str:
        """Name of the kind of a site of :attr:`hyper`, for messages."""
        return "hyperparameter"

    def _describe_sites(self) -> list[str]:
        lines = [f"field: {n} {self.site_shapes[n]} ({self.sites[n].family})" for n in self.field]
        for name, site in self.hyper.items():
            kind = "param" if site.is_param else self.sites[name].family
            lines.append(f"{self._role_of(name)}: {name} {site.shape} ({kind})")
        return lines + [f"left out (integrates to one): {n}" for n in self.predictive]

    def _env(self, hyper: Mapping[str, object], data: Sequence[object] | None) -> dict[int, Any]:
        env: dict[int, Any] = {}
        for name, atom in self._given.items():
            value = self._left_out.values[name] if name in self.predictive else hyper[name]
            leaves = jax.tree.leaves(value)
            env.update(zip(jax.tree.leaves(atom), (jnp.asarray(v) for v in leaves), strict=True))
        # A form may keep there, after these, what it has looked up in them.
        env.update(zip(self._program.constants, self.data if data is None else data, strict=False))
        for atom in jax.tree.leaves(self._given):
            env[atom] = env[atom].astype(self._program.avals[atom].dtype)
        return env

    def _env_at(self, hyper: Mapping[str, object], e: Array, data: Sequence[object] | None) -> dict[int, Any]:
        field = {atom: e[self._columns[name]] for name, (atom, _) in self._field.items()}
        return self._env(hyper, data) | field

    def values(self, hyper: Mapping[str, object], e: Array, data: Sequence[object] | None = None) -> dict[str, Array]:
        """Every latent and deterministic site at the unknowns ``e`` of shape ``(num_columns,)``."""
        env = self._env_at(hyper, e, data)
        names = [n for n in self._trace.values if n not in self.predictive]
        found = self._program.evaluate([self._trace.values[n] for n in names], env)
        return dict(zip(names, (jnp.asarray(v) for v in found), strict=True))

    def latent_shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of the values of :attr:`field` and :attr:`hyper`, without computing them."""

        def shape(name: str) -> Any:
            atom = self._trace.values[name]
            aval = jax.typeof(atom.value) if isinstance(atom, Constant) else self._program.avals[atom]
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

        params: dict[str, Any] = {n: site.init for n, site in self.hyper.items() if n not in self._trace.values}
        if params:  # a trace takes as long as much of what else is done for a reading
            params = jax.eval_shape(lambda: params)  # which may be trees
        return {n: shape(n) if n in self._trace.values else params[n] for n in (*self.field, *self.hyper)}

    @cached_property
    def structure(self) -> Structure[Self]:
        """This reading without its data, for compiled programs; equal for readings that make the same functions of
        hyperparameters and data, as all is compared that such a function can see."""
        return Structure(self.without_data())

    def without_data(self) -> Self:
        """This reading without the model, its arguments and its data.

        Its functions of hyperparameters and data are the same, where they are given both. What has to be looked up in
        the data, such as indices, is found before, when a model is read.
        """
        out = self._copy()
        out._questions = self._questions.without_data()
        out.model, out.args, out.kwargs = None, (), {}
        out.data, out.changing = shapes_of((self.data, self.changing))
        out.sites = {n: SiteInfo(n, s.kind, s.shape, s.family) for n, s in self.sites.items()}
        out.hyper = {n: h._replace(init=shapes_of(h.init)) for n, h in self.hyper.items()}
        return out

    def _copy(self) -> Self:
        """A copy to be changed, without what was computed of this one."""
        out = copy.copy(self)
        for name in [name for name in vars(out) if isinstance(getattr(type(out), name, None), cached_property)]:
            del vars(out)[name]
        return out

    def initial_hyper(self) -> dict[str, Any]:
        """Starting values of the hyperparameters: medians or means of their priors, initial values of ``param``."""
        return {n: h.init for n, h in self.hyper.items()}

    @property
    def behind_predictive(self) -> tuple[str, ...]:
        """The sites of :attr:`predictive`, and those deterministic sites that are computed from them."""
        return self._computed_from(atom for name in self.predictive for atom in jax.tree.leaves(self._given[name]))

    @property
    def behind_field(self) -> tuple[str, ...]:
        """The sites of the field and of :attr:`predictive`, and the deterministic ones computed from them."""
        field = self._computed_from(atom for atom, _ in self._field.values())
        return tuple(dict.fromkeys((*field, *self.behind_predictive)))

    def _computed_from(self, inputs: Iterable[Atom]) -> tuple[str, ...]:
        inputs = set(inputs)
        return tuple(n for n, atom in self._trace.values.items() if self._program.ancestors([atom]) & inputs)

    def _at_start(self) -> str:
        """Words for the starting values of the hyperparameters."""
        parts = [
            f"{n}={np.asarray(v):.4g}" if np.ndim(v) == 0 else f"{n}={np.asarray(v)}"
            for n, v in self.initial_hyper().items()
        ]
        return f" at {', '.join(parts)}" if parts else ""
