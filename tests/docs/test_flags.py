"""The page of flags: it is what the script makes, and its examples are accepted."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

import pytest

from megatron_zb import schedules
from megatron_zb.job.settings import (
    FLAGS,
    MEGATRON_LM,
    add_megatron_lm_arguments,
    chooses_schedule,
)
from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_core.refusals import OVERLAP
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import interchange

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
import make_flags  # noqa: E402

PAGE = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")


def test_the_page_of_flags_is_what_the_script_makes() -> None:
    assert make_flags.page() == PAGE, "run docs/make_flags.py"


def test_every_flag_has_its_section_and_its_example() -> None:
    for name in (*FLAGS[MEGATRON_LM], make_flags.CHUNKS, OVERLAP):
        assert re.search(rf"^`{flag_of(name)}`: ", PAGE, re.M), name
        assert flag_of(name) in make_flags.EXAMPLES[name]


def parsed(line: str) -> argparse.Namespace:
    """The arguments of an example, with those of Megatron-LM that it names."""
    parser = add_megatron_lm_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=4)
    parser.add_argument(flag_of(make_flags.CHUNKS), type=int)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--load")
    for flag in (flag_of(OVERLAP), "--bf16", "--fp16"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(shlex.split(line))


@pytest.mark.parametrize("name", sorted(make_flags.EXAMPLES))
def test_an_example_is_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = schedules.build("zb-h1", pipeline_size=4, num_microbatches=8)
    interchange.write_csv(table, Path("order.csv"))
    args = parsed(make_flags.EXAMPLES[name])
    assert chooses_schedule(args)
    chunks = args.num_virtual_stages_per_pipeline_rank
    refusals.check(refusals.of_arguments(args, chunks=chunks))


def test_a_conflict_is_listed_on_both_sides() -> None:
    """But what is excluded by every schedule, which support.md lists."""
    shown = {flag: make_flags.excluded(flag) for flag in make_flags.EXAMPLES}
    for name, found in shown.items():
        for others in found.values():
            for other in shown:
                if any(f"`{flag_of(other)}`" in each.split(" with ")[0] for each in others):
                    back = " ".join(e for each in shown[other].values() for e in each)
                    assert flag_of(name) in back or "CUDA" in back, (name, other)
