"""Token slices in Megatron's models: attention with a prefix, data and losses of one slice.

A stage runs one slice of a microbatch at a time (:mod:`megatron_zb.schedules.slices`). Its layers
see a shorter sequence. Only attention needs more: in F, the keys and values of the slices before
it, and in B, the gradients that the slices behind it leave for its own keys and values. Both are
kept for each layer and microbatch by :class:`Prefix`. Gradients are summed in float32, as a sum in
bfloat16 would lose digits with every slice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.router import TopKRouter

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.sliced_context import ContextShare
from megatron_zb.megatron_core.sliced_documents import (
    ENDS,
    OF_DOCUMENTS,
    Cut,
    Documents,
    all_reduced_max,
    ends_in,
    starts_of,
)
from megatron_zb.megatron_core.sliced_engine import add_gradients_in_any_order
from megatron_zb.megatron_core.sliced_routers import WholeRouting, has_losses
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, StepPart, activation_shape, device
from megatron_zb.schedules.slices import Slicing, slicing_of

FLAG = "--pipeline-slices"
LOSS_MASK = "loss_mask"
_OF_SAMPLES = frozenset({"context_lengths", "dataset_id", "metadata", "token_count"})
"""What the data has of whole samples, which no forward step reads."""


class SlicesPart(StepPart):
    """Runs steps on token slices.

    Args:
        slicing: the slices of every microbatch.
        reading: returns the context in which a forward step reads a slice of so many tokens.
    """

    def __init__(
        self,
        slicing: Slicing,
        reading: Callable[[int], AbstractContextManager[None]] = lambda tokens: nullcontext(),
    ) -> None:
        self.slicing, self.reading = slicing, reading
        self.documents: str | None = None
        """Documents of the data to attend within, as MASK, ENDS or "" for none.

        With None, the first stage looks for ends in every step.
        """
        self.cuts: list[Cut] = []
        self._layers: list[Prefix | WholeRouting] = []
        self._readers: list[SlicedReading | None] = []

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
            if not isinstance(chunk, GPTModel):
                raise UsageError(
                    f"{FLAG} is for GPTModel, not for {type(chunk).__name__}: leave it out"
                )
            for module in chunk.modules():
                if hasattr(module, "self_attention"):
                    self._layers.append(Prefix(cut, module.self_attention))
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
        self._readers = [
            None if iterator is None else SlicedReading(iterator, borders, bool(self.documents))
            for iterator in step.data_iterators
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
                reader.has_documents = True
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
        stage.reading = self.reading
        if number in (0, step.physical.placement.num_stages - 1):
            stage.reader = self._readers[stage.chunk]
        if stage.is_output:
            stage.counts = TokenCounts(self._readers[stage.chunk], stage.cut, step)

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
        if all(isinstance(record, Record) for record in step.forward_data_store):
            whole = _joined_records(step.forward_data_store, self.slicing.slices)
            step.forward_data_store[:] = whole


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


# --- stages


class SlicedStage(MegatronStage):
    """A model chunk whose passes run one slice each; see :class:`SlicesPart` for what it is set."""

    cut: Cut
    joins_weight: bool
    reading: Callable[[int], AbstractContextManager[None]]
    counts: TokenCounts
    reader: SlicedReading | None = None
    """The data of the first or the last stage."""

    def _unit(self, microbatch: int) -> AbstractContextManager[None]:
        self.cut.unit = microbatch
        if self.reader is not None:
            self.reader.check_next(microbatch)
        start, end = self.cut.tokens
        return self.reading(end - start)

    def _user_step(self, *arguments: Any, **options: Any) -> Any:
        output, loss_func = super()._user_step(*arguments, **options)
        if not (self.is_output and callable(loss_func)):
            return output, loss_func
        return output, partial(self._weighed, loss_func)

    def _weighed(self, loss_func: Callable[..., Any], output: Any, **more: Any) -> Any:
        """Return a slice's loss as a part of its microbatch's, by the tokens that count.

        A mean over no tokens is no number: the loss of such a slice, and its gradient, are 0.
        Context-parallel ranks return sums of their tokens, which Megatron averages, or their parts
        of a mean over the group, which Megatron adds up.
        """
        if more:
            return loss_func(output, **more)
        ranks = self.cut.context.size
        own, of_group, all_slices = self.counts.of(self.cut.unit)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(partial(_if_any, own))
        result = loss_func(output)
        if len(result) == 3:
            loss, num_tokens, record = result
            if not self._step.config.calculate_per_token_loss:
                loss, num_tokens = loss * ranks, all_slices.to(num_tokens.dtype)
            return loss, num_tokens, Record.of(record, own * ranks, all_slices)
        loss, record = result
        share = (of_group / all_slices.clamp(min=1)).to(loss.dtype)
        return _if_any(of_group, loss * share), Record.of(record, of_group, all_slices)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.cut.unit = microbatch
        if self.joins_weight and not self.split.queue.deferring:  # a BW: with W of all slices
            result = self.backward_input(microbatch, gradient)
            self.backward_weight(microbatch)
            return result
        return super().backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """Run W of a slice, or of all slices of the microbatch in the order of their B."""
        if not self.joins_weight:
            super().backward_weight(microbatch)
            return
        units = range(microbatch + self.cut.slices - 1, microbatch - 1, -1)
        queue = self.split.queue

        def weights() -> Counter[int]:
            return sum(map(queue.weights, units), Counter[int]())

        sync = self._training_sync
        sync.before_weight_gradients(self.chunk, weights)
        for unit in units:
            queue.run(unit)
        sync.after_weight_gradients(self.chunk)


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
        """Run causal attention of the last queries of so many keys."""
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
    """Return the mask of the last queries of so many keys: true for what they do not attend to."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=where)
    return ones.triu(1 + keys - queries)[None, None]


