"""Read a NumPyro model as sparse linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Unpack

from ..model.search import Form, ReadOptions, read_first
from .priors import is_sparse
from .reading import SparseLinearReading

SPARSE_LINEAR = Form(
    SparseLinearReading,
    is_sparse,
    "the model has no site of sparse coefficients (latent sites: {}). This engine needs HiddenMarkovTree, Laplace, "
    "StudentT or Normal sites; use EP for flat and other Gaussian sites, or NUTS.",
)


def read_sparse_linear(
    model: Callable[..., object],
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    **options: Unpack[ReadOptions],
) -> SparseLinearReading:
    """Read a model as sparse linear: coefficients with a product or forest prior behind an operator, Gaussian noise.

    The coefficients are the latent sites ``HiddenMarkovTree``, ``Laplace``, ``StudentT`` or ``Normal``, of one family
    of components, in which the means of all observed ``Normal`` sites are jointly affine; everything else becomes a
    hyperparameter. Operators are not materialised: an image of 256 x 256 pixels is read in seconds.

    :param model: a NumPyro model.
    :param tuple args: its arguments, which stay concrete.
    :param dict kwargs: its keyword arguments.
    :param options: ``field``, ``init_values``, ``rng_key`` and ``check``: see
        :func:`~numpyro_ext.structure.read_first`.
    :return: the reading.
    :raises ModelStructureError: naming the site that does not fit, what was found there and what to do.

    **Example:**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro_ext.linalg import convolution
    >>> from numpyro_ext.structure import read_sparse_linear
    >>> blur = convolution((4,), jnp.array([0.25, 0.5, 0.25]))
    >>> def model(y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     s = numpyro.sample("s", dist.Laplace(0.0, scale).expand([4]).to_event(1))
    ...     numpyro.sample("y", dist.Normal(blur @ s, 0.1).to_event(1), obs=y)
    >>> reading = read_sparse_linear(model, (jnp.array([1.0, 0.0, 0.0, 2.0]),))
    >>> form = reading.form({"scale": 1.0})
    >>> reading.field, tuple(reading.hyper), form.operator.shape
    (('s',), ('scale',), (4, 4))

    Cost: a few abstract traces of the model; with ``check`` one compilation, reused for data of the same shapes.
    """
    return read_first([SPARSE_LINEAR], model, args, kwargs, **options)
