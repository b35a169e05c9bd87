"""Batches on several devices and of several processes: the same numbers as those of joined batches on one device."""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import types
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
from tests.infer.bilinear.batches.bilinear_batch_devices import (
    KILLED_IN,
    fits,
    fits_of_common,
    fits_of_pairs,
    fits_over_columns,
)
from tests.processes import ROOT, environment, module_command, run_in_two_processes, run_on_devices

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
MODULE = "tests.infer.bilinear.batches.bilinear_batch_devices"


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
    "outside": "ModelStructureError: the model refuses these arguments: cols must lie in 0, ..., 5",
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


def blocks(page, language):
    """The examples of a page of the documentation in some language."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


FIT, LAUNCH, ARROW = blocks("scaling.md", "python")
(SLURM,), (KUBERNETES,) = blocks("scaling.md", "bash"), blocks("scaling.md", "yaml")


class StandInForRay:
    """A trainer of one process, which Ray has joined to no others."""

    def __init__(self, train, *, scaling_config, run_config):
        assert scaling_config["num_workers"] == 2 and run_config["failure_config"]["max_failures"] > 0
        self.fit = train


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The names of the example, run in this process alone, as the launcher for Ray does."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    (folder / "fit.py").write_text(FIT)
    train = {name: dict for name in ("FailureConfig", "RunConfig", "ScalingConfig")}
    modules = {"ray": {}, "ray.train": train, "ray.train.v2": {}, "ray.train.v2.jax": {"JaxTrainer": StandInForRay}}
    run_path, change = runpy.run_path, os.chdir
    with pytest.MonkeyPatch.context() as patch:
        for name, content in modules.items():
            patch.setitem(sys.modules, name, types.ModuleType(name))
            vars(sys.modules[name]).update(content)
        patch.setattr(jax.distributed, "is_initialized", lambda: True)
        patch.chdir(folder)
        patch.setattr(os, "chdir", lambda path: change(folder if path == "/shared" else path))
        patch.setattr(runpy, "run_path", lambda path: found.update(run_path(path)))
        exec(compile(LAUNCH, "launch.py", "exec"), {})
    return found


def compare_evidence(printed, example):
    # other batches, to the same optimum
    assert example["fitted"].diagnostics.converged
    evidence = float(printed.rpartition(":")[2])
    np.testing.assert_allclose(evidence, float(example["fitted"].log_evidence), rtol=1e-4)


@pytest.mark.slow
def test_the_job_for_kubernetes_in_two_processes(example, tmp_path):
    """Its command is run as it is, but for the address of the first pod."""
    yaml = pytest.importorskip("yaml", reason="comes with the tools for notebooks")
    service, job = yaml.safe_load_all(KUBERNETES)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    shell, option, command = pod["containers"][0]["command"]
    names = service["metadata"]["name"], service["spec"]["selector"]["job-name"], pod["subdomain"]
    assert set(names) == {job["metadata"]["name"]} == {"fit"}
    assert spec["completions"] == spec["parallelism"] == int(command.split()[-2])
    assert {v["name"] for v in pod["volumes"]} == {v["name"] for v in pod["containers"][0]["volumeMounts"]}
    (tmp_path / "fit.py").write_text(FIT)

    def start(port, number):
        own = command.replace("fit-0.fit:5678", f"localhost:{port}").replace("python", shlex.quote(sys.executable))
        call = f"JOB_COMPLETION_INDEX={number} exec {shell} {option} {shlex.quote(own)}"
        return ["-c", f"import os; os.execvp('sh', ['sh', '-c', {call!r}])"]

    compare_evidence(run_in_two_processes(start, cwd=tmp_path)[0], example)


# Two tasks of a step, as SLURM starts them, and an end that says whether both ended well.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for number in 0 1; do
    SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID=$number SLURM_LOCALID=$number "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || ended=1; done
exit ${ended:-0}
"""


def submit(folder, environment, **programs):
    """Run the batch file with these programs first in the path; the port is that of the number of the job."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", SLURM],
        cwd=folder,
        env={**environment, "PATH": path, "SLURM_JOB_ID": str(os.getpid())},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.mark.slow
def test_the_batch_file_for_slurm_with_two_tasks(example, tmp_path):
    (tmp_path / "fit.py").write_text(FIT)
    python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    found = submit(tmp_path, environment(2), srun=SRUN, python=python, scontrol="#!/bin/sh\nexit 1\n")
    assert found.returncode == 0, found.stderr
    compare_evidence(found.stdout, example)


@pytest.mark.parametrize(("restarts", "said"), [("0", "requeue"), ("5", "")])
def test_the_batch_file_for_slurm_starts_again_a_few_times(tmp_path, restarts, said):
    programs = {"srun": "#!/bin/sh\nexit 1\n", "scontrol": '#!/bin/sh\necho "$1"\n'}
    found = submit(tmp_path, os.environ | {"SLURM_RESTART_COUNT": restarts}, **programs)
    assert found.returncode == 1 and found.stdout.strip() == said


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
    exec(ARROW, example)
    monkeypatch.chdir(tmp_path)
    users = np.array_split(example["own"], 2)
    for group in users:
        found, expected = example["load_arrow"](group), example["load"](group)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    options = {"over": "w", "num_epochs": 200, "num_cols": example["NUM_ITEMS"], "rank": 1}
    again = fit_batches(example["engine"], jax.random.key(0), map(example["load_arrow"], users), **options)
    assert float(again.log_evidence) == float(example["fitted"].log_evidence)
