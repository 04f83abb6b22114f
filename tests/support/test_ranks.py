"""The harness of the distributed tests: order of results, failures, hangs, deaths, clean ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from live_processes import is_alive, wait_until
from ranks import RankFailure, RankPool, RankPools, RankTimeout

# How long a case that hangs on purpose may take.
SOON = 2.0


def sum_over_ranks(scale: int) -> tuple[int, int]:
    total = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def process_id() -> int:
    return os.getpid()


def random_number() -> float:
    return float(torch.rand(()))


def make_parallel_groups() -> int:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    return int(parallel_state.get_pipeline_model_parallel_rank())


def raise_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    return "fine"


def print_and_raise() -> NoReturn:
    print(f"what {dist.get_rank()} saw")
    raise ValueError("no luck")


def raise_while_others_wait(rank: int) -> None:
    raise_on(rank)
    dist.barrier()


def raise_after_half_a_message() -> None:
    """Leaves a message that nobody has received in the group."""
    if dist.get_rank() == 0:
        dist.isend(torch.full((1,), 13.0), 1)
    raise ValueError("message left behind")


def receive_from_rank_0(value: float) -> float:
    tensor = torch.full((1,), value)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0)
    return float(tensor)


def wait_for_ever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def exit_with(status: int, rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(status)


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_come_in_the_order_of_ranks(ranks: RankPools, world_size: int) -> None:
    total = 3 * sum(range(world_size))
    results = ranks(world_size).run(sum_over_ranks, scale=3)
    assert results == [(rank, total) for rank in range(world_size)]


def test_cases_share_processes(ranks: RankPools) -> None:
    first = ranks(2).run(process_id)
    assert len(set(first)) == 2
    assert ranks(2).run(process_id) == first


def test_cases_start_from_the_same_seed(ranks: RankPools) -> None:
    assert ranks(2).run(random_number) == ranks(2).run(random_number)


def test_parallel_groups_do_not_outlive_a_case(ranks: RankPools) -> None:
    assert ranks(2).run(make_parallel_groups) == [0, 1]
    assert ranks(2).run(make_parallel_groups) == [0, 1]


def threads_of_groups() -> dict[str, int]:
    """How many threads of gloo's devices and groups this process has."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return {name: names.count(name) for name in ("gloo_tcp_loop", "pt_gloo_runloop")}


def threads_of_more_groups() -> dict[str, int]:
    make_parallel_groups()
    return threads_of_groups()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="NOT RUN: needs Linux's /proc")
def test_threads_of_groups_end_with_a_case(ranks: RankPools) -> None:
    """All groups share one device, and those of an ended case are destroyed; threads end later."""
    cases = [ranks(2).run(threads_of_more_groups) for _ in range(4)]
    for first, last in zip(cases[0], cases[-1], strict=True):
        assert first["gloo_tcp_loop"] == last["gloo_tcp_loop"] == 1
        assert last["pt_gloo_runloop"] < 2 * first["pt_gloo_runloop"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_names_its_rank(ranks: RankPools, rank: int) -> None:
    with pytest.raises(RankFailure, match=f"rank {rank}: ValueError: no luck on {rank}") as caught:
        ranks(2).run(raise_on, rank=rank)
    assert caught.value.rank == rank
    assert caught.value.exception_type == "ValueError"
    assert 'raise ValueError(f"no luck on {rank}")' in str(caught.value)


def test_a_failure_tells_all_ranks_and_what_they_printed(ranks: RankPools) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(print_and_raise)
    text = str(caught.value)
    assert f"rank {1 - caught.value.rank} too: ValueError: no luck" in text
    assert "what 0 saw" in text
    assert "what 1 saw" in text


def test_an_exception_is_not_held_up_by_ranks_that_wait(
    ranks: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.GRACE_AFTER_FAILURE", 1.0)
    ranks(2).run(process_id)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1: ValueError") as caught:
        ranks(2).run(raise_while_others_wait, rank=1)
    assert time.monotonic() - start < 20
    assert "rank 0 did not end" in str(caught.value)
    assert "in raise_while_others_wait" in str(caught.value)
    assert ranks(2).run(sum_over_ranks, scale=1) == [(0, 1), (1, 1)]


def test_messages_of_a_failed_case_do_not_reach_the_next(ranks: RankPools) -> None:
    with pytest.raises(RankFailure, match="message left behind"):
        ranks(2).run(raise_after_half_a_message)
    assert ranks(2).run(receive_from_rank_0, value=7.0) == [7.0, 7.0]


def test_a_hang_shows_where_it_is_and_the_next_case_runs(ranks: RankPools) -> None:
    before = ranks(2).run(process_id)
    with pytest.raises(RankTimeout, match="these ranks were not done: 1\n") as caught:
        ranks(2).run(wait_for_ever_on, rank=1, timeout=SOON)
    assert "in wait_for_ever_on" in str(caught.value)
    assert not any(is_alive(pid) for pid in before)
    after = ranks(2).run(process_id)
    assert not set(before) & set(after)


def test_a_dead_rank_is_told_with_its_status(ranks: RankPools) -> None:
    with pytest.raises(RankFailure, match="rank 1: ProcessDied: exit status 7"):
        ranks(2).run(exit_with, status=7, rank=1)
    assert ranks(2).run(sum_over_ranks, scale=1) == [(0, 1), (1, 1)]


def test_a_result_that_cannot_be_pickled_is_a_failure(ranks: RankPools) -> None:
    with pytest.raises(RankFailure, match="unpicklable"):
        ranks(2).run(unpicklable)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="not at module level"):
        RankPool(2).run(lambda: None)


def test_no_process_outlives_its_pool() -> None:
    pools = RankPools()
    pids = pools(2).run(process_id)
    assert all(is_alive(pid) for pid in pids)
    pools.close()
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
def test_ranks_end_when_the_test_process_is_killed(tmp_path: Path) -> None:
    """Also when they are in the middle of a case."""
    written = tmp_path / "pids"
    # without Megatron, which takes seconds
    (tmp_path / "rank_imports.py").write_text("import torch.distributed\n")
    program = (
        "from ranks import Kind, RankPool\n"
        "from test_ranks import process_id, wait_for_ever_on\n"
        "pool = RankPool(2, Kind.PLAIN); pids = pool.run(process_id)\n"
        f"open({str(written)!r}, 'w').write(' '.join(map(str, pids)))\n"
        "pool.run(wait_for_ever_on, rank=0)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), *sys.path])),
        "TMPDIR": str(tmp_path),  # a killed process leaves its files behind
    }
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as parent:
        wait_until(lambda: written.exists() and written.read_text().count(" ") == 1)
        parent.kill()
    pids = [int(pid) for pid in written.read_text().split()]
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
