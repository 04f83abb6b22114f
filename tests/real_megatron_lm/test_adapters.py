"""Several LoRA adapters of one base: each is, to the last digit, what it is in a separate run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from real_megatron_lm.adapter_runs import (
    SPECIAL,
    check_refused,
    check_same_adapter,
    evaluation_of,
    lines_of,
    model,
    train,
    written,
)
from real_megatron_lm.runs import PIPELINE_OF_TWO, pretrain


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [("1f1b", 1), ("v-half", 1), ("v-zb", 1), ("interleaved", 1), ("1f1b", 2), ("v-zb", 3)],
)
def test_each_adapter_is_as_in_a_separate_run(
    checkout: Path, checkpoint_of_two: Path, tmp_path: Path, schedule: str, steps: int
) -> None:
    more = "--num-virtual-stages-per-pipeline-rank 2" if schedule == "interleaved" else ""
    more += f" --attention-dropout .1 --clip-grad .2 --pipeline-adapter-steps {steps}"
    together = train(checkout, checkpoint_of_two, tmp_path / "all", SPECIAL, schedule, more)
    assert together.code == 0, together.output
    lines = lines_of(together)
    assert {name: len(of) for name, of in lines.items()} == {"a": 4, "b": 3}
    for name, entry in SPECIAL.items():
        only = {name: entry}
        alone = train(checkout, checkpoint_of_two, tmp_path / name, only, schedule, more)
        assert alone.code == 0, alone.output
        assert lines_of(alone) == {name: lines[name]}
        assert evaluation_of(alone, name) == evaluation_of(together, name) != []
        check_same_adapter(tmp_path / name, tmp_path / "all", name)


def test_a_job_goes_on_with_others(checkout: Path, checkpoint_of_two: Path, tmp_path: Path) -> None:
    """It ends early; then one adapter is left out, another one begins, on twice as many ranks."""
    save = tmp_path / "save"
    first = train(checkout, checkpoint_of_two, save, SPECIAL, "v-zb", "--exit-interval 2")
    assert first.code == 0, first.output
    assert lines_of(first).keys() == {"a", "b"}
    others = {"a": SPECIAL["a"], "c": "batch: 2, steps: 2, rank: 2, modules: [linear_proj]"}
    second = train(checkout, checkpoint_of_two, save, others, "v-half", ranks=4, stages=4)
    assert second.code == 0, second.output
    assert "megatron_zb: adapter a: going on after 2 of 4 steps" in second.said
    whole = train(checkout, checkpoint_of_two, tmp_path / "whole", others, "v-zb")
    lines = lines_of(whole)
    assert lines_of(second) == {"a": lines["a"][2:], "c": lines["c"]}
    assert lines_of(first)["a"] == lines["a"][:2]
    for name in others:
        check_same_adapter(save, tmp_path / "whole", name)
    assert (save / "b" / "iter_0000002").is_dir()  # it can go on another time


def test_one_whose_loss_is_no_number_ends_without_the_others(
    checkout: Path, checkpoint_of_two: Path, tmp_path: Path
) -> None:
    """Its weights are multiplied by 10,000 in every step."""
    diverging = "batch: 2, steps: 9, rank: 4, learning_rate: 100, weight_decay: 100"
    entries = {"a": SPECIAL["a"], "bad": diverging}
    both = train(checkout, checkpoint_of_two, tmp_path / "both", entries, "v-zb")
    assert both.code != 0, both.output
    (said,) = both.error.splitlines()
    assert re.search(r"adapter bad ended in step \d, whose loss or gradient is no number", said)
    alone = train(checkout, checkpoint_of_two, tmp_path / "a", {"a": SPECIAL["a"]}, "v-zb")
    assert alone.code == 0, alone.output
    assert lines_of(both)["a"] == lines_of(alone)["a"]
    check_same_adapter(tmp_path / "a", tmp_path / "both", "a")


def test_after_a_rank_is_killed_each_goes_on_from_its_last_checkpoint(
    checkout: Path, checkpoint_of_two: Path, tmp_path: Path
) -> None:
    """In the fourth step of both; they are saved after every second one."""
    entries = {"a": SPECIAL["a"], "b": SPECIAL["b"].replace("steps: 3", "steps: 5")}
    save, program = tmp_path / "save", "run_and_kill_adapters.py"
    killed = train(checkout, checkpoint_of_two, save, entries, "v-half", program=program)
    assert killed.code != 0
    done = lines_of(killed)
    assert {name: [step for step, _ in of] for name, of in done.items()} == {
        "a": ["1", "2", "3"],
        "b": ["1", "2", "3"],
    }
    again = train(checkout, checkpoint_of_two, save, entries, "v-half")
    assert again.code == 0, again.output
    lines = lines_of(again)
    for name, of in lines.items():
        assert f"megatron_zb: adapter {name}: going on after 2 of" in again.output
        assert done[name][2] == of[0]  # the step that was lost, again
    whole = train(checkout, checkpoint_of_two, tmp_path / "whole", entries, "v-half")
    assert {name: of[2:] for name, of in lines_of(whole).items()} == lines
    for name in entries:
        check_same_adapter(save, tmp_path / "whole", name)


@pytest.mark.parametrize(
    ("entry", "more", "said"),
    [
        ("batch: 4, steps: 4, rnk: 4", "", "'adapters.0.rnk' is no field here: did you mean rank"),
        ("batch: 3, steps: 4", "--micro-batch-size 2", "cannot be dealt out in microbatches of 2"),
        (
            "steps: 4",
            "",
            "adapter a has no batch: give it, such as batch: 32, or --global-batch-si",
        ),
        (SPECIAL["a"], "--pipeline-slices 2", "--pipeline-slices 2 cannot be combined with --pip"),
        (SPECIAL["a"], "--pipeline-adapter-steps 0", "--pipeline-adapter-steps is 0: it must be 1"),
    ],
    ids=["key", "batch", "missing", "slices", "steps"],
)
def test_a_mistake_ends_the_job_before_the_model_is_built(
    checkout: Path, checkpoint_of_two: Path, tmp_path: Path, entry: str, more: str, said: str
) -> None:
    run = train(checkout, checkpoint_of_two, tmp_path, {"a": entry}, "v-half", more)
    check_refused(run, said)


def test_adapters_need_a_base(checkout: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "adapters.yaml", {"a": SPECIAL["a"]})
    flags = f"--pipeline-adapters {file} --pipeline-schedule v-half"
    run = pretrain(checkout, model(), PIPELINE_OF_TWO, flags, ranks=2)
    check_refused(run, "give its checkpoint as --load")
