"""Plans with sequences of unequal lengths: what is drawn, packed and simulated."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from small_models import WHOLE

from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.measured.config import path_of
from megatron_zb.plan.device import read_device
from megatron_zb.plan.features.lengths import (
    SequenceLengths,
    attention_of,
    evenly,
    into,
    lengths_of,
    together,
    with_lengths,
)
from megatron_zb.plan.model import read_model
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.strategy import Choices, candidates_of
from megatron_zb.schedules.step_plan import Lengths

SIZES = "--config llama3_8b --gpus 8 --device h100_sxm --tensor 2 --pipeline 4".split()


def plan_of(sequence: int, data: int = 1) -> Plan:
    device = read_device(path_of("--device", "devices", Path("h100_sxm")))
    job = PlanJob(
        model=read_model(path_of("--config", "models", Path("llama3_8b"))),
        device=device,
        gpus=8 * data,
        memory=device.memory_bytes,
        global_batch=8 * data,
        sequence=sequence,
        choices=Choices(tensor=(2,), pipeline=(4,)),
        features=WHOLE,
    )
    return search(job.of_single_samples(sequence), candidates_of(["v-half", "zb-h1"]))


@pytest.mark.parametrize(
    ("text", "content", "sentence"),
    [
        ("lognormal:4096", None, "has no median in tokens and no standard deviation"),
        ("lognormal:0:1", None, "has no median in tokens"),
        ("lognormal:nan:1", None, "has no median in tokens"),
        ("lengths.txt", None, "cannot be read"),
        ("lengths.txt", "", "it is empty, where the tokens of a sequence should be"),
        ("lengths.txt", "12\n-3\n", "'-3', where the tokens of a sequence should be"),
        ("lengths.txt", "12\n1.5\n", "'1.5', where the tokens"),
    ],
)
def test_lengths_that_cannot_be_read_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    content: str | None,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(text).write_text(content)
    with pytest.raises(UsageError, match=sentence):
        SequenceLengths.read(text, 4096, packs=False)


def test_lengths_of_a_file_are_drawn_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100\n200\n9000\n")
    source = SequenceLengths.read(str(file), 4096, packs=False)
    drawn = source.drawn(200, random.Random(1))
    assert {length for pack in drawn for length in pack} == {100, 200, 4096}
    assert all(len(pack) == 1 for pack in drawn)
    assert drawn == source.drawn(200, random.Random(1))


def test_packs_of_very_many_sequences_are_refused() -> None:
    with pytest.raises(UsageError, match="a pack of 131072 tokens would have more than 500"):
        SequenceLengths.read("lognormal:20:0.5", 131072, packs=True)
    assert SequenceLengths.read("lognormal:20:0.5", 131072, packs=False).mean == 128


def test_packs_are_filled_in_the_order_in_which_sequences_come() -> None:
    source = SequenceLengths.read("lognormal:1000:0.8", 4096, packs=True)
    packs = source.drawn(16, random.Random(1))
    assert len(packs) == 16
    assert all(sum(pack) <= 4096 for pack in packs)
    first = packs[0]
    assert all(sum(first) + pack[0] > 4096 for pack in packs[1:])
    assert 0.75 * 4096 < source.mean < 4096


@pytest.mark.parametrize("seed", range(20))
def test_even_packs_have_all_sequences_within_the_most(seed: int) -> None:
    source = SequenceLengths.read("lognormal:1000:0.8", 4096, packs=False)
    sequences = [pack[0] for pack in source.drawn(40, random.Random(seed))]
    packs = evenly(sequences, 4096)
    assert sorted(length for pack in packs for length in pack) == sorted(sequences)
    assert max(map(sum, packs)) <= 4096
    assert len(packs) == 1 or max(map(sum, into(sequences, len(packs) - 1))) > 4096


def test_replicas_that_share_experts_wait_for_the_longest() -> None:
    replicas = [Lengths.of([1.0, 4.0]), Lengths.of([3.0, 2.0]), Lengths.of([9.0, 9.0])]
    as_fed = together(replicas[:2], 2, in_order=True)
    assert [lengths.tokens for lengths in as_fed] == [(3.0, 4.0)]
    planned = together(replicas[:2], 2, in_order=False)
    assert [lengths.tokens for lengths in planned] == [(4.0, 2.0)]
    apart = together(replicas, 1, in_order=False)
    assert apart == replicas


def test_equal_sequences_take_what_the_plan_says() -> None:
    plan = plan_of(4096)
    source = SequenceLengths(4096, given=(4096,))
    found = with_lengths(plan.ranked, source, plan.job.memory)
    assert len(found.rows) == len([row for row in plan.ranked if row.timeline])
    for row in found.rows:
        expected = pytest.approx(plan.ranked[row.index].tokens_per_gpu, rel=1e-6)
        assert row.tokens_per_gpu == expected
        assert row.as_fed == expected
    assert found.evenly is not None
    assert found.evenly[1] == pytest.approx(1.0, rel=1e-6)


def test_unequal_sequences_cost_more_and_planning_wins_some_of_it_back() -> None:
    source = SequenceLengths.read("lognormal:4096:0.9", 16384, packs=False)
    plan = plan_of(source.mean)
    found = with_lengths(plan.ranked, source, plan.job.memory)
    rates = {plan.ranked[row.index].candidate: row for row in found.rows}
    for row in rates.values():
        assert row.as_fed is not None
        assert row.as_fed < plan.ranked[row.index].tokens_per_gpu
    planned = rates["zb-h1"].tokens_per_gpu
    assert planned is not None
    assert planned > 1.03 * (rates["zb-h1"].as_fed or 0.0)
    assert planned > (rates["Megatron 1F1B"].tokens_per_gpu or 0.0)
    assert [row.tokens_per_gpu or 0.0 for row in found.rows] == sorted(
        (row.tokens_per_gpu or 0.0 for row in found.rows), reverse=True
    )


@pytest.mark.slow
def test_more_replicas_wait_for_the_slowest() -> None:
    source = SequenceLengths.read("lognormal:4096:0.9", 16384, packs=False)
    rates = []
    for data in (1, 4):
        plan = plan_of(source.mean, data)
        found = with_lengths(plan.ranked, source, plan.job.memory)
        of = {plan.ranked[row.index].candidate: row.as_fed for row in found.rows}
        rates.append(of["Megatron 1F1B"] or 0.0)
    assert rates[1] < 0.97 * rates[0]


def test_what_does_not_fit_has_no_figure() -> None:
    plan = plan_of(4096)
    source = SequenceLengths(65536, given=(4096, 65536))
    found = with_lengths(plan.ranked, source, min(row.memory.total for row in plan.ranked))
    assert all(row.as_fed is row.tokens_per_gpu is None for row in found.rows)
    assert found.evenly is None


def test_attention_takes_a_share_of_a_layer() -> None:
    work = attention_of(plan_of(4096).ranked[0].load)
    assert work.backward > work.forward > 0
    lengths = lengths_of([[4096]])
    assert 0.01 < work.forward * lengths.squares[0] / lengths.tokens[0] < 1


# --- the command


def found_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["plan", *SIZES, *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_command_has_a_second_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--lengths lognormal:2048:0.9 --packing first-fit --seq-length 8192 --schedules v-half"
    printed = found_by(capsys, *words.split(), "--global-batch-size", "8")
    assert "with packs of sequences of unequal lengths" in printed
    assert "packed evenly into" in printed


@pytest.mark.slow
def test_the_command_has_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--lengths lognormal:2048:0.9 --seq-length 8192 --schedules v-half --format json"
    plan: dict[str, Any] = json.loads(found_by(capsys, *words.split(), "--global-batch-size", "8"))
    unequal = plan["unequal"]
    assert unequal["mean_tokens"] == plan["sequence_length"]
    assert unequal["most_tokens"] == 8192
    names = [plan["ranked"][row["index"]]["schedule"] for row in unequal["rows"]]
    assert names == [row["schedule"] for row in unequal["rows"]]
    assert {"v-half", "Megatron 1F1B"} <= set(names)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--packing none", "--packing needs --lengths"),
        ("--lengths lognormal:2048:1 --micro-batch-size 2", "leave it out"),
    ],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    assert cli.main(["plan", *SIZES, *words.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1
