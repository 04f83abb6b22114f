"""Data of the stages in a job with a schedule: which chunks read batches, and loops over them.

Each method whose first argument is ``original`` takes the place of that function of Megatron-LM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_zb.megatron_core.adapter import PipelineAdapter


class StageData:
    """The data of this rank's chunks."""

    def __init__(self, adapter: PipelineAdapter, args: argparse.Namespace) -> None:
        self._adapter = adapter
        self._args = args

    @property
    def is_placed(self) -> bool:
        """Whether other stages read data than those that Megatron-LM expects to."""
        return self._adapter.physical.mirrored or self._on_every_stage

    @property
    def _on_every_stage(self) -> bool:
        """Return whether inner stages need batches, too.

        Megatron-LM leaves them without: their attention would go across documents, or they would
        read the ends of documents from nothing, and they could not count the batches of a whole
        validation set.
        """
        args = self._args
        resets = args.reset_attention_mask and args.create_attention_mask_in_dataloader
        has_ends = getattr(args, "dataloader_inter_document_masking", False)  # new in 0.19
        return bool(resets or has_ends or args.full_validation)

    # --- which stages read

    def is_first_stage(
        self, original: Any, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        """Return whether this stage has the embedding, which is on the last rank in a V."""
        del original
        return self._holds(self._adapter.pre_process, None if ignore_virtual else vp_stage)

    def is_first_or_last_stage(self, original: Any, vp_stage: int | None) -> bool:
        """Return whether this stage reads data: first, last, or all stages."""
        del original
        if self._on_every_stage:
            return True
        adapter = self._adapter
        return self._holds(adapter.pre_process, vp_stage) or self._holds(
            adapter.post_process, vp_stage
        )

    def _holds(self, part: Callable[[int, int], bool], vp_stage: int | None) -> bool:
        """Return whether a chunk, or with None any chunk, of this rank has a part of the model."""
        from megatron.core import parallel_state

        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        chunks = range(self._adapter.chunks) if vp_stage is None else (vp_stage,)
        return any(part(pp_rank, chunk) for chunk in chunks)

    def get_batch_on_this_tp_rank(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Broadcast a batch as for MTP, since one rank needs tokens, labels and mask."""
        keywords["mtp_on_this_rank"] = True
        return original(*args, **keywords)

    def dataset_builder(
        self, original: Any, builder: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any
    ) -> None:
        """Build data sets on the job's first rank, too, which tells all others if there is data."""
        is_first = self._args.rank == 0
        original(builder, cls, sizes, lambda: is_built_on_rank() or is_first, config)

    def sums_of_lengths(self, original: Any) -> tuple[float | None, ...]:
        """Return sums over the packed sequences of a step, each counted once.

        Megatron-LM counts each in every chunk, and its log would tell of twice the throughput.
        """
        return tuple(each and each / self._adapter.chunks for each in original())

    # --- loops over batches

    def skip_step(self, original: Any, data_iterator: Any) -> None:
        """Read the batches of a step without a model; Megatron-LM reads one iterator alone."""
        del original
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        while get_rerun_state_machine().should_run_forward_backward(data_iterator):
            for iterator in (each for each in iterators if each is not None):
                for _ in range(get_num_microbatches()):
                    next(iterator)

    def evaluate(
        self, original: Any, prefix: Any, forward_step: Any, iterators: Any, *rest: Any, **more: Any
    ) -> Any:
        """Evaluate each of several validation sets on all chunks.

        Megatron-LM makes a list of sets for each chunk, and expects a list of chunks for each set.
        """
        several = self._args.multiple_validation_sets and self._adapter.chunks > 1
        if several and None not in iterators:
            iterators = [list(of_one_set) for of_one_set in zip(*iterators, strict=True)]
        return original(prefix, forward_step, iterators, *rest, **more)
