"""Libraries that only a part of the package needs, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def optional(module: str, extra: str) -> Any:
    """Import a library of one of the package's extras.

    :param str module: its import name.
    :param str extra: the extra that installs it.
    :return: the module.
    :raises ModuleNotFoundError: if it is not installed, saying how to install it.

    **Example:**

    >>> optional("scipy", "images").__name__
    'scipy'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"{library} is not installed, and this part of numpyro_ext needs it: "
            f'pip install "numpyro-ext-engines[{extra}]"',
            name=library,
        ) from error
