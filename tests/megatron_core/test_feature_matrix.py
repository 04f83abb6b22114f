"""What docs/support.md says: every row of the feature matrix, and every refusal."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from feature_matrix import IN_EVERY_RUN, ON_PATTERNS, ROWS, TRIED_HERE, Row, Verdict
from gpt_cases import (
    GPTCase,
    as_hybrid,
    built,
    differences,
    forward_backward,
    gradients,
    microbatches,
    optimizer,
    run,
    skip_without_hybrids,
)
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.connections import ChannelsPart
from megatron_zb.megatron_core.data_parallel import DataParallelSync
from megatron_zb.megatron_core.refusals import check_step

ROOT = Path(__file__).resolve().parents[2]


def skip_unless_in_this_megatron(row: Row) -> None:
    if not row.since <= versions.core_series() < row.until:
        pytest.skip("this Megatron does not have it")


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "schedule"),
    [
        pytest.param(
            row,
            name,
            id=f"{row.feature}-{name}",
            marks=() if (row.feature, name) in IN_EVERY_RUN else pytest.mark.full,
        )
        for row, name in TRIED_HERE
    ],
)
def test_a_feature_gives_what_megatron_gives(ranks: RankPools, row: Row, schedule: str) -> None:
    assert row.case is not None
    skip_unless_in_this_megatron(row)
    num_microbatches = max(3, len(row.case.lengths))
    found = ranks(row.ranks).run(
        differences, case=row.case, schedule=schedule, num_microbatches=[num_microbatches]
    )
    assert found == [[]] * row.ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "schedule"),
    [
        pytest.param(
            row,
            name,
            id=f"{row.feature}-{name}",
            marks=() if name == row.schedules[0] else pytest.mark.full,
        )
        for row, name in ON_PATTERNS
    ],
)
def test_a_hybrid_model_of_the_same_layers_gives_it_too(
    ranks: RankPools, row: Row, schedule: str
) -> None:
    assert row.case is not None
    skip_unless_in_this_megatron(row)
    case = as_hybrid(row.case)
    skip_without_hybrids(case)
    found = ranks(row.ranks).run(
        differences,
        case=case,
        schedule=schedule,
        num_microbatches=[max(3, len(case.lengths))],
        forward_only=row.verdict is Verdict.LOSSES,
    )
    assert found == [[]] * row.ranks


def test_a_hybrid_model_has_nearly_all_that_a_gpt_has() -> None:
    rows = [row for row in ROWS if row.has_pattern]
    for row in rows:
        shown = (row, row.schedules[0]) in ON_PATTERNS or row.pattern_test is not None
        assert shown != bool(row.pattern_refused), row.feature
    equal = [row for row in rows if not row.pattern_refused]
    assert len(equal) >= 0.95 * len(rows) > 50


def test_rows_name_tests_that_exist() -> None:
    written = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    for row in ROWS:
        for name in filter(None, (row.test, row.pattern_test)):
            assert f"def {name}(" in written, name
        assert (row.verdict is Verdict.NOT_ON_CPU) == bool(row.reason), row.feature


@pytest.mark.parametrize(
    "setting",
    [
        "num_microbatches_with_partial_activation_checkpoints",
        "delay_wgrad_compute",
        "defer_embedding_wgrad_compute",
        "overlap_dispatch_backward_with_experts_wgrad",
        "fine_grained_activation_offloading",
        "gtp_weight_remat_size",
        "expert_gtp_weight_remat_size",
    ],
)
def test_settings_that_cannot_be_served_are_refused(setting: str) -> None:
    config = SimpleNamespace(**{setting: 2})
    with pytest.raises(UsageError, match=rf"^{setting} cannot be combined with .* v-half: "):
        check_step(config, "v-half")


def test_weights_of_which_a_rank_has_all_are_served() -> None:
    config = SimpleNamespace(gtp_weight_remat_size=1, expert_gtp_weight_remat_size=1)
    check_step(config, "v-half")


def test_a_step_is_refused_by_its_placement() -> None:
    config = SimpleNamespace(sequence_packing_scheduler="dp_balanced")
    v = schedules.build("v-half", pipeline_size=2, num_microbatches=2).placement
    with pytest.raises(UsageError, match=r"^sequence_packing_scheduler .* v-half: "):
        check_step(config, "v-half", placement=v)
    straight = schedules.build("zb-h1", pipeline_size=2, num_microbatches=2).placement
    check_step(config, "zb-h1", placement=straight)


def sizes_of_groups() -> dict[str, int]:
    """Those that Megatron's reduction of gradients asks for, 2 pipelines of 2 ranks."""
    with built(GPTCase(data_parallel=2), "zb-h1", num_microbatches=2):
        groups = versions.process_groups()
        names = ("tp", "pp", "cp", "dp_cp", "tp_dp_cp")
        return {name: getattr(groups, name).size() for name in names}


