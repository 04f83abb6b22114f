"""What ranks compare at the start tells runs apart that could not run together."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_zb.megatron.adapter import PipelineAdapter
from megatron_zb.megatron_lm import fingerprint
from megatron_zb.schedules.layout import Layers


def plan(name: str = "v-half", microbatches: int = 8, layout: str | None = None) -> PipelineAdapter:
    return PipelineAdapter.create(
        name,
        pipeline_size=2,
        num_microbatches=microbatches,
        layers=Layers(8),
        layer_layout=layout,
    )


def values(
    of: PipelineAdapter | None = None,
    variables: dict[str, str] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    args = argparse.Namespace(**{"seq_length": 32, "hidden_size": 64, **arguments})
    return fingerprint.of_run(args, of or plan(), variables or {})


def test_equal_runs_are_equal() -> None:
    assert values() == values()


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("the schedule", values(plan("v-zb"))),
        ("a table with the digest", values(plan(microbatches=6))),
        ("layers placed as", values(plan(layout="Ett|tt|t|tttL"))),
        ("microbatches", values(plan(microbatches=6))),
        ("--seq-length", values(seq_length=64)),
        ("--params-dtype", values(params_dtype="torch.bfloat16")),
        ("CUDA_DEVICE_MAX_CONNECTIONS", values(None, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})),
        ("NVTE_FLASH_ATTN", values(None, {"NVTE_FLASH_ATTN": "0"})),
    ],
)
def test_a_difference_shows_under_its_name(name: str, other: dict[str, Any]) -> None:
    assert other.get(name) != values().get(name)


def test_what_may_differ_between_hosts_does_not_count() -> None:
    assert values(None, {"HOSTNAME": "a", "NCCL_SOCKET_IFNAME": "eth1"}) == values()
