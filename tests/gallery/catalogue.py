"""What is said of a published model: where it is from, how it splits, which engines take it, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpyro_ext.structure import Reason

__all__ = ["GAUSSIAN", "INTEGRATED", "MODELS", "OF_PAIRS", "Published", "Refusal", "published"]

GAUSSIAN = "EP LaplaceApproximation VariationalGaussian INLA"
OF_PAIRS = "EP LaplaceApproximation VariationalGaussian"
"""Engines for factors of two predictors, which INLA's own marginals do not take."""
INTEGRATED = "EP VariationalGaussian"
"""Engines that integrate over coefficients whose priors are neither Gaussian nor smooth."""


class Refusal(NamedTuple):
    """Why no engine takes a model."""

    reason: Reason
    site: str | None
    words: str
    """A regular expression for what the message says besides."""


class Published(NamedTuple):
    """A model as it stands in a tutorial, a chapter or a case study."""

    source: str
    model: Callable[..., Any]
    data: Callable[[], tuple]
    field: frozenset[str]
    """The field that a statistician would name, where a form of the model has one."""
    hyper: frozenset[str]
    engines: frozenset[str]
    """Names of all engines that take it."""
    refusal: Refusal | None
    kind: str
    """The file it is in."""
    is_slow: bool

    @property
    def is_latent_gaussian(self) -> bool:
        return "LaplaceApproximation" in self.engines or "VariationalGaussian" in self.engines


MODELS: dict[str, Published] = {}
"""All of them by name, in the order in which they are written down."""


def published(
    source: str,
    data: Callable[[], tuple],
    field: str = "",
    hyper: str = "",
    engines: str = GAUSSIAN,
    refusal: Refusal | None = None,
    is_slow: bool = False,
) -> Callable[[Any], Any]:
    """Put a model into the gallery, under the name of its function.

    :param str source: project, and title of the page or chapter.
    :param data: makes the arguments of the model; the same ones at each call.
    :param str field: names of the sites of the field, with spaces between.
    :param str hyper: names of all other latent and ``param`` sites.
    :param str engines: names of the engines that take it.
    :param Refusal refusal: why none does.
    :param bool is_slow: whether reading it takes more than a second or two.
    """

    def enter(model: Any) -> Any:
        name = model.__name__
        assert name not in MODELS, name
        takers = frozenset() if refusal else frozenset(engines.split())
        kind = model.__module__.rsplit(".", 1)[-1]
        sites = frozenset(field.split()), frozenset(hyper.split())
        MODELS[name] = Published(source, model, data, *sites, takers, refusal, kind, is_slow)
        return model

    return enter
