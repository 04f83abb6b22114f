"""One rank builds a schedule for all, and a folder keeps it: whatever goes wrong on the way."""

from __future__ import annotations

import base64
import json
import socket
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jobs import of_rank, started
from torch.distributed import HashStore, TCPStore
from training_jobs import end_of, torchrun

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import store_of_job
from megatron_zb.job.shared_build import SharedBuild, kept
from megatron_zb.schedules import Costs, interchange
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.features.slices import Slicing
from megatron_zb.schedules.placement import v_shape

SIZES: dict[str, Any] = {"pipeline_size": 2, "num_microbatches": 4}
RANK = Path(__file__).resolve().parents[1] / "support" / "shared_build_rank.py"


class Counting:
    """``schedules.build`` that counts its calls, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls, self.error = 0, error

    def __call__(self, name: str, **request: Any) -> schedules.Schedule:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self._build(name, **request)

    def _build(self, name: str, **request: Any) -> schedules.Schedule:
        return schedules.build(name, **request)


class CountingWithoutSearch(Counting):
    """It gives the same schedule whatever is asked."""

    def _build(self, name: str, **request: Any) -> schedules.Schedule:
        return schedules.build("v-zb", **SIZES)


def on_ranks(builders: list[Any], requests: list[dict[str, Any]]) -> list[Any]:
    """What each rank gets: a schedule, or the text of its error."""
    store = HashStore()
    world = len(builders)

    def one(rank: int) -> Any:
        shared = SharedBuild(lambda: store, rank, world, builders[rank], seconds=20)
        asked = {"name": "v-zb", **SIZES, **requests[rank]}
        try:
            return shared(asked.pop("name"), **asked)
        except (UsageError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


@pytest.mark.parametrize("name", ["auto", "v-half", "zb-2p", "wave", "interleaved", "1f1b"])
def test_rank_0_builds_and_all_have_its_schedule(name: str) -> None:
    builders = [Counting() for _ in range(3)]
    found = on_ranks(builders, [{"name": name}] * 3)
    assert [builder.calls for builder in builders] == [1, 0, 0]
    assert found[0].name == name
    assert found[1] == found[2] == found[0]
    assert found[1].reason == found[0].reason


@pytest.mark.parametrize("name", ["v-half", "interleaved"])
def test_passes_of_a_second_model_are_shared(name: str) -> None:
    encoder = SecondModel(SecondRole.ENCODER, forward=0.1, backward=0.2, copies=True)
    request = {"name": name, "chunks": 2 if name == "interleaved" else None}
    asked = [{**request, "second_model": encoder}] * 2
    found = on_ranks([Counting(), Counting()], asked)
    assert found[1] == found[0]
    assert found[1].placement.chunks == 3
    other = [asked[0], {**request, "second_model": encoder.scaled(2.0)}]
    assert "second model" in on_ranks([Counting(), Counting()], other)[1]


@pytest.mark.long
@pytest.mark.parametrize("state", ["kept", "recomputed", "offloaded"])
def test_slices_are_shared_with_what_is_recomputed_and_offloaded(state: str) -> None:
    """On their units: passes count slices, and B takes them in reverse."""
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    if state == "recomputed":
        costs = costs.having(Recomputation(kept_input=0.01))
    if state == "offloaded":
        costs = costs.having(Offload(seconds=0.3))
    limit = None if state == "kept" else 0.55
    slices = Slicing.equal(8, attention=0.3)
    request = {"name": "v-half", "costs": costs, "slices": slices, "memory_limit": limit}
    found = on_ranks([Counting(), Counting()], [request] * 2)
    assert found[1] == found[0]
    assert bool(found[1].recomputed) is (state == "recomputed")
    assert bool(found[1].offloaded) is (state == "offloaded")
    assert {str(p.microbatch) for p in found[1].ranks[0]} >= {"0.0", "0.7", "3.7"}


def test_a_failure_of_rank_0_is_one_sentence_on_every_rank() -> None:
    failing = Counting(UsageError("v-zb cannot keep the memory limit of 0.1 of 1F1B"))
    found = on_ranks([failing, Counting(), Counting()], [{}] * 3)
    assert set(found) == {"UsageError: v-zb cannot keep the memory limit of 0.1 of 1F1B"}
    crashing = Counting(MemoryError("no more"))
    found = on_ranks([crashing, Counting()], [{}] * 2)
    assert found[0] == "MemoryError: no more"
    assert found[1] == "UsageError: rank 0 failed to build v-zb: MemoryError('no more')"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"name": "v-min"}, "--pipeline-schedule v-zb on rank 0, but --pipeline-schedule v-min"),
        ({"memory_limit": 0.5}, "no --pipeline-memory-limit on rank 0, but --pipeline-memory-l"),
        ({"num_microbatches": 6}, "num microbatches 4 on rank 0, but num microbatches 6 on rank 1"),
    ],
)
def test_ranks_that_ask_for_different_schedules_are_told(other: dict[str, Any], words: str) -> None:
    builders = [Counting(), Counting()]
    found = on_ranks(builders, [{}, other])
    assert isinstance(found[0], schedules.Schedule)  # it hears of the other where all ranks meet
    assert words in found[1]
    assert builders[1].calls == 0


def test_a_rank_0_that_asks_for_nothing_tells_those_that_wait() -> None:
    store = HashStore()
    first, other = (SharedBuild(lambda: store, rank, 2, Counting(), seconds=20) for rank in (0, 1))
    first.abandon(UsageError("the file of the layers is not there"))
    with pytest.raises(UsageError, match="the file of the layers is not there"):
        other("v-zb", **SIZES)


@pytest.mark.parametrize("given", [b"x", b"[]", b"{}", b'{"reason": "", "table": "0F0"}'])
def test_what_is_received_is_checked(given: bytes) -> None:
    store = HashStore()
    first, other = (SharedBuild(lambda: store, rank, 2, Counting(), seconds=5) for rank in (0, 1))
    first("v-zb", **SIZES)
    store.set("schedule/0/built/0", base64.b64encode(zlib.compress(given)).decode())
    with pytest.raises(UsageError, match="what rank 0 has given is no schedule"):
        other("v-zb", **SIZES)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def results(folder: Path, attempt: int, world: int) -> list[dict[str, Any]]:
    files = [folder / f"{attempt}-{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def codes(environments: list[dict[str, str]], folder: Path, how: str) -> list[int | None]:
    """With which codes the ranks of these variables have ended."""
    printed = [folder / "printed"] * 2
    ranks = [started(str(RANK), [str(folder), how], more, printed) for more in environments]
    for process in ranks:
        process.join(240)
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("how", ["go", "fail"])
def test_ranks_without_torchrun_meet_before_and_after_process_groups_exist(
    how: str, tmp_path: Path
) -> None:
    """As under Slurm: the ranks' variables are set, and nothing serves a store but rank 0."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [{**place, "RANK": str(rank)} for rank in range(2)]
    assert codes(environments, tmp_path, how) == [0, 0]
    first, second = results(tmp_path, 0, 2)
    if how == "fail":
        assert first["said"] == second["said"] == "this cannot be built"
        assert second["built"] == 0
        return
    assert (first["built"], second["built"]) == (2, 0)
    assert first["total"] == second["total"] == 2.0
    assert first["table"] == second["table"] != ""


