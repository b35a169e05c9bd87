"""Models read as sparse linear models: against NumPyro's log density and dense matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_ext.distributions import HiddenMarkovTree
from numpyro_ext.linalg import LinearOperator, convolution, fourier, from_matrix, select, total_variation
from numpyro_ext.linalg.frozen_pytree import frozen_pytree
from numpyro_ext.linalg.operators.wavelets import wavelet_transform
from numpyro_ext.potentials.families.gaussian import GaussianPotential
from numpyro_ext.potentials.families.laplace import LaplacePotential
from numpyro_ext.potentials.families.student_t import StudentTPotential
from numpyro_ext.potentials.trees.forest import wavelet_forest
from numpyro_ext.structure import ModelStructureError, SparseLinearReading, read_sparse_linear

SHAPE, SIZE = (4, 4), 16
rng = np.random.default_rng(7)
Y = rng.normal(size=SIZE)
IMAGE = Y.reshape(SHAPE)
BLUR = convolution(SHAPE, rng.random((3, 3)), "reflect")
TRANSFORM = wavelet_transform(SHAPE, "haar", 2)
MASK = rng.random(SHAPE) < 0.5
DENSE = rng.normal(size=(5, SIZE))


def _check(reading: SparseLinearReading) -> Any:
    """The density and every affine site against NumPyro, at values outside of the reader's own check."""
    hyper = reading.initial_hyper()
    s = 0.7 * jax.random.normal(jax.random.key(5), (reading.num_columns,))

    @jax.jit
    def both(s: Any, data: Any) -> Any:
        form = reading.form(hyper, data)
        values = reading.values(hyper, s, data)
        latents = {n: values.get(n, hyper.get(n)) for n in (*reading.field, *reading.hyper)}
        expected, trace = log_density(handlers.seed(reading.model, 0), reading.args, reading.kwargs, latents)
        maps = {n: operator @ s + offset for n, (operator, offset) in reading.maps(hyper, data).items()}
        sites = {n: jnp.ravel(trace[n]["value"]) for n in maps}
        return form, form.operator.materialise(), (reading.log_joint(hyper, s, data), maps), (expected, sites)

    form, matrix, (found, maps), (expected, sites) = both(s, reading.data)
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    for name, value in maps.items():
        np.testing.assert_allclose(value, sites[name], atol=1e-12)
    return form, matrix


def _coefficients(scale: Any = 1.0) -> Any:
    return numpyro.sample("s", dist.Laplace(0.0, scale).expand([SIZE]).to_event(1))


@pytest.mark.thorough
def test_masked_wavelet_model_with_hyperparameters() -> None:
    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
        bias = numpyro.sample("bias", dist.LogNormal(0.0, 1.0))
        image = numpyro.deterministic("image", (TRANSFORM.T @ _coefficients(scale)).reshape(SHAPE))
        numpyro.deterministic("energy", jnp.sum(image**2))
        mean = (BLUR @ image.reshape(-1)).reshape(SHAPE) + bias
        with handlers.mask(mask=MASK):
            numpyro.sample("y", dist.Normal(mean, noise), obs=y)

    broken = np.where(MASK, IMAGE, np.nan)
    reading = read_sparse_linear(model, (jnp.nan_to_num(broken),))
    assert reading.field == ("s",)
    assert set(reading.hyper) == {"scale", "noise", "bias"}
    assert reading.affine_sites == ("s", "image")
    form, matrix = _check(reading)
    expected = np.asarray(jax.jit((BLUR @ TRANSFORM.T).materialise)())[MASK.reshape(-1)]
    np.testing.assert_allclose(matrix, expected, atol=1e-13)
    adjoint = jax.jit(lambda operator: operator.T @ jnp.eye(len(expected)))(form.operator)
    np.testing.assert_allclose(adjoint, expected.T, atol=1e-13)
    np.testing.assert_allclose(form.observed, Y[MASK.reshape(-1)] - reading.initial_hyper()["bias"], atol=1e-13)
    assert form.noise_variance.shape == ()
    np.testing.assert_allclose(form.noise_variance, 0.09)
    assert not reading.is_design_fixed
    assert form.forest.num_groups == 1
    assert isinstance(form.prior.low, LaplacePotential)
    assert f"{MASK.sum()} of 16 elements" in reading.describe()

    # pure in hyperparameters: through jit and grad, and equal structures are compiled once
    hyper = {"scale": jnp.float64(0.5), "noise": jnp.float64(0.2), "bias": jnp.float64(1.0)}
    value = jax.jit(lambda h, d: reading.form(h, d).log_density(jnp.ones(SIZE)))
    gradient = jax.grad(value)(hyper, reading.data)
    step = 1e-6
    for name, center in hyper.items():
        up, down = ({**hyper, name: center + sign * step} for sign in (1.0, -1.0))
        slope = (value(up, reading.data) - value(down, reading.data)) / (2.0 * step)
        np.testing.assert_allclose(gradient[name], slope, rtol=1e-6)
    again = read_sparse_linear(model, (jnp.asarray(IMAGE + 1.0),), check=False)
    assert again.structure == reading.structure
    first, second = (jax.tree.structure(jax.eval_shape(each.form, hyper, each.data)) for each in (reading, again))
    assert first == second
    assert hash(first) == hash(second)


