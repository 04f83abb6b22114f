"""One rank of a pool: a process that joins a gloo group once and runs cases until it is killed.

Started by ``ranks.py``, which sends `Case` objects over a pipe and gets one `Outcome` for each.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

# Longer than any case may run: a case that hangs is ended by the pool, which shows where it hangs.
# Not torch's default, so that a test can tell whether a group has it.
COLLECTIVE_TIMEOUT = timedelta(minutes=31)

# Where Transformer-Engine is installed, out of the sight of the tests that are not about it:
# megatron-core takes any that it can import for a whole one.
TRANSFORMER_ENGINE = Path(sys.prefix) / "transformer-engine"
# In the environment of a rank process that is to have it.
TRANSFORMER_ENGINE_WANTED = "TESTS_WITH_TRANSFORMER_ENGINE"
# In the environment of a rank process whose messages obey gloo's rules alone; see hostile.py.
PLAIN_WANTED = "TESTS_WITH_PLAIN_MESSAGES"


@dataclass(frozen=True)
class Case:
    """A call to make on every rank: a module-level function by name, and its arguments."""

    module: str
    qualified_name: str
    arguments: dict[str, Any]
    # Where modules are looked for: what the test can import, its ranks can import.
    path: list[str]

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


def join_group(rank: int, world_size: int, meeting_point: str) -> None:
    """Initialise torch.distributed over the file `meeting_point`."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def import_megatron(folder: Path) -> None:
    """Import torch and Megatron, so that cases start at once; ranks share a new folder."""
    import torch

    from megatron_zb.megatron.cpu import run_on_cpu

    torch.set_num_threads(1)
    with_transformer_engine = TRANSFORMER_ENGINE_WANTED in os.environ
    if with_transformer_engine:
        import te_stand_in

        te_stand_in.install()
    # Transformer-Engine asks as much of a GPU as the training loop does
    run_on_cpu(training_loop=with_transformer_engine)
    if PLAIN_WANTED not in os.environ:
        import hostile

        hostile.install(folder)
    import megatron.core.models.gpt  # noqa: F401


def leave_megatron() -> None:
    """Forget the parallel groups that a case has made, so that the next one can make its own."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()


def run_case(case: Case) -> Outcome:
    """Call the function; its result must be picklable."""
    import torch

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
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(file_descriptor: int, rank: int, world_size: int, meeting_point: str) -> None:
    """Serve cases from the pipe until the process is killed."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    end_with_parent()
    pool = Connection(file_descriptor)
    import_megatron(Path(f"{meeting_point}-sent"))
    join_group(rank, world_size, meeting_point)
    pool.send(Outcome(result=pickle.dumps("ready")))
    while True:
        case = pool.recv()
        sys.path[:] = case.path
        outcome = run_case(case)
        leave_megatron()
        sys.stdout.flush()
        pool.send(outcome)


if __name__ == "__main__":
    # Under its importable name, so that both ends pickle the same classes.
    import rank_process

    rank_process.main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