def restarted_by_torchrun(folder: Path) -> None:
    launcher, *rest = torchrun(2, str(RANK), str(folder), "restart")
    place = rest.index("--standalone")
    command = [launcher, *rest[:place], "--max-restarts", "1", *rest[place:]]
    done = end_of(command, 300)
    assert done.code == 0, done.stderr


def restarted(folder: Path) -> None:
    """As torchrun does: the store of the job stays, and the attempt is counted."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, code in ((0, 1), (1, 0)):
        environments = [of_rank(rank, 2, store.port, attempt) for rank in range(2)]
        assert codes(environments, folder, "restart") == [code, code]


@pytest.mark.parametrize(
    "restart", [restarted, pytest.param(restarted_by_torchrun, marks=pytest.mark.full)]
)
def test_an_attempt_after_a_restart_has_a_schedule_of_its_own(
    restart: Callable[[Path], None], tmp_path: Path
) -> None:
    restart(tmp_path)
    tables = []
    for attempt in (0, 1):
        first, second = results(tmp_path, attempt, 2)
        assert (first["built"], second["built"]) == (2, 0)
        assert first["table"] == second["table"]
        tables.append(first["table"])
    assert tables[0] != tables[1]


def test_a_process_alone_needs_no_one() -> None:
    shared = SharedBuild(lambda: store_of_job(1, "0"), 0, 1)
    assert shared("v-zb", **SIZES) == schedules.build("v-zb", **SIZES)


# --- the folder ----------------------------------------------------------------------------------


def test_a_schedule_is_found_again(tmp_path: Path) -> None:
    counting, said = Counting(), list[str]()
    build = kept(tmp_path / "new" / "folder", said.append, counting)
    first = build("auto", **SIZES)
    assert (counting.calls, said) == (1, [])
    again = build("auto", **SIZES)
    assert counting.calls == 1
    assert (again, again.reason) == (first, first.reason)
    assert "the schedule is taken from" in said[0]
    others: list[dict[str, Any]] = [
        {"memory_limit": 0.75},
        {"placement": v_shape(2)},
        {"num_microbatches": 5},
    ]
    others.append(
        {"costs": schedules.Costs.uniform(pipeline_size=2, forward=1, backward=2, weight=1)}
    )
    counting = CountingWithoutSearch()
    build = kept(tmp_path / "new" / "folder", said.append, counting)
    for number, other in enumerate(others, 1):
        build("auto", **{**SIZES, **other})
        assert counting.calls == number
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1 + len(others)


def spoilt(name: str, path: Path) -> None:
    """Break a kept file in a way."""
    kept_file = json.loads(path.read_text(encoding="utf-8"))
    whole = schedules.build("v-zb", **SIZES)
    other = schedules.build("v-zb", pipeline_size=2, num_microbatches=6)
    one_chunk = schedules.build("zb-h1", **SIZES)
    large = schedules.build("gpipe", pipeline_size=2, num_microbatches=4)
    tables = {"sizes": other, "chunks": one_chunk, "limit": large}
    if name == "text":
        path.write_text("no JSON", encoding="utf-8")
    elif name == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    elif name == "half":
        path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    elif name == "nested":
        path.write_text("[" * 100_000, encoding="utf-8")
    elif name == "foreign":
        kept_file["asked"]["version"] = "0"
        path.write_text(json.dumps(kept_file), encoding="utf-8")
    elif name == "pass":
        table = interchange.to_csv(whole).replace("3F0", "3F1")
        kept_file["schedule"]["table"] = table
        path.write_text(json.dumps(kept_file), encoding="utf-8")
    else:
        kept_file["schedule"]["table"] = interchange.to_csv(tables[name])
        path.write_text(json.dumps(kept_file), encoding="utf-8")


@pytest.mark.parametrize(
    "how", ["text", "bytes", "half", "nested", "foreign", "pass", "sizes", "chunks", "limit"]
)
def test_a_spoilt_file_is_told_in_one_line_and_replaced(how: str, tmp_path: Path) -> None:
    request: dict[str, Any] = {**SIZES, "memory_limit": 1.0}
    request["costs"] = schedules.Costs.uniform(pipeline_size=2, forward=1, backward=1, weight=1)
    if how == "chunks":
        request["placement"] = v_shape(2)
    counting, said = Counting(), list[str]()
    build = kept(tmp_path, said.append, counting)
    first = build("auto", **request)
    (path,) = tmp_path.iterdir()
    spoilt(how, path)
    assert build("auto", **request) == first
    assert counting.calls == 2
    (line,) = said
    assert line.startswith("searching anew: ")
    assert "\n" not in line
    assert build("auto", **request) == first
    assert counting.calls == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    said: list[str] = []
    build = kept(tmp_path / "file", said.append)
    assert build("v-zb", **SIZES) == schedules.build("v-zb", **SIZES)
    file = tmp_path / "file"
    assert any(f"the schedule is not kept: cannot write '{file}/" in line for line in said)
