"""Versions of libraries below that compute wrong numbers."""

from __future__ import annotations

import os
import warnings
from importlib import metadata

__all__ = ["warn_of_wrong_sums"]

_FLAG = "--xla_cpu_experimental_ynn_fusion_type="


def warn_of_wrong_sums() -> None:
    """Warn of jaxlib 0.10.2, whose compiled sums of products are wrong on the CPU (jax-ml/jax, issue 39103).

    It was withdrawn, and is no dependency of this package, but an environment that was made otherwise may have it. The
    error shows from some ten thousand rows on, in both precisions.
    """
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:  # built by the user
        return
    if version == "0.10.2" and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            "jaxlib 0.10.2 adds up products wrongly on the CPU, from some ten thousand rows on, without an error "
            "(jax-ml/jax, issue 39103). Install another version of jax and jaxlib, or set the environment variable "
            f"XLA_FLAGS={_FLAG} before Python starts.",
            RuntimeWarning,
            stacklevel=3,
        )
