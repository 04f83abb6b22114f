"""What the adapter says of a schedule, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
from adapters import scheduled

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import ScheduleSettings
from megatron_zb.measured.balance import Ends
from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter
from megatron_zb.megatron_core.connections import WatchPart
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.interchange import from_csv
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.request import Limit


def adapter_of(name: str) -> PipelineAdapter:
    return scheduled(name, pipeline_size=4, num_microbatches=8, layers=Layers(8))


def test_both_ends_of_a_v_are_on_the_last_rank_of_megatrons() -> None:
    adapter = adapter_of("v-half")
    assert adapter.embedding_ranks is not None
    assert adapter.embedding_ranks([10, 11, 12, 13]) == [13]
    places = [(rank, chunk) for rank in range(4) for chunk in range(2)]
    assert [place for place in places if adapter.pre_process(*place)] == [(3, 0)]
    assert [place for place in places if adapter.post_process(*place)] == [(3, 1)]


@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("interleaved", 2)])
def test_a_loop_has_its_ends_where_megatron_has_them(name: str, chunks: int) -> None:
    adapter = adapter_of(name)
    assert adapter.embedding_ranks is None
    places = [(rank, chunk) for rank in range(4) for chunk in range(chunks)]
    assert [place for place in places if adapter.pre_process(*place)] == [(0, 0)]
    assert [place for place in places if adapter.post_process(*place)] == [(3, chunks - 1)]


@pytest.mark.parametrize(
    ("given", "timeout"), [(None, 540.0), (0.0, None), (7.0, 7.0)], ids=["none", "never", "seconds"]
)
def test_the_watchdog_ends_a_job_a_little_before_torch_does(
    given: float | None, timeout: float | None
) -> None:
    adapter = adapter_of("v-half")
    adapter.watch(given, distributed_timeout_minutes=10)
    assert adapter.part(WatchPart).timeout == timeout


@pytest.mark.parametrize(("output", "vocabulary_parallel"), [(0.01, False), (8.0, True)])
def test_the_faster_of_a_whole_and_a_sharded_vocabulary(
    output: float, vocabulary_parallel: bool
) -> None:
    sizes = {"pipeline_size": 2, "num_microbatches": 4, "layers": Layers(4)}
    with pytest.raises(UsageError, match="'auto' has to know what the ends of the model take"):
        scheduled("zb-h1", **sizes, pipeline_vocabulary="auto")
    ends = Ends(0.0, output, "given")
    adapter = scheduled("zb-h1", **sizes, ends=ends, pipeline_vocabulary="auto")
    assert (adapter.costs.feature(Vocabulary) is not None) is vocabulary_parallel
    assert f"simulated for {ends}" in adapter.describe()
    for asked in ("on", "off"):
        adapter = scheduled("zb-h1", **sizes, ends=ends, pipeline_vocabulary=asked)
        assert (adapter.costs.feature(Vocabulary) is not None) is (asked == "on")


def test_offloaded_activations_need_the_time_of_a_copy() -> None:
    with pytest.raises(UsageError, match=r"pipeline_offload needs .*: give copy, such as 0\.1"):
        scheduled(
            "zb-h1",
            pipeline_size=2,
            num_microbatches=4,
            layers=Layers(4),
            pipeline_offload="auto",
        )


def test_a_table_with_backwards_from_the_last_on_does_not_train() -> None:
    """As torch's ScheduleLoopedBFS has them."""
    table = from_csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    sizes = JobSizes(pipeline_size=2, num_microbatches=2, layers=Layers(4))
    with pytest.raises(UsageError, match="begins its backwards with the last microbatch"):
        PipelineAdapter.of_table(table, sizes)


def test_a_timeout_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--pipeline-timeout is -1: it must be 0 or greater$"):
        adapter_of("v-half").watch(-1, distributed_timeout_minutes=10)


def test_an_evaluation_of_more_microbatches_has_no_memory_limit() -> None:
    """An evaluation keeps no activations and may have another batch size than training."""
    adapter = scheduled(
        "zb-h2",
        pipeline_size=2,
        num_microbatches=1,
        layers=Layers(4),
        pipeline_memory_limit=0.6,
    )
    with pytest.raises(UsageError, match=r"cannot keep the memory limit of 0\.6 of 1F1B"):
        adapter.current.program_for(3, False, False)
    program = adapter.current.program_for(3, True, False)
    kinds = {p.kind for rank in program.schedule.ranks for p in rank}
    assert (program.schedule.num_microbatches, kinds) == (3, {PassKind.F})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("pipeline_recompute", "yes", "pipeline_recompute is 'yes': give auto or on or off"),
        ("pipeline_memory_limit", "40", None),
        ("pipeline_memory_limit", "40 apples", "pipeline_memory_limit is '40 apples': give a frac"),
    ],
)
def test_settings_in_python_are_checked_as_flags_are(
    name: str, value: str, said: str | None
) -> None:
    given: dict[str, Any] = {name: value}
    if said is None:
        assert ScheduleSettings(**given).memory_limit == Limit(40.0)
        return
    with pytest.raises(UsageError, match=said):
        ScheduleSettings(**given)