COMPONENTS = {
    "scale per coefficient": (lambda: dist.Laplace(0.0, jnp.linspace(0.5, 2.0, SIZE)), LaplacePotential, SIZE),
    "location": (lambda: dist.Laplace(jnp.linspace(-1.0, 1.0, SIZE), 2.0), LaplacePotential, 1),
    "normal": (lambda: dist.Normal(0.0, 2.0).expand([SIZE]), GaussianPotential, 1),
    "student": (lambda: dist.StudentT(3.0, 0.0, 0.5).expand([SIZE]), StudentTPotential, 1),
}


@pytest.mark.parametrize("name", COMPONENTS)
def test_components(name: str) -> None:
    make, component, num_groups = COMPONENTS[name]

    def model(y: Any) -> None:
        s = numpyro.sample("s", make().to_event(1))
        numpyro.sample("y", dist.Normal(DENSE @ s, jnp.linspace(0.1, 0.5, 5)), obs=y)

    reading = read_sparse_linear(model, (Y[:5],))
    form, matrix = _check(reading)
    assert isinstance(form.prior.low, component)
    assert form.forest.num_groups == num_groups
    assert reading.is_design_fixed
    np.testing.assert_allclose(matrix, DENSE, atol=1e-14)
    np.testing.assert_allclose(form.noise_variance, np.linspace(0.1, 0.5, 5) ** 2)


def test_priors_with_the_same_parameters_are_told_apart() -> None:
    """Programs are shared between readings of equal structure, and a program knows no more than arrays."""

    def reading_of(prior: Any) -> Any:
        def model(y: Any) -> None:
            s = numpyro.sample("s", prior.expand([SIZE]).to_event(1))
            numpyro.sample("y", dist.Normal(BLUR @ s, 0.1).to_event(1), obs=y)

        return read_sparse_linear(model, (Y,))

    laplace, normal = reading_of(dist.Laplace(0.0, 2.0)), reading_of(dist.Normal(0.0, 2.0))
    assert laplace.structure != normal.structure


@pytest.mark.thorough
def test_several_transforms_and_several_observed_sites() -> None:
    def model(y: Any, spectrum: Any) -> None:
        s = _coefficients(0.5)
        with numpyro.plate("pixels", SIZE):
            d = numpyro.sample("d", dist.Laplace(0.0, jnp.linspace(1.0, 2.0, SIZE)))
        image = TRANSFORM.T @ s + fourier(SHAPE).T @ d
        numpyro.sample("y", dist.Normal(BLUR @ image, 0.1).to_event(1), obs=y)
        residual = spectrum - (select([0, 3], SIZE) @ fourier(SHAPE)) @ image
        numpyro.sample("spectrum", dist.Normal(residual, 0.3).to_event(1), obs=jnp.zeros(2))
        numpyro.sample("unrelated", dist.Normal(0.0, 1.0), obs=0.3)

    reading = read_sparse_linear(model, (Y, jnp.ones(2)))
    assert reading.field == ("s", "d")
    assert reading.factor_names == ("y", "spectrum")
    form, _ = _check(reading)
    assert form.operator.shape == (SIZE + 2, 2 * SIZE)
    assert form.forest.num_groups == 1 + SIZE
    np.testing.assert_allclose(form.noise_variance, np.repeat([0.01, 0.09], [SIZE, 2]))


def test_smaller_sites_of_another_family_become_hyperparameters() -> None:
    def model(y: Any) -> None:
        bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(BLUR @ _coefficients() + bias, 0.1).to_event(1), obs=y)

    reading = read_sparse_linear(model, (Y,))
    assert reading.field == ("s",)
    assert tuple(reading.hyper) == ("bias",)
    _check(reading)
    assert read_sparse_linear(model, (Y,), field=["s"], check=False).field == ("s",)


