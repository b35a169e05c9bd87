"""One import path, ``numpyro_ext.models``, from a plain checkout, an editable install and a wheel."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import numpyro_ext

ROOT = Path(__file__).parents[1]
IMPORT = """
import sys, numpyro_ext, numpyro_ext.models
from numpyro_ext.models import cox_process
from numpyro_ext.datasets import load_coal_mining
assert load_coal_mining().shape == (191,)
assert cox_process.__module__ == "numpyro_ext.models.gaussian_process", cox_process.__module__
print(numpyro_ext.__file__)
print(numpyro_ext.models.__file__)
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what is distributed: building in place would leave traces in the repository."""
    copy = tmp_path / "checkout"
    for folder in ("numpyro_ext", "models"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    return copy


def run(*command, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        check=False,
        cwd=Path(sys.prefix),
        env=kept | {"PYTHONDONTWRITEBYTECODE": "1", **environment},
        text=True,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def imported_files(python, **environment):
    """The files of the package and of its models, as a fresh interpreter imports them."""
    return [Path(line).resolve() for line in run(python, "-c", IMPORT, **environment).split()]


def test_every_package_is_listed_and_every_listed_package_exists():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "numpyro_ext").rglob("__init__.py")}
    assert set(settings["packages"]) == found | {"numpyro_ext.models"}
    assert settings["package-dir"]["numpyro_ext.models"] == "models"


def test_models_import_only_what_they_may():
    ours = {"numpyro_ext.distributions", "numpyro_ext.linalg", "numpyro_ext.optional", "numpyro_ext.potentials"}
    ours |= {"numpyro_ext.quantum", "numpyro_ext.first_look"}
    allowed = {*sys.stdlib_module_names, *ours, "jax", "numpy", "numpyro"}
    for file in (ROOT / "models").glob("*.py"):
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", file.read_text(), re.MULTILINE):
            assert module.startswith(".") or module in allowed or module.split(".")[0] in allowed, (file, module)


def test_plain_checkout(checkout):
    assert imported_files(sys.executable, PYTHONPATH=str(checkout)) == [
        checkout / "numpyro_ext" / "__init__.py",
        checkout / "models" / "__init__.py",
    ]


def test_one_version_everywhere():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "numpyro_ext.__version__"}
    assert (
        re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == numpyro_ext.__version__
    )
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest in ("Unreleased", numpyro_ext.__version__)


WITHOUT_EXTRAS = """
import sys
for name in ("matplotlib", "matfree", "pywt", "sklearn", "tinygp"):
    sys.modules[name] = None
import jax.numpy as jnp, numpyro_ext.distributions, numpyro_ext.infer, numpyro_ext.potentials
from numpyro_ext.linalg import convolution, wavelet_transform
from numpyro_ext.models import cox_process
from numpyro_ext.optional import optional
from numpyro_ext.structure import read_latent_gaussian
convolution((4,), jnp.ones(3)) @ jnp.ones(4)
read_latent_gaussian(cox_process, (jnp.arange(3.0), jnp.ones(3)))
for needy in (lambda: wavelet_transform((8,)), lambda: optional("matplotlib.pyplot", "demo")):
    try:
        needy()
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_core_needs_no_extra_and_says_which_one_a_part_needs():
    printed = run(sys.executable, "-c", WITHOUT_EXTRAS, PYTHONPATH=str(ROOT)).splitlines()
    assert ["[images]" in printed[0], "[demo]" in printed[1]] == [True, True], printed


@pytest.mark.slow
def test_wheel(checkout, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheels", checkout)
    (wheel,) = (tmp_path / "wheels").glob("numpyro_ext_engines-*.whl")
    run(*pip, "install", "--no-deps", "--target", tmp_path / "installed", wheel)
    shutil.rmtree(checkout)
    package = tmp_path / "installed" / "numpyro_ext"
    assert imported_files(sys.executable, PYTHONPATH=str(tmp_path / "installed")) == [
        package / "__init__.py",
        package / "models" / "__init__.py",
    ]
    assert (package / "py.typed").exists()


@pytest.mark.slow
def test_editable_install(checkout, tmp_path):
    # An environment of its own that borrows the dependencies of this one, without what is installed as editable.
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (site_packages,) = environment.glob("lib/python*/site-packages")
    borrowed = next(path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "borrowed.pth").write_text(borrowed + "\n")
    run(python, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-build-isolation",
        "-e", checkout)  # fmt: skip
    assert imported_files(python) == [
        checkout / "numpyro_ext" / "__init__.py",
        checkout / "models" / "__init__.py",
    ]
