"""The type of nested containers of arrays, as JAX maps over them."""

from __future__ import annotations

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Arrays in tuples, dictionaries and registered classes: states of algorithms, carries of loops, data of readings.

Which containers these are is the choice of whoever makes them, so type checkers take any.
"""
