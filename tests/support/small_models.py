"""A small model for the planner, and what it asks of an A100."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.features.catalog import asking
from megatron_zb.plan.features.vocabulary import PlanVocabulary
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.strategy import Strategy
from megatron_zb.plan.work import Workload

ROOT = Path(__file__).resolve().parents[2]
SMALL = """\
name: small
source: test
layers: 8
hidden_size: 1024
attention_heads: 16
vocabulary: 32000
sequence_length: 1024
global_batch_size: 32
"""
WHOLE = asking(PlanVocabulary("off"))
"""Features of a plan, none of whose schedules shards the output layer."""


def a100() -> DeviceConfig:
    return read_device(ROOT / "configs" / "devices" / "a100_80gb_sxm.yaml")


def small(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({**yaml.safe_load(SMALL), **changes})


def load(model: ModelConfig, device: DeviceConfig | None = None, **changes: Any) -> Workload:
    strategy = replace(Strategy(1, 4, 1, 1, 1, "none"), **changes)
    return Workload(model, device or a100(), strategy, model.sequence_length)
