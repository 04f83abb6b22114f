"""Run functions on the ranks of a process group, many cases on the same processes.

    def sum_of_ranks(scale):                  # at module level, in any module the test can import
        total = torch.tensor(scale * dist.get_rank())
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks):
        assert ranks(4).run(sum_of_ranks, scale=2) == [12, 12, 12, 12]

Importing torch and Megatron takes seconds: one process has imported them, and ranks are forked off
it. A pool for each world size is started when first asked for and lives until its tests have run or
a case fails. A case finds torch.distributed initialised (gloo), torch seeded, Megatron imported,
and no parallel groups of earlier cases.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from rank_process import TRANSFORMER_ENGINES, Case, Kind, Outcome, Start, main

START_TIMEOUT = 120.0
# When one rank has failed, the others are likely to wait for it for ever: how long they get.
GRACE_AFTER_FAILURE = 3.0
# Until faulthandler has written the stacks of a rank; nothing tells when it is done.
STACKS_TAKE = 0.5
SHOWN_LINES = 60


_PRELOADED = {
    Kind.TRANSFORMER_ENGINE: "te_rank_imports",
    Kind.OLDER_TRANSFORMER_ENGINE: "te_rank_imports",
    Kind.MEGATRON_LM: "megatron_lm_rank_imports",
    Kind.TRAINERS: "trainer_rank_imports",
    Kind.MS_SWIFT: "swift_rank_imports",
}


class RankFailure(AssertionError):
    """A case failed on a rank. The text has that rank's traceback and what the ranks printed."""

    def __init__(self, rank: int, outcome: Outcome, details: str) -> None:
        self.rank = rank
        self.exception_type = outcome.exception_type
        self.message = outcome.message
        super().__init__(
            f"rank {rank}: {outcome.exception_type}: {outcome.message}\n"
            f"{outcome.traceback}{details}".rstrip()
        )


class RankTimeout(AssertionError):
    """A case did not end on every rank. The text has the stacks of all ranks."""


class RankProcess:
    """The test's side of one rank: its process, the pipe to it and the file it prints into."""

    def __init__(self, rank: int, start: Start) -> None:
        self.rank = rank
        self._log = start.log(rank)
        self._log.touch()
        self._shown = 0
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = fork(start.kind, main, theirs, rank, start)
        theirs.close()

    def send(self, case: Case) -> None:
        # A rank that has died is found when its answer is read.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(case)

    def receive(self) -> Outcome:
        """The answer, or a failed outcome when the process has died."""
        try:
            answer: Outcome = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            status = self.process.exitcode
            return Outcome(exception_type="ProcessDied", message=f"exit status {status}")
        return answer

    def new_output(self) -> str:
        """What the rank has printed since the last call."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        new, self._shown = text[self._shown :], len(text)
        return "\n".join(new.splitlines()[-SHOWN_LINES:])

    def ask_for_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    @property
    def process_id(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


def fork(kind: Kind, target: Callable[..., None], *arguments: Any) -> Any:
    """Start a process that has all that ranks of this kind import."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    server = _server(_PRELOADED.get(kind, "rank_imports"), TRANSFORMER_ENGINES.get(kind))
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        process.start()
    return process


