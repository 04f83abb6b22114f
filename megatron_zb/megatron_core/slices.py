"""Token slices in Megatron's models: attention with a prefix, and what stages are set.

A stage runs one slice of a microbatch at a time: :mod:`megatron_zb.schedules.features.slices`. Its
layers see a shorter sequence. Only attention needs more: in F, the keys and values of the slices
before it, and in B, the gradients that the slices behind it leave for its own keys and values. Both
are kept for each layer and microbatch by :class:`Prefix`. Gradients are summed in float32, as a sum
in bfloat16 would lose digits with every slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import lcm
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.sliced_context import ContextShare
from megatron_zb.megatron_core.sliced_documents import ENDS, Cut, Documents, all_reduced_max
from megatron_zb.megatron_core.sliced_engine import add_gradients_in_any_order
from megatron_zb.megatron_core.sliced_loss import ComparedGradients, SliceOutputs, TokenCounts
from megatron_zb.megatron_core.sliced_reading import (
    FLAG,
    ReadingArguments,
    ReadingOptions,
    SlicedReading,
)
from megatron_zb.megatron_core.sliced_routers import WholeRouting, has_losses
from megatron_zb.megatron_core.sliced_stage import SlicedStage
from megatron_zb.megatron_core.step import Step, StepPart, activation_shape
from megatron_zb.schedules.features.slices import Slicing, slicing_of

SLICED = frozenset({"GPTModel", "HybridModel", "MambaModel"})
"""Classes of models whose microbatches can be cut; a HybridModel was a MambaModel before 0.18."""


class SlicesPart(StepPart):
    """Runs steps on token slices.

    Args:
        slicing: the slices of every microbatch.
        shares_output: whether the output layer is vocabulary parallel.
    """

    def __init__(self, slicing: Slicing, *, shares_output: bool) -> None:
        self.slicing, self._shares_output = slicing, shares_output
        self.arguments = ReadingArguments()
        """Arguments by which the forward step receives data."""
        self.documents: str | None = None
        """Documents of the data to attend within, as MASK, ENDS or "" for none.

        With None, the first stage looks for ends in every step.
        """
        self.cuts: list[Cut] = []
        self._layers: list[Prefix | WholeRouting] = []
        self._readers: list[SlicedReading | None] = []
        self._compared = ComparedGradients()
        self._has_looked_at_loss = False

    fact = "is_sliced"

    @property
    def reads_on_every_stage(self) -> bool:
        """Whether stages between the first and the last also need data: the ends of documents."""
        return bool(self.documents)

    def finish_model(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            add_gradients_in_any_order(chunk)

    def prepare_model(self, chunks: list[Any]) -> None:
        """Replace the attention and the rotary embeddings of all layers.

        Raises:
            UsageError: a layer mixes tokens by other means than causal attention to all of them.
        """
        self.cuts = [Cut(()) for _ in chunks]
        for cut, chunk in zip(self.cuts, chunks, strict=True):
            if SLICED.isdisjoint(kind.__name__ for kind in type(chunk).__mro__):
                raise UsageError(
                    f"{FLAG} is for GPTModel and HybridModel, not for {type(chunk).__name__}: "
                    "leave it out"
                )
            for module in chunk.modules():
                attention = getattr(module, "self_attention", getattr(module, "mixer", None))
                if attention is not None and not isinstance(attention, IdentityOp):
                    self._layers.append(Prefix(cut, attention))
                if isinstance(module, TopKRouter) and has_losses(module):
                    self._layers.append(WholeRouting(cut, module))
                if isinstance(module, RotaryEmbedding):
                    module.forward = partial(_rotated, cut, module.forward)

    def before_step(self, step: Step) -> None:
        context = ContextShare(step.pg_collection.cp)
        borders = borders_of(self.slicing, step, context)
        for cut in self.cuts:
            cut.borders, cut.forward_only, cut.context = borders, step.forward_only, context
        lengths = [end - start for start, end in pairwise(borders)]
        shapes = [
            activation_shape(n, step.micro_batch_size, step.config, step.pg_collection)
            for n in lengths
        ]
        step.shapes = shapes * step.num_microbatches
        options = ReadingOptions(
            has_documents=bool(self.documents),
            arguments=self.arguments,
        )
        self._readers = [
            None
            if iterator is None
            else SlicedReading(
                iterator,
                borders,
                replace(options, keeps_whole=step.physical.holds_output(step.pp_rank, chunk)),
            )
            for chunk, iterator in enumerate(step.data_iterators)
        ]
        step.data_iterators = list(self._readers)
        if self.documents is None:
            self._find_documents(step)
        for cut, reader in zip(self.cuts, self._readers, strict=True) if self.documents else ():
            starts = None if reader is None else reader.read_ahead(step.num_microbatches)
            groups = [step.pg_collection.tp]
            cut.documents = Documents(starts, step, groups, restarts=self.documents == ENDS)

    def _find_documents(self, step: Step) -> None:
        """Let all stages have the documents that the first one reads, if its data has any.

        Inner stages may have no data, or may not have read what the first one has.
        """
        groups = [step.pg_collection.tp, step.pg_collection.pp]
        held = [step.physical.stage(step.pp_rank, chunk) for chunk in range(len(self._readers))]
        first = self._readers[held.index(0)] if 0 in held else None
        found = torch.tensor([first is not None and first.finds_ends()]).int()
        documents = None
        if bool(all_reduced_max(found, groups).any()):
            for reader in filter(None, self._readers):
                reader.options.has_documents = True
            starts = None if first is None else first.read_ahead(step.num_microbatches)
            documents = Documents(starts, step, groups, restarts=True)
        for cut in self.cuts:
            cut.documents = documents

    def stage_type(self, number: int, step: Step) -> Callable[..., Any]:
        return SlicedStage

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        if not isinstance(stage, SlicedStage):  # passes of the vocabulary have no layers
            return
        stage.cut = self.cuts[stage.chunk]
        stage.staying = stage.cut.storages
        stage.joins_weight = bool(self.slicing_of(step).joins_weight)
        stage.arguments = self.arguments
        if number in (0, step.physical.placement.num_stages - 1):
            stage.reader = self._readers[stage.chunk]
        if stage.is_output:
            stage.looks_at_loss = not (self._has_looked_at_loss or step.forward_only)
            stage.outputs = SliceOutputs(stage.cut)
            if stage.estimates_gradients:
                stage.counts = TokenCounts(stage.reader, stage.cut, step)
                stage.compared = self._compared

    @staticmethod
    def slicing_of(step: Step) -> Slicing:
        """Return the slicing of the step's schedule, in which W is joined or not."""
        found = slicing_of(step.program.schedule)
        assert found is not None, "the adapter adds this part for schedules with slices"
        return found

    def after_step(self, step: Step) -> None:
        for layer in self._layers:
            layer.kept.clear()
        for cut in self.cuts:
            cut.storages.clear()
        self._has_looked_at_loss |= not step.forward_only
        if self._shares_output and not step.forward_only:
            self._compared.check(step)


