"""Comparison of the teacher and the stitched student on held-out text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.distill.blocks import taught
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.stage import StageBlocks, batch_of, empty_activation
from megatron_zb.distill.student_block import StudentBlock


@dataclass(frozen=True)
class Compared:
    """Losses per token of teacher and student, in nats."""

    teacher: float
    student: float


def compare(
    args: argparse.Namespace,
    distribution: Distribution,
    stage_blocks: StageBlocks,
    chosen: Sequence[StudentBlock],
    dataset: Any,
) -> Compared:
    """Evaluate both on the first --eval-iters batches of the evaluation split.

    Collective over all ranks. The first ranks of the stages relay the outputs of teacher and
    student for a microbatch, as a tensor of shape (2, sequence, batch, hidden).
    """
    totals = torch.zeros(3, dtype=torch.float64, device=_device(args))
    lanes = stage_blocks.place.lanes
    if stage_blocks.place.blocks and stage_blocks.place.is_leader:
        with torch.no_grad():
            for number in range(args.eval_iters * args.num_microbatches // lanes.expert):
                batch = _batch(args, stage_blocks, dataset, number)
                totals += _microbatch(args, distribution, stage_blocks, chosen, batch)
    if stage_blocks.place.tensor_lane:  # its sums are those of the first lane
        totals.zero_()
    dist.all_reduce(totals)
    teacher, student, tokens = totals.tolist()
    return Compared(teacher / tokens, student / tokens)


def _batch(
    args: argparse.Namespace, stage_blocks: StageBlocks, dataset: Any, number: int
) -> dict[str, torch.Tensor]:
    """Return the tokens on the first stage, the labels on the last, and nothing in between."""
    if not (stage_blocks.place.is_first or stage_blocks.place.is_last):
        return {}
    return batch_of(args, dataset, number)


def _microbatch(
    args: argparse.Namespace,
    distribution: Distribution,
    stage_blocks: StageBlocks,
    chosen: Sequence[StudentBlock],
    batch: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the sums of both losses and the number of tokens; zeros but on the last stage."""
    place = stage_blocks.place
    if stage_blocks.embedding is not None:
        embedded = stage_blocks.embedding(batch["tokens"], batch["position_ids"])
        both = torch.stack([embedded, embedded])
    else:
        both = empty_activation(args, 2)
        dist.recv(both, place.leader_of(distribution, place.stage - 1))
    wanted, learnt = both[0], both[1]
    for layer, student_block in zip(stage_blocks.layers, chosen, strict=True):
        wanted = taught(layer, wanted, stage_blocks.rotary)
        learnt = student_block.forward(learnt, stage_blocks.rotary)
    if stage_blocks.head is None:
        following = place.leader_of(distribution, place.stage + 1)
        dist.send(torch.stack([wanted, learnt]), following)
        return torch.zeros(3, dtype=torch.float64, device=_device(args))
    mask = batch["loss_mask"].double()
    sums = [
        (stage_blocks.head.losses(hidden, batch["labels"]).double() * mask).sum()
        for hidden in (wanted, learnt)
    ]
    return torch.stack([*sums, mask.sum()])


def _device(args: argparse.Namespace) -> str:
    return "cpu" if args.cpu else "cuda"
