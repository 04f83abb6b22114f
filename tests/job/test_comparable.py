"""Values of two processes are equal text where the same is meant."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zb.job.agreement import comparable, named_arguments


class Kind(Enum):
    ONE = 1


@dataclass
class Settings:
    width: int
    kind: Kind


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (1e-3, 1e-3),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("a", "a"),
        ((1, [2.0]), [1, [2.0]]),
        ({"b", "a"}, ["a", "b"]),
        ({"b": 1, "a": (2,)}, {"a": [2], "b": 1}),
        (Path("/x/y"), "/x/y"),
        (torch.bfloat16, "torch.bfloat16"),
        (Kind.ONE, "Kind.ONE"),
        (torch.nn.functional.gelu.__class__, "builtins.builtin_function_or_method"),
        (json.dumps, "json.dumps"),
        (Settings(4, Kind.ONE), ["Settings", {"kind": "Kind.ONE", "width": 4}]),
        (argparse.Namespace(a=1), ["Namespace", {"a": 1}]),
        (partial(json.dumps, 1, indent=2), ["json.dumps", [1], {"indent": 2}]),
        (Plain(), "<test_comparable.Plain object>"),
    ],
)
def test_values_become_json(value: Any, expected: Any) -> None:
    found = comparable(value)
    assert json.loads(json.dumps(found)) == expected
    assert found == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON, JSON)
def test_what_differs_stays_different_through_json(one: Any, other: Any) -> None:
    as_text = [json.dumps(comparable(value)) for value in (one, other)]
    assert (as_text[0] == as_text[1]) == (repr(comparable(one)) == repr(comparable(other)))
    assert json.loads(as_text[0]) == comparable(one)


@pytest.mark.slow
def test_two_processes_say_the_same_of_what_has_an_address() -> None:
    program = (
        "import json\n"
        "from megatron_zb.job.agreement import comparable\n"
        "class Thing: pass\n"
        "print(json.dumps(comparable([Thing(), lambda x: x, {'b', 'a', 'c'}])))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_arguments_go_by_their_flags() -> None:
    args = argparse.Namespace(rank=3, lr=0.1, bias_gelu_fusion=True, tensorboard_dir="/tmp/a")
    flags = {"--lr", "--no-bias-gelu-fusion", "--tensorboard-dir"}
    found = named_arguments(args, of_rank=("rank",), local=("tensorboard_dir",), flags=flags)
    assert found == {"--lr": 0.1, "bias_gelu_fusion": True, "--tensorboard-dir": True}
