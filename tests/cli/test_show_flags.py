"""Flags of ``megatron-zb show`` by twos: each changes what is drawn, or one sentence refuses it."""

from __future__ import annotations

import argparse
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import drawn_sizes
import pytest

from megatron_zb.cli import show
from megatron_zb.errors import UsageError
from megatron_zb.schedules import interchange
from megatron_zb.schedules.features import offload, recomputation

pytestmark = pytest.mark.usefixtures("brief_searches", "brief_recomputation")

FLAGS = {
    "memory_limit": "0.45",
    "chunks": "4",
    "group_size": "6",
    "slices": "2",
    "attention": "0.5",
    "adapters": "2",
    "adapter_steps": "3",
    "encoder": "0.1",
    "reference": "0.5",
    "update_delay": "1",
    "forward": "1.5",
    "backward": "1.25",
    "weight": "0.5",
    "p2p": "0.125",
    "forward_comm": "0.5",
    "backward_comm": "0.75",
    "recompute": "0.03",
    "offload": "0.3",
    "cut_output": "0.5",
    "blocks": "5",
    "steps": "4",
    "run_ahead": "0",
    "distribution": "0-0:2,1-1:1",
    "teacher": "2",
    "student": "4",
    "update": "1",
    "relay": "0.5",
    "reduce": "2",
    "patches": "5",
    "time_steps": "3",
}
NOT_DRAWN = {"name", "pipeline_size", "num_microbatches", "csv", "output", "help"}
"""What is drawn, and where."""

SIZES = "--pipeline-size 3 --num-microbatches 6"
LIMITED = {"recompute", "offload"}
"""Flags that a schedule needs only under a memory limit."""


@pytest.fixture
def brief_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "SECONDS", 0.1)
    monkeypatch.setattr(offload, "_POLISHED", 0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    show.add_show(made)
    return made


def test_every_flag_is_tried() -> None:
    assert {action.dest for action in parser()._actions} == FLAGS.keys() | NOT_DRAWN


@cache
def drawn(base: str, *names: str) -> Any:
    """What is drawn with these flags; the error where they are refused."""
    words = base.split()
    for name in names:
        words += [f"--{name.replace('_', '-')}", FLAGS[name]]
    if LIMITED & {*names} and "csv" not in base:
        words += ["--memory-limit", "0.36"]
    try:
        timeline = show._timeline(parser().parse_args(words))
    except UsageError as error:
        return error
    return timeline.schedule.ranks, timeline.start, timeline.end, timeline.peak_memory


def check_each_has_an_effect(base: str, names: tuple[str, ...]) -> None:
    together = drawn(base, *names)
    if isinstance(together, UsageError):
        return
    for name in names:
        others = tuple(other for other in names if other != name)
        assert together != drawn(base, *others), f"--{name} makes no difference"


BASES = {
    "v-half": SIZES,
    "pipe-bd": f"{SIZES} --blocks 2 --teacher 1 3",
    "interleaved": SIZES,
    "1f1b": SIZES,
    "pipefusion": "--pipeline-size 3 --patches 4 --time-steps 2",
}
PAIRS = [pair for pair in combinations(FLAGS, 2) if not {*pair} <= LIMITED | {"memory_limit"}]
"""All but recomputation and offload, of which a search takes what is faster, under a limit."""


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("base", BASES)
def test_a_flag_alone(base: str, name: str) -> None:
    check_each_has_an_effect(f"{base} {BASES[base]}", (name,))


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
@pytest.mark.parametrize("base", drawn_sizes.first(2, [*BASES]))
def test_two_flags(base: str, pair: tuple[str, str]) -> None:
    check_each_has_an_effect(f"{base} {BASES[base]}", pair)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_beside_a_table(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    made = show._timeline(parser().parse_args(f"v-half {SIZES}".split()))
    interchange.write_csv(made.schedule, path)
    check_each_has_an_effect(f"--csv {path}", (name,))
