"""Command line of the demo."""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def main() -> None:
    """Run one of the two jobs and say where its pictures are."""
    parser = argparse.ArgumentParser(prog="python -m numpyro_ext.demo", description=__doc__)
    parser.add_argument(
        "job",
        nargs="?",
        default="comparison",
        choices=("comparison", "cross-validation"),
        help="compare NUTS, SMC, SVI, Laplace and EP (default), or cross-validate the three non-linearities with EP",
    )
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the pictures (default: demo)")
    options = parser.parse_args()

    import numpyro

    from ..optional import optional

    optional("matplotlib", "demo").use("Agg")
    numpyro.enable_x64()
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if options.job == "comparison":
        from .comparison import run
    else:
        from .cross_validation import run
    run(options.output)
    print(f"\nPictures in {options.output}/. Done in {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
