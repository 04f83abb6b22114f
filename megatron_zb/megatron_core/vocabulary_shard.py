"""Shards of the output layer and the embedding, along the vocabulary, on all pipeline ranks.

Rank r of p has the r-th part of the rows that its tensor-parallel rank has in Megatron. Where both
layers are tied they are one parameter of each rank. *Balancing Pipeline Parallelism with Vocabulary
Parallelism* (arXiv 2411.05288).

With multi-token prediction the output layer runs once more for each depth, so that the last stage
hands on the tokens of all depths, the model's own first, and P gets the losses of all. Megatron's
code between its prediction layers and its loss runs in P, on these losses. It masks, scales and
logs those of prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.multi_token_prediction import roll_tensor
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.model_calls import calls_replaced
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.split_backward import COMPUTED, HOOKED, has_hooks
from megatron_zb.megatron_core.step import device
from megatron_zb.megatron_core.versions import product_of_another_dtype
from megatron_zb.runtime.vocabulary import Rows

_OUTPUT, _EMBEDDING = "output_layer", "embedding_shard"
_STORED_EMBEDDING, _EXTRA = "embedding.word_embeddings.weight", "_extra_state"


class VocabularyShard(torch.nn.Module):
    """The rows of a weight (rows, width) that one rank has of the whole vocabulary.

    On the last stage Megatron's model calls that of the output layer in its place, and as its loss:
    it keeps the labels, and hands on what it is given. Checkpoints have the rows under the name
    that they have in Megatron, ``stored``, ``part`` of the parts of all ranks in its order. Logits
    have the type of the weight, or ``logit_dtype``.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        start: int,
        group: dist.ProcessGroup,
        part: tuple[int, int],
        stored: str,
        logit_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.logit_dtype = torch.nn.Parameter(weight), logit_dtype
        self.start, self.group, self._part, self._stored = start, group, part, stored
        self._labels: torch.Tensor | None = None
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(
        self, x: torch.Tensor, *, logits: bool = False, rows: Rows | None = None, **_options: Any
    ) -> Any:
        """Return the logits (tokens, rows) of ``x`` (tokens, width), or hand ``x`` on to O.

        With ``rows``, ``x`` (tokens) are numbers of the vocabulary: return their rows of the weight
        (tokens, width). Data parallelism gathers weights ahead of a call, whichever it is.
        """
        if rows is not None:
            return rows.embedded(self.weight, x)
        if not logits:
            return x, None
        if self.logit_dtype in (None, x.dtype):
            return x @ self.weight.t()
        return product_of_another_dtype()(x, self.weight, None, self.logit_dtype)

    def loss(self, labels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Stand in for ``compute_language_model_loss``: labels are (batch, sequence)."""
        self._labels = labels
        return x

    def labels(self) -> torch.Tensor:
        """Return the labels (batch, sequence) of the forward that has just run.

        Raises:
            UsageError: the model was called without labels.
        """
        labels, self._labels = self._labels, None
        if labels is None:
            raise UsageError(
                "the model was called without labels: with vocabulary parallelism over the "
                "pipeline, no rank has its logits; give labels, or --pipeline-vocabulary off"
            )
        return labels

    def rows(self, *, sequence_parallel: bool) -> Rows:
        group = self.group if self.group.size() > 1 else None
        return Rows(self.start, self.weight.size(0), group, sequence_parallel)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """Return the rows as a part of Megatron's weight; ``prefix`` ends with the module's name.

        ``sharded_offsets`` are those of layers, of which this is none.
        """
        del sharded_offsets
        group = (metadata or {}).get("dp_cp_group")
        group = group or parallel_state.get_data_parallel_group(with_context_parallel=True)
        of_model = prefix.removesuffix(f"{_OUTPUT}.").removesuffix(f"{_EMBEDDING}.")
        weight = ShardedTensor.from_rank_offsets(
            f"{of_model}{self._stored}",
            self.weight,
            (0, *self._part),
            replica_id=(0, 0, group.rank()),
            allow_shape_mismatch=True,  # of rows that are padding
        )
        return {f"{prefix}weight": weight}


class OutputShard(VocabularyShard):
    """The shard of the rank that had the output layer, whose empty extra state checkpoints have.

    A GPTModel leaves it out of its checkpoints, a HybridModel does not.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._register_load_state_dict_pre_hook(
            lambda state, prefix, *_: state.setdefault(f"{prefix}{_EXTRA}")
        )

    def get_extra_state(self) -> None:
        """Return nothing, as Megatron's layer does."""

    def set_extra_state(self, state: Any) -> None:
        """Take what :meth:`get_extra_state` gives."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        name = f"{prefix}{_EXTRA}"
        return {**found, name: make_sharded_object_for_checkpoint(None, name)}


class Lookups(torch.nn.Module):
    """The word embedding of a stage, which gives on what all shards have looked up.

    ``given`` (tokens, width) are those of its calls in the F that runs next. ``spread`` says that
    each tensor-parallel rank has the tokens of its part of the sequence
    (``reduce_scatter_embeddings``).
    """

    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.spread = spread
        self.given: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows (sequence, batch, width) if they are spread, else (batch, sequence, width).

        Args:
            tokens: (batch, sequence), whose numbers have been looked up already.
        """
        given = self.given.pop(0)
        rows = given.view(-1, tokens.size(0), given.size(1))
        return rows if self.spread else rows.transpose(0, 1)


class VocabularyParallelEmbedding(NamedTuple):
    """A rank's part of a vocabulary-parallel embedding, in its model ``chunk``.

    The ``start``-th rank in logical order has the first stage. ``spread`` is that of
    :class:`Lookups`; ``tied`` says that the weight is the output layer's.
    """

    shard: VocabularyShard
    chunk: int
    start: int
    spread: bool
    tied: bool


class VocabularyParallelOutput(NamedTuple):
    """A rank's part of a vocabulary-parallel output layer, and of the embedding.

    ``chunk`` of the rank holds it; ``end`` is the logical rank of the last stage, and ``depths``
    are 1 and the layers of multi-token prediction.
    """

    shard: VocabularyShard
    chunk: int
    end: int
    embedding: VocabularyParallelEmbedding
    depths: int


def shard_output(chunks: list[Any], physical: PhysicalPlacement) -> VocabularyParallelOutput:
    """Give every pipeline rank its rows of both layers; collective over the pipeline.

    The last stage, or else the rank's first chunk, holds its shard as ``output_layer``; the rank's
    first chunk that of an embedding with a weight of its own, as ``embedding_shard``.

    Raises:
        UsageError: the rows cannot be sharded evenly, or the output layer is not a plain one.
    """
    scattering = _Scattering(physical, device())
    models = [get_attr_wrapped_model(c, "post_process", return_model_obj=True) for c in chunks]
    first = next((model for model in models if model.pre_process), None)
    last = next((chunk for chunk, model in enumerate(models) if model.post_process), None)
    end, start = physical.placement.rank_of[-1], physical.placement.rank_of[0]
    layer = scattering.told(end, None if last is None else _OutputLayer.of(models[last]))
    layer.check(scattering.p)
    spread, refused = scattering.told(start, first and _of_embedding(first)) or (False, "")
    if refused:
        raise UsageError(
            f"the embedding cannot be vocabulary parallel: {refused}; give "
            "--pipeline-vocabulary off"
        )
    chunk = 0 if last is None else last
    kind = VocabularyShard if last is None else OutputShard
    words = None if first is None else first.embedding.word_embeddings.weight
    if layer.tied:
        output = embedding = scattering.shard(start, words, layer, _STORED_EMBEDDING, kind)
        output.weight.shared_embedding = True  # type: ignore[attr-defined]
    else:
        whole = None if last is None else models[last].output_layer.weight
        output = scattering.shard(end, whole, layer, f"{_OUTPUT}.weight", kind)
        embedding = scattering.shard(start, words, layer, _STORED_EMBEDDING)
        models[0].add_module(_EMBEDDING, embedding.to(_device_of(models[0])))
    models[chunk].output_layer = output.to(_device_of(models[chunk]))
    if last is not None:
        models[last].compute_language_model_loss = output.loss
    for model in models:
        if model.pre_process or (model.post_process and layer.depths > 1):
            model.embedding.word_embeddings = Lookups(spread)
        # no rank has a copy of a weight, whose gradients or checkpoints Megatron would add up
        model.share_embeddings_and_output_weights = model.mtp_process = False
        model.shared_embedding_or_output_weight = _nothing
    holder = chunk if layer.tied else 0
    of_embedding = VocabularyParallelEmbedding(embedding, holder, start, spread, layer.tied)
    return VocabularyParallelOutput(output, chunk, end, of_embedding, layer.depths)


def _nothing() -> None:
    """Stand in for ``shared_embedding_or_output_weight``."""


def _device_of(model: Any) -> torch.device:
    device: torch.device = next(model.decoder.parameters()).device
    return device


def _of_embedding(model: Any) -> tuple[bool, str]:
    """Return whether rows are spread over tensor-parallel ranks, and why they cannot be sharded."""
    embedding = model.embedding
    why = changed_by_user(embedding.word_embeddings.weight)
    return bool(embedding.reduce_scatter_embeddings), why


def changed_by_user(weight: torch.Tensor) -> str:
    """Return why a shard cannot take the place of a weight that a user has changed, if so."""
    if not weight.is_leaf:
        return COMPUTED
    if has_hooks(weight):
        return HOOKED
    return "" if weight.requires_grad else "its weight is frozen"


class _OutputLayer(NamedTuple):
    """Properties of the output layer for all ranks; ``refused`` is why it cannot be sharded."""

    rows: int
    width: int
    dtype: torch.dtype
    logit_dtype: torch.dtype | None
    tied: bool
    depths: int
    refused: str

    @classmethod
    def of(cls, model: Any) -> _OutputLayer:
        config = model.config
        reasons = {
            "multi-token prediction detaches it": getattr(config, "mtp_detach_heads", False),
            "it has a bias": getattr(model.output_layer, "bias", None) is not None,
            "its logits are scaled": getattr(config, "use_mup", False),
        }
        weight = model.output_layer.weight
        refused = next((why for why, holds in reasons.items() if holds), changed_by_user(weight))
        tied = bool(model.share_embeddings_and_output_weights)
        depths = 1 + (getattr(config, "mtp_num_layers", None) or 0)
        logit_dtype = getattr(model.output_layer, "output_dtype", None)
        rows, width = weight.shape
        return cls(rows, width, weight.dtype, logit_dtype, tied, depths, refused)

    def check(self, p: int) -> None:
        if self.refused:
            raise UsageError(
                f"the output layer cannot be vocabulary parallel: {self.refused}; give "
                "--pipeline-vocabulary off"
            )
        if self.rows % p:
            raise UsageError(
                f"{self.rows} rows of the output layer cannot be sharded evenly for {p} pipeline "
                f"ranks: make --make-vocab-size-divisible-by a multiple of {p}"
            )


class _Scattering:
    """Messages between the ranks of a pipeline while a model is built, by logical rank."""

    def __init__(self, physical: PhysicalPlacement, device: Any) -> None:
        self._physical, self._device = physical, device
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self.p = self._group.size()

    def _source(self, logical: int) -> int:
        return dist.get_global_rank(self._group, self._physical.logical(logical))

    def told(self, by: int, what: Any) -> Any:
        """Return a rank's message, on all ranks."""
        said = [what]
        dist.broadcast_object_list(said, src=self._source(by), group=self._group)
        return said[0]

    def shard(
        self,
        holder: int,
        weight: torch.Tensor | None,
        layer: _OutputLayer,
        stored: str,
        kind: type[VocabularyShard] = VocabularyShard,
    ) -> VocabularyShard:
        """Return this rank's rows of the weight that the ``holder`` has."""
        count = layer.rows // self.p
        own = torch.empty(count, layer.width, dtype=layer.dtype, device=self._device)
        parts = None
        if weight is not None:
            of_logical = weight.detach().to(own.device).chunk(self.p)
            order = map(self._physical.logical, range(self.p))
            parts = [of_logical[logical].contiguous() for logical in order]
        dist.scatter(own, parts, src=self._source(holder), group=self._group)
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        part = tensor_group.rank() * self.p + self._physical.logical(self._group.rank())
        parts_in_all = (part, self.p * tensor_group.size())
        start = part * count
        return kind(own, start, tensor_group, parts_in_all, stored, layer.logit_dtype)


# --- multi-token prediction

_OF_LOSSES = ("labels", "loss_mask", "packed_seq_params")


def with_later(tokens: torch.Tensor, depths: int, group: Any, packed: Any) -> list[torch.Tensor]:
    """Return tokens (batch, sequence), and at each further depth those that follow them."""
    found = [tokens]
    for _ in range(depths - 1):
        rolled, _ = roll_tensor(found[-1], cp_group=group, packed_seq_params=packed)
        found.append(rolled)
    return found


class PredictedLosses:
    """The last stage's ``model`` with multi-token prediction: stops it before its losses.

    A GPTModel computes them in a method of its own, a HybridModel at the end of its forward.
    """

    def __init__(self, model: Any, shard: VocabularyShard) -> None:
        self._model, self._shard = model, shard
        self._call: dict[str, Any] = {}
        self._has_processor = False
        self._losses: list[torch.Tensor] = []
        self._replace_end()
        model.compute_language_model_loss = self._next_loss

    @classmethod
    def of(cls, model: Any, shard: VocabularyShard) -> PredictedLosses:
        kind = cls if hasattr(model, "_postprocess") else _PredictedLossesOfHybrid
        return kind(model, shard)

    def _replace_end(self) -> None:
        self._whole = self._model._postprocess
        self._model._postprocess = self._before_losses

    def _before_losses(self, **call: Any) -> torch.Tensor:
        """Return the output (depths x sequence, batch, width) of the layers of all depths."""
        with self._with(post_process=False):
            hidden: torch.Tensor = self._whole(**{**call, "mtp_in_postprocess": True})
        return self._keep(call, hidden)

    def _keep(self, call: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
        self._call = dict.fromkeys(call) | {name: call.get(name) for name in _OF_LOSSES}
        self._has_processor = call.get("output_processor") is not None
        return self._shard.loss(call["labels"], hidden)

    @contextmanager
    def _with(self, **attributes: Any) -> Iterator[None]:
        """Let the model have other attributes inside."""
        usual = {name: getattr(self._model, name, None) for name in attributes}
        vars(self._model).update(attributes)
        try:
            yield
        finally:
            vars(self._model).update(usual)

    def call(self) -> dict[str, Any]:
        """Return what the losses of the forward that has just run depend on.

        Raises:
            UsageError: the model was called with an ``output_processor``.
        """
        if self._has_processor:
            raise UsageError(
                "the model was called with an output_processor, which would get a part of the "
                "logits: give --pipeline-vocabulary off"
            )
        found, self._call = self._call, {}
        return found

    def main_loss(
        self, call: dict[str, Any], losses: Sequence[torch.Tensor], right: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the model's own losses (batch, sequence), whose backward starts all others.

        Args:
            call: that of the microbatch.
            losses: the losses of all depths, the model's own first.
            right: (batch, sequence) whether the label's logit is the largest, for each depth.
        """
        self._losses = [*losses[1:], losses[0]]
        # logits of two words, of which the first one is every label
        words = [torch.stack([of.t().float(), 0.5 * torch.ones_like(of.t())], 2) for of in right]
        labels = torch.zeros_like(call["labels"])
        given = call | {"labels": labels, "runtime_gather_output": True}
        return self._run_end(given, torch.cat(words))

    def _run_end(self, call: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Run Megatron's code between its prediction layers and its loss."""
        given = call | {"hidden_states": logits, "mtp_in_postprocess": False}
        found: torch.Tensor = self._whole(**given)
        return found

    def _next_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Stand in for ``compute_language_model_loss``, which the model calls for its own last."""
        del labels
        loss = self._losses.pop(0)
        return loss if self._losses else loss + 0 * logits[..., 0].t()


class _PredictedLossesOfHybrid(PredictedLosses):
    def _replace_end(self) -> None:
        self._whole = self._model.forward
        self._model.forward = self._run_up_to_losses

    def _run_up_to_losses(self, *arguments: Any, **options: Any) -> torch.Tensor:
        call = signature(self._whole).bind(*arguments, **options).arguments
        with self._with(post_process=False, mtp_process=True):
            hidden: torch.Tensor = self._whole(**call)
        return self._keep(call, hidden)

    def _run_end(self, call: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Run the forward with logits in the place of what all its layers return."""

        def layers(*_arguments: Any, **_options: Any) -> torch.Tensor:
            return logits

        model = self._model
        changed = self._with(mtp_process=True, preprocess_for_paged_stash=_nothing)
        with changed, calls_replaced(model.decoder, layers), calls_replaced(model.mtp, layers):
            found: torch.Tensor = self._whole(**call | {"decoder_input": logits})
        return found