def _rotated(cut: Cut, usual: Callable[..., Any], length: int, *more: Any, **options: Any) -> Any:
    """Return rotary embeddings of the positions of a slice, of so many tokens."""
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


# --- data and losses


class SlicedReading:
    """An iterator over slices of the microbatches of another one.

    Raises:
        UsageError: a microbatch is no dict of tensors by sequence and token.
    """

    def __init__(
        self, whole: Iterator[Any], borders: Sequence[int], has_documents: bool = False
    ) -> None:
        self._whole, self.borders, self.has_documents = whole, borders, has_documents
        self._read, self._microbatch = 0, dict[str, Any]()
        self._seen, self._ahead = deque[Any](), deque[dict[str, Any]]()
        self.masks: dict[int, torch.Tensor] = {}
        """Loss masks of whole microbatches, by number."""
        self._starts: dict[int, torch.Tensor] = {}

    def read_ahead(self, count: int) -> dict[int, torch.Tensor]:
        """Read so many microbatches; return where the document of each token starts, by number."""
        self._ahead.extend(self._checked(self._next(), j) for j in range(count))
        return self._starts

    def check_next(self, unit: int) -> None:
        """Read the microbatch of a slice ahead of the user's forward step, if it is the next one.

        A refusal then ends no context manager of the forward step.
        """
        j, i = divmod(self._read, len(self.borders) - 1)
        if unit == self._read and i == 0 and not self._ahead:
            with suppress(StopIteration):  # the forward step gets it
                self._ahead.append(self._checked(self._next(), j))

    def finds_ends(self) -> bool:
        """Read the first microbatch; return whether it has the ends of documents."""
        self._seen.append(self._next())
        return ends_in(self._seen[0]) is not None

    def _next(self) -> Any:
        return self._seen.popleft() if self._seen else next(self._whole)

    def __iter__(self) -> SlicedReading:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __next__(self) -> dict[str, Any]:
        j, i = divmod(self._read, len(self.borders) - 1)
        if i == 0:
            ahead = self._ahead
            self._microbatch = ahead.popleft() if ahead else self._checked(self._next(), j)
            if LOSS_MASK in self._microbatch:
                self.masks[j] = self._microbatch[LOSS_MASK]
        self._read += 1
        start, end = self.borders[i : i + 2]
        # contiguous: Megatron's loss function views the mask as one row
        return {n: tensor[:, start:end].contiguous() for n, tensor in self._microbatch.items()}

    def _checked(self, microbatch: Any, number: int) -> dict[str, Any]:
        if microbatch is None:  # of a stage that needs no data
            return {}
        if not isinstance(microbatch, dict):
            raise UsageError(
                f"{FLAG}: the data has a {type(microbatch).__name__} for a microbatch, but only "
                "dicts of tensors are cut into slices: leave the flag out for this data"
            )
        if self.has_documents:
            self._starts[number] = starts_of(microbatch, self.borders[-1])
        elif microbatch.get("attention_mask") is not None:
            self._check_causal(microbatch["attention_mask"])
        left_out = {"attention_mask"} | _OF_SAMPLES
        left_out |= OF_DOCUMENTS if self.has_documents else set()
        found = {n: t for n, t in microbatch.items() if n not in left_out and t is not None}
        for name, tensor in found.items():
            if getattr(tensor, "ndim", 0) != 2 or tensor.shape[1] != self.borders[-1]:
                raise UsageError(
                    f"{FLAG}: {name} of a microbatch has no axis of {self.borders[-1]} tokens "
                    "behind its first: leave the flag out for this data"
                )
        return found

    def _check_causal(self, mask: torch.Tensor) -> None:
        """Refuse a mask that keeps attention within documents: slices leave masks out."""
        length = self.borders[-1]
        if (
            mask.shape[-2:] == (length, length)
            and starts_of({"attention_mask": mask}, length).any()
        ):
            raise UsageError(
                f"{FLAG}: attention_mask of a microbatch keeps attention within documents, which "
                "slices find by the ends of packed samples: pack the data, or leave the flag out"
            )


