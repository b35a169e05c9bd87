"""Integrated nested Laplace approximation as an inference engine for NumPyro models."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, Unpack

from ....potentials.vector_rows import VectorRows
from ....structure import LatentGaussianReading, ModelStructureError
from ...front.options import check_one_of, check_positive
from ..algorithms.algorithm import Algorithm
from ..algorithms.posterior import LARGEST_DENSE_COVARIANCE
from ..integration.exploration import Integrate, Integration
from ..integration.simplified_laplace import (
    LARGEST_CORRECTED_FIELD,
    gaussian_marginals,
    simplified_laplace_marginals,
)
from .laplace_approximation import LaplaceApproximation, LaplaceOptions

Marginal = Literal["simplified-laplace", "gaussian"]
DesignName = Literal["auto", "lattice", "central-composite"]

_DESIGNS: dict[str, Integrate] = {"auto": "auto", "lattice": "grid", "central-composite": "ccd"}


class INLA(LaplaceApproximation):
    """Integrated nested Laplace approximation (Rue, Martino and Chopin 2009): Laplace's method for the field, marginals
    corrected for skewness, and integration over the hyperparameters by a deterministic design.

    Accepts the models of :class:`~numpyro_ext.infer.LaplaceApproximation`. The posterior of the hyperparameters is the
    Laplace evidence times their prior, in the unconstrained space. Its mode is found first, and ``integrate`` says how
    the points around it are chosen (``"auto"`` by default; see :class:`~numpyro_ext.infer.Engine`). The posterior of
    each quantity is a mixture over the points.

    ``posterior`` holds these mixtures, ``hyper`` the posteriors of the hyperparameters, ``log_evidence`` is the
    integral over both, and :meth:`get_samples` draws both. With ``marginal="simplified-laplace"`` the components of
    the mixtures are skew normals with the mean and skewness of the simplified Laplace approximation. Draws have
    Gaussian components in either case, and the means of the marginals. ``guide``, ``params`` and ``psis_diagnostic``
    are those of the mode.

    **Example:**

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
    :param str design: ``"lattice"`` or ``"central-composite"``: former names of ``integrate="grid"`` and ``"ccd"``.
    :param float grid_step: of the lattice, in posterior standard deviations.
    :param float log_density_drop: the lattice ends where the log density has fallen by this much.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``integrate``, ``num_steps``, ``tol``, ``field``,
        ``hyper_values``, ``init_values``, ``num_restarts``, ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and
        ``progress_bar``.
    :raises ValueError: if an option is unknown or out of range.
    """

    must_integrate: ClassVar[bool] = True

    def __init__(
        self,
        model: Callable[..., object],
        *,
        marginal: Marginal = "simplified-laplace",
        design: DesignName | None = None,
        grid_step: float = 0.75,
        log_density_drop: float = 10.0,
        **options: Unpack[LaplaceOptions],
    ) -> None:
        check_one_of(Marginal, marginal=marginal)
        check_positive(grid_step=grid_step, log_density_drop=log_density_drop)
        if design is not None:
            check_one_of(DesignName, design=design)
            options["integrate"] = _DESIGNS[design]
        options.setdefault("integrate", "auto")
        if options["integrate"] == "none":
            raise ValueError("INLA integrates over hyperparameters; LaplaceApproximation sets them to their optimum.")
        super().__init__(model, **options)
        self.marginal = marginal
        self.design = design
        self.grid_step = grid_step
        self.log_density_drop = log_density_drop

    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        for name, potential in zip(reading.factor_names, reading.abstract_form.potentials, strict=True):
            if self.marginal == "simplified-laplace" and isinstance(potential, VectorRows):
                raise ModelStructureError(
                    f"The simplified Laplace marginals need factors of one predictor each, and those of site {name!r} "
                    f"({type(potential.base).__name__}) have several. Use INLA(model, marginal='gaussian'), or keep "
                    "one predictor in the field (field=[...]) and integrate over the other's few coefficients.",
                    site=name,
                )
        num_unknowns = reading.abstract_form.num_columns
        is_sparse = reading.abstract_form.layout is not None
        largest = LARGEST_CORRECTED_FIELD if is_sparse else LARGEST_DENSE_COVARIANCE
        if self.marginal == "simplified-laplace" and num_unknowns > largest:
            # EP would factorise what is left to iterations here
            other = (
                "LaplaceApproximation(model)" if reading.has_estimates else "EP, whose means are not those of a mode"
            )
            raise ModelStructureError(
                f"The simplified Laplace marginals need the covariance of every predictor with all {num_unknowns} "
                f"unknowns, which {'takes a solve for each of them' if is_sparse else 'is too large'}. Use "
                f"INLA(model, marginal='gaussian'), or {other}."
            )
        return super().algorithm(reading)

    @property
    def _integration(self) -> Integration:
        return Integration(
            self.integrate, self.grid_step, self.log_density_drop, self.progress_bar, self._costs.most_points
        )

    @property
    def _marginals_fn(self) -> Callable[..., object]:
        return gaussian_marginals if self.marginal == "gaussian" else simplified_laplace_marginals
