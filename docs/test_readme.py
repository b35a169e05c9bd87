"""The code of the README and of the page on engines runs as it stands there, and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def output_of(path):
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, f"{path} holds no python block"
    # A process of its own, since the code switches float64 on; warnings are not errors, as for a reader.
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, check=False, cwd=ROOT, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.\d*", text)]


def test_readme():
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    output = output_of(ROOT / "README.md")
    assert output.endswith(shown[-1])
    for line, expected in zip(output.splitlines(), "".join(shown).splitlines(), strict=True):
        # draws differ between versions of JAX by their Monte Carlo error
        assert line.split()[0] == expected.split()[0]
        assert numbers(line) == pytest.approx(numbers(expected), abs=0.35)


def test_page_on_engines():
    output = output_of(ROOT / "docs" / "engines.md")
    for engine in ("EP", "LaplaceApproximation", "MCMC", "SVI"):
        assert re.search(rf"^{engine} ", output, re.MULTILINE), output
