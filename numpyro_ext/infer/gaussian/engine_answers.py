"""Answers of an engine on latent Gaussian models once it has run: prediction, leave-one-out, a guide."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import numpy as np
from jax import Array
from numpyro.infer.autoguide import AutoMultivariateNormal

from ...structure import LatentGaussianReading
from ...structure.model.running.execution import check_key
from ..exact.overlap import Overlap, overlap
from ..exact.sampling import ExactSamples, sample_exactly
from ..front.answers.arviz import elpd_data
from ..front.engine import BaseEngine
from ..front.run import FinishedRun
from ..front.running.progress import warn
from .answers.leave_one_out import check_cavities, check_single
from .answers.prediction import by_site
from .new_arguments.predict import Prediction, log_predictive, predict
from .runs.run import GaussianRun


class GaussianAnswers(BaseEngine[FinishedRun]):
    """The answers that engines with a Gaussian field give beyond those of every engine."""

    def predict(
        self, rng_key: Array, *args: object, joint: Mapping[str, object] | None = None, **kwargs: object
    ) -> Prediction:
        """The posterior at new arguments of the model, as if it were fitted with the new observations masked; no refit.

        The model is read on old and new arguments together: arrays are put one behind the other along the axis in which
        they differ (or taken as they are where they begin with those of the fit), numbers that count rows or members
        take the sum or the larger value, and indices point into the whole. That the predictors of the fit stay what
        they are is checked: a model that computes something of all its inputs, as ``x - x.mean()``, is refused.

        :param rng_key: random number generator key of the draws.
        :param args: arguments of the model, without observations (or ``None`` for them); by default those of the fit.
        :param dict joint: what a parameter is for old and new rows together, the old ones first, where it is unclear.
        :param kwargs: keyword arguments of the model.
        :return: with ``posterior``, ``get_samples()`` and ``to_arviz()``, as an engine has them.
        :raises ValueError: if the arguments do not go together, or the model on both is not that of the fit.
        """
        run = self._finished()
        if not isinstance(run, GaussianRun):
            run.predict(rng_key)
        assert isinstance(run, GaussianRun)  # the others refuse
        args, kwargs = self._as_fitted(args, kwargs)
        joint = None if joint is None else self._as_fitted((), joint)[1]
        read = partial(self._read_as_fitted, run, check_observations=False)
        return predict(run, read, rng_key, args, kwargs, joint)

    def log_predictive(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Log predictive density of observations that the fit has not seen.

        Without arguments these are the masked observations of the fit; those whose value is missing (NaN, or outside
        the support, such as a count or category coded -1) score zero. With arguments the model is read on them and all
        its observations (that are not masked) are scored under the posterior of the fit, one by one; where
        the field is another one (a Gaussian process at new inputs) it is what :meth:`predict` finds.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where nothing was scored.
        :raises ValueError: if the field of the model on these arguments is another one, or coordinates of an
            observation (of a multivariate normal) depend on each other.
        """
        run = self._finished()
        if not (isinstance(run, GaussianRun) and (args or kwargs)):
            return run.log_predictive()
        args, kwargs = self._as_fitted(args, kwargs)
        return log_predictive(run, partial(self._read_as_fitted, run), args, kwargs)

    def _read_as_fitted(
        self, run: GaussianRun, args: tuple[object, ...], kwargs: dict[str, object], **options: object
    ) -> Any:
        """The model on other arguments, with all sites of the fitted field in its field.

        The largest field of a model may be another one where it has other numbers of members.
        """
        read = partial(self._read, run.rng_key, args, kwargs, check=False, **options)
        found = read()
        return found if set(run.reading.field) <= set(found.field) else read(field=list(run.reading.field))

    def _fitted_field(self, run: GaussianRun, args: tuple[object, ...], kwargs: dict[str, object]) -> list[str]:
        """Names of the field of the model on other arguments."""
        return list(self._read_as_fitted(run, args, kwargs).field)

    def fold_in(self, rng_key: Array, *args: Any, **kwargs: Any) -> Self:
        """Posteriors of new groups (people, sites, series) from their own observations, at the hyperparameters found.

        Where all of the field stands in one plate, its members are independent given the hyperparameters: what was
        observed of others says nothing more of a new one. Hyperparameters outside that plate are held at their values
        in this fit; those within it belong to the members and are learned anew.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP
        >>> def model(shop, sold, num_shops):
        ...     level, scale = numpyro.sample("level", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
        ...     with numpyro.plate("shops", num_shops):
        ...         rate = numpyro.sample("rate", dist.Normal(level, scale))
        ...     numpyro.sample("sold", dist.Poisson(jnp.exp(rate[shop])), obs=sold)
        >>> engine = EP(model, field=["rate"])
        >>> engine.run(jax.random.key(0), jnp.array([0, 0, 1, 1, 2, 2]), jnp.array([8, 9, 3, 2, 6, 5]), 3)
        >>> new = engine.fold_in(jax.random.key(1), jnp.array([0]), jnp.array([4]), 1)
        >>> bool(1.3 < new.posterior["rate"].mean[0] < 1.6)
        True

        :param rng_key: random number generator key.
        :param args: arguments of the model with the new groups alone: their number, and their observations.
        :param kwargs: keyword arguments of the model.
        :return: an engine that answers for the new groups as this one for those of the fit. Its ``log_evidence`` is
            that of the new observations. Where this fit has not converged it has not either.
        :raises ValueError: if some of the field is shared by all groups.
        """
        check_key(rng_key, "fold_in(jax.random.key(0), new_y)", "comes first")
        run = self._finished()
        args, kwargs = self._as_fitted(args, kwargs)
        if not isinstance(run, GaussianRun):
            raise ValueError("fold_in needs groups that are independent; coefficients of a transform are none.")
        options = self._options_given() | {
            "field": self._fitted_field(run, args, kwargs),
            "hyper_values": shared_hyper(run.judged, {name: found.value for name, found in run.hyper.items()}),
        }
        new = type(self)(self.model, **options)
        new.run(rng_key, *args, **kwargs)
        if not self.diagnostics.converged:
            message = (
                f"{type(self).__name__} has not converged, and new groups are scored at the hyperparameters it has."
            )
            found = new._finished()
            ending = found.fit.diagnostics
            ending = ending._replace(converged=False, messages=(*ending.messages, message))
            found.fit = found.fit._replace(diagnostics=ending)
            warn(message)
        return new

    def loo(self, var_name: str | None = None) -> Any:
        """Leave-one-out cross-validation from the cavities of the fit, in ArviZ's type.

        The log predictive density of each observation given all others, at the hyperparameters of the fit or over
        those it integrates over: exact for Gaussian likelihoods. Elsewhere the Gaussian sites of all other observations
        are held, but for the most influential ones, whose log density is higher by more than a tenth where the fit
        has seen them: these are left out of fits at the hyperparameters of the mode, four at a time and 64 at most,
        until scores change by less than 0.02. (Of 12 binary observations of six unknowns, held sites were wrong by up
        to 0.19.) ``arviz.loo`` weights draws instead, which fails for draws of an approximation where a likelihood
        vanishes, as that of rectified-linear counts does.

        >>> import arviz as az
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP

        >>> def model(y):
        ...     level = numpyro.sample("level", dist.Normal(0, 2))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

        >>> engine = EP(model)
        >>> engine.run(jax.random.key(0), jnp.array([3, 5, 2, 4]))
        >>> print(engine.loo())  # doctest: +ELLIPSIS
        Computed from 1000 posterior samples and 4 observations log-likelihood matrix.
        ...

        :param str var_name: the observed site, where there are several.
        :return: an ``arviz.ELPDData`` with pointwise values, to be printed or given to ``arviz.compare``. Observations
            that are masked are not in it; coordinates say which are. Its first line is ArviZ's own and counts the
            engine's draws, none of which are used.
        :raises ValueError: if there is no such site, or its observations cannot be left out one by one.
        :raises FloatingPointError: if an observation has no proper cavity.
        """
        run = self._finished()
        if not isinstance(run, GaussianRun):
            raise ValueError("loo needs a Gaussian posterior; that of sparse coefficients is none.")
        name = check_single(run.reading, var_name)
        without, within = run.leave_one_out
        check_cavities(without)
        change, doubt = run.refits_without
        if doubt:
            warnings.warn(
                "The scores of observations that have much influence on the fit are rough, as the Gaussian sites of "
                f"all others are held: {doubt}. cross_validate fits without each of them.",
                UserWarning,
                stacklevel=2,
            )
        left_out, scored = (np.asarray(by_site(run.reading, values)[name]) for values in (without + change, within))
        keep = run.reading.known_mask(name)
        if keep.shape != left_out.shape:  # of observations that are read as one factor
            keep = np.ones(left_out.shape, bool)
        return elpd_data(name, left_out, scored, keep, self.num_samples)

    def sample_exactly(
        self,
        rng_key: Array,
        num_samples: int = 1000,
        *,
        num_chains: int = 4,
        num_warmup: int = 200,
        target_accept_prob: float = 0.8,
        **options: Any,
    ) -> ExactSamples:
        """Exact draws of the posterior, by Hamiltonian Monte Carlo in the coordinates of a fit, and their distance from
        it.

        The sites of the fit are held and the prior moves with the hyperparameters
        (:class:`~numpyro_ext.infer.PosteriorReparam`), so that the chains see something near a standard normal and no
        funnel. A trajectory is some quarter of a turn, which is exact for a standard normal, with a few gradients for
        what is not normal (Shahbaba et al. 2014). Their density is the model's own: the draws are exact whatever the
        fit was. A posterior of several modes of which the fit has one may keep all chains at that: ``SMC`` looks for
        others. Ctrl-C keeps what was drawn, and ``messages`` says so.

        By ``AdaptiveQuadrature`` the chains move hyperparameters alone, with the field integrated out at each step;
        most steps are turns that need no gradient, where enough of these are accepted. The field is drawn given each
        draw of them when it is first asked for (``get_samples``, ``agreement``), which costs more than the chains.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP
        >>> def model(y):
        ...     level = numpyro.sample("level", dist.Normal(0, 2))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)
        >>> engine = EP(model)
        >>> engine.run(jax.random.key(0), jnp.array([3, 5, 2, 4]))
        >>> exact = engine.sample_exactly(jax.random.key(1), num_chains=2)
        >>> exact.get_samples()["level"].shape
        (2000,)
        >>> exact.agreement.word
        'holds'

        :param rng_key: random number generator key.
        :param int num_samples: draws of each chain.
        :param int num_chains: chains, side by side; the warm-up learns from all of them.
        :param int num_warmup: steps before the draws.
        :param float target_accept_prob: average acceptance of trajectories, to which their steps are adapted.
        :param options: ``thinning``, ``progress_bar``, and ``chain_method="sequential"`` for gradients of one chain
            after the other, where all at once need too much memory.
        :return: an ``MCMC`` that has run, with draws of the model's sites, and ``agreement``.
        :raises ValueError: if there is no map from normal numbers to the sites: sparse coefficients, coefficients on a
            half line, sparse fields that add up to zero, discrete missing values; or nothing but the field to sample.
        """
        self._finished()
        return sample_exactly(
            self,
            rng_key,
            num_samples,
            num_chains=num_chains,
            num_warmup=num_warmup,
            target_accept_prob=target_accept_prob,
            **options,
        )

    def overlap(self, rng_key: Array, num_draws: int = 1000) -> Overlap:
        """Overlap of the approximation with the posterior, by the model's own density at draws of it.

        The draws are those of :class:`~numpyro_ext.infer.IndependenceMetropolis`: hyperparameters by their normal
        approximation, and the field given these, with the sites of the fit held. Once it is known,
        :meth:`print_summary` says it. It cannot see a mode that the fit has not.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP
        >>> def model(y):
        ...     level = numpyro.sample("level", dist.Normal(0, 2))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)
        >>> engine = EP(model)
        >>> engine.run(jax.random.key(0), jnp.array([3, 5, 2, 4]))
        >>> engine.overlap(jax.random.key(1)).share > 0.9
        True

        Cost: for each draw one density of the model and one conditioning of the field, and their compilation.

        :param rng_key: random number generator key.
        :param int num_draws: at least 100.
        :return: the chance that a draw of the approximation would do for the posterior, and k-hat of the tails.
        :raises ValueError: if there is no map from normal numbers to the sites, as for :meth:`sample_exactly`.
        :raises FloatingPointError: if no draw has a positive density.
        """
        return overlap(self, rng_key, num_draws)

    @property
    def guide(self) -> AutoMultivariateNormal:
        """The posterior as a fitted autoguide over all latent sites, for ``Predictive``, ELBO or PSIS; see ``params``.

        Hyperparameters have in it the covariance given by the curvature (none in directions in which the evidence does
        not curve), and are independent of the field.
        """
        return self._finished().guide_and_params[0]

    @property
    def params(self) -> dict[str, Array]:
        """The parameters of :attr:`guide` and the values of the model's ``param`` sites."""
        return self._finished().guide_and_params[1]

    def psis_diagnostic(self, rng_key: Array, num_particles: int = 1000) -> float:
        """Pareto k-hat of the field's posterior, given the hyperparameters: below 0.7 the approximation can be trusted.

        :param rng_key: random number generator key.
        :param int num_particles: number of draws.
        :return: k-hat (Vehtari et al., 2024).
        """
        check_key(rng_key, "psis_diagnostic(jax.random.key(0))", "comes first")
        return self._finished().psis_diagnostic(rng_key, num_particles)


def shared_hyper(reading: LatentGaussianReading, hyper: Mapping[str, object]) -> dict[str, object]:
    """The hyperparameters that new members of the plate have in common with those of a fit.

    :param LatentGaussianReading reading: of the fit.
    :param hyper: its hyperparameters, constrained.
    :return: those of them that stand outside the plate.
    :raises ValueError: if no plate holds the whole field, naming what stands outside.
    """
    plates = {name: {plate for plate, _ in reading.sites[name].plates} for name in reading.field}
    common = set.intersection(*plates.values())
    if not common:
        largest = max(
            sorted(set.union(*plates.values())),
            key=lambda plate: sum(plate in of for of in plates.values()),
            default=None,
        )
        shared = [name for name, found in plates.items() if largest not in found]
        where = "in a plate (numpyro.plate)" if largest is None else f"in plate {largest!r}"
        raise ValueError(
            f"new groups are independent of those of the fit where the whole field stands in one plate, and here "
            f"{', '.join(map(repr, shared))} is not {where}: what the fit knows of it would be lost. Run the model on "
            "old and new groups together, or make it a hyperparameter (field=[...] names the other sites)."
        )
    return {
        name: value for name, value in hyper.items() if not common & {plate for plate, _ in reading.sites[name].plates}
    }
