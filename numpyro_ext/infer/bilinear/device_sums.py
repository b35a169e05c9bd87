"""Sums of what several devices hold."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["over_devices"]


def over_devices(x: Any, axis_name: str | None) -> Any:
    """The sum over the devices of an axis, within ``shard_map``; ``x`` itself where there is no such axis.

    :param x: array or tree of arrays.
    :param str axis_name: of the axis of devices.
    """
    return x if axis_name is None else jax.lax.psum(x, axis_name)
