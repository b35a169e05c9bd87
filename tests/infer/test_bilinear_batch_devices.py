"""Batches on several devices and of several processes: the same numbers as those of joined batches on one device."""

import json
import re
import signal
import sys
import warnings
from functools import partial

import jax
import numpy as np
import pytest

from numpyro_ext.infer import fit_batches
from numpyro_ext.infer.bilinear.batches.checkpoints import BatchCheckpoints
from numpyro_ext.infer.bilinear.batches.devices import BatchDevices
from numpyro_ext.infer.bilinear.batches.processes import Processes
from numpyro_ext.infer.front.files.archive import read_archive
from tests.infer.bilinear_batch_devices import KILLED_IN, fits, fits_of_common, fits_of_pairs, fits_over_columns
from tests.processes import ROOT, module_command, run_in_two_processes, run_on_devices

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
MODULE = "tests.infer.bilinear_batch_devices"


@pytest.fixture(scope="module")
def alone():
    """On the default device, all processes' batches joined."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not converge")
        return fits(None, [0, 1]) | fits_over_columns(None) | fits_of_pairs(None, [0, 1]) | fits_of_common(None)


def compare(found, alone, names):
    for name in names:
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-10, atol=1e-10, err_msg=name)


@needs_float64
@pytest.mark.slow
def test_four_devices(alone, tmp_path):
    run_on_devices(MODULE, tmp_path)
    with np.load(tmp_path / "0.npz") as found:
        assert set(found) == set(alone)
        compare(found, alone, alone)


def epochs_of(folder, name):
    """Epochs of which there are checkpoints, by process."""
    files = [[folder / f"{name}.{number}.{turn}" for turn in range(2)] for number in range(2)]
    return [sorted(read_archive(file)["num_steps"] for file in of_one) for of_one in files]


SAID = {
    "rank": "Components of a shared vector: 3 in process 0, 4 in process 1",
    "items": "Number of shared vectors: 6 in process 0, 7 in process 1",
    "epochs": "num_epochs: 3 in process 0, 2 in process 1",
    "empty": "There is no batch in process 1",
    "key": "rng_key: [0, 0] in process 0, [0, 1] in process 1",
    "checkpoint": "checkpoint= given?: False in process 0, True in process 1",
}
# What the second says itself, and tells the first.
TOLD = {
    "invalid": "ValueError: num_epochs must be at least 1, got 0.",
    "no list": "TypeError: batches must be a list or generator of batches, got NoneType.",
    "broken": "OSError: the disk is full",
    "outside": "ModelStructureError: the model does not run on these arguments",
}


@needs_float64
@pytest.mark.slow
def test_two_processes_with_rows_of_their_own_of_which_one_is_killed(alone, tmp_path):
    """The second dies after an epoch, before it has written the checkpoint that the first has, and then within an epoch
    of pairs; all start again."""
    ends = None, -signal.SIGKILL
    run_in_two_processes(partial(module_command, MODULE, tmp_path, "--killed", "counts"), ends=ends)
    assert epochs_of(tmp_path, "counts") == [[KILLED_IN - 1, KILLED_IN], [KILLED_IN - 2, KILLED_IN - 1]]
    run_in_two_processes(partial(module_command, MODULE, tmp_path, "--killed", "pairs"), ends=ends)
    assert epochs_of(tmp_path, "pairs") == [[KILLED_IN - 2, KILLED_IN - 1]] * 2
    run_in_two_processes(partial(module_command, MODULE, tmp_path))
    for number in range(2):
        with np.load(tmp_path / f"{number}.npz") as found:
            assert found["epochs"].tolist() == [KILLED_IN - 1] * 2
            own = {"counts w", "pairs u", "pairs pi"}
            compare(found, alone, set(found) - own - {"epochs"})
            assert {"pairs bound", "pairs trace", "pairs v", "pairs psi", "pairs tangent"} <= set(found)
            if number:
                # A fit of these rows alone, to their optimum.
                np.testing.assert_allclose(found["counts w"], alone["last w of process 1"], atol=1e-3)
            else:
                compare(found, alone, own)
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    for name, text in SAID.items():
        assert text in first[name] and text in second[name]
    for name, text in TOLD.items():
        assert second[name].startswith(text)
        assert first[name].startswith("RuntimeError: Process 1 stopped") and text in first[name]
    assert first["floats"] == second["floats"] == "no error"


@pytest.fixture
def two_processes(monkeypatch):
    """Records of two processes, of which the other one says what is in a list."""
    processes, others = Processes(BatchDevices(None)), []
    processes.numbers = [0, 1]
    monkeypatch.setattr(BatchDevices, "of_all_processes", lambda self, own: np.stack([own, others.pop()]))
    return processes, others


def as_text(record):
    text = np.frombuffer(json.dumps(record).encode(), np.uint8)
    return np.pad(text, (0, (1 << 14) - text.size))


def test_records_of_two_processes(two_processes):
    processes, others = two_processes
    others.append(as_text({"rank": 2, "prior": [1.0, 0.3 + 1e-12]}))
    found = processes.share(lambda: {"rank": 2, "prior": [1.0, 0.3]}, "in batch 0")
    processes.check_equal(found)
    for record in ({"rank": 3, "prior": [1.0, 0.3]}, {"prior": [1.0, 0.3]}, {"rank": 2, "prior": [1.0, 0.4]}):
        with pytest.raises(ValueError, match="in process 0, .* in process 1"):
            processes.check_equal([found[0], record])
    others.append(as_text({"error": "OSError: the disk is full"}))
    with pytest.raises(RuntimeError, match="Process 1 stopped in batch 3: OSError: the disk is full"):
        processes.share(dict, "in batch 3")
    # What fails here is raised here, once the other has heard of it.
    others.append(as_text({}))
    with pytest.raises(ZeroDivisionError):
        processes.share(lambda: {"rank": 1 / 0}, "in batch 4")
    others.append(as_text({}))
    with pytest.raises(RuntimeError, match="longer than"):
        processes.share(lambda: {"names": "x" * 20_000}, "in batch 5")
    assert not others


@pytest.mark.parametrize(
    ("epochs", "chosen"), [([[], []], None), ([[1], []], None), ([[2, 3], [1, 2]], 2), ([[1, 2], [1, 2]], 2)]
)
def test_the_last_epoch_that_all_processes_have(two_processes, epochs, chosen):
    checkpoints = BatchCheckpoints("path", two_processes[0])
    checkpoints.choose(epochs)
    assert checkpoints._epoch == chosen


def test_checkpoints_without_a_common_epoch(two_processes):
    checkpoints = BatchCheckpoints("path", two_processes[0])
    for epochs in ([[4, 5], []], [[4, 5], [2, 3]]):
        with pytest.raises(ValueError, match="start as many processes as before"):
            checkpoints.choose(epochs)


def python_blocks(page):
    """The examples of a page of the documentation."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The names of the example, run in this process alone."""
    script, _ = python_blocks("scaling.md")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", lambda *arguments: None)
        patch.setattr(sys, "argv", ["fit.py", "", "1", "0"])
        patch.chdir(tmp_path_factory.mktemp("alone"))
        names = {}
        exec(compile(script, "fit.py", "exec"), names)
    return names


