"""Agreement of a job's ranks before and while they build: if one cannot go on, none does.

Nothing collective is called: a rank that cannot go on, or goes another way, leaves none waiting.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import Disagreement, agree, leave, store_of_job, store_of_launcher


def raise_it(error: UsageError, *, speaks: bool | None = None) -> NoReturn:
    """Raise an error that every rank has."""
    raise error


class Rendezvous:
    """The part of this rank in the agreement.

    Args:
        seconds: the longest wait for another rank.
        end: ends this rank for an error of the user; ``speaks`` is true on the rank that reports.
        store: of the job, where it is known already.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        seconds: float,
        *,
        end: Callable[..., NoReturn] = raise_it,
        store: dist.Store | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._store = store
        self.end = end

    def begin(self, name: str) -> None:
        """Take this rank's place in torch.distributed, which has been initialised."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(name, _get_default_store())
        number = store.add(f"begun by {self._rank}", 1)  # of this process group
        self._store = dist.PrefixStore(str(number), store)

    @property
    def is_possible(self) -> bool:
        """Whether the address of the job's store is known."""
        if self._store is not None or self._world_size == 1:
            return True
        return dist.is_initialized() or "MASTER_ADDR" in os.environ

    def store(self) -> dist.Store:
        """Connect to the store of the job, once."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    def agree(self, where: str, values: Mapping[str, Any], failure: Exception | None) -> bool:
        """Go on if every rank comes here with the same values and without a failure.

        Ends this rank with one sentence otherwise, or raises ``failure`` where that is what ends
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
