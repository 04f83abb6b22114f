"""A training whose files find no room: one sentence, and what was there stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job
from training_jobs import MODULE, SECONDS_TO_TRAIN

# As on a full disk: Megatron calls torch.save, and this package fsync.
ON_A_FULL_DISK = """
import errno, io, os, sys
import torch
from megatron_zb.train.launch import launch

usual = torch.save

def fail(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def save(what, where, *more, **named):
    return (usual if isinstance(where, io.BytesIO) else fail)(what, where, *more, **named)

torch.save, os.fsync = save, fail
launch(sys.argv[1:])
"""
TRAINING = (
    "--cpu --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --seq-length 32 "
    "--num-attention-heads 4 --micro-batch-size 1 --global-batch-size 4 --mock-data "
    "--vocab-size 128 --lr 1e-3 --eval-iters 0 --pipeline-schedule zb-h1"
)


def trained(folder: Path, flags: str) -> str:
    """Train on a full disk; return the error."""
    program = folder / "on_a_full_disk.py"
    program.write_text(ON_A_FULL_DISK)
    words = [*TRAINING.split(), *flags.split()]
    ended = run_job(2, str(program), words, SECONDS_TO_TRAIN)
    assert ended.code != 0, ended.stderr
    assert "Traceback" not in ended.stderr
    sentences = [line for line in ended.stderr.splitlines() if "No space left" in line]
    assert len(sentences) == 1, ended.stderr
    return sentences[0]


def contents(saved: Path) -> dict[str, bytes]:
    """All files of finished checkpoints, by their paths."""
    files = (path for path in saved.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in files if "unfinished" not in str(p)}


@pytest.mark.long
def test_an_earlier_checkpoint_stays(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    words = [*TRAINING.split(), "--save", str(saved), "--train-iters", "1"]
    assert run_job(2, MODULE, words, SECONDS_TO_TRAIN).code == 0
    before = contents(saved)
    said = trained(tmp_path, f"--save {saved} --train-iters 2")
    assert f"--save {saved}: the checkpoint of iteration 2 cannot be written (No space" in said
    assert "earlier checkpoints are as they were" in said
    assert contents(saved) == before


def test_an_older_log_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("an older file\n")
    said = trained(tmp_path, f"--train-iters 2 --log-file {path}")
    assert said == f"megatron_zb: error: cannot write '{path}': No space left on device"
    assert path.read_text() == "an older file\n"
