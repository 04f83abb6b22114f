"""Metrics of experts where the rank that logs them holds no experts."""

from __future__ import annotations

from typing import Any

import torch
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core import parallel_state
from model_options import EXPERTS
from ranks import RankPools

from megatron_zb.megatron_core import experts, versions

M = 4
WITHOUT_ON_THE_LAST = {**EXPERTS, "moe_layer_freq": [0, 1, 1, 0]}


def logged() -> dict[str, list[float]]:
    """The metrics of this rank after Megatron's reduction."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ModuleNotFoundError:
        from megatron.core.transformer.moe.moe_utils import reduce_aux_losses_tracker_across_ranks

        reduce_aux_losses_tracker_across_ranks()
    else:
        tracker = get_moe_metrics_tracker()
        tracker._sync_metrics(list(tracker.metrics))
    return {name: e["values"].tolist() for name, e in versions.expert_metrics().items()}


def trained(schedule: str) -> tuple[bool, dict[str, list[float]]]:
    """Whether this rank has routers, and what it would log after a step."""
    case = GPTCase(data_parallel=2, options=tuple(WITHOUT_ON_THE_LAST.items()))
    with (
        versions.losses_logged_apart(),
        built(case, schedule, M) as (adapter, chunks),
    ):
        assert adapter is not None
        data: list[Any] = [microbatches(case, M) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, M)
        has_routers = any("router" in name for c in chunks for name, _ in c.named_modules())
        return has_routers, logged()


def test_a_rank_without_experts_logs_what_the_others_do(ranks: RankPools) -> None:
    found = ranks(4).run(trained, schedule="v-half")
    assert [has_routers for has_routers, _ in found] == [True, True, False, False]
    metrics = [each for _, each in found]
    assert metrics.count(metrics[0]) == 4
    values = metrics[0]["load_balancing_loss"]
    assert [value > 0 for value in values] == [False, True, True, False]


def shared(groups: dict[str, bool]) -> dict[str, dict[str, Any]]:
    """Entries of both ranks after they have shared them; rank 1 begins with none."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    with versions.losses_logged_apart():
        if pipeline.rank() == 0:
            group = parallel_state.get_tensor_and_context_parallel_group()
            for name, has_group in groups.items():
                fields = {"values": torch.ones(3), "reduce_group": group if has_group else None}
                versions.set_expert_metric(name, {**fields, "avg_group": None})
        experts.share(pipeline, "cpu")
        found = versions.expert_metrics()
        return {
            name: {"sum": e["values"].sum().item(), "size": len(e["values"]), **_sizes(e)}
            for name, e in found.items()
        }


def _sizes(entry: dict[str, Any]) -> dict[str, int | None]:
    groups = {name: entry[name] for name in ("reduce_group", "avg_group")}
    return {name: None if group is None else group.size() for name, group in groups.items()}


def test_entries_have_the_groups_and_the_sizes_of_routers(ranks: RankPools) -> None:
    first, second = ranks(2).run(shared, groups={"a_loss": True, "z_loss": False})
    none = {"reduce_group": None, "avg_group": None}
    assert first == {
        "a_loss": {**none, "sum": 3, "size": 3, "reduce_group": 1},
        "z_loss": {**none, "sum": 3, "size": 3},
    }
    assert second == {
        "a_loss": {**none, "sum": 0, "size": 3, "reduce_group": 1},
        "z_loss": {**none, "sum": 0, "size": 3},
    }
