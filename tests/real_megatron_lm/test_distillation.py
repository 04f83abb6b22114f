"""A teacher that Megatron-LM has trained, and a student that Megatron-LM evaluates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from real_megatron_lm.runs import pretrain

ROOT = Path(__file__).resolve().parents[2]

MODEL = """
--tokenizer-type NullTokenizer --vocab-size 256 --split 80,10,10
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
--attention-dropout 0 --hidden-dropout 0 --lr 1e-2 --train-iters 4
--eval-iters 2 --eval-interval 1000 --log-interval 1 --ckpt-format torch_dist
"""


def _run(*command: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_megatron_lm_before_and_after(checkout: Path, tmp_path: Path) -> None:
    """Trained on two pipeline ranks, distilled on two, evaluated on two data-parallel ones."""
    text, teacher, student = (tmp_path / name for name in ("text", "teacher", "student"))
    _run("scripts/prepare_text.py", "--max-bytes", 2000000, "--output-prefix", text)
    data = f"--data-path {text}"
    pipeline = "--pipeline-model-parallel-size 2"
    trained = pretrain(
        checkout, MODEL, data, pipeline, f"--save {teacher} --save-interval 4", ranks=2
    )
    assert trained.code == 0, trained.output

    log = tmp_path / "log.jsonl"
    _run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "megatron_zb.distill", "--cpu", "--teacher-load", teacher),
        *("--student-config", "configs/students/half_mlp.yaml", "--data-path", text),
        *("--split", "80,10,10", "--micro-batch-size", 2, "--global-batch-size", 8),
        *("--train-iters", 3, "--lr", 1e-2, "--eval-iters", 2, "--distribution", "0-1:1,2-3:1"),
        *("--log-file", log, "--save-student", student),
    )
    found = json.loads(log.read_text().splitlines()[-1])

    only = "--finetune --skip-train"
    losses = {}
    for name, load, more in (
        ("teacher", teacher, ""),
        ("student", student, "--ffn-hidden-size 128"),
    ):
        ended = pretrain(checkout, MODEL, data, only, f"--load {load}", more, ranks=2)
        assert ended.code == 0, ended.output
        losses[name] = ended.evaluations["validation after 0"]
    assert losses["teacher"] == f"{found['teacher_eval_loss']:.6E}"
    assert losses["student"] == f"{found['student_eval_loss']:.6E}"
    assert losses["teacher"] != losses["student"]
