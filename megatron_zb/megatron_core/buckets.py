"""Reductions of a model chunk's gradient buckets over the data-parallel ranks.

Megatron's data parallelism puts gradients into buckets, last layers first, and reduces a bucket
when a hook has fired for each of its weights in the last microbatch. With a split backward the
hooks fire in B, when the weight gradients are still to come. So this file listens to them in
Megatron's place, counts what W brings as well, and starts each reduction itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def overlaps_grad_reduce(chunk: Any) -> bool:
    """Return whether a chunk is wrapped in Megatron's DDP with --overlap-grad-reduce."""
    ddp_config = getattr(chunk, "ddp_config", None)
    return ddp_config is not None and bool(ddp_config.overlap_grad_reduce)


class BucketReductions:
    """The reductions of one chunk's buckets, each started after the last gradient of its weights.

    Only the last pass of a step that adds weight gradients, a W or a BW, makes gradients final.
    The gradients of a W are known before it runs. Those of a BW are taken from the chunk's previous
    BW; if that is not known, or a weight gets nothing, its bucket waits for the pass to end.
    Buckets start in their own order, so that all data-parallel ranks call the same collectives.
    """

    def __init__(self, chunk: Any) -> None:
        self.chunk = chunk
        dense, experts = chunk.bucket_groups, chunk.expert_parallel_bucket_groups
        self._lines = [_Line(groups) for groups in (dense, experts)]
        self._in_backward: Counter[int] = Counter()
        self._usual: Counter[int] = Counter()
        self._listens = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Replace Megatron's own count of gradients while a step runs."""
        groups = [group for line in self._lines for group in line.groups]
        for group in groups:
            group.register_grad_ready = self._hook
        try:
            yield
        finally:
            for group in groups:
                del group.register_grad_ready

    def before_pass(self, brings: Mapping[int, int] | None, final: bool) -> None:
        """Prepare for a W or a BW that is about to run.

        Args:
            brings: the number of gradients the W adds to a weight, by its ``id``; None for a BW.
                Is read only where the pass is final.
            final: no other such pass of the chunk follows in this step.
        """
        self._listens = brings is None
        self._in_backward.clear()
        if final:
            for line in self._lines:
                line.expect(self._usual if brings is None else brings, unknown=brings is None)
                line.start_what_is_ready(self._force_all_reduce)

    def gradient_came(self, weight: torch.Tensor) -> None:
        """Count a gradient that a W has added to ``main_grad``."""
        for line in self._lines:
            line.gradient_came(weight, self._force_all_reduce)

    def after_pass(self, final: bool) -> None:
        """Finish a W or a BW that has run."""
        if self._listens:
            self._usual = self._in_backward.copy()
        self._listens = False
        if final:
            for line in self._lines:
                line.start_the_rest(self._force_all_reduce)

    def _hook(self, weight: torch.Tensor, force_all_reduce: bool | None = False) -> None:
        """Count a gradient from Megatron's hook of a weight; it is ignored in a B."""
        if self._listens:
            self._in_backward[id(weight)] += 1
            self.gradient_came(weight)

    @property
    def _force_all_reduce(self) -> bool:
        return bool(getattr(self.chunk, "force_all_reduce", False))


class _Line:
    """Bucket groups that start one after another, and the gradients each still waits for."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups = groups
        self._group_of = {id(w): i for i, group in enumerate(groups) for w in group.params}
        self._awaited: list[dict[int, int]] | None = None  # None but in the last pass of a step
        self._next = 0

    def expect(self, brings: Mapping[int, int], unknown: bool) -> None:
        """Set the awaited gradients; if ``unknown``, weights not in ``brings`` may get one, too."""
        none = -1 if unknown else 0
        awaited = [{id(w): brings.get(id(w), none) for w in group.params} for group in self.groups]
        self._awaited = [{w: n for w, n in group.items() if n} for group in awaited]
        self._next = 0

    def gradient_came(self, weight: torch.Tensor, force_all_reduce: bool) -> None:
        group = self._group_of.get(id(weight))
        if self._awaited is None or group is None:
            return
        awaited = self._awaited[group]
        if id(weight) not in awaited:
            raise RuntimeError(
                f"a gradient of a weight of shape {tuple(weight.shape)} came after the last one "
                "that was expected of it, when its reduction may have begun"
            )
        awaited[id(weight)] -= 1
        if not awaited[id(weight)]:
            del awaited[id(weight)]
            self.start_what_is_ready(force_all_reduce)

    def start_what_is_ready(self, force_all_reduce: bool) -> None:
        while self._awaited and self._next < len(self.groups) and not self._awaited[self._next]:
            self._start_next(force_all_reduce)

    def start_the_rest(self, force_all_reduce: bool) -> None:
        while self._next < len(self.groups):
            self._start_next(force_all_reduce)
        self._awaited = None
        self._next = 0

    def _start_next(self, force_all_reduce: bool) -> None:
        self.groups[self._next].start_grad_sync(force_all_reduce=force_all_reduce)
        self._next += 1
