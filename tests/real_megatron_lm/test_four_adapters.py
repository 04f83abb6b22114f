"""Four adapters for eight steps on 2 and 4 pipeline ranks: each is what it is in a separate run."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.adapter_runs import (
    FOUR,
    check_same_adapter,
    evaluation_of,
    lines_of,
    train,
)
from real_megatron_lm.runs import Logged


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "v-half", "v-zb", "interleaved"])
def test_each_of_four_is_as_in_a_separate_run(
    checkout: Path, checkpoint_of_two: Path, tmp_path: Path, schedule: str, stages: int
) -> None:
    """In a pipeline that is drained after each step, and in one that is filled for three."""
    layout = "--num-virtual-stages-per-pipeline-rank 2" if schedule == "interleaved" else ""

    def run(folder: str, entries: dict[str, str], more: str = "") -> Logged:
        flags = f"{layout} --clip-grad 1e3 {more}"  # no norm is near that, but it is computed
        how = (checkout, checkpoint_of_two, tmp_path / folder, entries, schedule, flags)
        ended = train(*how, ranks=stages, stages=stages)
        assert ended.code == 0, ended.output
        return ended

    window = run("window", FOUR)
    entries = {name: entry.replace(", clip: .2", "") for name, entry in FOUR.items()}
    stream = run("stream", entries, "--pipeline-adapter-steps 3")
    steps = {"a": 8, "b": 8, "c": 5, "d": 8}
    for together in (window, stream):
        assert {name: len(of) for name, of in lines_of(together).items()} == steps
    for name, entry in FOUR.items():
        alone = run(name, {name: entry})
        assert lines_of(alone) == {name: lines_of(window)[name]}
        assert evaluation_of(alone, name) == evaluation_of(window, name) != []
        check_same_adapter(tmp_path / name, tmp_path / "window", name)
        if name == "d":  # clipped, where a filled pipeline sums parts of a norm in another order
            alone = run("unclipped", {name: entries[name]})
        assert losses(alone, name) == losses(stream, name)
        own = tmp_path / ("unclipped" if name == "d" else name)
        check_same_adapter(own, tmp_path / "stream", name)


def losses(run: Logged, name: str) -> list[str]:
    return [said.partition("|")[0] for _, said in lines_of(run)[name]]


def test_each_has_its_curves(checkout: Path, checkpoint_of_two: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    flags = f"--tensorboard-dir {board} --tensorboard-log-interval 2"
    run = train(checkout, checkpoint_of_two, tmp_path, {"a": FOUR["a"]}, "v-half", flags)
    assert run.code == 0, run.output
    found = EventAccumulator(str(board))
    found.Reload()
    assert {tag for tag in found.Tags()["scalars"] if tag.startswith("a/")} == {
        "a/lm loss",
        "a/learning-rate",
        "a/loss-scale",
        "a/grad-norm",
    }
    logged = {int(step): float(said.split()[2]) for step, said in lines_of(run)["a"]}
    of_board = {it.step: it.value for it in found.Scalars("a/lm loss")}
    assert of_board == {step: pytest.approx(logged[step], rel=1e-6) for step in (2, 4, 6, 8)}
