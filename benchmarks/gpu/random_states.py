#!/usr/bin/env python3
"""Does a recomputation draw the dropout masks of the forward, with every RNG tracker of Megatron?

Takes the RNG states as a recomputation does, draws masks in and outside the tracker's states,
restores the states and draws again. Both must be equal to the last bit. Megatron's own tracker
keeps tensors; Transformer-Engine's and the one for CUDA graphs keep generators, which advance in
place.

Prints one JSON line, and ends with exit status 1 when masks differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import layer_sizes
import one_device
import torch

SEED, COUNT, DROPOUT = 7, 1 << 16, 0.1
MEGATRON, TE = "Megatron's", "Transformer-Engine's"
TRACKERS = {
    MEGATRON: {},
    TE: {"te_rng_tracker": True},
    "for CUDA graphs": {"use_cudagraphable_rng": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    device = one_device.choose(parser.parse_args().device)
    one_device.start(device)
    equal = {name: compare(TRACKERS[name], device) for name in _trackers(device)}
    one_device.finish()
    line = {"benchmark": "random_states", "machine": one_device.describe(device), "equal": equal}
    print(json.dumps(line), flush=True)
    sys.exit(not all(equal.values()))


def _trackers(device: torch.device) -> list[str]:
    """The trackers that this machine has: the last needs a GPU, the second its library, too."""
    if device.type == "cpu":
        return [MEGATRON]
    without_te = layer_sizes.missing(layer_sizes.TRANSFORMER_ENGINE, device) is not None
    return [name for name in TRACKERS if not (without_te and name == TE)]


def compare(settings: dict[str, bool], device: torch.device) -> bool:
    """Whether the masks after :meth:`RandomState.restore` are those before."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_zb.megatron_core.random_streams import RandomState

    model_parallel_cuda_manual_seed(SEED, force_reset_rng=True, **settings)
    masks(device)  # a state that has been used
    state = RandomState()
    expected = masks(device)
    state.restore()
    return all(torch.equal(a, b) for a, b in zip(expected, masks(device), strict=True))


def masks(device: torch.device) -> list[torch.Tensor]:
    """Draw two masks from the default state around one from the tracker's, and one on the host."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    ones = torch.ones(COUNT, device=device)
    first = torch.nn.functional.dropout(ones, DROPOUT)
    with get_cuda_rng_tracker().fork():
        tracked = torch.nn.functional.dropout(ones, DROPOUT)
    return [first, tracked, torch.nn.functional.dropout(ones, DROPOUT), torch.rand(COUNT)]


if __name__ == "__main__":
    one_device.run(main)