class TokenCounts:
    """Numbers of tokens of each slice that count in the loss, the same on all tensor ranks."""

    def __init__(self, reading: SlicedReading | None, cut: Cut, step: Step) -> None:
        self._reading, self._cut = reading, cut
        self._group = step.pg_collection.tp
        self._found: dict[int, torch.Tensor] = {}

    def of(self, unit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the numbers of this rank's tokens of a slice, of all of it, and of its microbatch.

        Collective over the tensor-parallel ranks, of which the first reads the data.

        Raises:
            UsageError: the data has no loss mask.
        """
        j, i = divmod(unit, self._cut.slices)
        if j not in self._found:
            self._found[j] = self._counted(j)
        own, of_group = self._found[j]
        return own[i], of_group[i], of_group.sum()

    def _counted(self, microbatch: int) -> torch.Tensor:
        counts = torch.zeros(2, self._cut.slices, dtype=torch.float64, device=device())
        if self._reading is not None:
            mask = self._reading.masks.pop(microbatch, None)
            if mask is None:
                raise UsageError(
                    f"{FLAG} weighs losses of slices by the tokens in {LOSS_MASK}, which the data "
                    "does not have: add it to the microbatches"
                )
            slices = [mask[:, start:end] for start, end in pairwise(self._reading.borders)]
            for row, parts in enumerate(([self._cut.context.own(s, 1) for s in slices], slices)):
                counts[row].copy_(torch.stack([part.sum() for part in parts]))
        if self._group.size() > 1:
            dist.broadcast(counts, dist.get_global_rank(self._group, 0), group=self._group)
        return counts


def _if_any(count: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value, or zeros if nothing was counted; without asking a GPU for the count."""
    return torch.where(count > 0, value, torch.zeros_like(value))


@dataclass
class Record:
    """Report of a loss function for a slice, with its tokens and those of its microbatch."""

    reported: Any
    share: torch.Tensor

    @classmethod
    def of(cls, reported: Any, own: torch.Tensor, whole: torch.Tensor) -> Record:
        return cls(reported, own / whole.clamp(min=1))


def _joined_records(records: Sequence[Record], slices: int) -> list[Any]:
    """Join the reports of all slices of each microbatch.

    A pair of a sum and a number of tokens is added up; a mean is weighed by tokens.
    """
    groups = [records[at : at + slices] for at in range(0, len(records), slices)]
    return [
        {name: sum(_part(record, name) for record in group) for name in group[0].reported}
        for group in groups
    ]


def _part(record: Record, name: str) -> Any:
    value = record.reported[name]
    numbers = value.numel() if isinstance(value, torch.Tensor) else len(value)
    return value if numbers > 1 else _if_any(record.share, value * record.share.to(value.dtype))
