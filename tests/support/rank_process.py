"""One rank of a pool: a process that joins a gloo group once and runs cases until it is killed.

Started by ``ranks.py``, which sends `Case` objects over a pipe and gets one `Outcome` for each.
Nothing that takes time to import is imported here.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

# Longer than any case may run: a case that hangs is ended by the pool, which shows where it hangs.
# Not torch's default, so that a test can tell whether a group has it.
COLLECTIVE_TIMEOUT = timedelta(minutes=31)


class Kind(Enum):
    """What the ranks of a pool have, and which rules their messages obey."""

    HOSTILE = "the rules of a GPU; see hostile.py"
    PLAIN = "gloo's own rules"
    STREAMS = "the streams of a GPU, whose order is noted; see sanitizer"
    TRANSFORMER_ENGINE = "Transformer-Engine, and the rules of a GPU"
    OLDER_TRANSFORMER_ENGINE = "one of 2.14, whose modules lose parameters in saved-tensor hooks"
    MEGATRON_LM = "the Megatron-LM checkout of MEGATRON_LM_PATH, and gloo's own rules"
    TRAINERS = "Megatron-Bridge and verl over names of Transformer-Engine, and the rules of a GPU"
    MS_SWIFT = "ms-swift over Transformer-Engine, and the rules of a GPU"


# Where Transformer-Engine is installed, out of the sight of the tests that are not about it:
# megatron-core takes any that it can import for a whole one.
TRANSFORMER_ENGINES = {
    Kind.TRANSFORMER_ENGINE: Path(sys.prefix) / "transformer-engine",
    Kind.OLDER_TRANSFORMER_ENGINE: Path(sys.prefix) / "transformer-engine-2.14",
    Kind.MS_SWIFT: Path(sys.prefix) / "transformer-engine",
}


def missing_transformer_engine(kind: Kind) -> str:
    """Return what a test says that is skipped for want of one, nothing if it is installed."""
    folder = TRANSFORMER_ENGINES[kind]
    installed = (folder / "transformer_engine").is_dir()
    return "" if installed else f"TRANSFORMER-ENGINE IS NOT TESTED: it is not in {folder}"


@dataclass(frozen=True)
class Start:
    """What the ranks of a pool are started with; the folder is new."""

    world_size: int
    folder: Path
    kind: Kind

    @property
    def meeting_point(self) -> Path:
        return self.folder / "meeting_point"

    def log(self, rank: int) -> Path:
        """What this rank prints."""
        return self.folder / f"rank{rank}.log"


@dataclass(frozen=True)
class Case:
    """A call to make on every rank: a module-level function by name, and its arguments."""

    module: str
    qualified_name: str
    arguments: dict[str, Any]
    # Where modules are looked for: what the test can import, its ranks can import.
    path: list[str]
    # Which test asks, as pytest names it in the environment.
    test: str = ""

    def function(self) -> Callable[..., Any]:
        found: Any = importlib.import_module(self.module)
        return cast(Callable[..., Any], reduce(getattr, self.qualified_name.split("."), found))


@dataclass(frozen=True)
class Outcome:
    """What became of a case on one rank: a pickled result, or an exception in words."""

    result: bytes | None = None
    exception_type: str = ""
    message: str = ""
    traceback: str = ""

    @property
    def failed(self) -> bool:
        return self.result is None


def share_device() -> None:
    """Let all groups of gloo of this process have the same device.

    torch makes a device for each group, and each has a thread that wakes up a hundred times a
    second: the groups of a few hundred cases would take all of a processor.
    """
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    gloo = c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    # new_group() hands no options on to gloo, and torch asks for groups of this class by isinstance
    class OnOneDevice(gloo):  # type: ignore[misc, valid-type]
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta, **_of_newer_torch: Any
        ) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnOneDevice


def join_group(rank: int, world_size: int, meeting_point: str) -> None:
    """Initialise torch.distributed over the file `meeting_point`."""
    import torch.distributed as dist

    share_device()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def import_megatron(start: Start, rank: int) -> None:
    """Import torch and Megatron, so that cases start at once."""
    if start.kind is Kind.MS_SWIFT:
        import swift_rank_imports  # noqa: F401
    elif start.kind in TRANSFORMER_ENGINES:
        import te_rank_imports  # noqa: F401
    import rank_imports  # noqa: F401

    if start.kind is Kind.STREAMS:
        from sanitizer import device

        device.install(rank)
    elif start.kind is not Kind.PLAIN:
        import hostile

        hostile.install(start.folder / "sent")


KEPT_GROUPS: set[Any] = set()
"""Process groups that later cases use again; leave_groups() destroys all others."""


def groups() -> set[Any]:
    """Return all process groups of this rank but that of all ranks."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    return set(c10d._world.pg_map) - {dist.group.WORLD}


def leave_groups() -> None:
    """Destroy the parallel groups that cases have made and that no further case will use.

    Megatron only forgets its groups, and each has threads. Only called when all ranks have ended
    the case, since a group that is destroyed loses what it has to send.
    """
    import torch.distributed as dist

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    for group in groups() - KEPT_GROUPS:
        dist.destroy_process_group(group)


def run_case(case: Case) -> Outcome:
    """Call the function; its result must be picklable."""
    import torch

    os.environ["PYTEST_CURRENT_TEST"] = case.test
    torch.manual_seed(1234)
    try:
        return Outcome(result=pickle.dumps(case.function()(**case.arguments)))
    except BaseException as error:
        return Outcome(
            exception_type=type(error).__qualname__,
            message=str(error),
            traceback=traceback.format_exc(),
        )


def end_with_parent() -> None:
    """End this process when the test process is gone, also in the middle of a case."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave_test_process(rank: int, start: Start) -> None:
    """Print into a file, and be in no way a part of the terminal's job."""
    os.setsid()  # Ctrl-C is for the test process alone
    sys.stdout.flush()
    sys.stderr.flush()
    with start.log(rank).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(start.world_size),
    }


def main(pool: Connection, rank: int, start: Start) -> None:
    """Serve cases from the pipe until the process is killed."""
    leave_test_process(rank, start)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    end_with_parent()
    import_megatron(start, rank)
    join_group(rank, start.world_size, str(start.meeting_point))
    pool.send(Outcome(result=pickle.dumps("ready")))
    while True:
        case = pool.recv()
        leave_groups()
        sys.path[:] = case.path
        outcome = run_case(case)
        sys.stdout.flush()
        pool.send(outcome)