def test_all_groups_are_handed_to_the_reduction_of_gradients(ranks: RankPools) -> None:
    """From 0.18 on it needs tp_dp_cp where experts have a bias."""
    expected = {"tp": 1, "pp": 2, "cp": 1, "dp_cp": 2, "tp_dp_cp": 2}
    assert ranks(4).run(sizes_of_groups) == [expected] * 4


def test_shapes_of_a_function_are_refused_unless_they_travel() -> None:
    config = SimpleNamespace(variable_seq_lengths=False)
    with pytest.raises(UsageError, match=r"adjust_tensor_shapes_fn .* set variable_seq_lengths"):
        check_step(config, "zb-h1", lambda *shapes: shapes)
    config.variable_seq_lengths = True
    check_step(config, "zb-h1", lambda *shapes: shapes)


class Chunk:
    """A model chunk that says its name in the place of its parameters."""

    def __init__(self, name: int) -> None:
        self.name = name

    def parameters(self) -> int:
        return self.name


def _syncs(**functions: Any) -> list[str]:
    """What is said in a step of two microbatches of four chunks, the last two in other order."""
    said: list[str] = []
    config = SimpleNamespace(
        **{f"{name}_sync_func": None for name in ("param", "grad")},
    )
    for name, kind in functions.items():
        calls = [lambda chunk, name=name: said.append(f"{name} {chunk}") for _ in range(4)]
        setattr(config, f"{name}_sync_func", calls if kind is list else calls[0])
    chunks = [Chunk(c) for c in range(4)]
    sync = DataParallelSync(config, chunks, [0, 1, 3, 2], [2] * 4, buckets=[None] * 4)
    for chunk in (0, 0, 1, 0, 1, 3, 2, 3):
        said.append(f"F{chunk}")
        sync.before_forward(chunk)
    for chunk in (3, 2, 3, 0, 2):
        said.append(f"W{chunk}")
        sync.before_weight_gradients(chunk, None)
        sync.after_weight_gradients(chunk)
    return said


@pytest.mark.parametrize("kind", [list, "one"])
def test_gathers_run_one_chunk_ahead_and_reductions_at_once(kind: Any) -> None:
    said = _syncs(param=kind, grad=kind)
    assert " ".join(said) == (
        "param 0 param 1 F0 F0 F1 param 3 F0 F1 F3 param 2 F2 F3 W3 W2 W3 grad 3 W0 W2 grad 2"
    )


def gathers_of_an_evaluation(schedule: str) -> list[int]:
    """How often weights were gathered: by an evaluation, and by a step that trains after it."""
    case, calls = GPTCase(), list[Any]()
    with built(case, schedule, num_microbatches=3) as (adapter, chunks):
        config = get_model_config(chunks[0])
        config.param_sync_func = [calls.append for _ in chunks]
        given = config.param_sync_func
        counts = []
        assert adapter is not None
        for forward_only in (True, False):
            data = [microbatches(case, 3) for _ in chunks]
            function = adapter.forward_backward_func
            forward_backward(function, chunks, data, 3, forward_only=forward_only)
            counts.append(len(calls))
        assert config.param_sync_func is given
    return counts


