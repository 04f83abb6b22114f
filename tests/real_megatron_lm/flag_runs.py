"""Runs of the real pretrain_gpt.py with a flag, under schedules and under Megatron-LM's own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from harmless_trials import without
from jobs import Ended, try_job
from rank_process import Kind

from real_megatron_lm.runs import MODEL

SIZES = f"{MODEL} --num-workers 0 --untie-embeddings-and-output-weights --num-layers 4"
SECONDS = 300
_ENDS = {"train": "a", "valid": "b", "test": "c"}

_LOSSES = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)")
_EVALUATIONS = re.compile(r"(\w+\S* loss at .*?) \| lm loss value: (\S+)")


@dataclass(frozen=True)
class Logged:
    """What a run has logged: numbers with ten digits."""

    ended: Ended
    losses: dict[int, float]
    norms: dict[int, float]
    evaluations: dict[str, float]

    @property
    def error(self) -> str:
        """The sentence of an error, or the last lines of a traceback."""
        lines = [line for line in self.ended.stderr.splitlines() if line.strip()]
        raised = [
            line for line in lines if re.match(r"megatron_zb: error|[\w.]*(Error|Exception)", line)
        ]
        return "\n".join(raised[-3:] or lines[-5:])


def train(
    checkout: Path, flags: str, ranks: int = 2, pipeline: int = 2, left_out: str = ""
) -> Logged:
    """Train on forked ranks."""
    usual = f"{SIZES} --pipeline-model-parallel-size {pipeline} --exit-interval 5"
    words = [*without(usual.split(), left_out), *flags.split()]
    script = str(checkout / "pretrain_gpt.py")
    ended = try_job(
        ranks, "megatron_zb.launch", [script, "--cpu", *words], SECONDS, Kind.MEGATRON_LM
    )
    found = _LOSSES.findall(ended.stdout)
    return Logged(
        ended,
        {int(number): float(loss) for number, loss, _ in found},
        {int(number): float(norm) for number, _, norm in found},
        {name: float(loss) for name, loss in _EVALUATIONS.findall(ended.stdout)},
    )


def check_same(run: Logged, upstream: Logged) -> None:
    """The same iterations and losses; sums over other ranks differ in the last bits of fp32."""
    assert run.ended.code == 0, run.error
    for name, rel in (("losses", 3e-7), ("norms", 3e-6), ("evaluations", 3e-7)):
        ours, theirs = getattr(run, name), getattr(upstream, name)
        assert ours == pytest.approx(theirs, rel=rel), f"{name} {ours}, but upstream has {theirs}"


def check_schedules(
    checkout: Path, folder: Path, flags: str, schedules: Sequence[str], sizes: str = ""
) -> Logged:
    """Upstream on two ranks, and each schedule, from a checkpoint that upstream has saved."""
    saving = f"{sizes} --save {folder} --save-interval 2 --exit-interval 2"
    saved = train(checkout, saving)
    assert saved.ended.code == 0, saved.error
    upstream = train(checkout, f"{sizes} {flags} --load {folder}")
    assert upstream.losses, upstream.error
    for schedule in schedules:
        name, _, ranks = schedule.partition(" on ")
        number = int(ranks or 2)
        chosen = f"{sizes} {flags} --load {folder} --pipeline-schedule {name}"
        check_same(train(checkout, chosen, number, number), upstream)
    return upstream


def make_texts(folder: Path) -> Path:
    """Make three sets of texts, and files that name them; return what their names begin with."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    texts, draw = folder / "texts", numpy.random.default_rng(0)
    for name, documents in (("a", 60), ("b", 12), ("c", 10)):
        builder = IndexedDatasetBuilder(f"{texts}_{name}.bin", dtype=numpy.uint16)
        for length in draw.integers(20, 60, documents).tolist():
            builder.add_document(torch.tensor(draw.integers(0, 128, length)), [length])
        builder.finalize(f"{texts}_{name}.idx")
    Path(f"{texts}_arguments").write_text(f"0.5 {texts}_a 0.5 {texts}_b")
    splits = {name: [f"{texts}_{end}"] for name, end in _ENDS.items()}
    Path(f"{texts}_splits.json").write_text(json.dumps(splits))
    Path(f"{texts}_sequences.json").write_text(
        json.dumps({f"{texts}_a": [60, 60], f"{texts}_b": [12, 12]})
    )
    return texts
