"""A model in the coordinates of an engine's posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions.transforms import Transform
from numpyro.infer.reparam import Reparam

from ...linalg.gaussian.normal_density import normal_log_density
from ...linalg.library_calls import most_together
from ..front.engine import AnyEngine, BaseEngine
from ..front.options import check_kind

LATENT = "posterior_coordinates"
"""Name of the site that holds the coordinates."""
_AT_A_TIME, _NUMBERS = 64, 20_000
"""Draws that are transformed together, at most, and about how many coordinates these may have."""


class Coordinates(Protocol):
    """Map from independent standard normal numbers to the sites of a model, as a run knows it."""

    @property
    def size(self) -> int:
        """Number of coordinates."""

    @property
    def has_field(self) -> bool:
        """True if the field is among the sites that they stand for, and false if it is integrated out."""

    @property
    def names(self) -> tuple[str, ...]:
        """Sample sites that they stand for."""

    @property
    def held(self) -> Mapping[str, Any]:
        """Values of sites that are not sampled: ``param`` sites and given hyperparameters."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Latent sites on which nothing else depends, and what is computed from them."""

    @property
    def num_replaced(self) -> int:
        """Number of site approximations of negative precision, in whose place stand tangents."""

    def values(self, white: Array) -> tuple[dict[str, Array], Array]:
        """Values of the sites, and their log volume per unit volume of the coordinates."""

    def log_ratios(self, white: Array) -> dict[str, Array]:
        """Log factors over their approximations by observed site, up to constants."""