@cache
def _server(preloaded: str, folder: Path | None) -> forkserver.ForkServer:
    """Start the process that ranks are forked off; it finds the preloaded module by PYTHONPATH.

    Kinds that import another Megatron, or Transformer-Engine before it, have a server of their own.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload([preloaded])
    path = [*sys.path, *([] if folder is None else [str(folder)])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, path))):
        server.ensure_running()
    return server


class RankPool:
    """`world_size` rank processes, started with the first case and again after a failed one.

    Of the kinds with Transformer-Engine they have it over stand-ins for its kernels, see
    te_stand_in.py.
    Their messages obey the rules of a GPU, see hostile.py, unless they are of `Kind.PLAIN`.
    """

    def __init__(self, world_size: int, kind: Kind = Kind.HOSTILE) -> None:
        self.world_size = world_size
        self._kind = kind
        folder = TRANSFORMER_ENGINES.get(kind)
        self._path = [] if folder is None else [str(folder)]
        self._ranks: list[RankProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._starts = 0

    @property
    def process_ids(self) -> list[int]:
        return [rank.process_id for rank in self._ranks]

    def run(
        self, function: Callable[..., Any], /, *, timeout: float = 300.0, **arguments: Any
    ) -> list[Any]:
        """Call `function(**arguments)` on every rank; the results, in the order of the ranks.

        Raises:
            RankFailure: it raised on some rank (the first to fail, if several).
            RankTimeout: some rank was not done after `timeout` seconds.
        """
        if "<locals>" in function.__qualname__:
            raise TypeError(
                f"{function.__qualname__} is not at module level: ranks cannot import it"
            )
        self._start()
        case = Case(
            module=function.__module__,
            qualified_name=function.__qualname__,
            arguments=arguments,
            path=[*sys.path, *self._path],
            test=os.environ.get("PYTEST_CURRENT_TEST", ""),
        )
        for rank in self._ranks:
            rank.new_output()
            rank.send(case)
        outcomes = self._collect(timeout)
        return [pickle.loads(outcomes[rank].result or b"") for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the processes; they have nothing to lose."""
        self._kill()

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        if self._ranks:
            return
        self._starts += 1
        folder = Path(self._folder.name) / str(self._starts)
        folder.mkdir()
        start = Start(self.world_size, folder, self._kind)
        self._ranks = [RankProcess(rank, start) for rank in range(self.world_size)]
        self._collect(START_TIMEOUT)

    def _collect(self, timeout: float) -> dict[int, Outcome]:
        """The outcome of every rank.

        Raises:
            RankFailure: a rank has failed; the others had a moment to end, too.
            RankTimeout: none has failed and some are not done.
        """
        outcomes: dict[int, Outcome] = {}
        try:
            self._wait_for(outcomes, timeout)
        except BaseException:  # such as Ctrl-C: the ranks would still be in the middle of a case
            self._kill()
            raise
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.failed}
        if failed:
            raise self._failure(failed, self._unfinished(outcomes))
        if len(outcomes) < self.world_size:
            raise self._timeout(timeout, self._unfinished(outcomes))
        return outcomes

    def _wait_for(self, outcomes: dict[int, Outcome], timeout: float) -> None:
        """Fill in outcomes, the first to arrive first, until all are there or time is up."""
        deadline = time.monotonic() + timeout
        waiting = {rank.pipe: rank for rank in self._ranks}
        while waiting:
            answered = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                return
            for pipe in answered:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                outcomes[rank.rank] = rank.receive()
                if outcomes[rank.rank].failed:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)

    def _unfinished(self, outcomes: dict[int, Outcome]) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.rank not in outcomes]

    def _failure(self, failed: dict[int, Outcome], unfinished: list[RankProcess]) -> RankFailure:
        first, *others = failed
        details = [f"rank {r} too: {failed[r].exception_type}: {failed[r].message}" for r in others]
        details += [f"rank {rank.rank} did not end" for rank in unfinished]
        error = RankFailure(first, failed[first], "\n".join([*details, *self._output(unfinished)]))
        # A failed case may leave anything behind: messages that nobody received, half a state.
        self._kill()
        return error

    def _timeout(self, timeout: float, unfinished: list[RankProcess]) -> RankTimeout:
        names = ", ".join(str(rank.rank) for rank in unfinished)
        printed = self._output(unfinished=self._ranks)
        self._kill()
        return RankTimeout(
            "\n".join([f"after {timeout:g} s these ranks were not done: {names}", *printed])
        )

    def _output(self, unfinished: list[RankProcess]) -> list[str]:
        """What the ranks printed, and the stacks of unfinished ones."""
        for rank in unfinished:
            rank.ask_for_stacks()
        if unfinished:
            time.sleep(STACKS_TAKE)
        printed = ((rank.rank, rank.new_output()) for rank in self._ranks)
        return [f"--- rank {rank} printed:\n{text}" for rank, text in printed if text]

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []


class RankPools:
    """One pool for each world size and kind of ranks, made when asked for."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, Kind], RankPool] = {}

    def __call__(self, world_size: int, kind: Kind = Kind.HOSTILE) -> RankPool:
        if (world_size, kind) not in self._pools:
            self._pools[world_size, kind] = RankPool(world_size, kind)
        return self._pools[world_size, kind]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
