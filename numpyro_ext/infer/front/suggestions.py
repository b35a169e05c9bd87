"""Unknown keyword arguments of questions, answered by the one that was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

_Question = ParamSpec("_Question")
_Answer = TypeVar("_Answer")

_USUAL_NAMES = {
    "num_samples": ("n", "num", "size", "draws", "num_draws", "ndraws", "n_samples", "nsamples", "n_draws", "samples"),
    "var_names": ("names", "sites", "vars", "variables", "return_sites", "sites_to_show", "site", "var_name"),
    "prob": ("hdi_prob", "ci_prob", "credible_interval", "probability", "level"),
    "seed": ("rng_key", "key", "random_seed", "random_state", "rng"),
    "resample": ("psis", "importance", "reweight"),
    "group_by_chain": ("chains", "num_chains", "by_chain"),
    "exclude_deterministic": ("deterministic", "include_deterministic"),
    "num_particles": ("particles",),
}
"""Names that things have elsewhere, by those that they have here."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if there is one.

    >>> nearest_name("n", ["group_by_chain", "seed", "num_samples"]), nearest_name("integrat", ["integrate", "tol"])
    ('num_samples', 'integrate')
    """
    known = list(known)
    usual = [right for right, others in _USUAL_NAMES.items() if right in known and name in others]
    return next(iter(usual or get_close_matches(name, known, n=1)), None)


def suggests(question: Callable[_Question, _Answer]) -> Callable[_Question, _Answer]:
    """Decorator of methods whose unknown keyword arguments are refused with the name that was probably meant."""
    known = [name for name in inspect.signature(question).parameters if name != "self"]

    @wraps(question)
    def method(*args: _Question.args, **kwargs: _Question.kwargs) -> _Answer:
        unknown = next((name for name in kwargs if name not in known), None)
        if unknown is not None:
            meant = nearest_name(unknown, known)
            hint = "" if meant is None else f" Did you mean {meant!r}?"
            raise TypeError(
                f"{question.__name__}() has no argument {unknown!r}; it has {', '.join(known) or 'none'}.{hint}"
            )
        return question(*args, **kwargs)

    return method
