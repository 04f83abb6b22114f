"""Where the ranks of a job meet before, and while, they build: one cannot go on, then none does.

Nothing collective is called: a rank that cannot go on, or goes another way, leaves none waiting.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import Disagreement, agree, leave, store_of_job, store_of_launcher
from megatron_zb.megatron_lm.ending import end_with


class Meeting:
    """This rank's part; ``seconds`` is how long a rank may let the others wait."""

    def __init__(self, rank: int, world_size: int, seconds: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._store: dist.Store | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the job has said where its ranks are."""
        return self._world_size == 1 or dist.is_initialized() or "MASTER_ADDR" in os.environ

    def store(self) -> dist.Store:
        """Connect to the store of the job, once."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    def agree(self, where: str, values: Mapping[str, Any], failure: Exception | None) -> bool:
        """Go on if every rank comes here with the same values and without a failure.

        Ends the process with one sentence otherwise, or raises ``failure`` where that is what ends
        the job and nothing that the user can mend.

        Returns:
            Whether the ranks have met: not where the job has not said yet where its ranks are.
        """
        can_meet = self.is_possible
        try:
            if can_meet:
                self._agree(where, values, failure)
            elif failure is not None:
                raise failure
        except Disagreement as error:
            if failure is None or isinstance(failure, UsageError) or not _tells(error, failure):
                end_with(error, self._rank, speaks=error.speaks)
            raise failure from None
        except UsageError as error:
            end_with(error, self._rank)
        return can_meet

    def _agree(self, where: str, values: Mapping[str, Any], failure: Exception | None) -> None:
        agree(
            dist.PrefixStore(where, self.store()),
            self._rank,
            self._world_size,
            values,
            _describe(failure),
            seconds=self._seconds,
        )

    def leave(self, where: str, failure: Exception) -> None:
        """Let ranks that come here know that this one does not, and why; waits for nothing."""
        if self._store is not None:
            with suppress(RuntimeError):
                leave(dist.PrefixStore(where, self._store), self._rank, {}, _describe(failure))

    def stay_away(self, where: str, values: Mapping[str, Any]) -> None:
        """Let ranks that meet know that this one does not; waits for nothing."""
        if self._world_size == 1:
            return
        with suppress(RuntimeError, OSError):  # then the others find that nobody comes
            store = store_of_launcher(_attempt())
            if store is not None:
                leave(dist.PrefixStore(where, store), self._rank, values)

    def _connect(self) -> dist.Store:
        if dist.is_initialized():
            return dist.PrefixStore("megatron_zb", _get_default_store())
        return store_of_job(self._world_size, _attempt())


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _tells(error: Disagreement, failure: Exception) -> bool:
    """Whether what ends the job is the failure of this rank."""
    return str(_describe(failure)) in str(error)


def _describe(failure: Exception | None) -> str | None:
    """In one line."""
    if failure is None:
        return None
    if isinstance(failure, UsageError):
        return str(failure)
    return " ".join("".join(traceback.format_exception_only(failure)).split())
