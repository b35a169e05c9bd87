"""The code of the README runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_readme_code_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, "README.md holds no python block"
    # A process of its own, since the code switches float64 on; warnings are not errors, as for a reader.
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, check=False, cwd=ROOT, text=True
    )
    assert result.returncode == 0, result.stderr
    for engine in ("EP", "LaplaceApproximation", "MCMC", "SVI"):
        assert re.search(rf"^{engine} ", result.stdout, re.MULTILINE), result.stdout
