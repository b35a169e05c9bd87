"""Integrated nested Laplace approximation as an inference engine for NumPyro models."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Unpack

from jax import Array

from ....potentials.vector_rows import VectorRows
from ....structure import LatentGaussianReading, ModelStructureError
from ...front.engine import check_one_of, check_positive
from ...front.running.progress import warn
from ...front.state import EngineState
from ...hyper.design import LARGEST_DIMENSION
from ...hyper.space import UnconstrainedSpace
from ..algorithms.posterior import LARGEST_DENSE_COVARIANCE
from ..engine import GaussianOptions
from ..laplace_approximation import LaplaceApproximation
from ..programs import Algorithm
from .run import DesignName, DesignOptions, INLARun, Marginal

__all__ = ["INLA"]


class INLA(LaplaceApproximation):
    """Integrated nested Laplace approximation (Rue, Martino and Chopin 2009): Laplace's method for the field, and
    integration over up to six hyperparameters by a deterministic design.

    Accepts the models of :class:`~numpyro_ext.infer.gaussian.laplace_approximation.LaplaceApproximation` in which every
    hyperparameter has a prior. The posterior of the hyperparameters is the Laplace evidence times their prior, in the
    unconstrained space. Its mode is found first. Up to two hyperparameters are then integrated over a lattice in the
    eigenbasis of the curvature there, three to six by a central composite design: 15 to 45 points, exact where the
    log density is quadratic on each side of the mode. The posterior of each quantity is a mixture over the points.

    ``posterior`` holds these mixtures, ``hyper`` the posteriors of the hyperparameters, ``log_evidence`` is the
    integral over both, and :meth:`get_samples` draws both. With ``marginal="simplified-laplace"`` the components of
    the mixtures are skew normals with the mean and skewness of the simplified Laplace approximation; draws have
    Gaussian components in either case. ``guide``, ``params`` and ``psis_diagnostic`` are those of the mode.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import INLA

        >>> def model(y=None):
        ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        ...     with numpyro.plate("groups", 6):
        ...         effect = numpyro.sample("effect", dist.Normal(1.0, scale))
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=y)

        >>> inla = INLA(model)
        >>> inla.run(jax.random.key(0), jnp.array([3, 0, 8, 2, 1, 5]))
        >>> print(f"{inla.posterior['effect'].mean[2]:.2f} +- {inla.posterior['effect'].sd[2]:.2f}")
        1.69 +- 0.41
        >>> print(f"{inla.hyper['scale'].mean:.2f} +- {inla.hyper['scale'].sd:.2f}")
        0.71 +- 0.39

    :param model: a NumPyro model.
    :param str marginal: ``"simplified-laplace"`` or ``"gaussian"``: what the components of the marginals are.
    :param str design: ``"auto"`` (as above), or ``"lattice"`` or ``"central-composite"`` for any number of
        hyperparameters. A lattice integrates to three digits, with about 11, 110 and 900 points for one, two and three
        of them. A central composite design leaves errors of hundredths in the log evidence and in the field's moments
        (in standard deviations), and of a tenth in the standard deviations of skewed hyperparameters.
    :param float grid_step: of the lattice, in posterior standard deviations.
    :param float log_density_drop: the lattice ends where the log density has fallen by this much.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``num_steps``, ``tol``, ``field``,
        ``hyper_values``, ``init_values``, ``num_restarts``, ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and
        ``progress_bar``.
    :raises ValueError: if an option is unknown or out of range.
    """

    integrates_hyper: ClassVar[bool] = True

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        marginal: Marginal = "simplified-laplace",
        design: DesignName = "auto",
        grid_step: float = 0.75,
        log_density_drop: float = 10.0,
        **options: Unpack[GaussianOptions],
    ) -> None:
        check_one_of(Marginal, marginal=marginal)
        check_one_of(DesignName, design=design)
        check_positive(grid_step=grid_step, log_density_drop=log_density_drop)
        super().__init__(model, **options)
        self.marginal = marginal
        self.design = design
        self.grid_step = grid_step
        self.log_density_drop = log_density_drop

    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        for name, site in reading.hyper.items():
            if site.is_param and name not in self.hyper_values:
                raise ModelStructureError(
                    f"INLA integrates over hyperparameters, and {name!r} is a param site, which has no prior. Make it "
                    "a sample site, or give its value in hyper_values."
                )
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        if space.size > LARGEST_DIMENSION:
            sizes = ", ".join(f"{name!r} ({math.prod(space.shapes[name])})" for name in space.names)
            raise ModelStructureError(
                f"INLA integrates over up to {LARGEST_DIMENSION} hyperparameters, and this model has {space.size}: "
                f"{sizes}. Give values to some of them in hyper_values, or maximise over them (LaplaceApproximation)."
            )
        for name, potential in zip(reading.factor_names, reading.abstract_form.potentials, strict=True):
            if self.marginal == "simplified-laplace" and isinstance(potential, VectorRows):
                raise ModelStructureError(
                    f"The simplified Laplace marginals need factors of one predictor each, and those of site {name!r} "
                    f"({type(potential.base).__name__}) have several. Use INLA(model, marginal='gaussian').",
                    site=name,
                )
        num_unknowns = reading.abstract_form.num_columns
        if self.marginal == "simplified-laplace" and num_unknowns > LARGEST_DENSE_COVARIANCE:
            raise ModelStructureError(
                f"The simplified Laplace marginals need the covariance of every predictor with all {num_unknowns} "
                "unknowns, which is too large. Use INLA(model, marginal='gaussian')."
            )
        return super().algorithm(reading)

    def run(self, rng_key: Array, *args: Any, init_state: EngineState | None = None, **kwargs: Any) -> None:
        """Read the model on these arguments, find the mode of its hyperparameters, and integrate over them.

        :param rng_key: random number generator key, for the check of the reading, the restarts and the draws.
        :param args: arguments of the model.
        :param EngineState init_state: ``last_state`` of an earlier run, where the search for the mode goes on.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the model is not of the form, a hyperparameter has no prior, or there are more
            than six.
        :raises ValueError: if the evidence is not finite; the message names the likely cause.
        :raises RuntimeError: if the density of the hyperparameters does not fall in every direction from its mode.
        """
        super().run(rng_key, *args, init_state=init_state, **kwargs)
        try:
            run = self._finished()
            assert isinstance(run, INLARun)  # of _new_run
            messages = run.exploration.messages
        except RuntimeError:
            self._run = None
            raise
        if messages:
            warn(f"{type(self).__name__}: " + " ".join(messages))

    @property
    def _new_run(self) -> Callable[..., INLARun]:
        options = DesignOptions(self.marginal, self.design, self.grid_step, self.log_density_drop)
        return partial(INLARun, num_samples=self.num_samples, options=options)