@pytest.mark.parametrize(("schedule", "chunks"), [("v-half", 2), ("zb-h1", 1)])
def test_an_evaluation_gathers_no_weights(ranks: RankPools, schedule: str, chunks: int) -> None:
    found = ranks(2).run(gathers_of_an_evaluation, schedule=schedule)
    assert found == [[0, chunks]] * 2


def gathers_after_a_step(schedule: str) -> tuple[int, list[bool], list[bool]]:
    """The first chunk that a rank runs, and of each chunk whether its weights are on their way.

    Last come those of its experts, which are spread over ranks.
    """
    gathers = (r for r in ROWS if r.case is not None and r.case.gather_in_optimizer)
    row = next(r for r in gathers if r.case is not None and r.case.expert_parallel > 1)
    assert row.case is not None
    order: list[int] = []
    with built(row.case, schedule, num_microbatches=2) as (adapter, chunks):
        assert adapter is not None
        for vp_stage, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(lambda *_, at=vp_stage: order.append(at))
        adam = optimizer(row.case, chunks)
        data = [microbatches(row.case, 2) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, 2)
        adam.step()
        dense, experts = (
            [any(g.param_gather_dispatched for g in getattr(chunk, groups)) for chunk in chunks]
            for groups in ("bucket_groups", "expert_parallel_bucket_groups")
        )
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=True)
    return order[0], dense, experts


@pytest.mark.parametrize("schedule", ["v-half", "interleaved"])
def test_the_chunk_that_runs_first_is_gathered_by_the_optimizer(
    ranks: RankPools, schedule: str
) -> None:
    """But for its experts, whose optimizer has yet to step then."""
    expected = (0, [True, False], [False, False])
    assert ranks(4).run(gathers_after_a_step, schedule=schedule) == [expected] * 4


def stale_weights(case: GPTCase, schedule: str) -> list[str]:
    """What three steps give other than without gathers in the optimizer's.

    Not other than Megatron with one chunk per rank, whose sums over four replicas have another
    order.
    """
    without = run(replace(case, gather_in_optimizer=False), schedule, [3])[3]
    found = run(case, schedule, [3])[3]
    assert found.losses == without.losses
    return [n for n, w in found.gradients.items() if not torch.equal(w, without.gradients[n])]


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "is_hybrid"), [("v-half", False), ("interleaved", False), ("v-half", True)]
)
def test_replicas_of_experts_are_gathered_after_they_are_stepped(
    ranks: RankPools, schedule: str, is_hybrid: bool
) -> None:
    row = next(r for r in ROWS if r.ranks == 8)
    assert row.case is not None
    case = as_hybrid(row.case) if is_hybrid else row.case
    skip_without_hybrids(case)
    assert ranks(8).run(stale_weights, case=case, schedule=schedule) == [[]] * 8


def test_the_page_is_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_support", ROOT / "docs" / "make_support.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == script.page(), "run docs/make_support.py"
    for heading in re.findall(r"^## .*$", page, flags=re.MULTILINE):
        assert page.count(heading) == 1


TIED = GPTCase(tied=True)


def what_a_second_run_finds(schedule: str, case: GPTCase = TIED) -> list[str]:
    """Run a step twice, as Megatron does to validate a result, and look for what was left."""
    found = []
    with built(case, schedule, num_microbatches=5) as (adapter, chunks):
        assert adapter is not None
        function = adapter.forward_backward_func
        outcomes = []
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            data = [microbatches(GPTCase(), 5) for _ in chunks]
            losses = forward_backward(function, chunks, data, 5)
            outcomes.append((losses, dict(gradients(chunks))))
            left = [len(list(rest)) for rest in data]
            if schedule in ("v-half", "v-zb") and adapter.physical.logical(dist.get_rank()) == 0:
                left[-1] -= 4  # the last stage reads with the first, once the first batch is equal
            found += [f"batches left: {count}" for count in left if count]
            found += [f"W left: {len(s.queue)}" for s in adapter._splits if len(s.queue)]
            channels = adapter.part(ChannelsPart).channels
            assert channels is not None
            if channels._received or any(channels._sends.values()):
                found.append("messages left")
        (losses, first), (again, second) = outcomes
        if losses != again:
            found.append(f"losses {losses}, then {again}")
        found += [name for name in first if not torch.equal(first[name], second[name])]
    return found


