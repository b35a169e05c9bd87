"""Messages that the sites of a model send through NumPyro's handlers."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
"""Statement of a site by the names that NumPyro gives its parts: ``type``, ``name``, ``fn``, ``value``, ``kwargs``."""
