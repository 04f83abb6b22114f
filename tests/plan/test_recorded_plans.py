"""What plans say, number by number: of models of every kind, and of each option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import OF_PYTHON, assert_as_recorded, lines_of

from megatron_zb.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"
DEVICE = "--device h100_sxm --micro-batch-size 1 --global-batch-size 32"
DENSE = f"--config llama3_8b --gpus 16 --tensor 2 --pipeline 4 {DEVICE} --seq-length 4096"
LARGE = f"--config llama3_70b --gpus 32 --tensor 4 --pipeline 8 {DEVICE} --seq-length 4096"
EXPERTS = f"--config qwen3_30b_a3b --gpus 16 --tensor 1 --pipeline 4 {DEVICE} --seq-length 4096"
GIVEN = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 32000 --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16 --bf16"
)
PLANS = {
    "dense": f"{DENSE} --schedules zb-h1,v-half",
    "dense_full": f"{DENSE} --schedules zb-h1 --recompute full,selective --vocabulary off",
    "dense_choices": "--config llama3_8b --gpus 8 --device a100_80gb_sxm --schedules 1f1b-v,zb-1p "
    "--global-batch-size 16 --seq-length 8192 --tensor 2,4 --context 1,2 --vocabulary off",
    "vocabulary": f"{DENSE} --schedules zb-h1 --vocabulary on",
    "adapters": f"{LARGE} --schedules v-half --lora",
    "fp8": f"{LARGE} --schedules v-half --precision fp8 --vocabulary off",
    "post_validation": f"{LARGE} --schedules zb-h1 --post-validation --snapshot --vocabulary off",
    "not_overlapped": f"{LARGE} --schedules zb-h1 --no-overlap-data-parallel --no-overlap-p2p",
    "experts": f"{EXPERTS} --schedules v-half,dualpipe-v --vocabulary off",
    "expert_tensor": f"{EXPERTS} --schedules zb-h1 --expert 2,4 --expert-tensor 1,2",
    "latent": "--config deepseek_v3_like --gpus 256 --device h200_sxm --tensor 4 --pipeline 16 "
    "--micro-batch-size 1 --schedules v-half --recompute full --expert 16 --vocabulary off",
    "hybrid": "--config nemotron_3_nano_like --gpus 16 --tensor 2 --pipeline 4 "
    f"{DEVICE} --schedules zb-h1,v-half",
    "gated_delta": "--config qwen3_next_like --gpus 32 --tensor 2 --pipeline 4 "
    f"{DEVICE} --schedules v-half --vocabulary off",
    "slices": f"{DENSE} --schedules v-half --slices 1,2,4 --slice-tokens 512 --vocabulary off",
    "lengths": f"{DENSE} --schedules zb-h1,v-half --lengths lognormal:2048:0.8 --vocabulary off",
    "packed": f"{DENSE} --schedules zb-h1 --lengths lognormal:1024:0.8 --packing first-fit",
    "arguments": f"--gpus 8 --schedules zb-h1,v-half -- {GIVEN}",
    "recomputed_arguments": f"--gpus 8 --schedules zb-h1 -- {GIVEN} --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "measured": "--profile PROFILE --schedules zb-h1,v-half",
    "measured_limit": "--profile PROFILE --schedules v-zb --memory-limit 0.6 --microbatches 8",
    "chart": f"{DENSE} --schedules zb-h1 --vocabulary off --chart --top 2",
}
PROFILE = ROOT / "docs/results/step.cpu.yaml"

pytestmark = [pytest.mark.usefixtures("brief_searches"), OF_PYTHON]


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_what_it_said(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    words = PLANS[name].replace("PROFILE", str(PROFILE)).split()
    options, arguments = words, []
    if "--" in words:
        options, arguments = words[: words.index("--")], words[words.index("--") :]
    text = ""
    for form in ("table", "json"):
        code = cli.main(["plan", *options, "--format", form, *arguments])
        printed = capsys.readouterr().out.rstrip()
        if form == "json" and code == 0:
            printed = lines_of(json.loads(printed))
        text += f"{form}, exit status {code}\n{printed}\n"
    assert_as_recorded(text.replace(str(ROOT), "ROOT"), RECORDED / f"{name}.txt")