@pytest.mark.parametrize(
    ("schedule", "case"),
    [
        *((name, TIED) for name in ("v-half", "zb-h1", "interleaved", "v-zb")),
        pytest.param("v-zb", as_hybrid(TIED), marks=pytest.mark.slow),
    ],
)
def test_a_step_can_be_run_again(ranks: RankPools, schedule: str, case: GPTCase) -> None:
    skip_without_hybrids(case)
    assert ranks(2).run(what_a_second_run_finds, schedule=schedule, case=case) == [[]] * 2


def _logits(batch: dict[str, torch.Tensor], output: torch.Tensor, non_loss_data: bool) -> Any:
    assert non_loss_data
    return batch["tokens"].sum().item(), output.detach().clone()


def _collecting_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    batch = next(iterator)
    length = batch["tokens"].size(1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(batch["tokens"], torch.arange(length).expand(2, -1), causal)
    return output, partial(_logits, batch)


def collected(schedule: str | None, case: GPTCase) -> list[Any]:
    """The logits of an evaluation of 3 microbatches, and then a step that trains."""
    with built(case, schedule, num_microbatches=3) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        evaluate = partial(forward_backward, function, chunks, num_microbatches=3)
        data = [microbatches(case, 3) for _ in chunks]
        found = evaluate(data, step=_collecting_step, forward_only=True, collect_non_loss_data=True)
        evaluate([microbatches(case, 3) for _ in chunks])
    return [(tokens, logits.numpy().tobytes()) for tokens, logits in found]


@pytest.mark.parametrize(
    ("schedule", "case"),
    [
        *((name, GPTCase()) for name in ("v-half", "zb-h1", "interleaved")),
        pytest.param("v-half", as_hybrid(GPTCase()), marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_collects_other_data(ranks: RankPools, schedule: str, case: GPTCase) -> None:
    skip_without_hybrids(case)
    ours, expected = [ranks(2).run(collected, schedule=s, case=case) for s in (schedule, None)]
    assert ours == expected
    assert [len(of_rank) for of_rank in ours] == [0, 3]


def error_of_fused_sums(schedule: str) -> float:
    """How far fused accumulation is off where a weight is looked up and multiplied with."""
    case = GPTCase(multi_token=1, rotary=True, tied=True)
    plain, fused = (
        run(replace(case, fused_accumulation=fuses), schedule, [3])[3].gradients
        for fuses in (False, True)
    )
    return max((plain[name] - fused[name]).abs().max().item() for name in plain)


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_fused_accumulation_keeps_what_the_lookup_adds(ranks: RankPools, schedule: str) -> None:
    """Compared with our own sums: Megatron's schedules leave the lookup's part out."""
    assert max(ranks(2).run(error_of_fused_sums, schedule=schedule)) < 1e-6


def asked_of_the_reduction(schedule: str) -> list[Any]:
    """What a step hands to the function that sums gradients, of all that it was asked for."""
    asked: list[Any] = []
    with built(GPTCase(), schedule, num_microbatches=2) as (adapter, chunks):
        assert adapter is not None
        config = get_model_config(chunks[0])

        def finalize(*_: Any, force_all_reduce: bool | None = None, **__: Any) -> None:
            asked.append(force_all_reduce)

        config.finalize_model_grads_func = finalize
        for forced in (True, False):
            data = [microbatches(GPTCase(), 2) for _ in chunks]
            function = adapter.forward_backward_func
            forward_backward(function, chunks, data, 2, force_all_reduce=forced)
    return asked


def test_gradients_are_reduced_in_full_where_that_is_asked(ranks: RankPools) -> None:
    assert ranks(2).run(asked_of_the_reduction, schedule="v-half") == [[True, False]] * 2