def test_kernel_that_depends_on_a_hyperparameter() -> None:
    def model(y: Any) -> None:
        width = numpyro.sample("width", dist.LogNormal(0.0, 0.3))
        kernel = jnp.exp(-0.5 * (jnp.arange(-2.0, 3.0) / width) ** 2)
        blur = convolution(SIZE, kernel / kernel.sum(), "zero")
        numpyro.sample("y", dist.Normal(blur @ _coefficients(), 0.1).to_event(1), obs=y)

    reading = read_sparse_linear(model, (Y,))
    assert not reading.is_design_fixed
    narrow = np.asarray(jax.jit(lambda hyper: reading.form(hyper).operator.materialise())({"width": 0.1}))
    np.testing.assert_allclose(narrow, np.eye(SIZE), atol=1e-12)
    _check(reading)


@frozen_pytree
class _WrongAdjoint(LinearOperator):
    """A product whose derivative rule is wrong."""

    scale: Any

    @property
    def shape(self) -> tuple[int, int]:
        return SIZE, SIZE

    def matvec(self, x: Any) -> Any:
        # linear in value, transposed wrongly
        return jax.custom_derivatives.linear_call(lambda _, v: self.scale * jnp.cumsum(v), lambda _, v: v, (), x)


def _observe(mean: Any, scale: Any = 0.1) -> Any:
    def model() -> None:
        s = _coefficients()
        numpyro.sample("y", dist.Normal(mean(s), scale(s) if callable(scale) else scale).to_event(1), obs=Y)

    return model


def _poisson() -> None:
    numpyro.sample("y", dist.Poisson(jnp.exp(BLUR @ _coefficients())).to_event(1), obs=np.arange(SIZE))


def _nan_pixels() -> None:
    data = np.where(np.arange(SIZE) < 3, np.nan, Y)
    numpyro.sample("y", dist.Normal(BLUR @ _coefficients(), 0.1).to_event(1), obs=data)


def _all_masked() -> None:
    s = _coefficients()
    with handlers.mask(mask=np.zeros(SIZE, bool)):
        numpyro.sample("y", dist.Normal(BLUR @ s, 0.1), obs=Y)


def _prior_masked_as_well() -> None:
    with handlers.mask(mask=np.zeros(SIZE, bool)):
        numpyro.sample("y", dist.Normal(BLUR @ _coefficients(), 0.1), obs=Y)


def _one_site_masked() -> None:
    s = _coefficients()
    numpyro.sample("z", dist.Normal(s, 0.1), obs=Y)
    with handlers.mask(mask=np.zeros(SIZE, bool)):
        numpyro.sample("y", dist.Normal(BLUR @ s, 0.1), obs=Y)


def _unknown_mask() -> None:
    s = _coefficients()
    level = numpyro.sample("level", dist.HalfNormal(1.0))
    with handlers.mask(mask=Y > level):
        numpyro.sample("y", dist.Normal(BLUR @ s, 0.1), obs=Y)


def _two_families() -> None:
    s = _coefficients()
    t = numpyro.sample("t", dist.StudentT(3.0, 0.0, 1.0).expand([300]).to_event(1))
    numpyro.sample("y", dist.Normal(s + t[:SIZE], 0.1), obs=Y)


def _scaled() -> None:
    s = _coefficients()
    with handlers.scale(scale=2.0):
        numpyro.sample("y", dist.Normal(BLUR @ s, 0.1), obs=Y)


def _no_noise(scale: float, validate: bool | None = False) -> Any:
    def model() -> None:
        numpyro.sample("y", dist.Normal(_coefficients(), scale, validate_args=validate).to_event(1), obs=Y)

    return model


def _flat() -> None:
    u = numpyro.sample("u", dist.ImproperUniform(dist.constraints.real_vector, (), (SIZE,)))
    numpyro.sample("y", dist.Normal(BLUR @ u, 0.1), obs=Y)


