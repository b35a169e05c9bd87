"""Rows divided between devices, of one process and of two: the same numbers as on a single device."""

import warnings
from functools import partial

import jax
import numpy as np
import pytest

from numpyro_ext.infer import BilinearVG
from numpyro_ext.infer.bilinear.algorithms.schedules.devices import place_rows
from numpyro_ext.models import poisson_factorization
from tests.infer.bilinear.batches.bilinear_devices import fits
from tests.processes import module_command, run_in_two_processes, run_on_devices

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")


def test_every_row_and_every_cell_has_one_place():
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.geometric(0.02, size=101))
    lengths[:7] = 0
    rows = rng.permutation(np.repeat(np.arange(101), lengths))
    columns = rng.integers(0, 13, rows.size)
    places = place_rows(rows, columns, 101, 4)
    assert np.array_equal(np.sort(places.source[places.is_used]), np.arange(101))
    assert np.array_equal(places.source[places.position], np.arange(101))
    assert np.array_equal(np.sort(places.cells[places.is_cell]), np.arange(rows.size))
    for device in range(4):
        held = places.source.reshape(4, -1)[device]
        cells, local = places.cells[device], places.local_row[device]
        np.testing.assert_array_equal(held[local], rows[cells])
        assert np.all(np.diff(local) >= 0) and np.all(np.diff(columns[cells][places.column_order[device]]) >= 0)
    num_cells = places.is_cell.sum(1)
    assert num_cells.max() <= 1.1 * num_cells.mean(), num_cells
    # fewer rows than devices
    few = place_rows(np.array([1]), np.array([0]), 2, 4)
    assert few.is_used.sum() == 2 and few.is_cell.sum() == 1


@pytest.mark.thorough
def test_sweeps_on_four_devices(tmp_path):
    path = tmp_path / "sweeps.npz"
    run_on_devices("tests.infer.bilinear.batches.bilinear_device_sweeps", path, timeout=300)
    with np.load(path) as found:
        assert found["num_devices"] == 4
        names = [name.removeprefix("one-") for name in found if name.startswith("one-")]
        assert np.isfinite(found["one-0"]) and len(names) > 4
        for name in names:
            np.testing.assert_allclose(found[f"all-{name}"], found[f"one-{name}"], rtol=1e-11, atol=1e-12)


def test_devices_of_other_processes_alone():
    with pytest.raises(ValueError, match="of this process"):
        BilinearVG(poisson_factorization, devices=[])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """On the default device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not converge")
        return fits(None, tmp_path_factory.mktemp("alone"))


def compare(path, alone):
    with np.load(path) as found:
        assert set(found) == set(alone)
        for name, expected in alone.items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-8, atol=1e-8, err_msg=name)


@needs_float64
@pytest.mark.slow
def test_four_devices(alone, tmp_path):
    run_on_devices("tests.infer.bilinear.batches.bilinear_devices", tmp_path)
    compare(tmp_path / "0.npz", alone)


@needs_float64
@pytest.mark.slow
def test_two_processes(alone, tmp_path):
    """Of two devices each."""
    run_in_two_processes(partial(module_command, "tests.infer.bilinear.batches.bilinear_devices", tmp_path))
    for number in range(2):
        compare(tmp_path / f"{number}.npz", alone)
