"""A small GPT of megatron-core on CPU ranks under a schedule, for benchmarks that compute."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch


class SmallGPT:
    """The chunks of a GPT on this rank, and the process groups of its schedule.

    Args:
        args: sizes, see :func:`add_sizes`.
        name: of the schedule.
        settings: further fields of ``ScheduleSettings``.
        sizes: further fields of ``JobSizes``.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        name: str,
        settings: dict[str, Any] | None = None,
        sizes: dict[str, Any] | None = None,
    ) -> None:
        from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter, ScheduleSettings
        from megatron_zb.schedules.layout import Layers

        self.args = args
        self.adapter = PipelineAdapter.create(
            ScheduleSettings(pipeline_schedule=name, **settings or {}),
            JobSizes(
                pipeline_size=args.ranks,
                num_microbatches=args.microbatches,
                layers=Layers(args.layers),
                **sizes or {},
            ),
        )
        self._enter_groups()
        self.chunks = [self._chunk(stage) for stage in range(self.adapter.chunks)]
        self.adapter.prepare_model(self.chunks)
        shape = 1, args.sequence
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(args.vocabulary, shape, generator=generator)
        self.positions = torch.arange(args.sequence).expand(1, -1)
        self.causal = torch.ones(1, 1, args.sequence, args.sequence, dtype=torch.bool).triu(1)

    def _enter_groups(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        parallel_state.destroy_model_parallel()
        choose = self.adapter.embedding_ranks
        more: dict[str, Any] = {}
        if choose is not None:
            more["get_embedding_ranks"] = lambda ranks, _=None: choose(ranks)
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=self.args.ranks,
            virtual_pipeline_model_parallel_size=self.adapter.virtual_pipeline_size,
            create_gloo_process_groups=False,
            **more,
        )
        model_parallel_cuda_manual_seed(1)
        self._state = dict(vars(parallel_state))

    def enter(self) -> None:
        """Return to the process groups of this model."""
        from megatron.core import parallel_state

        vars(parallel_state).update(self._state)

    def _chunk(self, vp_stage: int) -> Any:
        from megatron.core import parallel_state

        rank = parallel_state.get_pipeline_model_parallel_rank()
        config = self.config(
            self.args.layers,
            virtual_pipeline_model_parallel_size=self.adapter.virtual_pipeline_size,
            pipeline_model_parallel_layout=self.adapter.layer_layout,
        )
        return self.model(
            config,
            pre_process=self.adapter.pre_process(rank, vp_stage),
            post_process=self.adapter.post_process(rank, vp_stage),
            vp_stage=vp_stage if self.adapter.chunks > 1 else None,
        )

    def config(self, layers: int, **more: Any) -> Any:
        """Return Megatron's config of a GPT of some layers."""
        from megatron.core.transformer.transformer_config import TransformerConfig

        return TransformerConfig(
            num_layers=layers,
            hidden_size=self.args.hidden,
            num_attention_heads=max(1, self.args.hidden // 64),
            pipeline_model_parallel_size=self.args.ranks,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            **more,
        )

    def model(self, config: Any, **ends: Any) -> Any:
        """Build a part of a GPT; all parts of equal sizes have equal layers."""
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        torch.manual_seed(1)
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            self.args.vocabulary,
            self.args.sequence,
            share_embeddings_and_output_weights=False,
            **ends,
        )

    def run(self, forward_step: Callable[..., Any]) -> list[float]:
        """Run all passes of a step; return its losses, which one rank has."""
        many = len(self.chunks) > 1
        records = self.adapter.forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=[repeat(None)] * len(self.chunks) if many else repeat(None),
            model=self.chunks if many else self.chunks[0],
            num_microbatches=self.args.microbatches,
            seq_length=self.args.sequence,
            micro_batch_size=1,
        )
        return [float(it["loss"]) for it in records]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sizes."""
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks (default 2)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default 256)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--vocabulary", type=int, default=512, help="words (default 512)")
