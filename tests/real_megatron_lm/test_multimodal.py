"""The real pretrain_vlm.py: a language model with an encoder of images on its first stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, Logged, pretrain

# Megatron-LM keeps checkpoints of such models in this format alone; nothing is saved here.
IMAGES = "--ckpt-format torch --img-h 28 --img-w 28 --patch-dim 14 --dataloader-seq-length 16"
ENCODER = MODEL.replace("--num-layers 8", "--decoder-num-layers 8 --encoder-num-layers 3")


def trained(checkout: Path, *flags: str) -> Logged:
    program = Path(__file__).with_name("run_with_norm.py")
    return pretrain(checkout, PIPELINE, *flags, IMAGES, script="pretrain_vlm.py", program=program)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (MODEL, "1f1b"),
        (ENCODER, "zb-h1"),
        (f"{MODEL} --freeze-ViT", "zb-h1"),
        (f"{MODEL} --freeze-LM", "zb-h1"),
        (MODEL, "v-half --pipeline-random-streams rank"),
    ],
)
def test_a_model_with_images_logs_what_upstream_logs(
    checkout: Path, model: str, schedule: str
) -> None:
    upstream = trained(checkout, model)
    ours = trained(checkout, model, f"--pipeline-schedule {schedule}")
    assert ours.code == upstream.code == 0, ours.output + upstream.output
    assert len(upstream.losses) == 7
    assert ours.losses == upstream.losses
    assert ours.norms == upstream.norms
    assert ours.evaluations == upstream.evaluations


def test_an_encoder_has_all_its_layers_beside_fewer_of_the_language_model(checkout: Path) -> None:
    layout = "--pipeline-model-parallel-layout Et|tt|tt|tttL"
    run = trained(checkout, MODEL, "--train-iters 2", layout, "--pipeline-schedule zb-h1")
    assert run.code == 0, run.output
    assert list(run.losses) == [1, 2]
    assert "stage 0 (embedding, layers 1-1)" in run.output


def numbers(logged: Mapping[Any, str]) -> list[float]:
    """What a run has logged, as numbers."""
    return [*map(float, logged.values())]


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (ENCODER, "1f1b"),
        (f"{ENCODER} --freeze-ViT", "zb-h1"),
        (MODEL, "v-half --pipeline-random-streams rank"),
        (MODEL, "v-zb --pipeline-random-streams rank"),
        (
            MODEL,
            "interleaved --num-virtual-stages-per-pipeline-rank 2 --pipeline-random-streams rank",
        ),
    ],
)
def test_an_encoder_runs_on_every_rank(checkout: Path, model: str, schedule: str) -> None:
    """Losses of the first step are equal; then weights differ by the order of sums."""
    upstream = trained(checkout, model)
    ours = trained(checkout, model, f"--pipeline-schedule {schedule} --pipeline-encoder on")
    assert ours.code == upstream.code == 0, ours.output + upstream.output
    assert len(upstream.losses) == 7
    assert "every pipeline rank: a copy of the encoder" in ours.output
    assert ours.losses[1] == upstream.losses[1]
    for of_ours, of_upstream in (
        (ours.losses, upstream.losses),
        (ours.norms, upstream.norms),
        (ours.evaluations, upstream.evaluations),
    ):
        assert numbers(of_ours) == pytest.approx(numbers(of_upstream), rel=1e-4)


def test_an_encoder_on_every_rank_goes_on_from_a_checkpoint(checkout: Path, tmp_path: Path) -> None:
    """Legacy checkpoints, which alone Megatron-LM keeps of such models, are of one placement."""
    flags = f"{ENCODER} --pipeline-schedule zb-h1 --save {tmp_path} --save-interval 3"
    spread = f"{flags} --pipeline-encoder on"
    through = trained(checkout, spread)
    assert through.code == 0, through.output
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3", encoding="utf-8")
    resumed = trained(checkout, spread, f"--load {tmp_path}")
    assert resumed.code == 0, resumed.output
    # the second line after a start has the mean of two steps, in Megatron's own schedules, too
    for step in (4, 6, 7):
        assert resumed.losses[step] == through.losses[step]
    assert resumed.evaluations == through.evaluations
    elsewhere = trained(checkout, flags, f"--load {tmp_path}")
    assert elsewhere.code != 0
    assert "is in the legacy format and was written with" in elsewhere.error
    assert "with a copy of the encoder on every rank" in elsewhere.error
