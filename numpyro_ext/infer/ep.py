"""Expectation propagation as an inference engine for NumPyro models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from jax import Array

from ..potentials import Potential
from ..potentials.families.plackett_luce import PlackettLucePotential
from ..potentials.trees.chunks import FOREST_COSTS, ForestCosts
from ..potentials.vector_rows import vector_factors
from ..structure import LatentGaussianReading, ModelStructureError, Reason, SparseLinearReading
from ..structure.latent_gaussian.read import ONE_SIDED_LATENT_GAUSSIAN
from ..structure.model.priors import is_gaussian, is_one_sided
from ..structure.model.search import whole_field
from ..structure.sparse_linear.priors import is_sparse
from ..structure.sparse_linear.read import SPARSE_LINEAR
from .front.engine import BaseEngine
from .front.files.content import Content
from .front.many import Dataset
from .front.run import FinishedRun
from .front.state import EngineState
from .gaussian.algorithms.algorithm import Algorithm
from .gaussian.algorithms.propagation.expectation_propagation import Schedule
from .gaussian.algorithms.values import ExpectationPropagation
from .gaussian.answers.corrected import Corrected
from .gaussian.engine import Engine, GaussianOptions
from .gaussian.fitting.modes import check_mixtures
from .gaussian.runs.run import GaussianRun
from .sparse.trees.engine import TreeFitter, TreeRun
from .sparse.trees.mixtures import Pooling, check_average

_MOST_COEFFICIENTS = 200
"""Up to which coefficients of a regression with sparse priors are a Gaussian field with factors."""


def _signal(attempt: Callable[[frozenset[str]], SparseLinearReading], sizes: Mapping[str, int]) -> SparseLinearReading:
    """All coefficients as one factor, where they are many, or no fewer than the observations, as those of a signal.

    Those of a regression are a field, whose hyperparameters are integrated over.
    """
    reading = whole_field(attempt, sizes)
    if reading.num_columns < min(_MOST_COEFFICIENTS, sum(map(math.prod, reading.factor_shapes))):
        raise ModelStructureError(f"{list(sizes)} are coefficients of a regression.", reason=Reason.NO_FIELD)
    return reading


class EP(Engine):
    r"""Expectation propagation for latent Gaussian models (Minka 2001; Ko 2017, §2.1).

    Accepts models in which, given the hyperparameters, some latent sites are jointly Gaussian (the field) and every
    observation depends on the field through one predictor affine in it: generalised linear and multilevel models,
    Gaussian processes, random walks, series in time by ``scan``, with any likelihood of one predictor or two, and up to
    six categories with a predictor each (four of counts, and of the multinomial probit). Everything else latent, and
    every ``param`` site, is a hyperparameter and is set to the maximum of log evidence plus log prior.
    Other models are refused at :meth:`run` with a :class:`~numpyro_ext.structure.ModelStructureError` that says why.

    Each step costs one Cholesky factorisation in the number of observations or of unknowns, whichever is smaller; for
    long series, one pass over their steps.

    The posterior is a Gaussian. Where all factors cut the prior from one side, as with classes that can be separated,
    the exact one is skewed, and deviations by EP can be a fifth too small.

    Coefficients whose prior is not Gaussian (Laplace, Student-t, Cauchy, logistic, soft or asymmetric Laplace) are in
    the field as well: their priors are factors like those of observations. Where a heavy-tailed prior and the data are
    far apart the posterior has several modes, and a run may end without having converged, which it says. An element
    of which the data say nothing needs a prior that has a variance.

    So are coefficients on a half line (HalfNormal, Exponential, a Normal truncated from below) in which predictors of
    known likelihoods are affine. The marginal of each is a normal density cut at its bound, which has the moments of
    the Gaussian; draws of the Gaussian are moved onto the half lines element by element, by their ranks. Sites that are
    computed from these have Gaussian marginals, and draws that are computed from the moved ones. Scales, and sites with
    ``hyper_values`` or ``init_values``, are hyperparameters as before; ``field`` overrides.

    A model without any Gaussian site whose latent sites are sparse coefficients of a signal
    (:class:`~numpyro_ext.distributions.HiddenMarkovTree`; Laplace or Student-t ones, where they are 200 or more, or no
    fewer than the observations) behind a linear map with Gaussian noise is run by
    :class:`~numpyro_ext.infer.sparse.trees.engine.TreeFitter`: the prior of all coefficients is one factor, and for
    orthonormal transforms the posterior is exact. ``num_shifts`` and ``average_over`` make it a mixture, or an average,
    over arguments of the model. Of the options that one has no use for ``adapt_damping``, ``schedule`` and
    ``num_restarts``, and its ``hyper_tol`` is per standard error.

    **Example:**

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.infer import EP

    >>> def model(x, y=None):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    ...     numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

    >>> x = jnp.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0])
    >>> ep = EP(model)
    >>> ep.run(jax.random.key(0), x, jnp.array([0, 0, 1, 0, 1, 1]))
    >>> bool(ep.posterior["slope"].mean > 0.0), ep.diagnostics.converged
    (True, True)
    >>> ep.get_samples()["slope"].shape
    (1000,)

    A regression with Laplace coefficients is integrated over them, and over the scale of their prior:

    >>> def lasso(x, y=None):
    ...     tau = numpyro.sample("tau", dist.HalfCauchy(1))
    ...     level = numpyro.sample("level", dist.Normal(0, 5))
    ...     b = numpyro.sample("b", dist.Laplace(0, tau).expand([3]))
    ...     numpyro.sample("y", dist.Normal(level + x @ b, 0.5), obs=y)

    >>> columns = jnp.stack([x, x**2, jnp.cos(x)], axis=1)
    >>> ep = EP(lasso)
    >>> ep.run(jax.random.key(0), columns, 1.5 * x)
    >>> found = ep.posterior["b"]
    >>> print(f"{found.mean[0]:.2f}, variance {found.variance[0]:.2f}; tau = {ep.hyper['tau'].value:.2f}")
    1.47, variance 0.02; tau = 1.10

    :param model: a NumPyro model.
    :param float damping: fraction of the old site that is kept in a step, in ``[0, 1)``.
    :param bool adapt_damping: whether to damp more while the changes grow from step to step and, where priors are
        correlated, to extrapolate while they shrink slowly.
    :param float power: fraction of a factor that is replaced at a time; below one, fractional EP.
    :param str schedule: ``"parallel"`` (all factors, then one factorisation) or ``"sequential"``.
    :param int num_shifts: for images: how many random circular shifts (the argument ``shift``) to average over.
    :param int num_learning_shifts: from how many of these hyperparameters are learned, by the average of their log
        evidences; the first is no shift. Each evaluation costs as many times more.
    :param dict average_over: for sparse coefficients: further arguments of the model, each with its values, such as
        ``{"wavelet": ["haar", "db2", "sym4"]}``.
    :param str pooling: of these: ``"mixture"``, as if one of them were right; ``"average"``, whose deviations say
        how wrong the mean of all is if its members know how wrong they are; or ``"risk"``, which estimates that from
        the data (Stein 1981), for sites whose elements are all observed, in noise that is known.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``num_steps``, ``tol``, ``field``,
        ``hyper_values``, ``init_values``, ``num_restarts``, ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and
        ``progress_bar``.
    """

    # Coefficients of signals with sparse priors are one factor of the sparse form, where nothing else is in the field.
    forms = (
        ONE_SIDED_LATENT_GAUSSIAN._replace(
            makes_field=lambda fn: is_gaussian(fn) or not (is_sparse(fn) or is_one_sided(fn))
        ),
        SPARSE_LINEAR._replace(search=_signal),
        ONE_SIDED_LATENT_GAUSSIAN,
        SPARSE_LINEAR,
    )
    _forest_costs: ClassVar[ForestCosts] = FOREST_COSTS

    def __init__(
        self,
        model: Callable[..., object],
        *,
        damping: float = 0.0,
        adapt_damping: bool = True,
        power: float = 1.0,
        schedule: Schedule = "parallel",
        num_shifts: int | None = None,
        num_learning_shifts: int = 1,
        average_over: Mapping[str, Sequence[object]] | None = None,
        pooling: Pooling = "mixture",
        **options: Unpack[GaussianOptions],
    ) -> None:
        ExpectationPropagation(damping, adapt_damping, power, schedule)  # refuses what it cannot take
        super().__init__(model, **options)
        self.damping = damping
        self.adapt_damping = adapt_damping
        self.power = power
        self.schedule: Schedule = schedule
        self.average_over = check_average(model, num_shifts, average_over, pooling, num_learning_shifts)
        self.num_shifts = num_shifts
        self.num_learning_shifts = num_learning_shifts
        self.pooling = pooling

    def algorithm(self, reading: LatentGaussianReading | SparseLinearReading) -> Algorithm:
        if isinstance(reading, SparseLinearReading):
            raise ModelStructureError(
                f"This needs a Gaussian field, and the model was read as sparse coefficients {list(reading.field)}."
            )
        check_mixtures(reading, "EP")
        for name, potential in zip(reading.factor_names, reading.abstract_form.potentials, strict=True):
            self._check_vectors(name, potential)
        return ExpectationPropagation(self.damping, self.adapt_damping, self.power, self.schedule)

    def _check_vectors(self, name: str, potential: Potential) -> None:
        """Refuse factors of several predictors whose moments are not known, or not one predictor at a time."""
        vectors = vector_factors(potential)
        if vectors is None:
            return
        base = vectors[0].base
        if base.has_tilted_moments:
            if self.schedule == "sequential":
                raise ModelStructureError(
                    f"The sequential schedule visits one predictor at a time, and the factors of site {name!r} have "
                    f"{base.dimension} each. Use EP(model), which updates all sites at once.",
                    site=name,
                )
            return
        other = "as numpyro_ext.distributions.StickBreakingCategorical, whose factors have one predictor"
        if isinstance(base, PlackettLucePotential):
            other = "as comparisons of two items"
        raise ModelStructureError(
            "EP matches moments of one or two predictors per observation, of up to six categories, or of up to four "
            f"where these are counts or probit, and site {name!r} has {base.dimension} predictors each. Use "
            f"VariationalGaussian or LaplaceApproximation, or write the site {other}.",
            site=name,
        )

    def corrected(self) -> Corrected:
        """Log evidence and means with what EP leaves out, to second order (Opper, Paquet and Winther 2013).

        EP replaces tilted densities by Gaussians of the same mean and variance. Their third and fourth cumulants, pair
        by pair, give most of the remaining error where that is small; where the correction is large, it says so. At
        the optimum of the hyperparameters, or over the design that they are integrated over.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP

        >>> def model(y):
        ...     level = numpyro.sample("level", dist.Normal(0, 2))
        ...     numpyro.sample("y", dist.Bernoulli(logits=level), obs=y)

        >>> ep = EP(model)
        >>> ep.run(jax.random.key(0), jnp.array([1, 1, 1, 0, 1]))
        >>> ep.corrected()  # by quadrature -3.4366
        Corrected
          log evidence -3.43736, +0.00563 by cumulants to order 2

        Cost: correlations of all pairs of predictors, of which there may be 5000.

        :return: the log evidence, its change, and the means of the sites in :attr:`posterior`.
        :raises ValueError: if ``power`` is not one, a factor has several predictors (the site is named), there are too
            many of them, or the model was read as sparse coefficients.
        :raises RuntimeError: if EP has not converged.
        :raises FloatingPointError: if a tilted density has no fourth moment.
        """
        run = self._finished()
        if not isinstance(run, GaussianRun):
            raise ValueError("The correction is of EP on Gaussian fields; sparse coefficients are one factor.")
        if self.power != 1.0:
            raise ValueError(f"The correction is of EP itself, power=1; this is fractional EP, power={self.power}.")
        return run.corrected

    # The two forms

    def _start(
        self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], init_state: EngineState | None
    ) -> FinishedRun:
        if self._is_mixture:
            return self._tree_fitter().run(rng_key, args, kwargs, init_state)
        reading = self._read(rng_key, args, kwargs)
        if isinstance(reading, SparseLinearReading):
            return self._tree_fitter().run(rng_key, args, kwargs, init_state, reading=reading)
        return self._fit(reading, rng_key, init_state)

    def _start_many(self, datasets: Sequence[Dataset]) -> Iterator[Callable[[], FinishedRun]]:
        return BaseEngine._start_many(self, datasets) if self._is_mixture else super()._start_many(datasets)

    @property
    def _is_mixture(self) -> bool:
        return self.num_shifts is not None or bool(self.average_over)

    def _tree_fitter(self) -> TreeFitter:
        if self.integrate not in ("none", "auto"):
            raise ValueError(
                f"integrate={self.integrate!r} is for Gaussian fields. The parameters of sparse priors are learned."
            )
        if self.power != 1.0:
            raise ValueError("Fractional EP (power below one) is for latent Gaussian models, not for coefficients.")
        return TreeFitter(**{field.name: getattr(self, field.name) for field in dataclasses.fields(TreeFitter)})

    def _restore(
        self, content: Content, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> FinishedRun:
        if "tree" in content:
            return self._tree_fitter().restore(content["tree"], rng_key, args, kwargs)
        return super()._restore(content, rng_key, args, kwargs)

    # Answers of sparse coefficients

    @property
    def tree(self) -> TreeRun | None:
        """The last run, if it was one on sparse coefficients."""
        return self._run if isinstance(self._run, TreeRun) else None

    @property
    def members(self) -> tuple[Any, ...]:
        """Members of a mixture over shifts and other arguments: see :attr:`TreeRun.members`."""
        return self._finished().members

    def state_probabilities(self) -> Array:
        """Probability that each coefficient of a sparse linear model is in the high state, of shape ``(n,)``."""
        return self._finished().state_probabilities()
