"""Layers that are vocabulary parallel, in the real pretrain_gpt.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from real_megatron_lm.runs import (
    MODEL,
    PIPELINE_OF_TWO,
    Logged,
    check_equal,
    check_near,
    pretrain,
)

WEIGHTS = {"untied": "--untie-embeddings-and-output-weights", "tied": ""}
CUT = "--pipeline-schedule v-half --pipeline-vocabulary on"


@dataclass(frozen=True)
class Start:
    """Two iterations of Megatron's own 1F1B, and what it and v-half with shards log after them."""

    flags: str
    folder: Path
    upstream: Logged
    shards: Logged


@pytest.fixture(scope="module", params=WEIGHTS)
def start(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Start:
    folder = tmp_path_factory.mktemp(request.param)
    flags = f"{MODEL} {PIPELINE_OF_TWO} {WEIGHTS[request.param]}"
    saving = f"--exit-interval 2 --save {folder} --save-interval 2"
    run = pretrain(checkout, flags, saving, ranks=2)
    assert run.code == 0, run.output
    upstream, shards = (
        pretrain(checkout, flags, f"--load {folder}", more, ranks=2) for more in ("", CUT)
    )
    assert list(upstream.losses) == [3, 4, 5, 6, 7], upstream.output
    return Start(flags, folder, upstream, shards)


def test_shards_of_an_upstream_checkpoint_log_what_upstream_logs(start: Start) -> None:
    check_near(start.shards, start.upstream)


def test_no_exception_leaves_megatrons_context_managers(start: Start) -> None:
    """Its straggler detector, which is around the call of the model, prints each of them."""
    assert "Traceback" not in start.shards.output


def test_multi_token_prediction_logs_what_upstream_logs(checkout: Path, tmp_path: Path) -> None:
    """Its losses, too; from a checkpoint of Megatron's own, whose last stage has two embeddings."""
    more = "--mtp-num-layers 2 --position-embedding-type rope"
    flags = f"{MODEL} {PIPELINE_OF_TWO} {WEIGHTS['untied']} {more}"
    saving = f"--exit-interval 2 --save {tmp_path} --save-interval 2"
    first = pretrain(checkout, flags, saving, ranks=2)
    assert first.code == 0, first.output
    upstream, shards = (
        pretrain(checkout, flags, f"--load {tmp_path}", cut, ranks=2) for cut in ("", CUT)
    )
    check_near(shards, upstream)
    theirs, ours = (
        [float(text) for text in re.findall(r"mtp_\d loss: (\S+)", run.output)]
        for run in (upstream, shards)
    )
    assert len(theirs) == 2 * 5
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("name", ["v-half", "zb-h1", "auto"])
def test_where_sends_wait_and_hosts_drain_shards_log_the_same(
    checkout: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The rules of a GPU, in training and evaluation, and the same digits; see hostile.py."""
    monkeypatch.setenv("SENT", str(tmp_path / "sent"))
    flags = f"--load {start.folder} --pipeline-schedule {name} --pipeline-vocabulary on"
    hostile = Path(__file__).with_name("run_hostile.py")
    check_equal(pretrain(checkout, start.flags, flags, ranks=2, program=hostile), start.shards)
    assert any((tmp_path / "sent").iterdir())


def test_upstream_goes_on_with_a_checkpoint_of_shards(
    checkout: Path, start: Start, tmp_path: Path
) -> None:
    """As it does with one of its own, at the same iteration."""
    found = {}
    for name, more in (("upstream", ""), ("shards", CUT)):
        saving = f"--exit-interval 4 --save {tmp_path / name} --save-interval 4"
        run = pretrain(checkout, start.flags, f"--load {start.folder}", saving, more, ranks=2)
        assert run.code == 0, run.output
        found[name] = pretrain(checkout, start.flags, f"--load {tmp_path / name}", ranks=2)
    assert list(found["upstream"].losses) == [5, 6, 7]
    check_near(found["shards"], found["upstream"])