REFUSED = {
    "mean not affine": (_observe(jnp.exp), r"mean of observed site 'y' is not affine in \['s'\].*operator @ s"),
    "product of coefficients": (_observe(lambda s: s * s[::-1]), r"not affine in \['s'\]"),
    "noise depends": (
        _observe(lambda s: s, lambda s: 0.1 + s**2),
        r"noise scale of observed site 'y' depends on \['s'\]",
    ),
    "not Gaussian": (_poisson, r"'y' \(Poisson\).*not Gaussian.*use EP"),
    "no noise": (_no_noise(0.0), "noise scale of observed site 'y' is 0 in 16 of 16.*positive"),
    "negative noise": (_no_noise(-1.0), "noise scale of observed site 'y' is -1"),
    "noise refused by NumPyro": (_no_noise(0.0, None), "after site 's'.*invalid scale parameter.*must be positive"),
    "NaN pixels": (_nan_pixels, r"'y': 3 values are not finite.*mask it: handlers.mask\(mask=jnp.isfinite.*nan_to_num"),
    "all masked": (_all_masked, "masked: there is nothing to learn from"),
    "prior masked": (_prior_masked_as_well, r"\['s'\] are masked: mask their observations alone"),
    "one site masked": (_one_site_masked, "every observation of site 'y' is masked"),
    "mask not known": (_unknown_mask, "mask of observed site 'y' depends on"),
    "two families": (_two_families, r"components of different families.*'s': 'Laplace'.*'t': 'StudentT'"),
    "scale handler": (_scaled, "'y' is inside a scale handler"),
    "no candidate": (_flat, "no site of sparse coefficients.*ImproperUniform"),
    "wrong adjoint": (_observe(lambda s: _WrongAdjoint(2.0) @ s), "not affine|derivatives are not those"),
    "NaN operator": (_observe(lambda s: from_matrix(jnp.full((SIZE, SIZE), jnp.nan)) @ s), "not finite|not those"),
    "unused": (_observe(lambda s: jnp.zeros(SIZE)), r"no observed site depends on the field \['s'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_site(name: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(ModelStructureError, match="(?s)" + message):
        read_sparse_linear(model)


def test_field_can_be_chosen_and_is_checked() -> None:
    with pytest.raises(ModelStructureError, match=r"field: site 'u' is ImproperUniform"):
        read_sparse_linear(_flat, field=["u"])
    with pytest.raises(ModelStructureError, match="With field=.*different families"):
        read_sparse_linear(_two_families, field=["s", "t"])


@pytest.mark.thorough
def test_total_variation_of_white_coefficients_reads_in_linear_memory() -> None:
    # a matrix of this operator would take 34 GB
    sides = (256, 256)
    operator = total_variation(sides) @ wavelet_transform(sides, "haar", 2).T

    def model(y: Any) -> None:
        s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([operator.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Normal(operator @ s, 0.5).to_event(1), obs=y)

    y = rng.normal(size=operator.shape[0])
    reading = read_sparse_linear(model, (y,))
    form = reading.form({})
    s = rng.normal(size=form.num_columns)
    product, adjoint = jax.jit(lambda a, x, y: (a @ x, a.T @ y))(form.operator, s, y)
    expected, expected_adjoint = jax.jit(lambda x, y: (operator @ x, operator.T @ y))(s, y)
    np.testing.assert_allclose(product, expected, atol=1e-12)
    np.testing.assert_allclose(adjoint, expected_adjoint, atol=1e-12)


@pytest.mark.thorough
def test_forests() -> None:
    tree = wavelet_forest(TRANSFORM)
    groups = tree.num_groups

    def model(y: Any) -> None:
        low = numpyro.sample("low", dist.HalfNormal(1.0).expand([groups]).to_event(1))
        stay = numpyro.sample("stay", dist.Beta(8.0, 2.0))
        transition = jnp.broadcast_to(jnp.stack([1.0 - stay, stay]), (groups, 2))
        prior = HiddenMarkovTree(tree, dist.Laplace(0.0, low), dist.Laplace(0.0, 3.0), 0.4, transition)
        s = numpyro.sample("s", prior)
        other = numpyro.sample("other", dist.Laplace(0.0, 1.0).expand([2]).to_event(1))
        image = numpyro.deterministic("image", TRANSFORM.T @ s)
        numpyro.sample("y", dist.Normal(image.at[:2].add(other), 0.3).to_event(1), obs=y)

    reading = read_sparse_linear(model, (Y,))
    assert reading.field == ("s", "other")
    assert tuple(reading.hyper) == ("low", "stay")
    assert reading.affine_sites == ("s", "other", "image")
    form, matrix = _check(reading)
    assert form.forest.num_groups == groups + 1
    np.testing.assert_array_equal(form.forest.parents, [*np.asarray(tree.parents), -1, -1])
    np.testing.assert_allclose(matrix[:, SIZE:], np.eye(SIZE)[:, :2], atol=1e-14)
