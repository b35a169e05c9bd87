"""What is compiled while a test runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """The names of the programs that are compiled meanwhile, or taken from a cache on disk."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **info: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(info.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
