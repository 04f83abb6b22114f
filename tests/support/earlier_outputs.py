"""A model whose layers read the outputs of all layers before them, as with attention residuals.

So stages hand on several hidden states, side by side, and ever more of them. In a V a rank runs two
stages: the second one takes the outputs that the first one has seen from the rank itself, and is
sent the others alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_zb.megatron_core.step import WIDTHS
from megatron_zb.schedules.placement import Placement

HIDDEN, SEQUENCE, BATCH, VOCABULARY = 8, 6, 2, 16


class Kept:
    """Outputs that a rank keeps for its other stage, by microbatch, until their gradients come."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[torch.Tensor]] = {}

    def keep(self, microbatch: int, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keep copies for :meth:`take`; the backward of what is returned adds their gradients.

        So what is returned has to be read, by the layer or by the next stage.
        """
        copies = [each.detach().requires_grad_() for each in outputs]
        self._outputs.setdefault(microbatch, []).extend(copies)
        return [_Added.apply(each, copy) for each, copy in zip(outputs, copies, strict=True)]

    def take(self, microbatch: int) -> list[torch.Tensor]:
        return self._outputs.pop(microbatch)

    def __len__(self) -> int:
        return len(self._outputs)


class _Added(torch.autograd.Function):
    """The identity, whose backward adds the gradient of a copy, which later stages have read."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.copy = copy
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient + ctx.copy.grad, None


class Layer(torch.nn.Module):
    """A weighted sum of the earlier outputs, and a two-layer MLP of Megatron's linear layers."""

    def __init__(self, config: TransformerConfig, number: int) -> None:
        super().__init__()
        more: dict[str, Any] = {"config": config, "bias": False, "skip_bias_add": False}
        more["init_method"] = config.init_method
        wide = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **more)
        self.wide = wide
        self.narrow = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **more)
        self.query = torch.nn.Parameter(torch.empty(HIDDEN, dtype=config.params_dtype))
        generator = torch.Generator().manual_seed(100 + number)
        for parameter in self.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.copy_(0.3 * drawn)

    def forward(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        scores = torch.stack([each @ self.query for each in outputs]).softmax(0)
        mixed = sum(score[..., None] * each for score, each in zip(scores, outputs, strict=True))
        hidden, _ = self.wide(mixed)
        return mixed + self.narrow(torch.tanh(hidden))[0]


class Chunk(MegatronModule):
    """The layers of one stage; the first stage embeds tokens, the last one computes the loss."""

    def __init__(
        self, config: TransformerConfig, placement: Placement, stage: int, kept: Kept
    ) -> None:
        super().__init__(config=config)
        self.stage, self._placement, self._kept = stage, placement, kept
        self.pre_process, self.post_process = stage == 0, stage == placement.num_stages - 1
        self.share_embeddings_and_output_weights = False
        self.layer = Layer(config, stage)
        self._input: torch.Tensor | None = None
        if self.pre_process:
            generator = torch.Generator().manual_seed(99)
            table = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=config.params_dtype)
            self.embedding = torch.nn.Parameter(table)

    def set_input_tensor(self, given: Any) -> None:
        self._input = given[0] if isinstance(given, list) else given

    def forward(self, microbatch: int) -> torch.Tensor:
        if self.pre_process:
            outputs = [self.embedding[tokens_of(microbatch)]]
        else:
            assert self._input is not None
            outputs = list(self._input.split(HIDDEN, dim=-1))
        if seen_by(self._placement, self.stage):  # the first outputs are here already
            outputs = [*self._kept.take(microbatch), *outputs]
        count = kept_by(self._placement, self.stage)
        if count:
            outputs = self._kept.keep(microbatch, outputs)
        own = [self.layer(outputs)]
        if self.post_process:
            return own[0].square().sum(-1).t()
        outputs += self._kept.keep(microbatch, own) if count > len(outputs) else own
        return torch.cat(outputs[seen_by(self._placement, self.stage + 1) :], dim=-1)


def kept_by(placement: Placement, stage: int) -> int:
    """Return how many outputs a stage keeps for the other one of its rank, the first ones.

    Output 0 is the embedding's, ``i + 1`` that of stage i. Only in a V is there something to gain.
    The stage at the turn of the V hands its own output on to the next, on the same rank.
    """
    turn = placement.num_stages // 2 - 1
    if not is_v(placement) or stage > turn:
        return 0
    return stage + 2 - (stage == turn)


def seen_by(placement: Placement, stage: int) -> int:
    """Return how many outputs the rank of a stage has kept from its first stage."""
    return kept_by(placement, placement.num_stages - 1 - stage) if is_v(placement) else 0


def is_v(placement: Placement) -> bool:
    return placement.mirrored and placement.chunks == 2


def widths_of(placement: Placement) -> tuple[int, ...]:
    """Return the widths of what all stages but the last hand on."""
    stages = range(placement.num_stages - 1)
    return tuple(HIDDEN * (s + 2 - seen_by(placement, s + 1)) for s in stages)


def tokens_of(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=generator)


def config_of(placement: Placement) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=placement.num_stages,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=placement.pipeline_size,
        virtual_pipeline_model_parallel_size=placement.chunks if placement.chunks > 1 else None,
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    setattr(config, WIDTHS, widths_of(placement))
    return config


def forward_step(iterator: Iterator[int], chunk: Any) -> tuple[torch.Tensor, Any]:
    return chunk(next(iterator)), lambda losses: (losses.sum(), {"loss": losses.detach().sum()})


def on_one_rank(
    placement: Placement, num_microbatches: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of all stages one after another, in plain autograd."""
    config = config_of(placement)
    kept = [Kept() for _ in range(placement.pipeline_size)]
    chunks = [Chunk(config, placement, s, kept[r]) for s, r in enumerate(placement.rank_of)]
    losses = []
    for microbatch in range(num_microbatches):
        read: list[torch.Tensor] = []
        made: list[torch.Tensor] = []
        for chunk in chunks:
            if made:
                read.append(made[-1].detach().requires_grad_())
                chunk.set_input_tensor(read[-1])
            made.append(chunk(microbatch))
        loss = made.pop().sum()
        (loss / num_microbatches).backward()
        for output, message in zip(reversed(made), reversed(read), strict=True):
            output.backward(message.grad)
        losses.append(float(loss.detach()))
    return losses, dict(gradients_of(chunks))


def gradients_of(chunks: list[Chunk]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None, name
            yield f"{chunk.stage}.{name}", parameter.grad.clone()
