"""Imports go one way: between the rooms of the package, between the rooms inside each, and between modules."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "numpyro_ext"

# Each room may import those before it; what stands in one line may not import each other.
FLOORS = {
    "": [
        ["compilation", "linalg"],
        ["datasets", "potentials", "quantum"],
        ["distributions"],
        ["structure"],
        ["infer", "models"],
        ["design", "sequences"],
        ["psychometrics"],
        ["demo"],
    ],
    "linalg": [["sparse_cholesky"], ["sparse_krylov"], ["gaussian", "operators"], ["solvers"]],
    "potentials": [["integrals"], ["bounds"], ["families"], ["trees"]],
    "structure": [["program"], ["model"], ["factors"], ["latent_gaussian", "sparse_linear", "bilinear"]],
    "infer": [
        ["hyper"],
        ["front"],
        ["exact"],
        ["gaussian", "sparse", "bilinear", "rows", "stochastic"],
        ["collaborative", "monte_carlo"],
        ["comparison"],
    ],
    "infer.gaussian": [
        ["algorithms"],
        ["fitting"],
        ["integration", "answers"],
        ["programs"],
        ["runs"],
        ["new_arguments"],
        ["engine_answers", "engine_program"],
        ["engine"],
        ["cross_validation", "marginal", "variational"],
        ["engines", "predictive_moments"],
    ],
    "infer.gaussian.algorithms": [["modes", "nodes"], ["propagation"]],
    "design": [["outcomes"], ["selection"], ["scores"]],
}
# What may be run on arrays alone.
WITHOUT_NUMPYRO = ("compilation", "linalg", "potentials", "quantum")


def module_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(file): file for file in (ROOT / PACKAGE).rglob("*.py")}
FILES |= {f"{PACKAGE}.{module_of(file)}": file for file in (ROOT / "models").glob("*.py")}


def imported_modules(module):
    """Every module that a file imports, also inside functions; names of this package as ``(module, name)``."""
    file = FILES[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                yield inner if inner in FILES else target


ARROWS = {module: set(imported_modules(module)) - {module} for module in FILES}


def test_every_import_of_this_package_is_of_a_module_that_exists():
    for module, targets in ARROWS.items():
        missing = {t for t in targets if t.split(".")[0] == PACKAGE} - set(FILES)
        assert not missing, (module, missing)


def test_no_module_imports_itself_through_others():
    # A package imports its modules to show their names; that is no use of them.
    arrows = {m: {t for t in ts if t in FILES} for m, ts in ARROWS.items() if FILES[m].name != "__init__.py"}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' <- '.join(circle.args[1])}")


def test_no_part_of_a_folder_imports_itself_through_others():
    """Parts are modules, and folders as a whole: each folder of the package has an order in which it can be read."""
    arrows = {}
    for module, targets in ARROWS.items():
        for target in targets & set(FILES):
            here, there = module.split("."), target.split(".")
            shared = next((k for k, names in enumerate(zip(here, there, strict=False)) if len(set(names)) > 1), None)
            if shared is not None:  # else one is the folder that the other stands in
                inside = arrows.setdefault(".".join(here[:shared]), {})
                inside.setdefault(here[shared], set()).add(there[shared])
    assert {"numpyro_ext", "numpyro_ext.infer", "numpyro_ext.infer.gaussian", "numpyro_ext.linalg"} <= set(arrows)
    for folder, inside in arrows.items():
        try:
            TopologicalSorter(inside).prepare()
        except CycleError as circle:
            pytest.fail(f"a circle in {folder}: {' <- '.join(circle.args[1])}")


@pytest.mark.parametrize("house", FLOORS)
def test_rooms_import_only_what_stands_below_them(house):
    inside = f"{PACKAGE}.{house}".rstrip(".")
    floor = {room: number for number, rooms in enumerate(FLOORS[house]) for room in rooms}

    def room_of(module):
        rest = module.removeprefix(f"{inside}.").split(".") if module.startswith(f"{inside}.") else [""]
        return rest[0] if rest[0] in floor else None

    for file in (ROOT / PACKAGE / house.replace(".", "/")).iterdir():
        if (file / "__init__.py").exists():
            assert file.name in floor, f"{file.name} stands on no floor of {inside}"
    for module, targets in ARROWS.items():
        here = room_of(module)
        for target in targets if here else ():
            there = room_of(target)
            assert there in (None, here) or floor[there] < floor[here], f"{module} imports {target}"


def test_mathematics_knows_nothing_of_numpyro():
    for module, targets in ARROWS.items():
        if module.split(".")[1:2] and module.split(".")[1] in WITHOUT_NUMPYRO:
            assert not {t for t in targets if t.split(".")[0] == "numpyro"}, module


def test_names_of_all_public_rooms_can_be_imported():
    for room in ("distributions", "infer", "linalg", "models", "potentials", "psychometrics", "sequences", "structure"):
        module = __import__(f"{PACKAGE}.{room}", fromlist=["__all__"])
        assert all(hasattr(module, name) for name in module.__all__), room
    package, infer = sys.modules[PACKAGE], sys.modules[f"{PACKAGE}.infer"]
    assert [name for name in package.__all__ if name != "keep_compiled_programs"] == infer.__all__
    assert all(getattr(package, name) is getattr(infer, name) for name in infer.__all__)


def test_names_that_left_the_potentials_are_there_and_say_where_they_are():
    """Each is the object of its module, and none of our own modules asks for it here: warnings are errors."""
    potentials = import_module(f"{PACKAGE}.potentials")
    assert not set(potentials._MOVED) & set(potentials.__all__)
    for name, module in potentials._MOVED.items():
        home = f"{PACKAGE}.potentials.{module}"
        with pytest.warns(FutureWarning, match=f"`from {home} import {name}`"):
            found = getattr(potentials, name)
        assert found is getattr(import_module(home), name)
    assert not hasattr(potentials, "NoPotential")


def test_importing_starts_no_backend_and_is_quick():
    """Before `jax.distributed.initialize` nothing may be computed, and users choose platforms after importing."""
    lines = [
        "import sys",
        f"import {PACKAGE}.infer, {PACKAGE}.models",
        "from jax._src import xla_bridge",
        "assert not xla_bridge.backends_are_initialized()",
        # a third of the whole time, for what few calls need
        "assert not {'scipy.stats', 'scipy.optimize', 'matplotlib', 'arviz'} & {*sys.modules}",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=True)
