"""Data-parallel gathers of a chunk's weights and reductions of its gradients.

Megatron's own schedules dispatch both: ``config.param_sync_func`` ahead of a chunk's first forward,
``config.grad_sync_func`` after its last backward. Each may be None, a callable or one per chunk.

Megatron's data parallelism puts gradients into buckets, last layers first, and reduces a bucket
when a hook has fired for each of its weights in the last microbatch. With a split backward the
hooks fire in B, when the weight gradients are still to come. So :class:`BucketReductions` listens
to them in Megatron's place, counts the gradients of W as well, and starts each reduction itself.

The reductions of all chunks of a rank start in one order, later chunks first, as a schedule for
equal microbatches finishes them. Data-parallel ranks then call the same collectives even where
their microbatches have other lengths, and so their schedules another order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.schedules.lowering import Program, runs_of
from megatron_zb.schedules.passes import PassKind

# Chunks whose weights are gathered before the first forward; the others go one chunk ahead.
_GATHERED_UP_FRONT = 2


def gradients_of(chunk: Any) -> list[torch.Tensor]:
    """Return the buffers of the gradients of a chunk that is wrapped for data parallelism."""
    return [it.grad_data for it in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def bucket_groups_of(chunk: Any) -> list[Any]:
    """Return the groups of buckets of a chunk that is wrapped for data parallelism."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


class DataParallelPart(StepPart):
    """Gathers and reductions of the steps.

    Args:
        more_passes: function that counts the passes of each chunk that compute weight gradients, in
            addition to the W and BW of its stage.
    """

    def __init__(self, more_passes: Callable[[Step], Mapping[int, int]] = lambda step: {}) -> None:
        self._more_passes = more_passes
        self._sync: DataParallelSync | None = None
        self._buckets: list[BucketReductions | None] = []

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        config, chunks = step.config, step.model
        with no_grad_sync(config, chunks):
            # an evaluation gathers and reduces nothing
            self._sync = None if step.forward_only else self._start(step)
            with nullcontext() if self._sync is None else self._sync.listening():
                yield
        if step.is_rehearsal and not (step.is_warm_up or config.grad_sync_func):
            _start_reductions(chunks)

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        stage.sync = self._sync
        if stage.split is None:  # a shard of the vocabulary
            return
        stage.split.hooks_need_gradients = overlaps_grad_reduce(step.model[stage.chunk])
        if self._sync is not None:
            stage.split.queue.on_gradient = self._sync.listener(stage.chunk)

    def _start(self, step: Step) -> DataParallelSync:
        held = step.physical.placement.stages_of[step.logical]
        order: list[int] = []
        if step.config.param_sync_func is not None:
            order = [held.index(s) for s in _by_first_forward(step.program, step.logical)]
        more, passes = self._more_passes(step), step.program.schedule.ranks[step.logical]
        usual = Counter(p.stage for p in passes if p.kind in (PassKind.W, PassKind.BW))
        return DataParallelSync(
            step.config,
            step.model,
            order,
            # after no pass of a warm-up the gradients are complete, so none is counted as the last
            passes=[
                usual[stage] + more.get(chunk, 0) + step.is_warm_up
                for chunk, stage in enumerate(held)
            ],
            buckets=[None] * len(held) if step.is_rehearsal else self._reductions(step.model),
        )

    def _reductions(self, chunks: list[Any]) -> list[BucketReductions | None]:
        """Return the bucket reductions of the chunks, kept from step to step with their counts."""
        known = {id(b.chunk): b for b in self._buckets if b is not None}
        self._buckets = [
            known.get(id(c)) or BucketReductions(c) if overlaps_grad_reduce(c) else None
            for c in chunks
        ]
        return self._buckets


def _by_first_forward(program: Program, logical: int) -> list[int]:
    """Return the stages of a rank in the order of their first F."""
    passes = (run.work for run in runs_of(program.ranks[logical]))
    return list(dict.fromkeys(p.stage for p in passes if p.kind is PassKind.F))


def _start_reductions(chunks: list[Any]) -> None:
    """Start the reductions of chunks that overlap them, for a step that has not done so."""
    for chunk in chunks:
        if overlaps_grad_reduce(chunk):
            chunk.start_grad_sync()


