"""The code of the README runs as it stands there and prints what it says; the messages that the site explains exist."""

import ast
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


def tolerances(text):
    """Three and a half units of the last digit of each number: draws differ between versions of JAX."""
    return [3.5 * 10.0 ** -len(decimals) for decimals in re.findall(r"-?\d+\.(\d*)", text)]


def test_readme():
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    output = output_of(ROOT / "README.md")
    assert output.endswith(shown[-1])
    for line, expected in zip(output.splitlines(), "".join(shown).splitlines(), strict=True):
        assert line.split()[0] == expected.split()[0]
        for found, written, tolerance in zip(numbers(line), numbers(expected), tolerances(expected), strict=True):
            assert found == pytest.approx(written, abs=tolerance)


def messages_of_the_package():
    for path in (ROOT / "numpyro_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_the_site_explains():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^`(.*)`\n: ", page, re.MULTILINE)
    assert len(quoted) > 15
    known = list(messages_of_the_package())
    assert [words for words in quoted if not any(words in message for message in known)] == []
