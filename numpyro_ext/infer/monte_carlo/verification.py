"""Checks that particles have the density of the model as it was given, and keep the prior that they are from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ...compilation.quick_jit import holds_little, quick_jit
from ...compilation.store import Found, shared
from ...structure import ModelStructureError, Reason
from ...structure.model.running.execution import ModelCall
from ...structure.model.running.untouched import untouched_log_densities
from ...structure.model.verification import tolerance_of_densities
from .target import Target

_NUM_POINTS = 3
_PRIOR_TOLERANCE = 1e-6


def check_target(target: Target, vectors: Array) -> None:
    """Compare the log density of particles with NumPyro's, of the function that nothing of this package has touched.

    It is made once for each computation of a model, at the first few particles, and costs a compilation of the density
    without derivatives.

    :param target: of the particles.
    :param vectors: of particles, shape ``(num_particles, size)``.
    :raises ModelStructureError: if the two differ by more than rounding.
    """
    call = ModelCall(target.model, target.args, target.kwargs, target.rng_key)
    compared = shared(Compared, call.origin, target.fingerprint, tuple(target.given), str(target.dtype))
    if not compared.value:
        _compare(target, call, vectors[:_NUM_POINTS])
        compared.value = True


class Compared(Found[bool]):
    """True if a target was compared."""


def _compare(target: Target, call: ModelCall, vectors: Array) -> None:
    compiled = quick_jit(
        lambda vectors, data: jax.vmap(lambda vector: target.joint(vector, data))(vectors),
        is_small=holds_little((vectors, target.data)),
        is_lean=True,
    )
    # One array of particles over several devices would be divided between them.
    joint = jax.device_get(compiled(jnp.asarray(jax.device_get(vectors)), target.data))
    points = [
        target.given | {name: value[number] for name, value in (joint.values | joint.left_out).items()}
        for number in range(len(vectors))
    ]
    untouched = untouched_log_densities(call, points, {*target.given, *joint.left_out})
    found, expected = np.asarray(joint.log_density, float), untouched.values + np.asarray(joint.log_jacobian, float)
    # Outside the support of a site NumPyro has a density that is not zero, where nobody validates, and where a
    # probability underflows it has none.
    seen = np.flatnonzero(np.isfinite(found) & np.isfinite(expected))
    tolerance = tolerance_of_densities(untouched.dtype) * (1.0 + np.abs(expected[seen])) + untouched.errors[seen]
    wrong = seen[np.abs(found[seen] - expected[seen]) > tolerance]
    if wrong.size:
        worst = int(wrong[0])
        raise ModelStructureError(
            f"the model was misread: the log density of a draw from its prior is {expected[worst]:.10g}, particles "
            f"have {found[worst]:.10g} there. Please report this model; NUTS is not affected.",
            reason=Reason.MISREAD,
        )


def refuse_other_priors(
    sites: Collection[str], before: Mapping[str, Any], after: Mapping[str, Any], dtype: DTypeLike
) -> None:
    """Refuse the arguments of an update with which log priors of the particles, by site, are other ones than before.

    :raises ValueError: naming the site.
    """
    atol = 1e-4 if dtype == np.float32 else 1e-8
    for name in sites:
        if not all(np.allclose(a, b, _PRIOR_TOLERANCE, atol) for a, b in zip(before[name], after[name], strict=True)):
            raise ValueError(
                f"The prior of site '{name}' is another one with these arguments, and particles keep the prior "
                "that they were drawn from. Make it independent of what is updated (prior scales and inputs from "
                "the data are common causes), or call run(...) anew."
            )