class DataParallelSync:
    """The parameter gathers and gradient reductions of one training step.

    Both are started as early as possible, so that they overlap with passes: the gather one chunk
    ahead; the reduction of a bucket when its last gradient is there; the reduction of a chunk by a
    function of the user's when it has no B, BW or W left.

    Args:
        chunks: the model chunks of this rank, as data parallelism wraps them.
        order: their indices, in the order of their first forwards.
        passes: the number of W, BW and V of each chunk in the step.
        buckets: for each chunk, None where data parallelism does not overlap its reductions.
    """

    def __init__(
        self,
        config: Any,
        chunks: Sequence[Any],
        order: Sequence[int],
        passes: Sequence[int],
        buckets: Sequence[BucketReductions | None],
    ) -> None:
        self._chunks = chunks
        self._left = list(passes)
        self._gathers = one_for_each_chunk(config.param_sync_func, chunks)
        self._reductions = one_for_each_chunk(config.grad_sync_func, chunks)
        self._buckets = [
            None if bucket is not None and self._has_reduction_of_its_own(i) else bucket
            for i, bucket in enumerate(buckets)
        ]
        self._of_users = self._line_up()
        for chunk in chunks:
            _gather_experts_later(chunk)
        self._ungathered = deque(order if self._gathers else ())
        self._reached: set[int] = set()
        for _ in range(_GATHERED_UP_FRONT):
            self._gather_next()

    def _has_reduction_of_its_own(self, chunk: int) -> bool:
        """Return whether a chunk's ``grad_sync_func`` is other than data parallelism's own.

        Megatron-LM sets data parallelism's own function, which would start all buckets.
        """
        if not self._reductions:
            return False
        return self._reductions[chunk] != self._chunks[chunk].start_grad_sync

    def _line_up(self) -> dict[int, Reduction]:
        """Put all reductions in order; return those by functions of the user's, by their chunk."""
        dense, experts = ReductionOrder(), ReductionOrder()
        of_users = {}
        for number, chunk in reversed(list(enumerate(self._chunks))):
            if (buckets := self._buckets[number]) is not None:
                buckets.line_up(dense, experts)
            elif self._reductions:
                start = partial(self._reductions[number], chunk.parameters())
                of_users[number] = Reduction(start, dense)
        return of_users

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the gradients while the step runs."""
        with ExitStack() as stack:
            for buckets in self._buckets:
                if buckets is not None:
                    stack.enter_context(buckets.listening())
            yield

    def before_forward(self, chunk: int) -> None:
        """Dispatch the next chunk's gather before the first F of a chunk; called before every F."""
        if self._ungathered and chunk not in self._reached:
            self._reached.add(chunk)
            if len(self._reached) > 1:
                self._gather_next()

    def before_weight_gradients(
        self, chunk: int, brings: Callable[[], Mapping[int, int]] | None
    ) -> None:
        """Prepare for a W or BW; see :meth:`BucketReductions.before_pass`.

        Args:
            brings: returns the number of gradients the W adds to each weight; None for a BW.
        """
        if (buckets := self._buckets[chunk]) is not None:
            final = self._left[chunk] == 1
            if brings is None:
                buckets.before_pass(None, final)
            else:  # counting takes time, and only the last pass is asked
                buckets.before_pass(brings() if final else {}, final)

    def listener(self, chunk: int) -> Callable[[torch.Tensor], None] | None:
        """Return the function to call for every gradient that a W has computed, if any."""
        buckets = self._buckets[chunk]
        return None if buckets is None else buckets.gradient_came

    def after_weight_gradients(self, chunk: int) -> None:
        """Start what has not started after a chunk's last W or BW; called after each of them."""
        self._left[chunk] -= 1
        final = not self._left[chunk]
        if (buckets := self._buckets[chunk]) is not None:
            buckets.after_pass(final)
        elif final and chunk in self._of_users:
            self._of_users[chunk].expect({})

    def _gather_next(self) -> None:
        if self._ungathered:
            chunk = self._ungathered.popleft()
            self._gathers[chunk](self._chunks[chunk].parameters())


def _gather_experts_later(chunk: Any) -> None:
    """Let a gather in the optimizer's step leave out experts that are spread over ranks.

    ``--overlap-param-gather-with-optimizer-step`` gathers a rank's first chunk when its dense
    weights have been stepped, but such experts have an optimizer of their own, which steps last.
    What has not been gathered before the first F that needs it, Megatron gathers there.
    """
    gathers_early = getattr(chunk, "overlap_param_gather_with_optimizer_step", False)
    if not gathers_early or "start_param_sync" in vars(chunk):
        return
    gather = chunk.start_param_sync

    def start_param_sync(*args: Any, force_dispatch: bool = False, **options: Any) -> None:
        experts = chunk.expert_parallel_bucket_groups
        if force_dispatch:
            chunk.expert_parallel_bucket_groups = []
        try:
            gather(*args, force_dispatch=force_dispatch, **options)
        finally:
            chunk.expert_parallel_bucket_groups = experts

    chunk.start_param_sync = start_param_sync


def one_for_each_chunk(
    functions: Callable[..., Any] | list[Callable[..., Any]] | None, chunks: Sequence[Any]
) -> list[Callable[..., Any]]:
    """Return Megatron's None, one function for all chunks or list of them as a list."""
    if functions is None:
        return []
    return functions if isinstance(functions, list) else [functions for _ in chunks]


