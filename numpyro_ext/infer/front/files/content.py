"""Types of what files hold."""

from typing import Any, TypeAlias

Content: TypeAlias = dict[str, Any]
"""Numbers, words, arrays, and tuples and dictionaries of these, by the names under which a file keeps them."""
