"""Linear operators against dense matrices, scipy.ndimage and numpy.fft."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from numpyro_ext.linalg import (
    convolution,
    diagonal,
    finite_differences,
    fourier,
    from_functions,
    from_matrix,
    identity,
    masked_fourier,
    select,
    stack,
    total_variation,
)
from numpyro_ext.linalg.operators.convolution import _by_fourier, _DirectConvolution, _FourierConvolution

NDIMAGE_MODES = {"periodic": "wrap", "zero": "constant", "reflect": "reflect", "replicate": "nearest"}
RNG = np.random.default_rng(0)
MASK = RNG.random((4, 6)) < 0.4


def operators():
    kernel = RNG.random((3, 2))
    large = RNG.random((9, 8))
    out = {
        "identity": identity(24),
        "diagonal": diagonal(RNG.standard_normal(24)),
        "matrix": from_matrix(RNG.standard_normal((5, 24))),
        "mask": select(MASK),
        "indices": select([3, 0, 3, 23], 24),
        "differences": finite_differences((4, 6), 1),
        "total variation": total_variation((4, 6)),
        "total variation 3": total_variation((2, 3, 4)),
        "fourier": fourier((4, 6)),
        "masked fourier": masked_fourier(MASK),
        "functions": from_functions(lambda x: jnp.cumsum(x)[::2], None, (12, 24)),
    }
    for boundary in NDIMAGE_MODES:
        out[f"convolution {boundary}"] = convolution((4, 6), kernel, boundary)
        out[f"large convolution {boundary}"] = _by_fourier(jnp.asarray(large), (4, 6), boundary)
    blur = out["convolution reflect"]
    out["composition"] = out["mask"] @ blur @ fourier((4, 6)).T
    out["sum"] = 2.0 * blur - identity(24) + np.float64(0.5) * blur.T
    out["stack"] = stack([out["mask"], -blur])
    return out


OPERATORS = operators()
PRODUCT = jax.jit(lambda operator, x: operator @ x)


@functools.cache
def matrix_of(name):
    return np.asarray(jax.jit(lambda a: a.materialise())(OPERATORS[name]))


@pytest.mark.parametrize("name", OPERATORS)
def test_adjoint_is_that_of_the_matrix(name):
    operator = OPERATORS[name]
    rows, columns = operator.shape
    matrix = matrix_of(name)
    adjoint = jax.jit(lambda a: a.T @ jnp.eye(rows))(operator)
    assert matrix.shape == (rows, columns)
    assert operator.T.shape == (columns, rows)
    np.testing.assert_allclose(adjoint, matrix.T, atol=1e-13)


def test_expressions_equal_those_of_matrices():
    dense = {name: matrix_of(name) for name in OPERATORS}
    blur = dense["convolution reflect"]
    np.testing.assert_allclose(dense["mask"], np.eye(24)[MASK.reshape(-1)])
    np.testing.assert_allclose(dense["indices"], np.eye(24)[[3, 0, 3, 23]])
    np.testing.assert_allclose(dense["composition"], dense["mask"] @ blur @ dense["fourier"].T, atol=1e-14)
    np.testing.assert_allclose(dense["sum"], 2.0 * blur - np.eye(24) + 0.5 * blur.T, atol=1e-14)
    np.testing.assert_allclose(dense["stack"], np.concatenate([dense["mask"], -blur]), atol=1e-14)
    np.testing.assert_allclose(dense["functions"], np.tril(np.ones((24, 24)))[::2])


@pytest.mark.thorough
def test_arrays_on_the_left_and_batches():
    operator = OPERATORS["composition"]
    matrix = matrix_of("composition")
    y = RNG.standard_normal((3, operator.shape[0]))
    np.testing.assert_allclose(y @ operator, y @ matrix, atol=1e-13)
    np.testing.assert_allclose(jnp.asarray(y[0]) @ operator, y[0] @ matrix, atol=1e-13)
    x = RNG.standard_normal((5, 24))
    np.testing.assert_allclose(jax.vmap(lambda v: operator @ v)(x), x @ matrix.T, atol=1e-13)
    kernels = RNG.random((2, 3, 3))
    image = RNG.standard_normal(24)
    found = jax.vmap(lambda kernel: convolution((4, 6), kernel, "zero") @ image)(kernels)
    expected = [scipy.ndimage.convolve(image.reshape(4, 6), k, mode="constant").reshape(-1) for k in kernels]
    np.testing.assert_allclose(found, expected, atol=1e-13)
    # operators are data: a batch of them is one of operators
    scales = jnp.array([1.0, 3.0])
    batch = jax.vmap(lambda scale: scale * diagonal(scale * jnp.ones(24)))(scales)
    np.testing.assert_allclose(jax.vmap(lambda a: a @ jnp.ones(24))(batch)[:, 0], [1.0, 9.0])
    gradient = jax.grad(lambda scale: jnp.sum((convolution((24,), scale * jnp.ones(3)) @ image) ** 2))(2.0)
    blurred = scipy.ndimage.convolve(image, np.ones(3), mode="wrap")
    np.testing.assert_allclose(gradient, 4.0 * np.sum(blurred**2))


def test_classes_of_equal_fields_are_not_confused_by_jit():
    square = jax.jit(lambda a, x: a @ x)
    parts = (2.0 * identity(3), 2.0 * identity(3))
    x = jnp.ones(3)
    np.testing.assert_allclose(square(parts[0] @ parts[1], x), 4.0 * x)
    np.testing.assert_allclose(square(parts[0] + parts[1] + 0.0 * identity(3), x), 4.0 * x)
    assert square(stack(parts), x).shape == (6,)


@pytest.mark.parametrize("boundary", NDIMAGE_MODES)
@pytest.mark.parametrize("kernel_shape", [(5,), (2, 4), (7, 12), (3, 2, 2)])
def test_convolution_equals_ndimage(boundary, kernel_shape):
    # the 7 x 12 kernel is larger than the image
    sides = {1: (9,), 2: (5, 8), 3: (3, 4, 5)}[len(kernel_shape)]
    kernel, image = RNG.standard_normal(kernel_shape), RNG.standard_normal(sides)
    operator = convolution(sides, kernel, boundary)
    expected = scipy.ndimage.convolve(image, kernel, mode=NDIMAGE_MODES[boundary])
    for each in (operator, _by_fourier(jnp.asarray(kernel), sides, boundary)):
        np.testing.assert_allclose(PRODUCT(each, image.reshape(-1)), expected.reshape(-1), atol=1e-12)


def test_large_kernels_on_large_images_go_by_fourier_transforms():
    large, small = (convolution((256, 256), np.ones((k, k))) for k in (9, 8))
    assert (type(large), type(small)) == (_FourierConvolution, _DirectConvolution)
    assert type(convolution((64, 64), np.ones((9, 9)))) is _DirectConvolution


@pytest.mark.parametrize("sides", [(7,), (4, 6), (2, 3, 4)])
def test_fourier_is_orthonormal_and_equals_numpy(sides):
    size = int(np.prod(sides))
    operator = fourier(sides)
    matrix = np.asarray(jax.jit(lambda a: a.materialise())(operator))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-14)
    image = RNG.standard_normal(sides)
    spectrum = np.fft.fftn(image, norm="ortho")
    np.testing.assert_allclose(operator @ image.reshape(-1), operator.rows_of(spectrum), atol=1e-13)
    kept = spectrum.reshape(-1)[np.asarray(operator.frequencies)]
    count = len(kept)
    weight = np.where(np.arange(count) < operator.num_pairs, np.sqrt(2.0), 1.0)
    np.testing.assert_allclose((operator @ image.reshape(-1))[:count], weight * kept.real, atol=1e-13)


def test_masked_fourier_keeps_what_is_measured():
    rows = matrix_of("masked fourier")
    np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-14)
    # the space that the rows span is that of the measured exponentials
    exponentials = np.stack([np.fft.fftn(e.reshape(4, 6))[MASK] for e in np.eye(24)], axis=1)
    measured = np.concatenate([exponentials.real, exponentials.imag])
    assert np.linalg.matrix_rank(measured) == len(rows)
    np.testing.assert_allclose(measured @ rows.T @ rows, measured, atol=1e-12)


def test_differences_equal_numpy():
    image = RNG.standard_normal((2, 3, 4))
    expected = [np.diff(image, axis=axis).reshape(-1) for axis in range(3)]
    for axis in range(3):
        np.testing.assert_allclose(finite_differences((2, 3, 4), axis - 3) @ image.reshape(-1), expected[axis])
    np.testing.assert_allclose(total_variation((2, 3, 4)) @ image.reshape(-1), np.concatenate(expected))
    assert total_variation((1, 5)).shape == (4, 5)
    assert total_variation(5).shape == (4, 5)


@pytest.mark.float32
def test_single_precision_stays_single():
    x = jnp.ones(24, jnp.float32)
    for kernel in (np.ones((3, 3), np.float32), np.ones((9, 9), np.float32)):
        operator = convolution((4, 6), jnp.asarray(kernel), "zero")
        found = {(operator @ x).dtype, (operator.T @ x).dtype}
        assert found == {jnp.dtype(jnp.float32)}
    for operator in (fourier((4, 6)), total_variation((4, 6)), select([1], 24)):
        assert (operator @ x).dtype == jnp.float32
        assert (operator.T @ (operator @ x)).dtype == jnp.float32


def test_products_in_models_of_whole_numbers():
    np.testing.assert_allclose(total_variation(3) @ np.array([1, 4, 2]), [3.0, -2.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: identity(3) @ jnp.ones((2, 2)), r"multiplies arrays of shape \(3,\) or \(3, k\), not \(2, 2\)"),
        (lambda: identity(3) @ jnp.ones((3, 1, 1)), r"flatten images with .reshape\(-1\)"),
        (lambda: identity(3) @ (1j * jnp.ones(3)), "operators are real"),
        (lambda: jnp.ones(4) @ identity(3), r"not \(4,\)"),
        (lambda: identity(3) @ total_variation(3).T.T.T.T, "the first takes 3 numbers, the second gives 2"),
        (lambda: identity(3) + identity(4), r"shapes \(3, 3\) and \(4, 4\) cannot be added"),
        (lambda: jnp.ones(3) * identity(3), "use diagonal"),
        (lambda: stack([]), "at least one"),
        (lambda: stack([identity(3), identity(4)]), r"same number of columns, not \[3, 4\]"),
        (lambda: identity(0), "positive whole numbers, not 0"),
        (lambda: diagonal(jnp.ones((2, 2))), r"must have shape \(n,\)"),
        (lambda: from_matrix(jnp.ones(2)), "two axes"),
        (lambda: select(np.zeros((2, 2), bool)), "the mask keeps nothing"),
        (lambda: select(np.ones(4, bool), 5), "the mask has 4 elements, columns=5"),
        (lambda: select([0, 1]), "how many columns"),
        (lambda: select([0, 4], 4), r"outside 0 .. 3"),
        (lambda: select([0.5], 4), "must be integers"),
        (lambda: jax.jit(select)(jnp.array([True])), "must be known"),
        (lambda: convolution((4, 4), jnp.ones(3)), "needs as many axes"),
        (lambda: convolution((4, 4), jnp.ones((3, 3)), "mirror"), "boundary must be one of"),
        (lambda: convolution((4, 0), jnp.ones((3, 3))), "positive whole numbers, not 0"),
        (lambda: finite_differences((4, 1), 1), "one pixel along axis 1"),
        (lambda: finite_differences((4, 1), 2), "no axis 2"),
        (lambda: total_variation((1, 1)), "one pixel"),
        (lambda: masked_fourier(np.zeros((2, 2), bool)), "the mask keeps nothing"),
        (lambda: masked_fourier(np.zeros((2, 2))), "must be a boolean array"),
        (lambda: jax.jit(masked_fourier)(jnp.array([True])), "must be known"),
        (lambda: fourier((2, 2)).rows_of(jnp.ones(4)), r"must have shape \(2, 2\)"),
        (lambda: from_functions(jnp.cumsum, jnp.cumsum, (4, 4)), "rmatvec is not the adjoint"),
        (lambda: from_functions(lambda x: x**2, None, (4, 4)), "not linear"),
        (lambda: from_functions(lambda x: x + 1.0, lambda y: y, (4, 4)), "not linear"),
        (lambda: from_functions(lambda x: jnp.nan * x, lambda y: y, (4, 4)), "not linear"),
        (lambda: from_functions(lambda x: x[:2], lambda y: y, (4, 4)), r"must give shape \(4,\), not \(2,\)"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_user_functions_are_tested_while_a_model_is_compiled():
    @jax.jit
    def product(x):
        return from_functions(jnp.cumsum, jnp.cumsum, (4, 4)) @ x

    with pytest.raises(ValueError, match="rmatvec is not the adjoint"):
        product(jnp.ones(4))

    @jax.jit
    def scaled(x, factor):
        return from_functions(lambda v: factor * v, lambda v: factor * v, (4, 4)) @ x

    np.testing.assert_allclose(scaled(jnp.ones(4), 2.0), 2.0 * np.ones(4))
