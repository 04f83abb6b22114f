"""Commands import torch and Megatron, which takes seconds, only where they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from megatron_zb.cli.main import main

code = main(sys.argv[1:])
print(code, sorted({"torch", "megatron.core", "matplotlib", "numba"} & {*sys.modules}))
"""


@pytest.mark.parametrize(
    ("words", "said", "imported"),
    [
        ("check", "the arguments of a training are missing", []),
        ("check --", "the arguments of a training are missing", []),
        ("check -- --bf16", "no schedule is chosen", []),
        ("check -- --pipeline-schedule v-haf", "unknown pipeline schedule 'v-haf'", []),
        ("check -- --pipeline-schedule v-half --bf1", "unknown argument '--bf1'", []),
        ("check -- --pipeline-offload onn", "--pipeline-offload 'onn' is unknown", []),
        ("verify -- x --pipeline-offload onn", "--pipeline-offload 'onn' is unknown", []),
        ("flags --config gpt_1_5b", "", []),
        ("doctor", "", ["torch"]),
    ],
)
def test_a_command_imports_what_it_needs(words: str, said: str, imported: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True
    )
    code, _, found = done.stdout.splitlines()[-1].partition(" ")
    assert found == str(imported)
    assert said in done.stderr
    assert code == "2" or not said