@contextmanager
def no_grad_sync(config: Any, chunks: list[Any]) -> Iterator[None]:
    """Keep data parallelism from reducing by itself while any B or W is still to come."""
    functions = config.no_sync_func or []
    with ExitStack() as stack:
        for enter in functions if isinstance(functions, list) else [functions]:
            stack.enter_context(enter())
        for chunk in chunks:
            if overlaps_grad_reduce(chunk) and not functions:
                stack.enter_context(chunk.no_sync())
        yield


def overlaps_grad_reduce(chunk: Any) -> bool:
    """Return whether a chunk is wrapped in Megatron's DDP with --overlap-grad-reduce."""
    ddp_config = getattr(chunk, "ddp_config", None)
    return ddp_config is not None and bool(ddp_config.overlap_grad_reduce)


class ReductionOrder:
    """The order in which reductions start: each when it is ready and all before it have started."""

    def __init__(self) -> None:
        self._waiting: deque[Reduction] = deque()

    def append(self, reduction: Reduction) -> None:
        self._waiting.append(reduction)

    def start_what_is_ready(self) -> None:
        while self._waiting and self._waiting[0].is_ready:
            self._waiting.popleft().start()


class Reduction:
    """One collective, and the gradients it still waits for in a step.

    Args:
        start: starts the collective.
        order: where this one takes its place, after those already there.
        weights: the ``id`` of those whose gradients it reduces, if they are counted.
    """

    def __init__(
        self, start: Callable[[], None], order: ReductionOrder, weights: Collection[int] = ()
    ) -> None:
        self.start = start
        self._order = order
        self._weights = weights
        self._awaited: dict[int, int] | None = None  # None before the last pass of the step
        order.append(self)

    @property
    def is_ready(self) -> bool:
        return self._awaited is not None and not self._awaited

    def expect(self, brings: Mapping[int, int], unknown: bool = False) -> None:
        """Set the awaited gradients; if ``unknown``, weights not in ``brings`` may also get one."""
        counts = {w: brings.get(w, -1 if unknown else 0) for w in self._weights}
        self._awaited = {w: count for w, count in counts.items() if count}
        self._order.start_what_is_ready()

    def gradient_came(self, weight: torch.Tensor) -> None:
        """Count a gradient of one of the weights.

        Raises:
            RuntimeError: no gradient of it was expected any more.
        """
        if self._awaited is None:
            return
        if id(weight) not in self._awaited:
            raise RuntimeError(
                f"a gradient of a weight of shape {tuple(weight.shape)} came after the last one "
                "that was expected of it, when its reduction may have begun"
            )
        self._awaited[id(weight)] -= 1
        if not self._awaited[id(weight)]:
            del self._awaited[id(weight)]
            self._order.start_what_is_ready()


class BucketReductions:
    """The reductions of one chunk's buckets, each started after the last gradient of its weights.

    Only the last pass of a step that adds weight gradients, a W or a BW, makes gradients final.
    The gradients of a W are known before it runs. Those of a BW are taken from the chunk's previous
    BW; if that is not known, or a weight gets nothing, its bucket waits for the pass to end.
    """

    def __init__(self, chunk: Any) -> None:
        self.chunk = chunk
        self._dense, self._experts = chunk.bucket_groups, chunk.expert_parallel_bucket_groups
        self._reductions: list[Reduction] = []
        self._of_weight: dict[int, Reduction] = {}
        self._in_backward: Counter[int] = Counter()
        self._usual: Counter[int] = Counter()
        self._listens = False

    def line_up(self, dense: ReductionOrder, experts: ReductionOrder) -> None:
        """Append the reductions of a step to the orders, dense ones and those of experts apart."""
        self._reductions, self._of_weight = [], {}
        for order, groups in ((dense, self._dense), (experts, self._experts)):
            for group in groups:
                weights = [id(weight) for weight in group.params]
                reduction = Reduction(partial(self._start, group), order, weights)
                self._reductions.append(reduction)
                self._of_weight.update(dict.fromkeys(weights, reduction))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Replace Megatron's own count of gradients while a step runs."""
        groups = [*self._dense, *self._experts]
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
            for reduction in self._reductions:
                reduction.expect(self._usual if brings is None else brings, unknown=brings is None)

    def gradient_came(self, weight: torch.Tensor) -> None:
        """Count a gradient that a W has added to ``main_grad``."""
        if (reduction := self._of_weight.get(id(weight))) is not None:
            reduction.gradient_came(weight)

    def after_pass(self, final: bool) -> None:
        """Finish a W or a BW that has run."""
        if self._listens:
            self._usual = self._in_backward.copy()
        self._listens = False
        if final:
            for reduction in self._reductions:
                reduction.expect({})

    def _hook(self, weight: torch.Tensor, force_all_reduce: bool | None = False) -> None:
        """Count a gradient from Megatron's hook of a weight; it is ignored in a B."""
        if self._listens:
            self._in_backward[id(weight)] += 1
            self.gradient_came(weight)

    def _start(self, group: Any) -> None:
        force = bool(getattr(self.chunk, "force_all_reduce", False))
        group.start_grad_sync(force_all_reduce=force)
