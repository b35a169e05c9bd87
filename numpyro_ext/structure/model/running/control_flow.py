"""Check of NumPyro's control flow while a model runs."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from numpyro.ops.pytree import PytreeTrace
from numpyro.primitives import Messenger

from ...errors import ModelStructureError
from .messages import Message
from .plain_sites import is_scan


class Watch(Messenger):
    """Remember the last site that went by, to say where a model failed, and refuse sites that cannot be reached.

    :param fn: a model, or the body of a scan, whose sites other handlers do not see.
    :param outer: the handler around the scan.
    """

    last_site: str | None = None

    def __init__(self, fn: object, outer: Watch | None = None):
        self.outer = outer
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if is_scan(msg):
            msg["args"] = (Watch(msg["args"][0], self), *msg["args"][1:])
        elif self.outer is not None and msg["type"] in ("param", "prng_key"):
            is_param = msg["type"] == "param"
            what = f"the param '{msg['name']}'" if is_param else "a random key (as a site hidden by a block does)"
            raise ModelStructureError(
                f"a step of a scan asks for {what}{f' after site {self.last_site!r}' if self.last_site else ''}, of "
                "which NumPyro keeps no value. Ask for it before the scan, and hand it in by the carry or xs.",
                site=msg["name"] if is_param else self.last_site,
            )

    def postprocess_message(self, msg: Message) -> None:
        self.last_site = msg.get("name") or self.last_site
        if self.outer is not None:
            self.outer.last_site = self.last_site
        if msg["type"] == "control_flow":
            leaves = jax.tree.leaves(msg["value"], is_leaf=lambda leaf: isinstance(leaf, PytreeTrace))
            traces = [leaf.trace for leaf in leaves if isinstance(leaf, PytreeTrace)]
            for name, site in (item for trace in traces for item in trace.items()):
                reason = self._refusal(msg, name, site)
                if reason is not None:
                    raise ModelStructureError(f"site '{name}' is inside {reason}", site=name)

    def _refusal(self, msg: Message, name: str, site: Message) -> str | None:
        """Explain why a site inside control flow cannot be read, and what to do instead."""
        control_flow = "of numpyro.contrib.control_flow"
        if site["type"] not in ("sample", "param"):
            return None
        if site.get("is_observed"):
            given = [data for kind, data in msg["kwargs"].get("substitute_stack", ()) if kind == "condition"]
            found = [np.shape(data[name]) for data in given if isinstance(data, Mapping) and name in data]
            shape = np.shape(site["value"])
            if not found or len(found[0]) != len(shape) or found[0][0] >= shape[0]:
                return None
            return (
                f"a scan {control_flow} of {shape[0]} steps, of which only {found[0][0]} are given a value by "
                "handlers.condition. Scan the observed steps, and those to be forecast in a second scan that starts "
                "from the last carry; or hand all values in by xs, and mask those that are missing."
            )
        if not is_scan(msg) or self.outer is not None:
            where = "a scan within a scan" if is_scan(msg) else "a cond"
            return (
                f"{where} {control_flow}, where it cannot be read. Sample it outside, all its elements as one site, "
                "and use them inside; or use NUTS."
            )
        if msg["args"][4]:
            return (
                f"a scan {control_flow} with reverse=True, whose steps NumPyro records in another order than that in "
                "which it gives them values. Scan forwards, over xs that are reversed."
            )
        return None
