"""The variational Gaussian approximation as an inference engine for NumPyro models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Unpack

import jax
import numpy as np

from ....linalg.gaussian.prior import is_flat
from ....structure import LatentGaussianReading, ModelStructureError
from ....structure.latent_gaussian.form import LatentGaussian
from ...front.options import check_one_of
from ...hyper.space import UnconstrainedSpace
from ..algorithms.algorithm import Algorithm
from ..engine import Engine, GaussianOptions
from ..fitting.modes import check_mixtures
from .bound_choice import BoundName, SiteBound, check_name, choose_bound
from .shared_covariance import check_shared_covariance
from .values import CoordinateAscent, Covariance, GeneralOptimiser, NaturalGradient

Method = Literal["natural-gradient", "coordinate", "cholesky", "opper-archambeau"]

_NUM_STEPS: dict[str, int] = {"natural-gradient": 200, "coordinate": 100, "cholesky": 5000, "opper-archambeau": 5000}


class VariationalGaussian(Engine):
    r"""The Gaussian with the largest lower bound on the log evidence (Opper and Archambeau 2009; Khan 2012).

    Accepts the models of :class:`~numpyro_ext.infer.ep.EP` whose log factors have Gaussian expectations: not those that
    give a part of the line probability zero. For log-concave likelihoods the bound has a single maximum, and every
    step raises it. ``log_evidence`` is that bound, and hyperparameters are learned by raising it further; the
    ``objective_trace`` of the diagnostics is the bound after each step.

    Priors of coefficients that are not Gaussian (Laplace, Student-t, Cauchy, logistic, ...) are factors of the bound.

    The expectations of the log factors are exact (to the accuracy of closed forms and quadrature) or, for logistic
    likelihoods, smaller quantities with a closed form, the local bounds. A step costs what one of EP costs.

    **Example:**

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import VariationalGaussian

    >>> def model(x, y=None):
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    ...     numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

    >>> x, y = jnp.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]), jnp.array([0, 0, 1, 0, 1, 1])
    >>> engine = VariationalGaussian(model)
    >>> engine.run(jax.random.key(0), x, y)
    >>> print(f"{engine.log_evidence:.3f}, a lower bound: {engine.log_evidence.is_lower_bound}")
    -3.817, a lower bound: True
    >>> looser = VariationalGaussian(model, bound="jaakkola")
    >>> looser.run(jax.random.key(0), x, y)
    >>> bool(looser.log_evidence < engine.log_evidence)
    True

    Categories have a predictor each, in the words in which they are written: logits or a softmax, of coefficients for
    each of them, of pivoted ones, or of what is known of the alternatives.

    >>> def choice(price, chosen=None):
    ...     sensitivity = numpyro.sample("sensitivity", dist.Normal(0, 1))
    ...     probs = jax.nn.softmax(-sensitivity * price, axis=-1)
    ...     numpyro.sample("chosen", dist.Categorical(probs=probs), obs=chosen)

    >>> price = jnp.array([[1.0, 2.0, 3.0], [2.0, 1.0, 0.5], [0.5, 2.5, 1.0]])
    >>> engine = VariationalGaussian(choice)
    >>> engine.run(jax.random.key(0), price, jnp.array([0, 2, 0]))
    >>> found = engine.posterior["sensitivity"]
    >>> print(f"{found.mean:.3f}, variance {found.variance:.3f}")
    1.153, variance 0.526

    :param model: a NumPyro model.
    :param bound: ``"exact"``, or a local bound for logistic likelihoods: ``"jaakkola"``, ``"bohning"``,
        ``"piecewise-linear"`` or ``"piecewise-quadratic"``; a tuple of names for the tightest of them at each factor;
        for categorical sites one of :func:`~numpyro_ext.potentials.log_sum_exp_bound` (``"tilted"``, ``"log"``,
        ``"bohning"``, ...); or a dictionary from names of observed sites to these, other sites being treated exactly.
    :param int num_pieces: number of pieces of the piecewise bounds.
    :param str method: ``"natural-gradient"``; or, to compare with and slower, ``"coordinate"`` (one variance at a time;
        proper priors only), ``"cholesky"`` (L-BFGS on mean and Cholesky factor) or ``"opper-archambeau"`` (L-BFGS on
        two numbers per factor; proper priors only). For the last two ``tol`` bounds the derivatives of the bound.
    :param str covariance: ``"full"``, or ``"diagonal"`` for the best Gaussian of independent unknowns (mean field). Its
        bound is lower, its means are usually good and its variances too small. A step still solves for all means
        jointly, so that strong prior correlations do not slow it; it saves the joint variances, a third to two thirds
        of the algebra. What is independent are the unknowns as the model has them. ``"shared"`` is ``"full"`` for a
        plate of rows that have one covariance, because they have the same prior, loadings and observed cells and
        ``bound="bohning"`` (or a Gaussian likelihood): one factorisation serves all of them.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``num_steps`` (by default 200, 100, 5000 and 5000
        for the four methods), ``tol``, ``field``, ``hyper_values``, ``init_values``, ``num_restarts``,
        ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and ``progress_bar``.
    :raises ValueError: if a bound, a method or a covariance is unknown, or for a covariance that is not ``"full"`` by
        another method than ``"natural-gradient"``.
    """

    def __init__(
        self,
        model: Callable[..., object],
        *,
        bound: BoundName | Mapping[str, BoundName] = "exact",
        num_pieces: int = 20,
        method: Method = "natural-gradient",
        covariance: Covariance = "full",
        **options: Unpack[GaussianOptions],
    ) -> None:
        check_one_of(Method, method=method)
        check_one_of(Covariance, covariance=covariance)
        if covariance != "full" and method != "natural-gradient":
            raise ValueError(f"A {covariance} covariance is fitted by method='natural-gradient' only, got {method!r}.")
        for part in bound.values() if isinstance(bound, Mapping) else [bound]:
            check_name(part, num_pieces)
        options.setdefault("num_steps", _NUM_STEPS[method])
        super().__init__(model, **options)
        self.bound = dict(bound) if isinstance(bound, Mapping) else bound
        self.num_pieces = num_pieces
        self.method: Method = method
        self.covariance: Covariance = covariance

    def _choose_bounds(self, reading: LatentGaussianReading) -> dict[str, SiteBound]:
        """Choose the expectation of each observed site.

        :raises ModelStructureError: if there is no such expectation, or the method or covariance does not serve it.
        """
        form = reading.compiled_form(reading.initial_hyper())
        names = tuple(reading.factor_names)
        requested = self.bound if isinstance(self.bound, dict) else dict.fromkeys(reading.observed_names, self.bound)
        unknown = [name for name in requested if name not in names]
        if unknown:
            raise ValueError(f"bound names {unknown[0]!r}, which is no observed site; there are {', '.join(names)}.")
        sites: dict[str, SiteBound] = {}
        for name, potential, mask in zip(names, form.potentials, form.observed, strict=True):
            is_finite = np.broadcast_to(potential.has_finite_expectation(), mask.shape)
            if not np.all(is_finite | ~np.asarray(mask)):
                raise ModelStructureError(
                    f"The factor of site {name!r} ({type(potential).__name__}) is zero on a part of the line: the "
                    "Gaussian expectation of its log density is -inf, and no Gaussian has a finite bound. Use EP.",
                    site=name,
                )
            sites[name] = choose_bound(name, potential, requested.get(name, "exact"), self.num_pieces)
        if self.method in ("coordinate", "opper-archambeau"):
            _check_proper(reading, form, self.method)
        if self.covariance == "shared":
            space = UnconstrainedSpace(reading.hyper, self.hyper_values)
            points = [space.initial(self.init_values)]
            if space.size:  # what is the same in all rows at one value may differ at others
                points.append(points[0] + 0.1 * jax.random.normal(jax.random.key(0), (space.size,), points[0].dtype))
            treated = NaturalGradient(tuple(sites.items())).treated
            check_shared_covariance(treated(reading.form(space.unpack(point))) for point in points)
        return sites

    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        check_mixtures(reading, "a variational Gaussian")
        sites, request = tuple(self._choose_bounds(reading).items()), (repr(self.bound), self.num_pieces)
        if self.method == "coordinate":
            return CoordinateAscent(sites, request=request)
        if self.method == "natural-gradient":
            return NaturalGradient(sites, covariance=self.covariance, request=request)
        return GeneralOptimiser(sites, parameters=self.method, request=request)


def _check_proper(reading: LatentGaussianReading, form: LatentGaussian, method: str) -> None:
    for block in form.prior:
        if is_flat(block):
            raise ModelStructureError(
                f"method={method!r} works with the prior covariance of the predictors, and the field "
                f"({', '.join(map(repr, reading.field))}) has a part whose prior is flat or not Gaussian, which "
                "has none. "
                "Use method='natural-gradient' or 'cholesky'."
            )
