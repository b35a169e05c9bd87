"""Shared parts of all studies: experiments that are kept, pages, tables, processes, clocks and chains (README.md)."""

from .clock import cpu_seconds, first_and_next, in_turns, peak_bytes, shortest
from .compilation import ProgramLog, compile_function, compile_sweep
from .pages import SCOREBOARD, complete_scoreboard, in_words, run_environment, write_report
from .processes import COLD, in_own_process
from .results_table import Row, at_least, at_most
from .sampling import Chains, CompiledNuts, decentred, make_nuts, run_chains
from .study import Study
from .tables import blocks, mean_and_error, standardised, summary, table, table_head, verdict

__all__ = [
    "CompiledNuts",
    "COLD",
    "SCOREBOARD",
    "Chains",
    "ProgramLog",
    "Row",
    "Study",
    "at_least",
    "at_most",
    "blocks",
    "compile_function",
    "compile_sweep",
    "complete_scoreboard",
    "cpu_seconds",
    "decentred",
    "first_and_next",
    "in_own_process",
    "in_turns",
    "in_words",
    "make_nuts",
    "mean_and_error",
    "peak_bytes",
    "run_chains",
    "run_environment",
    "shortest",
    "standardised",
    "summary",
    "table",
    "table_head",
    "verdict",
    "write_report",
]
