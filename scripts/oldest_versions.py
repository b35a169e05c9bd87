"""Prints the lower bounds of what the package and its tests need, as constraints for pip."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
needed = {*project["dependencies"], *extras["demo"], *extras["images"], *extras["rows"], *extras["test"]}
for requirement in sorted(needed):
    bound = re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement)
    if bound:
        print(f"{bound[1]}=={bound[2]}")
