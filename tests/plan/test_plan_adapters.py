"""Plans of several adapters that share a pipeline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

from megatron_zb import schedules
from megatron_zb.cli.main import main
from megatron_zb.schedules.features.adapters import Adapter, Adapters

SIZES = (
    "plan --config gpt_1_5b --gpus 8 --device a100_80gb_sxm --pipeline 8 --tensor 1 "
    "--micro-batch-size 1 --schedules 1f1b,v-zb --tries 1"
)
pytestmark = pytest.mark.usefixtures("brief_searches")


def written(path: Path, *entries: str) -> Path:
    path.write_text("\n".join(["adapters:", *(f"  - {{{entry}}}" for entry in entries), ""]))
    return path


def planned(file: Path, capsys: pytest.CaptureFixture[str], more: str = "") -> dict[str, Any]:
    assert main([*SIZES.split(), "--adapters", str(file), "--format", "json", *more.split()]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_time_of_all_is_that_of_the_steps_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten steps of both adapters, then ten of the longer one."""
    file = written(
        tmp_path / "a.yaml", "name: a, batch: 8, steps: 10", "name: b, batch: 4, steps: 20"
    )
    plan = planned(file, capsys)
    assert plan["adapters"]["names"] == ["a", "b"]
    rows = {row["schedule"]: row for row in plan["adapters"]["rows"]}
    assert {"Megatron 1F1B", "1f1b", "v-zb"} <= rows.keys()
    assert rows["Megatron 1F1B"]["together_seconds"] is None
    own, megatrons = rows["1f1b"], rows["Megatron 1F1B"]
    assert own["one_after_another_seconds"] == pytest.approx(
        megatrons["one_after_another_seconds"], rel=0.05
    )
    assert own["together_seconds"] < own["one_after_another_seconds"]
    # in the time of one stage: p - 1 of idle time in each of 30 steps, or in each of 20
    apart, together = 10 * (8 + 7) + 20 * (4 + 7), 10 * (12 + 7) + 10 * (4 + 7)
    found = own["together_seconds"] / own["one_after_another_seconds"]
    assert found == pytest.approx(together / apart, rel=0.03)
    seconds = [
        min(filter(None, (row["together_seconds"], row["one_after_another_seconds"])))
        for row in plan["adapters"]["rows"]
    ]
    assert seconds == sorted(seconds)


def test_the_ratio_is_that_of_simulated_steps() -> None:
    """The formula of the test above, by the simulator."""
    costs = schedules.Costs.uniform(pipeline_size=8, forward=1.0, backward=1.0, weight=0.0)

    def slots(*microbatches: int) -> float:
        adapters = Adapters(tuple(Adapter(str(i), m) for i, m in enumerate(microbatches)))
        order = schedules.build("1f1b", pipeline_size=8, adapters=adapters, costs=costs)
        return schedules.simulate(order, costs).makespan / 2

    assert [slots(8), slots(4), slots(8, 4)] == pytest.approx([15, 11, 19])


def test_the_table_has_both_ways_and_what_the_fastest_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "a.yaml", *(f"name: a{i}, batch: 8, steps: 5" for i in range(4)))
    assert main([*SIZES.split(), "--adapters", str(file)]) == 0
    said = capsys.readouterr().out
    assert "4 adapters, hours until all have done their steps" in said
    assert "less time than the fastest one after another: --pipeline-adapters FILE" in said


