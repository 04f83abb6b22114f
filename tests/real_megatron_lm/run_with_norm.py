"""The launcher, with a norm for the CLIP of pretrain_vlm.py, which Megatron has none for on a CPU.

Without Transformer-Engine it takes torch.nn.LayerNorm, which cannot be built in Megatron's way.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch

from megatron_zb.launch import main

run_path = runpy.run_path


def run(*arguments: Any, **keywords: Any) -> Any:
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    defaults = CLIPViTModel.__init__.__defaults__ or ()
    CLIPViTModel.__init__.__defaults__ = tuple(
        WrappedTorchNorm if value is torch.nn.LayerNorm else value for value in defaults
    )
    return run_path(*arguments, **keywords)


if __name__ == "__main__":
    runpy.run_path = run
    main(sys.argv[1:])
