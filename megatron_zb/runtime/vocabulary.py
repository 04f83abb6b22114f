"""Arithmetic of vocabulary-parallel output layers and embeddings.

*Balancing Pipeline Parallelism with Vocabulary Parallelism* (arXiv 2411.05288) with one barrier:
each shard scales its exponentials by its own maximum, and what is left to do when all parts are
there is a weighted sum. Every token is a row. Messages are also rows, of one type, in which
integers and float32 numbers travel by their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

_LABEL, _NUMBER = torch.int64, torch.float32
_STATISTICS = 3
_LABELS = 2
"""How often a row has its label: after 16 bytes, the next row is aligned for matrix products."""


class Hidden(NamedTuple):
    """Output of the last stage: ``x`` (tokens, width) and the ``labels`` (tokens) it predicts."""

    x: torch.Tensor
    labels: torch.Tensor

    def packed(self) -> torch.Tensor:
        """Return one tensor, of :func:`hidden_width` columns."""
        twice = self.labels.unsqueeze(1).expand(-1, _LABELS)
        return torch.cat([self.x, _bits(twice, self.x.dtype)], 1)

    @classmethod
    def of(cls, message: torch.Tensor) -> Hidden:
        width = message.size(1) - _columns(_LABEL, message.dtype, _LABELS)
        return cls(message[:, :width], _bits(message[:, width:], _LABEL)[:, 0])


class ShardLoss(NamedTuple):
    """Results of one shard for each token.

    ``weighted`` (tokens, width) is the sum of its rows of the weight, each by the exponential of
    its logit less ``greatest``; ``row`` is that of the label, or 0. ``greatest``, ``total`` and
    ``chosen`` (tokens) are the largest logit, the sum of the exponentials, and the label's logit.
    """

    weighted: torch.Tensor
    row: torch.Tensor
    greatest: torch.Tensor
    total: torch.Tensor
    chosen: torch.Tensor

    def packed(self) -> torch.Tensor:
        """Return one tensor, of :func:`part_width` columns."""
        statistics = torch.stack([self.greatest, self.total, self.chosen], 1)
        return torch.cat([self.weighted, self.row, _bits(statistics, self.row.dtype)], 1)

    @classmethod
    def of(cls, message: torch.Tensor) -> ShardLoss:
        width = (message.size(1) - _columns(_NUMBER, message.dtype, _STATISTICS)) // 2
        weighted, row, statistics = message.tensor_split([width, 2 * width], dim=1)
        return cls(weighted, row, *_bits(statistics, _NUMBER).unbind(1))


def hidden_width(width: int, dtype: torch.dtype) -> int:
    """Return the columns of a message with the last stage's output."""
    return width + _columns(_LABEL, dtype, _LABELS)


def part_width(width: int, dtype: torch.dtype) -> int:
    """Return the columns of a message with a shard's part."""
    return 2 * width + _columns(_NUMBER, dtype, _STATISTICS)


LOSS_WIDTH = 2
"""Columns of a message with the loss, in float32: see :class:`Loss`."""


def _columns(what: torch.dtype, dtype: torch.dtype, count: int) -> int:
    return count * what.itemsize // dtype.itemsize