def borders_of(slicing: Slicing, step: Step, context: ContextShare) -> tuple[int, ...]:
    """Return the borders of the slices in tokens of a sequence.

    Raises:
        UsageError: they do not divide the sequence, or a slice over its ranks.
    """
    borders = slicing.borders(step.seq_length)
    ranks = step.pg_collection.tp.size() if step.config.sequence_parallel else 1
    multiple = lcm(context.multiple, context.size * ranks)
    if any(border % multiple for border in borders):
        spread = [f"{ranks} tensor-parallel ranks by --sequence-parallel"] if ranks > 1 else []
        spread += [f"{context.size} context-parallel ranks"] if context.size > 1 else []
        raise UsageError(
            f"{FLAG}: slices that end at tokens {list(borders[1:])} cannot be spread over "
            f"{' and '.join(spread)}: give lengths in multiples of {multiple}"
        )
    return borders


# --- attention


@dataclass
class _Kept:
    """Keys and values of a microbatch in one layer, and gradients that later slices left."""

    keys: torch.Tensor
    values: torch.Tensor
    left: list[torch.Tensor | None] = field(default_factory=lambda: [None, None])

    @property
    def storages(self) -> set[int]:
        """Addresses of the storages of both."""
        return {tensor.untyped_storage()._cdata for tensor in (self.keys, self.values)}


