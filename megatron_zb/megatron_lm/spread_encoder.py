"""``--pipeline-encoder``: the encoder of a vision-language model on every rank, in Megatron-LM.

A script of Megatron-LM builds the encoder into the first stage. So every other rank builds a first
stage, too, and keeps its encoder alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.encoders import ENCODERS, EncoderOfModel, encoder_of
from megatron_zb.megatron_core.random_streams import RandomState
from megatron_zb.megatron_lm import models
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.step_plan import AttentionWork

FLAG = "--pipeline-encoder"

_PROJECTION = 0.05
"""Backward of what stays trained of a frozen encoder, as a share of its forward: its projection.

Frozen projections count as well, since models of Megatron-Bridge have further layers that train.
"""


def second_model_of(
    args: argparse.Namespace, sizes: argparse.Namespace, attention: AttentionWork
) -> SecondModel | None:
    """Return the encoder that is to run on every rank, with what it takes; None without the flag.

    Args:
        args: the arguments of the run.
        sizes: the same, with sizes filled in that follow from others.
        attention: of the language model.

    Raises:
        UsageError: its share is to be counted, and a size is missing.
    """
    if (asked := args.pipeline_encoder) is None:
        return None
    share = asked if isinstance(asked, float) else _counted(args, sizes, attention)
    is_frozen = any(getattr(args, name, False) for name in ("freeze_ViT", "freeze_vision_model"))
    backward = share * (_PROJECTION if is_frozen else 2.0)
    return SecondModel(SecondRole.ENCODER, forward=share, backward=backward, copies=True)


def _counted(
    args: argparse.Namespace, sizes: argparse.Namespace, attention: AttentionWork
) -> float:
    """Return the work of an encoder relative to the language model's, in layers of one width.

    This is so in ``pretrain_vlm.py``, whose encoder has the sizes of the language model.
    """
    images: list[Any] = [getattr(args, name, None) for name in ("img_h", "img_w", "patch_dim")]
    tokens = getattr(args, "dataloader_seq_length", None) or sizes.seq_length
    if not hasattr(args, "freeze_ViT") or None in images or not tokens:
        raise UsageError(
            f"{FLAG} on: the sizes of the encoder are not among the arguments, so its share cannot "
            f"be counted: give it, such as {FLAG} 0.2"
        )
    height, width, patch = images
    patches = (height // patch) * (width // patch) + 1
    layers = getattr(args, "encoder_num_layers", None) or sizes.num_layers

    def work(number: int) -> float:
        return number * (1 + attention.forward * number)

    return layers * work(patches) / (sizes.num_layers * work(tokens + patches))


def give_encoder(
    chunk: Any,
    build: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    kinds: Mapping[str, EncoderOfModel] = ENCODERS,
) -> None:
    """Give a chunk the encoder of a first stage that is built for it, and drawn apart.

    Args:
        chunk: a chunk of another stage.
        build: builds a chunk.
        args: for ``build``.
        keywords: for ``build``, of the chunk.
        kinds: the encoders that may be given, by the class of the model.

    Raises:
        UsageError: the encoder of such a model cannot run on every rank.
    """
    encoder = encoder_of(chunk, kinds)
    place = {**keywords, "pre_process": True, "post_process": False}
    before = RandomState()
    with models.answering_ends(place):
        first = build(*args, **place)
    before.restore()
    encoder.move(first, chunk)