@pytest.mark.slow
def test_example_of_the_documentation_in_two_processes(example, tmp_path):
    script = tmp_path / "fit.py"
    script.write_text(python_blocks("scaling.md")[0])
    said = run_in_two_processes(lambda port, number: [script, f"localhost:{port}", 2, number], cwd=tmp_path)
    evidence = float(said[0].rpartition(":")[2])
    # other batches, to the same optimum
    assert example["fitted"].diagnostics.converged
    np.testing.assert_allclose(evidence, float(example["fitted"].log_evidence), rtol=1e-4)


@pytest.mark.slow
def test_batches_from_files_of_arrow(example, tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the dev extra")
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is in the dev extra")
    cells = example["load"](np.arange(example["NUM_USERS"]))
    table = arrow.table({name: cells[key] for name, key in (("user", "rows"), ("item", "cols"), ("count", "counts"))})
    # two files, the first of which ends within a user, and small row groups
    (tmp_path / "cells").mkdir()
    for number, part in enumerate((table[:777], table[777:])):
        parquet.write_table(part, tmp_path / "cells" / f"{number}.parquet", row_group_size=100)
    exec(python_blocks("scaling.md")[1], example)
    monkeypatch.chdir(tmp_path)
    users = np.array_split(example["own"], 2)
    for group in users:
        found, expected = example["load_arrow"](group), example["load"](group)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    options = {"over": "w", "num_epochs": 200, "num_cols": example["NUM_ITEMS"], "rank": 1}
    again = fit_batches(example["engine"], jax.random.key(0), map(example["load_arrow"], users), **options)
    assert float(again.log_evidence) == float(example["fitted"].log_evidence)
