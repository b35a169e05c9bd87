"""Orders of elimination as arrays, so that one program serves all designs of like size.

An :class:`~.elimination.Elimination` is compared by what it holds: a program that has seen one is compiled anew for
another. Here the same indices stand beside the data, and the host knows the order again by its digest.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..frozen_pytree import frozen_pytree
from ..sparse_cholesky import CarriedPattern
from .elimination import Elimination

_MOST_KNOWN = 4
"""Orders of elimination whose plans the host keeps."""
_known: OrderedDict[bytes, Elimination] = OrderedDict()


@frozen_pytree
class CarriedElimination:
    """Order in which the unknowns of a sparse precision are eliminated; see :class:`~.elimination.Elimination`."""

    pattern: CarriedPattern
    leaves: Array
    """Shape ``(b, n)``."""
    common: Array
    """Shape ``(q,)``."""
    directions: Array
    """Known directions, shape ``(m, r)``."""
    digest: Array
    """Digest of the order, bytes of shape ``(16,)``."""
    num_probes: int | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, elimination: Elimination) -> CarriedElimination:
        """The same order, which the host keeps as it is."""
        _keep(elimination)
        pattern = jax.tree.map(jnp.asarray, CarriedPattern.of(elimination.pattern))
        digest = np.frombuffer(elimination.digest, np.uint8)
        leaves, common = (jnp.asarray(a.astype(np.int32)) for a in (elimination.leaves, elimination.common))
        directions = jnp.asarray(elimination.known)
        return cls(pattern, leaves, common, directions, jnp.asarray(digest), elimination.num_probes)

    def known(self) -> Elimination:
        """The order of arrays that have values, made again where the host has forgotten it."""
        digest = np.asarray(self.digest, np.uint8).tobytes()
        if digest not in _known:
            directions = np.array(self.directions, np.float64)  # a copy, since the host keeps it
            arrays = np.asarray(self.leaves), np.asarray(self.common)
            _keep(Elimination(self.pattern.known(), *arrays, self.num_probes, directions), digest)
        _known.move_to_end(digest)
        return _known[digest]

    def describe(self) -> str:
        """The order of elimination, in a line."""
        return self.known().describe()


def _keep(elimination: Elimination, digest: bytes | None = None) -> None:
    _known[elimination.digest if digest is None else digest] = elimination
    while len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)