class Prefix:
    """The core attention of a layer, to whose keys and values those of earlier slices are put.

    Its ``forward`` is replaced on the instance. Positions have been applied before, and latent
    attention has expanded its keys, so all kinds of self-attention are alike here.
    """

    def __init__(self, cut: Cut, attention: Any) -> None:
        core = getattr(attention, "core_attention", attention)
        self._is_local = isinstance(core, DotProductAttention)
        is_of_te = any(kind.__name__ == "TEDotProductAttention" for kind in type(core).__mro__)
        is_causal = getattr(attention, "attn_mask_type", None) is AttnMaskType.causal
        if not (self._is_local or is_of_te) or not is_causal:
            raise UsageError(
                f"{FLAG} needs causal attention of Megatron's or of Transformer-Engine, not "
                f"{type(core).__name__}: leave the flag out for this model"
            )
        self._cut, self._usual = cut, core.forward
        if is_of_te and core.config.context_parallel_size > 1:  # it gets all keys
            core.set_context_parallel_group(None, None, None, "all_gather")
        if self._is_local:  # its fused kernel is for as many queries as keys
            core.scale_mask_softmax.scaled_masked_softmax_fusion = False
        self.kept: dict[int, _Kept] = {}
        core.forward = self.forward

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
    ) -> torch.Tensor:
        """Run the attention of a slice to itself and to all before it.

        Args:
            query: of shape [tokens of the slice, batch, heads, width]; keys and values likewise.
            mask: is not used: attention is causal.
        """
        start, end = self._cut.tokens
        microbatch = self._cut.microbatch
        if start == 0 and microbatch not in self.kept:
            length = self._cut.borders[-1]
            keys, values = (x.detach().new_empty(length, *x.shape[1:]) for x in (key, value))
            self.kept[microbatch] = _Kept(keys, values)
            self._cut.storages |= self.kept[microbatch].storages
        prefixes = _WithPrefix.apply(key, value, self.kept, self._cut)
        more["attn_mask_type"] = AttnMaskType.causal_bottom_right
        runs = self._cut.context.runs(start, end)
        parts = zip(query.chunk(len(runs)), prefixes[0::2], prefixes[1::2], strict=True)
        outputs = [
            self._within_documents(more, tensors, first)
            for tensors, (first, _) in zip(parts, runs, strict=True)
        ]
        output = outputs[0] if len(runs) == 1 else torch.cat(outputs)
        if self._cut.forward_only and end == self._cut.borders[-1]:
            self._cut.storages -= self.kept.pop(microbatch).storages
        return output

    def _within_documents(
        self,
        more: dict[str, Any],
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        start: int,
    ) -> torch.Tensor:
        """Run attention of consecutive queries from a place on to all keys up to the last one."""
        attend = partial(self._attend, more)
        if (documents := self._cut.documents) is None:
            return attend(*tensors)
        return documents.attend(attend, tensors, self._cut.microbatch, start)

    def _attend(
        self,
        more: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Run causal attention of queries that are the last ones of the keys."""
        mask = _causal(len(query), len(key), query.device) if self._is_local else None
        output: torch.Tensor = self._usual(query, key, value, mask, **more)
        return output


class _WithPrefix(torch.autograd.Function):
    """Puts the keys and values of a slice behind those of the slices before it.

    They are returned once for each run of tokens that this rank has of the slice, up to its end. A
    recomputed forward writes the same once more.
    """

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, kept: dict[int, _Kept], cut: Cut
    ) -> tuple[torch.Tensor, ...]:
        (ctx.start, ctx.end), ctx.context = cut.tokens, cut.context
        ctx.kept, ctx.microbatch, ctx.cut = kept, cut.microbatch, cut
        held = kept[ctx.microbatch]
        # ``data`` has a separate version counter: autograd would refuse the part of the buffer that
        # attention has saved, although later slices are written behind it.
        for buffer, own in ((held.keys, key), (held.values, value)):
            ctx.context.gather(own, buffer.data[ctx.start : ctx.end])
        ends = [end for _, end in ctx.context.runs(ctx.start, ctx.end)]
        return tuple(each.data[:end] for end in ends for each in (held.keys, held.values))

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        held, own = ctx.kept[ctx.microbatch], []
        for place, kind in enumerate((gradients[0::2], gradients[1::2])):
            if (whole := held.left[place]) is None:  # the last slice
                wide = torch.promote_types(kind[0].dtype, torch.float32)
                whole = kind[0].new_zeros(ctx.end, *kind[0].shape[1:], dtype=wide)
            for gradient in kind:
                whole[: len(gradient)] += gradient
            own.append(ctx.context.summed(whole[ctx.start :]).to(kind[0].dtype))
            held.left[place] = whole[: ctx.start]
        if ctx.start == 0:
            ctx.cut.storages.difference_update(ctx.kept.pop(ctx.microbatch).storages)
        return own[0], own[1], None, None


@lru_cache(maxsize=64)  # documents have many lengths
def _causal(queries: int, keys: int, where: torch.device) -> torch.Tensor:
    """Return the mask of queries that are the last of the keys: true where they do not attend."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=where)
    return ones.triu(1 + keys - queries)[None, None]


def _rotated(cut: Cut, usual: Callable[..., Any], length: int, *more: Any, **options: Any) -> Any:
    """Return rotary embeddings of the positions of a slice."""
    start, end = cut.tokens
    if cut.context.size > 1:  # those of packed sequences are not cut over ranks
        options["packed_seq"] = True
    found = usual(end, *more, **options)
    table, *scale = found if isinstance(found, tuple) else (found,)
    if cut.documents is not None and cut.documents.restarts:
        places = cut.documents.positions(cut.microbatch, start, end)
        own = table[places.to(table.device)].squeeze(2)
    else:
        own = table[end - length : end]
    own = cut.context.own(own)
    return (own, *scale) if scale else own
