"""Faults of libraries below."""

from __future__ import annotations

import os
import warnings
from importlib import metadata

from jaxlib import utils

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


def silence_false_alarms() -> None:
    """Keep jaxlib 0.10 from printing, for each program that it reads from the disk, that the machine is another one.

    It takes two preferences of the compiler for features of the processor (openxla/xla, issue 44565), and reads the
    program all the same. What it would log until the process ends is silenced with it, unless the environment variable
    ``TF_CPP_MIN_LOG_LEVEL`` is 0 (JAX sets it to 1); what fails still raises an exception.
    """
    if metadata.version("jaxlib").startswith("0.10.") and os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
        utils.absl_set_min_log_level(3)
