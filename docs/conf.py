"""The documentation site: ``make site`` builds it into ``docs/_build``."""

import os
import sys
from pathlib import Path

import numpyro_ext

sys.path.insert(0, str(Path(__file__).parent))  # for site_pages

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
    "site_pages",
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
# NUMPYRO_EXT_SITE_SHARE=1/4 executes the second of every four pages, and shows the code of the others.
number, total = map(int, (os.environ.get("NUMPYRO_EXT_SITE_SHARE") or "0/1").split("/"))
here = Path(__file__).parent
pages = sorted([*here.glob("*.md"), *here.glob("engines/*.md"), *here.glob("how_to/*.md")])
nb_execution_excludepatterns += [page.as_posix() for place, page in enumerate(pages) if place % total != number]
suppress_warnings = ["myst-nb.lexer"] if total > 1 else []  # the kernel names the language of a page that it executes
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": True}
# Defaults are shown as they are written.
autodoc_preserve_defaults = True