def _bits(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.contiguous().view(dtype)


class Loss(NamedTuple):
    """Inputs of V for each token: the ``log`` of the sum of all exponentials, and ``gradient``.

    The latter is that of the whole loss by the loss of this token.
    """

    log: torch.Tensor
    gradient: torch.Tensor

    def packed(self) -> torch.Tensor:
        return torch.stack(self, 1)

    @classmethod
    def of(cls, message: torch.Tensor) -> Loss:
        return cls(*message.unbind(1))


@dataclass(frozen=True)
class Rows:
    """The rows of the vocabulary that one shard has: ``count`` from ``start``.

    ``group`` are the tensor-parallel ranks, each with rows of its own, which make one part
    together; with ``sequence_parallel`` each of them has the tokens of its part of the sequence.
    """

    start: int
    count: int
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    def gathered(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of all ranks of the group."""
        if self.group is None or not self.sequence_parallel:
            return tokens
        whole = tokens.new_empty((tokens.size(0) * self.group.size(), *tokens.shape[1:]))
        dist.all_gather_into_tensor(whole, tokens.contiguous(), group=self.group)
        return whole

    def _largest(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group, of this rank's own tokens if they are spread over it."""
        if self.group is None:
            return part
        if not self.sequence_parallel:
            dist.all_reduce(part, group=self.group)
            return part
        own = part.new_empty((part.size(0) // self.group.size(), *part.shape[1:]))
        dist.reduce_scatter_tensor(own, part.contiguous(), group=self.group)
        return own

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return those of all tokens that this rank has."""
        if self.group is None or not self.sequence_parallel:
            return tokens
        return tokens.chunk(self.group.size())[self.group.rank()]

    def in_order_of_ranks(self, depths: torch.Tensor) -> torch.Tensor:
        """Return the tokens (depths, tokens) of all depths of prediction, rank by rank."""
        return depths.unflatten(1, (self._parts, -1)).transpose(0, 1).flatten()

    def by_depth(self, tokens: torch.Tensor, depths: int) -> torch.Tensor:
        """Return what :meth:`in_order_of_ranks` was given."""
        return tokens.view(self._parts, depths, -1).transpose(0, 1).flatten(1)

    @property
    def _parts(self) -> int:
        return 1 if self.group is None or not self.sequence_parallel else self.group.size()

    def _places(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each label, and whether it is one of this shard's."""
        places = labels - self.start
        here = (places >= 0) & (places < self.count)
        return places.clamp(0, self.count - 1), here

    def embedded(self, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Run E: return the rows of the tokens (tokens, width), zeros for another shard's."""
        places, here = self._places(tokens)
        found = torch.nn.functional.embedding(places, weight)
        return self._summed(found.masked_fill_(~here.unsqueeze(1), 0))

    def embedding_gradient(self, gradient: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Run G: return the gradient of the weight from that of all rows of the tokens."""
        places, here = self._places(tokens)
        masked = gradient.masked_fill(~here.unsqueeze(1), 0)
        return torch.ops.aten.embedding_dense_backward(masked, places, self.count, -1, False)

    def part(self, weight: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> ShardLoss:
        """Run what O does after the logits (tokens, rows), of which none is changed."""
        exact = logits.float()
        greatest = self._largest(exact.amax(1))
        exponentials = (exact - greatest.unsqueeze(1)).exp()
        places, here = self._places(labels)
        chosen = exact.gather(1, places.unsqueeze(1)).squeeze(1) * here
        statistics = self._summed(torch.stack([exponentials.sum(1), chosen], 1))
        weighted = exponentials.to(weight.dtype) @ weight
        row = weight[places] * here.unsqueeze(1)
        return ShardLoss(
            self._summed(weighted), self._summed(row), self.own(greatest), *statistics.unbind(1)
        )

    def gradient(
        self, logits: torch.Tensor, labels: torch.Tensor, loss: Loss, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient of the logits (tokens, rows), of which V makes that of the weight."""
        gradient = (logits.float() - loss.log.unsqueeze(1)).exp_()
        places, here = self._places(labels)
        gradient.scatter_add_(1, places.unsqueeze(1), -here.to(gradient.dtype).unsqueeze(1))
        return gradient.mul_(loss.gradient.unsqueeze(1)).to(dtype)


class Whole(NamedTuple):
    """All parts put together: the loss of each token, and the gradient of the stage's output.

    ``log`` is the logarithm of the sum of all exponentials, ``per_token`` the loss (tokens), and
    ``right`` whether the label's logit is the largest; ``direction`` (tokens, width), in float32,
    is the gradient of a token's own loss.
    """

    log: torch.Tensor
    per_token: torch.Tensor
    right: torch.Tensor
    direction: torch.Tensor


def put_together(parts: Sequence[ShardLoss], *, with_gradient: bool) -> Whole:
    """Run P on the parts of all shards, always summed in the order in which they are given."""
    greatest = torch.stack([part.greatest for part in parts]).amax(0)
    scales = [(part.greatest - greatest).exp() for part in parts]
    total = _sum([part.total * scale for part, scale in zip(parts, scales, strict=True)])
    log = greatest + total.log()
    chosen = _sum([part.chosen for part in parts])
    loss, right = log - chosen, chosen >= greatest
    if not with_gradient:
        return Whole(log, loss, right, loss.new_empty(0))
    weighted = _sum(
        [part.weighted * scale.unsqueeze(1) for part, scale in zip(parts, scales, strict=True)]
    )
    rows = _sum([part.row.float() for part in parts])
    return Whole(log, loss, right, weighted / total.unsqueeze(1) - rows)


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term
    return total
