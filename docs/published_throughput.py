"""Predicted beside published throughput, in FLOP/s: a part of make_validation.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_zb.parsing import GIB
from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.operators import model_flops
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.strategy import Choices, Strategy, candidates_of
from megatron_zb.plan.work import Workload

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "docs" / "results" / "published_throughput.yaml"
CLOSE = 0.10


@dataclass(frozen=True)
class Throughput:
    """One published run; ``published`` and ``predicted`` in TFLOP/s of a GPU.

    ``fitted``: a figure of the device file was fitted to this row.
    """

    table: str
    setup: str
    setting: str
    schedule: str
    published: float
    predicted: float
    bubble: float
    memory: float
    fitted: bool

    @property
    def miss(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_close(self) -> bool:
        return abs(self.miss) <= CLOSE


def tables() -> list[dict[str, Any]]:
    """The published tables."""
    return list(yaml.safe_load(TABLES.read_text(encoding="utf-8")))


def throughput(table: dict[str, Any], row: dict[str, Any]) -> Throughput:
    """Predict one row."""
    found = _prediction(table, row)
    return Throughput(
        table=table["name"],
        setup=f"{row['name']} on {row['gpus']} GPUs, batch {row['batch']}",
        setting=str(found.load.strategy),
        schedule=found.name,
        published=float(row["value"]),
        predicted=_flops(table, found) / found.seconds / found.gpus / 1e12,
        bubble=found.bubble,
        memory=found.memory.total / GIB,
        fitted=bool(row.get("fitted", False)),
    )


def _flops(table: dict[str, Any], found: Prediction) -> float:
    """As the source counts them."""
    model = found.load.model
    needed = model_flops(model, found.tokens, found.load.sequence, all_scores=True)
    output = 6.0 * found.tokens * model.hidden_size * model.vocabulary
    return needed + (needed - output) / 3 if table.get("recomputed") else needed


def _prediction(table: dict[str, Any], row: dict[str, Any]) -> Prediction:
    device, model = read_device(_config("devices", table["device"])), _model(table, row)
    if "microbatch" in row:
        return _as_told(table, row, device, model)
    choices = Choices(
        tensor=(row["tensor"],),
        pipeline=(row["pipeline"],),
        recompute=tuple(table.get("recompute", ["none", "full"])),
        overlap=table.get("overlap", True),
        sequence_parallel=table.get("sequence_parallel", True),
    )
    job = PlanJob(
        model,
        device,
        row["gpus"],
        device.memory_bytes,
        row["batch"],
        model.sequence_length,
        choices,
    )
    own = candidates_of(["zb-h1"], overlap=table.get("overlap_messages", True))[:2]
    return search(job, own, tries=4).ranked[0]


def _as_told(
    table: dict[str, Any], row: dict[str, Any], device: DeviceConfig, model: ModelConfig
) -> Prediction:
    tensor, pipeline = row["tensor"], row["pipeline"]
    data = row["gpus"] // (tensor * pipeline)
    (recompute,) = row.get("recompute", table["recompute"])
    strategy = replace(
        Strategy(tensor, pipeline, data, 1, row["microbatch"], recompute),
        overlap=table.get("overlap", True),
        sequence_parallel=row.get("sequence_parallel", True),
    )
    one, interleaved = candidates_of(["zb-h1"], overlap=table.get("overlap_messages", True))[:2]
    candidate, chunks = (interleaved, row["chunks"]) if "chunks" in row else (one, None)
    staged = cut_into_stages(
        Workload(model, device, strategy, model.sequence_length), candidate, chunks
    )
    assert staged is not None
    m = strategy.num_microbatches(row["batch"])
    return predict(staged, candidate, IterationSettings(m), chunks)


def _model(table: dict[str, Any], row: dict[str, Any]) -> ModelConfig:
    if "config" in table:
        return read_model(_config("models", table["config"]))
    return ModelConfig(
        name=f"GPT {row['name']}",
        source=table["source"][:300],
        layers=row["layers"],
        hidden_size=row["hidden"],
        attention_heads=row["heads"],
        global_batch_size=row["batch"],
        **table["model"],
    )


def _config(kind: str, name: str) -> Path:
    return ROOT / "configs" / kind / f"{name}.yaml"


def all_rows(watch: Callable[[Throughput], None], text: str = "") -> list[Throughput]:
    """Every row of every table with this text in its name; ``watch`` is told each."""
    out = []
    for table in (table for table in tables() if text in table["name"]):
        for row in table["rows"]:
            out.append(throughput(table, row))
            watch(out[-1])
    return out
