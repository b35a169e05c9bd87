"""Three item-response models beyond the usual ones, to read and to copy: a few more lines each."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers

from .indices import checked_indices

__all__ = ["items_between_groups", "speed_and_accuracy", "students_in_schools"]


def speed_and_accuracy(
    response: ArrayLike | None = None,
    times: ArrayLike | None = None,
    *,
    num_categories: int,
    shape: tuple[int, int] | None = None,
) -> None:
    r"""Graded answers and the times that they took: who is able and who is fast (van der Linden, 2007).

    .. math:: P(y_{ni} \ge k) = \sigma(a_i \theta_n - c_{ik}), \qquad \log t_{ni} \sim N(b_i - \tau_n, s_i^2)

    with correlated ability and speed. Sites: ``discrimination`` (:math:`a`), ``cutpoints`` (:math:`c`),
    ``time_intensity`` (:math:`b`), ``time_noise`` (:math:`s`), ``speed_scale``, ``trait_cholesky``, ``trait``
    (``(people, 2)``, ability and speed), and the observed ``response`` and ``times``.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import speed_and_accuracy
        >>> draws = Predictive(speed_and_accuracy, num_samples=5)(random.key(0), num_categories=3, shape=(10, 4))
        >>> print(draws["response"].shape, draws["times"].shape)
        (5, 10, 4) (5, 10, 4)

    :param response: answers ``0, ..., num_categories - 1``, shape ``(people, items)``, ``nan`` for none.
    :param times: positive times, of the same shape, ``nan`` for none.
    :param int num_categories: number of categories of each item.
    :param tuple shape: ``(people, items)``, needed without answers.
    :raises ValueError: if neither answers nor a shape is given.
    """
    num_people, num_items = _shape(response, shape, "speed_and_accuracy")
    with numpyro.plate("items", num_items):
        a = numpyro.sample("discrimination", dist.LogNormal(0.0, 0.5))
        free = dist.Normal(np.linspace(-1.0, 1.0, num_categories - 1), 1.0).to_event(1)
        ordered = dist.TransformedDistribution(free, dist.transforms.OrderedTransform())
        cutpoints = numpyro.sample("cutpoints", ordered)
        intensity = numpyro.sample("time_intensity", dist.Normal(0.0, 3.0))
        noise = numpyro.sample("time_noise", dist.HalfNormal(1.0))
    speed_scale = numpyro.sample("speed_scale", dist.HalfNormal(1.0))
    scales = jnp.stack([jnp.ones_like(speed_scale), speed_scale])
    factor = numpyro.sample("trait_cholesky", dist.LKJCholesky(2, 1.0))
    with numpyro.plate("people", num_people):
        trait = numpyro.sample("trait", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scales[:, None] * factor))
    _observe("response", dist.OrderedLogistic(a * trait[:, :1], cutpoints), response, is_integer=True)
    _observe("times", dist.LogNormal(intensity - trait[:, 1:], noise), times, otherwise=1.0)


def items_between_groups(
    response: ArrayLike | None = None,
    group: ArrayLike | None = None,
    *,
    num_groups: int,
    shape: tuple[int, int] | None = None,
) -> None:
    r"""Items that may differ between groups of people, by little unless the answers say so.

    .. math:: P(y_{ni} = 1) = \sigma(a_i \theta_n + d_i + \delta_{g(n) i}), \qquad \delta_{gi} \sim N(0, s^2), \quad
        \theta_n \sim N(\mu_{g(n)}, 1)

    with the first group as the reference, :math:`\delta_{0i} = \mu_0 = 0`: differential item functioning as a
    multilevel model. The prior of the differences tells them from a difference of the means. Sites: ``discrimination``,
    ``intercept``, ``difference_scale`` (:math:`s`), ``difference`` (:math:`\delta`, ``(num_groups - 1, items)``),
    ``group_mean`` (:math:`\mu`, ``(num_groups - 1,)``), ``trait`` and the observed ``response``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import items_between_groups
        >>> draws = Predictive(items_between_groups, num_samples=5)(
        ...     random.key(0), group=np.arange(10) % 3, num_groups=3, shape=(10, 4))
        >>> print(draws["difference"].shape, draws["response"].shape)
        (5, 2, 4) (5, 10, 4)

    :param response: answers 0 and 1, shape ``(people, items)``, ``nan`` for none.
    :param group: group of each person, integers from 0, shape ``(people,)``.
    :param int num_groups: number of groups.
    :param tuple shape: ``(people, items)``, needed without answers.
    :raises ValueError: for groups out of range, and if neither answers nor a shape is given.
    """
    num_people, num_items = _shape(response, shape, "items_between_groups")
    (groups,) = checked_indices(group=(np.zeros(num_people, int) if group is None else group, num_groups))
    a, d = _logistic_items(num_items)
    scale = numpyro.sample("difference_scale", dist.HalfNormal(0.5))
    others = dist.Normal(0.0, scale).expand([num_groups - 1, num_items]).to_event(2)
    difference = jnp.concatenate([jnp.zeros((1, num_items)), numpyro.sample("difference", others)])
    means = numpyro.sample("group_mean", dist.Normal(0.0, 1.0).expand([num_groups - 1]).to_event(1))
    means = jnp.concatenate([jnp.zeros(1), means])
    with numpyro.plate("people", num_people):
        trait = numpyro.sample("trait", dist.Normal(means[groups], 1.0))
    _observe("response", dist.Bernoulli(logits=a * trait[:, None] + d + difference[groups]), response, is_integer=True)


def students_in_schools(
    response: ArrayLike | None = None,
    school: ArrayLike | None = None,
    *,
    num_schools: int,
    shape: tuple[int, int] | None = None,
) -> None:
    r"""Abilities of students that depend on their school: a multilevel model of what a test measures.

    .. math:: P(y_{ni} = 1) = \sigma(a_i \theta_n + d_i), \qquad \theta_n \sim N(u_{s(n)}, 1), \quad u_s \sim N(0, t^2)

    Sites: ``discrimination``, ``intercept``, ``school_scale`` (:math:`t`), ``school_effect`` (:math:`u`), ``trait`` and
    the observed ``response``. The share of variance between schools is :math:`t^2 / (1 + t^2)`.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import students_in_schools
        >>> draws = Predictive(students_in_schools, num_samples=5)(
        ...     random.key(0), school=np.arange(10) // 5, num_schools=2, shape=(10, 4))
        >>> print(draws["school_effect"].shape, draws["response"].shape)
        (5, 2) (5, 10, 4)

    :param response: answers 0 and 1, shape ``(students, items)``, ``nan`` for none.
    :param school: school of each student, integers from 0, shape ``(students,)``.
    :param int num_schools: number of schools.
    :param tuple shape: ``(students, items)``, needed without answers.
    :raises ValueError: for schools out of range, and if neither answers nor a shape is given.
    """
    num_people, num_items = _shape(response, shape, "students_in_schools")
    (schools,) = checked_indices(school=(np.zeros(num_people, int) if school is None else school, num_schools))
    a, d = _logistic_items(num_items)
    scale = numpyro.sample("school_scale", dist.HalfNormal(1.0))
    with numpyro.plate("schools", num_schools):
        effect = numpyro.sample("school_effect", dist.Normal(0.0, scale))
    with numpyro.plate("people", num_people):
        trait = numpyro.sample("trait", dist.Normal(effect[schools], 1.0))
    _observe("response", dist.Bernoulli(logits=a * trait[:, None] + d), response, is_integer=True)


def _logistic_items(num_items: int) -> tuple[Array, Array]:
    """Slopes and intercepts of items with two answers."""
    with numpyro.plate("items", num_items):
        a = numpyro.sample("discrimination", dist.LogNormal(0.0, 0.5))
        return a, numpyro.sample("intercept", dist.Normal(0.0, 3.0))


def _shape(response: ArrayLike | None, shape: tuple[int, int] | None, model: str) -> tuple[int, int]:
    found = shape if response is None else np.shape(response)
    if found is None or len(found) != 2:
        raise ValueError(f"{model} needs answers of people to items, or their shape (people, items); got {found}.")
    return int(found[0]), int(found[1])


def _observe(
    name: str, distribution: dist.Distribution, values: ArrayLike | None, *, is_integer: bool = False,
    otherwise: float = 0.0,
) -> None:  # fmt: skip
    """An observed site whose values that are ``nan`` are left out."""
    observed: Array | None = None
    known: ArrayLike = True
    if values is not None:
        values = jnp.asarray(values)
        known = ~jnp.isnan(values.astype(float))
        observed = jnp.where(known, values, otherwise)
        observed = observed.astype(int) if is_integer else observed
    with handlers.mask(mask=known):
        numpyro.sample(name, distribution, obs=observed)
