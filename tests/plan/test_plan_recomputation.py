"""Activations that a schedule recomputes or offloads, in plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from brief_searches import briefly
from small_models import a100, load, small

from megatron_zb.cli import main as cli
from megatron_zb.parsing import GIB, gib
from megatron_zb.plan.byte_counts import ActivationBytes
from megatron_zb.plan.features.catalog import asking
from megatron_zb.plan.features.offload import PlanOffload
from megatron_zb.plan.prediction import peak_of
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.strategy import Choices, candidates_of
from megatron_zb.plan.table import as_json, flags
from megatron_zb.schedules import Pass, PassKind
from megatron_zb.schedules.features.offload import Offload

ONE = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))
F, B, W, R, D, H = (getattr(PassKind, kind) for kind in "FBWRDH")


def plan(gib_per_gpu: float, **changes: Any) -> Plan:
    host = a100().host
    assert host is not None
    device = a100().model_copy(update={"host": host.model_copy(update={"bandwidth": 1e12})})
    job = PlanJob(small(sequence_length=4096), device, 4, gib_per_gpu * GIB, 16, 4096, ONE)
    with briefly():
        return search(replace(job, **changes), candidates_of(["auto"]), tries=1)


def test_memory_counts_what_is_recomputed_and_what_is_on_the_host() -> None:
    held = (ActivationBytes(activation=10.0, for_weight=4.0, in_backward=0.0, kept_input=1.0),)

    def peak(*kinds: tuple[PassKind, int]) -> float:
        return sum(peak_of([Pass(kind, 0, j) for kind, j in kinds], held))

    rest = ((B, 0), (W, 0), (B, 1), (W, 1))
    assert peak((F, 0), (F, 1), *rest) == 20
    assert peak((F, 0), (F, 1), (R, 0), *rest) == 20
    assert peak((F, 0), (F, 1), (B, 1), (W, 1), (R, 0), (B, 0), (W, 0)) == 11
    assert peak((F, 0), (D, 0), (F, 1), (B, 1), (W, 1), (H, 0), (B, 0), (W, 0)) == 10


def test_seconds_of_copies_are_those_of_the_link() -> None:
    (candidate,) = candidates_of(["v-half"])[2:]
    staged = cut_into_stages(load(small()), candidate, None)
    assert staged is not None
    costs = replace(staged, features=(PlanOffload(),)).costs(blocking=False)
    host = a100().host
    assert host is not None
    offload = costs.feature(Offload)
    assert offload is not None
    assert offload.seconds == pytest.approx(
        [size / host.bandwidth for size in costs.memory["activation"]]
    )
    assert offload.host_limit == host.memory_gib * GIB


@pytest.mark.slow
def test_what_offload_brings_is_told_beside_what_keeps_all() -> None:
    kept, offloaded = plan(6.2), plan(6.2, features=asking(PlanOffload("auto")))
    row, usual = offloaded.freed, offloaded.all_kept
    assert row is not None
    assert usual is not None
    share, of_host = PlanOffload().as_json(offloaded, row).values()
    assert share > 0
    assert row.memory.total <= 6.2 * GIB
    said = as_json(offloaded)["activation_states"]
    assert f"offloads {share:.0%} to the host ({gib(of_host)} of each rank)" in said
    lead = row.tokens_per_gpu / usual.tokens_per_gpu - 1
    assert f"{abs(lead):.1%} {'ahead of' if lead >= 0 else 'behind'} auto that keeps all" in said
    assert "--pipeline-offload auto" in flags(row, 16)
    assert "--pipeline-offload auto" not in flags(usual, 16)
    best = max(r.tokens_per_gpu for r in offloaded.ranked)
    assert best >= max(r.tokens_per_gpu for r in kept.ranked)
    assert as_json(kept)["activation_states"] is None


def test_a_device_without_a_link_to_its_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", "gpt_38b", "--gpus", "8", "--device", "mi300x"]
    assert cli.main([*words, "--pipeline-offload", "auto"]) == 2
    said = capsys.readouterr().err
    assert "--pipeline-offload auto: the description of MI300X has no host: give" in said
