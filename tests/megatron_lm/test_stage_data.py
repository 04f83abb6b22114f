"""Which stages read data, and the loops that read it, without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron_arguments import parsed

from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of
from megatron_zb.megatron_lm.hooks import StageData

FLAGS = {
    "reset_attention_mask": False,
    "create_attention_mask_in_dataloader": True,
    "full_validation": False,
    "multiple_validation_sets": False,
}


def data_of(schedule: str, **flags: bool) -> StageData:
    args = parsed(f"--pipeline-schedule {schedule}", **{**FLAGS, **flags})
    return StageData(adapter_of(args), args)


@pytest.mark.parametrize(
    ("schedule", "flags", "placed"),
    [
        ("v-half", {}, True),
        ("zb-h1", {}, False),
        ("zb-h1", {"reset_attention_mask": True}, True),
        (
            "zb-h1",
            {"reset_attention_mask": True, "create_attention_mask_in_dataloader": False},
            False,
        ),
        ("interleaved", {"full_validation": True}, True),
        ("zb-h1", {"dataloader_inter_document_masking": True}, True),
    ],
)
def test_other_stages_read_where_a_v_or_a_mask_needs_it(
    schedule: str, flags: dict[str, bool], placed: bool
) -> None:
    assert data_of(schedule, **flags).is_placed is placed


def test_every_stage_reads_where_documents_reset_the_mask() -> None:
    def refuse(vp_stage: int | None) -> bool:
        raise AssertionError("asks Megatron-LM")

    assert data_of("zb-h1", reset_attention_mask=True).is_first_or_last_stage(refuse, None)


def test_every_stage_reads_documents_of_slices() -> None:
    args = parsed(
        "--pipeline-schedule zb-h1 --pipeline-slices 2",
        **FLAGS,
        dataloader_inter_document_masking=True,
    )
    data = StageData(adapter_of(args), args)
    args.dataloader_inter_document_masking = False  # as while a slice is read
    assert data.is_first_or_last_stage(None, None)


def test_a_skipped_step_reads_each_chunks_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import num_microbatches_calculator, rerun_state_machine

    asked: list[Any] = []

    def should_run(data: Any) -> bool:
        asked.append(data)
        return len(asked) == 1

    machine = SimpleNamespace(should_run_forward_backward=should_run)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(num_microbatches_calculator, "get_num_microbatches", lambda: 3)
    first, last = iter(range(10)), iter(range(10))
    data_of("v-half").skip_step(None, [first, None, last])
    assert (next(first), next(last)) == (3, 3)
    assert asked == [[first, None, last]] * 2
    asked.clear()
    data_of("zb-h1").skip_step(None, first)
    assert next(first) == 7
    asked.clear()
    data_of("zb-h1").skip_step(None, None)


def test_sets_of_each_chunk_become_chunks_of_each_set() -> None:
    def original(prefix: str, step: None, iterators: Any, *rest: Any, **more: Any) -> Any:
        return iterators

    several = data_of("v-half", multiple_validation_sets=True)
    assert several.evaluate(original, "", None, [["a0", "b0"], ["a1", "b1"]]) == [
        ["a0", "a1"],
        ["b0", "b1"],
    ]
    assert several.evaluate(original, "", None, [None, None]) == [None, None]
    assert data_of("v-half").evaluate(original, "", None, ["a0", "a1"]) == ["a0", "a1"]
    one = data_of("zb-h1", multiple_validation_sets=True)
    assert one.evaluate(original, "", None, ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(("schedule", "times"), [("v-half", 2), ("zb-h1", 1)])
def test_lengths_that_every_chunk_adds_are_counted_once(schedule: str, times: int) -> None:
    data = data_of(schedule)
    assert data.sums_of_lengths(lambda: (12.0 * times, 50.0 * times)) == (12, 50)
    assert data.sums_of_lengths(lambda: (None, None)) == (None, None)
