"""Agreement of a job's ranks before and while they build: if one cannot go on, none does.

Nothing collective is called: a rank that cannot go on, or goes another way, leaves none waiting.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import Disagreement, agree, leave, store_of_job, store_of_launcher
from megatron_zb.megatron_lm.ending import end_with


class Meeting:
    """The part of this rank in the agreement; ``seconds`` is the longest wait for another rank."""

    def __init__(self, rank: int, world_size: int, seconds: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._store: dist.Store | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the address of the job's store is known."""
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
            Whether the ranks have met: not where the address of the job's store is not known yet.
        """
        can_meet = self.is_possible
        try:
            if can_meet:
                self._agree(where, values, failure)
            elif failure is not None:
                raise failure
        except Disagreement as error:
            if failure is None or isinstance(failure, UsageError) or not _tells(error, failure):
                self.end(error, speaks=error.speaks)
            raise failure from None
        except UsageError as error:
            self.end(error)
        return can_meet

    def end(self, error: UsageError, *, speaks: bool | None = None) -> NoReturn:
        """End this process for a mistake that ends every rank."""
        end_with(error, self._rank, speaks=speaks)

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
        """Tell ranks that come here that this one does not, and why; wait for nothing."""
        if self._store is not None:
            with suppress(RuntimeError):
                leave(dist.PrefixStore(where, self._store), self._rank, {}, _describe(failure))

    def stay_away(self, where: str, values: Mapping[str, Any]) -> None:
        """Tell ranks that meet that this one does not; wait for nothing."""
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
    """Return whether the failure of this rank is what ends the job."""
    return str(_describe(failure)) in str(error)


def _describe(failure: Exception | None) -> str | None:
    """Describe a failure in one line."""
    if failure is None:
        return None
    if isinstance(failure, UsageError):
        return str(failure)
    return " ".join("".join(traceback.format_exception_only(failure)).split())