@pytest.mark.parametrize(
    ("entry", "more", "said"),
    [
        ("name: a, batch: 8", "", "adapter a has no steps, by which a plan counts its steps"),
        ("name: a, steps: 8", "", "adapter a has no batch"),
        ("name: a, batch: 8, stps: 3", "", "'adapters.0.stps' is no field here: did you mean"),
        ("name: a, batch: 8, steps: 3", "--lengths lognormal:4096:0.9", "with --lengths"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str, more: str, said: str
) -> None:
    file = written(tmp_path / "a.yaml", entry)
    assert main([*SIZES.split(), "--adapters", str(file), *more.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_batches_that_no_microbatch_divides_have_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(
        tmp_path / "a.yaml", "name: a, batch: 7, steps: 5", "name: b, batch: 8, steps: 5"
    )
    more = "--micro-batch-size 2"
    assert planned(file, capsys, more)["adapters"]["rows"] == []


def test_groups_of_gpus_have_adapters_that_end_at_like_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [f"name: a{i}, batch: 8, steps: {steps}" for i, steps in enumerate((40, 10, 20, 10))]
    file = written(tmp_path / "a.yaml", *entries)
    sizes = (
        "plan --config gpt_1_5b --gpus 8 --device a100_80gb_sxm --tensor 1 "
        "--micro-batch-size 1 --schedules v-zb --tries 1"
    )
    assert main([*sizes.split(), "--adapters", str(file), "--format", "json"]) == 0
    groups = {of["groups"]: of for of in json.loads(capsys.readouterr().out)["adapters"]["groups"]}
    assert groups.keys() == {1, 2, 4}
    assert {n: of["gpus_of_each"] for n, of in groups.items()} == {1: 8, 2: 4, 4: 2}
    assert groups[2]["adapters"] == [["a0"], ["a1", "a2", "a3"]]
    assert groups[4]["adapters"] == [["a0"], ["a2"], ["a1"], ["a3"]]
    assert main([*sizes.split(), "--adapters", str(file)]) == 0
    said = capsys.readouterr().out
    assert "groups of GPUs, each with some of the adapters" in said
    assert "a0 | a1 a2 a3" in " ".join(said.split())


@pytest.mark.slow
def test_the_page_has_the_tables_that_its_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    sizes = zip("abcd", (16, 16, 32, 8), (500, 500, 300, 800), strict=True)
    entries = [f"name: {name}, batch: {batch}, steps: {steps}" for name, batch, steps in sizes]
    file = written(tmp_path / "adapters.yaml", *entries)
    command = re.findall(
        r"^megatron-zb (plan --config \S+ .*) --adapters adapters\.yaml$", page, re.M
    )
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*command[0].split(), "--adapters", str(file)]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    table = re.findall(r"^```text\n(GPUs .*?)\n```", page, re.M | re.S)[0].splitlines()
    assert len(table) == 4
    assert table == [line for line in printed if line in table]
    (best,) = (line.split() for line in printed if line.startswith("auto: searched"))
    assert f"only: {best[-2]} hours on all GPUs" in page


def test_a_number_of_groups_without_a_setting_has_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [f"name: {name}, batch: 8, steps: 5" for name in "ab"]
    file = written(tmp_path / "a.yaml", *entries)
    why = "--pipeline 8 cannot be had for GPT 1.5B on 4 GPUs"
    assert planned(file, capsys)["adapters"]["no_groups"]["2"].startswith(why)
    assert main([*SIZES.split(), "--adapters", str(file)]) == 0
    assert f" -  2 × 4: {why}" in capsys.readouterr().out


def test_copies_of_all_weights_share_a_pipeline_where_they_have_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.5 billion weights on 8 ranks: 18 bytes of each are 3.4 GB a rank."""
    rows = {}
    for count in (2, 40):
        entries = [f"name: a{i}, batch: 8, steps: 3, weights: all" for i in range(count)]
        plan = planned(written(tmp_path / f"{count}.yaml", *entries), capsys)
        rows[count] = {row["schedule"]: row for row in plan["adapters"]["rows"]}
    assert rows[2]["v-zb"]["together_seconds"] < rows[2]["v-zb"]["one_after_another_seconds"]
    assert rows[40]["v-zb"]["together_seconds"] is None
    entry = "name: a, batch: 8, steps: 3"
    file = written(tmp_path / "both.yaml", entry, f"{entry}, weights: all".replace(" a,", " b,"))
    assert main([*SIZES.split(), "--adapters", str(file)]) == 2
    assert "a plan counts one kind of weights" in capsys.readouterr().err
