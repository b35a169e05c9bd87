"""The documentation site: ``make site`` builds it into ``docs/_build``."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from site_pages import write_generated_pages  # noqa: E402

import numpyro_ext  # noqa: E402

project = "numpyro_ext"
author = "The numpyro_ext developers"
copyright = author
release = numpyro_ext.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "extending/*.py", "README.md", "**.ipynb_checkpoints"]
root_doc = "index"

html_theme = "furo"
html_title = "numpyro_ext"
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}

# Pages are executed when the site is built, and an error in one ends the build; stored notebooks are shown as they are,
# as `make notebooks` runs them.
nb_execution_mode = os.environ.get("NUMPYRO_EXT_SITE_EXECUTION", "force")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_excludepatterns = ["generated/notebooks/*"]
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": True}
# Defaults are shown as they are written.
autodoc_preserve_defaults = True


def is_foreign(app: object, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Leave out members that other packages define: those of NumPyro's distributions, of tuples and lists."""
    defined = getattr(member, "fget", None) or getattr(member, "func", None) or member
    module = getattr(defined, "__module__", None)
    if what == "class" and callable(defined) and not str(module).startswith("numpyro_ext"):
        return True
    return None


def setup(app: Any) -> None:
    """Pages that are made from notebooks, results of benchmarks and public names."""
    write_generated_pages(Path(__file__).parent)
    app.connect("autodoc-skip-member", is_foreign)
