"""One import path for the models, installed or not.

The models are developed in the top-level folder ``models/`` and installed as ``numpyro_ext.models``. In a checkout
that folder stands beside this package, where Python would not look for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_NAME = "numpyro_ext.models"


class _ModelsFinder(MetaPathFinder):
    """Finds ``numpyro_ext.models``, and nothing else, in the folder of a checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        return spec_from_file_location(
            _NAME, self._folder / "__init__.py", submodule_search_locations=[str(self._folder)]
        )


def find_models_of_checkout() -> None:
    """Make ``numpyro_ext.models`` importable if this package lies in a checkout; once installed, do nothing.

    The finder comes first, so that a checkout on the path uses its own models even where another one is installed.
    """
    package = Path(__file__).resolve().parent
    folder = package.parent / "models"
    in_checkout = (package.parent / "pyproject.toml").is_file() and (folder / "__init__.py").is_file()
    if in_checkout and not (package / "models").is_dir():
        sys.meta_path.insert(0, _ModelsFinder(folder))