class PosteriorReparam:
    r"""Reparameterisation of a model by the posterior of an engine, for any kernel of NumPyro and for SVI.

    The sites of the model become functions of one site of independent coordinates, which are nearly standard normal:
    the hyperparameters :math:`\theta`, whitened by their approximate covariance, and the field given these,
    :math:`q(e \mid \theta) \propto p(e \mid \theta) \prod_i \tilde t_i`, where the Gaussian sites
    :math:`\tilde t_i` of the fit are held and the prior moves with :math:`\theta`. So there is no funnel, whatever
    the scales. The density is that of the user's own model, times the determinant of the map: chains are exact
    whatever the fit was, and a bad fit costs steps.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_ext.infer import EP, PosteriorReparam

    >>> def eight_schools(sigma, y=None):
    ...     mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    ...     with numpyro.plate("schools", 8):
    ...         theta = numpyro.sample("theta", dist.Normal(mu, tau))
    ...         numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    >>> data = jnp.array([15, 10, 16, 11, 9, 11, 10, 18]), jnp.array([28, 8, -3, 7, -1, 1, 18, 12])
    >>> engine = EP(eight_schools)
    >>> engine.run(jax.random.key(0), *data)
    >>> reparam = PosteriorReparam(engine)
    >>> mcmc = MCMC(NUTS(reparam.reparam(eight_schools)), num_warmup=100, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), *data)
    >>> draws = reparam.transform_sample(mcmc.get_samples())
    >>> print({name: value.shape for name, value in sorted(draws.items())})
    {'mu': (200,), 'tau': (200,), 'theta': (200, 8)}

    One evaluation of the density costs one conditioning of the field more than that of the model, in the space that the
    engine has: linear in groups with a border, and in steps of a state space. ``param`` sites and given hyperparameters
    (``hyper_values``) are held at their values. Latent sites on which nothing depends (missing observations) stay
    sample sites.

    Of :class:`~numpyro_ext.infer.AdaptiveQuadrature` the coordinates are hyperparameters alone, and the model that
    :meth:`reparam` returns without an argument has the field integrated out (as of
    :func:`~numpyro_ext.infer.marginalize`); :meth:`recover` draws it.

    :param engine: an engine on a Gaussian field that has run: EP, VariationalGaussian, LaplaceApproximation, INLA or
        AdaptiveQuadrature. It need not have converged.
    :raises ValueError: if the posterior of the engine is no Gaussian field, naming what to use instead.
    """

    def __init__(self, engine: AnyEngine) -> None:
        wanted = "an engine on a Gaussian field (EP, VariationalGaussian, LaplaceApproximation, INLA, quadrature)"
        check_kind(type(self).__name__, engine, BaseEngine, wanted)
        run = engine._finished()
        self.coordinates: Coordinates = run.coordinates
        self.model = engine._sampled_model()
        self.whole_model: Callable[..., Any] = run.reading.model
        self._transforms = {name: run.reading.sites[name].transform for name in self.coordinates.names}
        self._values = jax.jit(self.coordinates.values)  # traced once for all that samplers do with it

    def reparam(self, fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The model with coordinates in the place of its sites, whose values are deterministic sites.

        :param fn: a model with the latent sites of the fit, by default the model of the engine. Sites for which there
            are no coordinates, such as a field that was integrated out, stay latent sites of it. With other data the
            chain is exact all the same, as long as the shapes and the supports of the latent sites stay.
        :return: a model of the same arguments, which raises a ValueError where they do not, or a site is missing.
        """
        model = self.model if fn is None else fn
        transforms = {} if model is self.model else self._transforms

        def in_coordinates(*args: Any, **kwargs: Any) -> Any:
            base = dist.Normal(jnp.zeros(self.coordinates.size), 1.0).to_event(1)
            white = numpyro.sample(LATENT, base.mask(False))
            values, log_volume = self._values(white)
            numpyro.factor(f"_{LATENT}_log_volume", log_volume)
            sites = {name: _Known(value, transforms.get(name)) for name, value in values.items()}
            held = dict(self.coordinates.held)
            # A scan hands no site of its body to other handlers but those that give values.
            with handlers.condition(data=values), handlers.reparam(config=sites), handlers.substitute(data=held):
                found = model(*args, **kwargs)
            missing = [name for name, site in sites.items() if not site.is_used]
            if missing:
                raise ValueError(
                    f"The latent sites {missing} of the fit are not in this model, so that nothing holds their "
                    "coordinates: run the engine on this model."
                )
            return found

        return in_coordinates

    def transform_sample(self, latent: Mapping[str, object] | Array) -> dict[str, Array]:
        """Draws of the model's latent sites from draws of the reparameterised model.

        :param latent: what ``mcmc.get_samples()`` returns, by chain or not, or the draws of its coordinates alone,
            shape ``(..., size)``.
        :return: latent sites by name, with the leading axes of the draws.
        """
        white = jnp.asarray(latent[LATENT] if isinstance(latent, Mapping) else latent)
        flat = white.reshape(-1, white.shape[-1])
        found = self._transform(flat)
        shape = white.shape[:-1]
        values = {name: value.reshape(*shape, *value.shape[1:]) for name, value in found.items()}
        others = latent if isinstance(latent, Mapping) else {}
        kept = {name: jnp.asarray(value) for name, value in others.items() if name in self.coordinates.left_out}
        return values | kept

    def recover(
        self, rng_key: Array, samples: Mapping[str, ArrayLike], *args: object, **kwargs: object
    ) -> dict[str, Array]:
        """Draws of a field that is integrated out of the model, and of what depends on it, given draws of the sites.

        :param rng_key: random number generator key.
        :param samples: draws of the latent sites, of :meth:`transform_sample`, with the leading axis running over them.
        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: one draw of all latent and deterministic sites for each; the samples where there is no such field.
        """
        recover = getattr(self.model, "recover", None)
        found = dict(samples) if recover is None else recover(rng_key, samples, *args, **kwargs)
        return {name: jnp.asarray(value) for name, value in found.items()}

    @cached_property
    def _transform(self) -> Callable[[Array], dict[str, Array]]:
        def sites(white: Array) -> dict[str, Array]:
            values, _ = self.coordinates.values(white)
            return {name: values[name] for name in self.coordinates.names}

        return jax.jit(lambda flat: map_draws(jax.jit(sites), flat))


def map_draws(function: Callable[..., dict[str, Array]], white: Array, *others: Array) -> dict[str, Array]:
    """A function of each draw, several side by side as far as memory and libraries allow.

    :param function: of coordinates and others of one draw, made by ``jax.jit``.
    :param white: coordinates, shape ``(draws, size)``.
    :param others: arrays with the draws on their first axis.
    """
    each = white, *others
    together = most_together(function, *(jax.eval_shape(lambda x: x[0], x) for x in each)) if len(white) else None
    number = max(1, min(_AT_A_TIME, _NUMBERS // max(1, white.shape[1]), len(white), together or _AT_A_TIME))
    found: dict[str, Array] = jax.lax.map(lambda one: function(*one), each, batch_size=number)
    return found


class _Known(Reparam):
    """A sample site at a value that is computed elsewhere: deterministic, with its log density as a factor."""

    def __init__(self, value: Array, transform: Transform | None) -> None:
        self.value, self.transform, self.is_used = value, transform, False

    def __call__(self, name: str, fn: dist.Distribution, obs: Array | None) -> tuple[None, Array]:
        if obs is not None and not self._is_given(obs):
            raise ValueError(f"The site {name!r} is latent in the fit, and observed here.")
        if fn.shape() != np.shape(self.value):
            raise ValueError(
                f"The site {name!r} has shape {fn.shape()} here and {np.shape(self.value)} in the fit: run the engine "
                "at these arguments."
            )
        if self.transform is not None and not _are_equal(self.transform, dist.biject_to(fn.support)):
            raise ValueError(
                f"The support of the site {name!r} is not that of the fit, which its coordinates cover: run the engine "
                "on this model."
            )
        self.is_used = True
        numpyro.factor(f"_{name}_log_prob", _log_prob(fn, self.value))
        return None, self.value

    def _is_given(self, obs: Array) -> bool:
        """True if it is the value of this site, which a scan shows once its body was given it."""
        if isinstance(obs, jax.core.Tracer) or isinstance(self.value, jax.core.Tracer):
            return True  # a chain begins with numbers
        return np.array_equal(obs, self.value, equal_nan=True)


def _log_prob(fn: dist.Distribution, value: Array) -> Array:
    """Log density of a site; that of a normal vector with a covariance has derivatives in closed form."""
    if type(fn) is dist.MultivariateNormal and fn.batch_shape == () and "covariance_matrix" in vars(fn):
        return normal_log_density(fn.covariance_matrix, value - fn.loc, fn.scale_tril)
    found: Array = fn.log_prob(value)
    return found


def _are_equal(transform: Transform, other: Transform) -> bool:
    """True if the transforms are equal, as far as it is known: bounds that are latent are not."""
    try:
        return bool(transform == other)
    except jax.errors.ConcretizationTypeError:
        return True


def log_normal(white: Array) -> Array:
    """Log density of independent standard normal numbers, shape ``(size,)``."""
    return -0.5 * (white @ white + white.size * math.log(2.0 * math.pi))
