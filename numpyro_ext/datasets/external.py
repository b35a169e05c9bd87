"""Sources of data that cannot be distributed with the package."""

from __future__ import annotations

import os
from pathlib import Path

DATA_VARIABLE = "NUMPYRO_EXT_DATA"
"""Name of the environment variable that holds the folder of downloaded data."""


def data_path(*parts: str) -> Path:
    """Path of a downloaded file, below the folder named by the environment variable ``NUMPYRO_EXT_DATA``.

    :param str parts: the path inside that folder, for example ``"ml-100k", "ratings.csv.gz"``.
    :return: the path, which exists.
    :raises FileNotFoundError: if the variable is not set, or the folder or the file does not exist.
    """
    name = "/".join(parts)
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        raise FileNotFoundError(
            f"{name!r} is not part of the package. Download it, and set the environment variable {DATA_VARIABLE} "
            "to the folder that holds it."
        )
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"The environment variable {DATA_VARIABLE} names {folder!r}, which is not a folder.")
    path = root.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"There is no {name!r} in {folder!r}, the folder that {DATA_VARIABLE} names.")
    return path
