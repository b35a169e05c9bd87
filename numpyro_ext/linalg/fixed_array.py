"""NumPy arrays that may stand in the static part of a pytree."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np

from .saved_names import saved_as


@saved_as("numpyro_ext.FixedArray")
@dataclasses.dataclass(frozen=True, eq=False)
class FixedArray:
    """NumPy array that is compared and hashed by its content, so that ``jit`` takes it as a static value.

    The array is not copied; it must not be written to afterwards.
    """

    array: np.ndarray

    @functools.cached_property
    def digest(self) -> bytes:
        """Digest of dtype, shape and numbers."""
        digest = hashlib.blake2b(f"{self.array.dtype}{self.array.shape}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.array).tobytes())
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)
