"""The table of docs/memory.md of what vocabulary parallelism rounds differently; its command."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zb.megatron_core.versions import core_series

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
COMMAND = re.search(r"^scripts/fuzz\.py .*$", PAGE, re.M)
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("precision", NAMES)
def test_the_command_of_the_page_prints_the_row_of_the_table(
    precision: str, checkout: Path
) -> None:
    assert COMMAND is not None
    script, *words = shlex.split(COMMAND[0].replace("precision=bf16", f"precision={precision}"))
    words[words.index("--megatron-lm") + 1] = str(checkout)
    done = subprocess.run(
        [sys.executable, ROOT / script, *words], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["verdict"] == "equal"
    row = re.search(rf"\| {NAMES[precision]} \| (\S+) \| (\S+) \|", PAGE)
    assert row is not None
    limits = [float(figure) for figure in row.groups()]
    measured = [found["losses"], found["norms"]]
    if core_series() == (0, 16):
        assert [f"{x:.0e}" for x in limits] == [f"{x:.0e}" for x in measured]
    assert all(x <= 3 * most for x, most in zip(measured, limits, strict=True))
