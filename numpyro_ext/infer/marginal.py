"""Models over the hyperparameters of others, whose Gaussian field an engine integrates out."""

from __future__ import annotations

from collections.abc import Callable

from .ep import EP
from .gaussian.engine import Engine
from .gaussian.marginal.model import MarginalModel


def marginalize(model: Callable[..., object], engine: Callable[..., object] = EP, **options: object) -> MarginalModel:
    """A NumPyro model over the hyperparameters of ``model``, for NUTS, SVI or anything that takes a model.

    It samples what is not in the field by the code of the model itself, with its priors, plates and transforms, and
    adds the log evidence of the field given them, by the engine, as a factor. So a chain moves in a few dimensions
    without funnels, and :meth:`~numpyro_ext.infer.gaussian.marginal.model.MarginalModel.recover` draws the field given
    its draws. The density is that of EP, of the variational bound or of Laplace's method; where all factors are
    Gaussian, it is exact and costs a single factorisation, and by AdaptiveQuadrature it is exact up to the sum over
    nodes. ``AdaptiveQuadrature(model).sample_exactly`` draws from that density in coordinates of a fit, with far fewer
    evaluations than NUTS takes.

    It pays where full NUTS moves slowly and the field is small with Gaussian factors: two to five times the effective
    draws per second on eight schools, a horseshoe, four counties. It does not where an evaluation of the evidence
    (a factorisation, or some ten for EP on other likelihoods) costs many gradients of the full density: full NUTS is
    ten times faster and more than EP's marginal models of counts and answers, and two to four times than Laplace's.
    With ``field=[...]`` one may leave what couples the groups to the chain, so that they are small independent blocks.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_ext.infer import marginalize

    >>> def eight_schools(sigma, y=None):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     tau = numpyro.sample("tau", dist.HalfCauchy(5))
    ...     with numpyro.plate("schools", 8):
    ...         theta = numpyro.sample("theta", dist.Normal(mu, tau))
    ...         numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    >>> sigma = jnp.array([15, 10, 16, 11, 9, 11, 10, 18])
    >>> y = jnp.array([28, 8, -3, 7, -1, 1, 18, 12])
    >>> marginal = marginalize(eight_schools)
    >>> mcmc = MCMC(NUTS(marginal), num_warmup=200, num_samples=300, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), sigma, y)
    >>> print(marginal)
    MarginalModel(eight_schools, engine=EP): samples tau; integrates out mu, theta
    >>> draws = marginal.recover(jax.random.key(1), mcmc.get_samples())
    >>> print({name: value.shape for name, value in sorted(draws.items())})
    {'mu': (300,), 'tau': (300,), 'theta': (300, 8)}

    :param model: a NumPyro model that the engine takes.
    :param engine: the class of an engine on latent Gaussian models: EP, VariationalGaussian, LaplaceApproximation,
        AdaptiveQuadrature or one of your own; or a ``functools.partial`` of it.
    :param options: those of the engine: ``field``, ``num_steps``, ``tol`` (by default ``1e-6``, in float32 ``1e-4``),
        ``hyper_values`` for hyperparameters that are given and not sampled, ``init_values``, ...
    :return: the model. It reads ``model`` when it is called, once for the same arguments, and has ``recover(rng_key,
        samples)`` and ``describe(*args)``.
    :raises TypeError: if ``engine`` is no such class; what it cannot read is refused when it is called.
    """
    if isinstance(engine, Engine):
        raise TypeError(
            f"engine is a class and its options are keywords: marginalize(model, {type(engine).__name__}, ...)."
        )
    if not callable(engine):
        raise TypeError(f"engine must be the class of an engine (EP, LaplaceApproximation, ...), got {engine!r}.")
    made = engine(model, **options)
    name = type(made).__name__
    if not isinstance(made, Engine):
        raise TypeError(
            f"{name} gives no log evidence of a Gaussian field to be differentiated. Take EP, VariationalGaussian or "
            "LaplaceApproximation."
        )
    if made.must_integrate or made.integrate not in ("none", "auto"):
        raise TypeError(
            f"{name} with integrate={made.integrate!r} integrates over the hyperparameters by itself. For a chain over "
            "them leave integrate out, and take LaplaceApproximation instead of INLA: its evidence is the same."
        )
    return MarginalModel(made)
