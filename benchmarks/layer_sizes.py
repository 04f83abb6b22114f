"""The sizes of a GPT layer as the benchmarks take them, and the ways to compute it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from importlib.util import find_spec

import torch
from one_device import at_least_one

from megatron_zb.errors import UsageError

LOCAL = "local"
LOCAL_FLASH = "local-flash"
TRANSFORMER_ENGINE = "transformer-engine"
IMPLEMENTATIONS = {
    LOCAL: "Megatron's local layers",
    LOCAL_FLASH: "the same with torch's fused attention",
    TRANSFORMER_ENGINE: "Transformer-Engine's layers, on a GPU",
}


@dataclass(frozen=True)
class LayerSizes:
    """``vocabulary`` 0 is a model without embedding and output layer."""

    hidden: int
    heads: int
    ffn_hidden: int
    seq_length: int
    micro_batch_size: int
    vocabulary: int = 0


# A layer of a model of seven billion weights; one that a processor computes in a moment.
ON_GPU = LayerSizes(hidden=4096, heads=32, ffn_hidden=11008, seq_length=4096, micro_batch_size=1)
ON_CPU = LayerSizes(hidden=512, heads=8, ffn_hidden=1376, seq_length=512, micro_batch_size=1)


def add_options(
    parser: argparse.ArgumentParser, on_cpu: LayerSizes = ON_CPU, on_gpu: LayerSizes = ON_GPU
) -> None:
    """``--hidden`` and its like; :func:`chosen` reads them."""
    meanings = {
        "hidden": "hidden size",
        "heads": "attention heads",
        "ffn_hidden": "width of the gated MLP",
        "seq_length": "tokens of a sample",
        "micro_batch_size": "samples of a microbatch",
    }
    for name, meaning in meanings.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=at_least_one,
            metavar="N",
            help=f"{meaning} (default {getattr(on_gpu, name)} on a GPU, "
            f"{getattr(on_cpu, name)} on a CPU)",
        )


def chosen(
    args: argparse.Namespace,
    device: torch.device,
    on_cpu: LayerSizes = ON_CPU,
    on_gpu: LayerSizes = ON_GPU,
) -> LayerSizes:
    """The sizes of these options, with the device's defaults for those not given.

    Raises:
        UsageError: the heads do not divide the hidden size.
    """
    defaults = on_gpu if device.type == "cuda" else on_cpu
    values = {}
    for field in fields(LayerSizes):
        given = getattr(args, field.name, None)
        values[field.name] = getattr(defaults, field.name) if given is None else given
    sizes = LayerSizes(**values)
    if sizes.hidden % (2 * sizes.heads):
        raise UsageError(
            f"--hidden {sizes.hidden} cannot be split among --heads {sizes.heads}: every head "
            "needs an even number of values"
        )
    return sizes


def missing(implementation: str, device: torch.device) -> str | None:
    """Why an implementation cannot be measured here, or None."""
    if implementation != TRANSFORMER_ENGINE:
        return None
    if device.type != "cuda":
        return "there is no GPU, without which Transformer-Engine computes nothing"
    if find_spec("transformer_engine") is None:
        return "Transformer-Engine is not installed"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # its own libraries, or those of CUDA
        return f"Transformer-Engine cannot be imported: {type(error).__name__}: {error}"
    return None
