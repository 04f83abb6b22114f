"""The launcher, with a norm for the CLIP of pretrain_vlm.py, which Megatron has none for on a CPU.

Without Transformer-Engine it takes torch.nn.LayerNorm, which cannot be built in Megatron's way.
Weights are drawn by their names: the script's checkpoints cannot be read under another placement.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch

from megatron_zb.launch import main
from megatron_zb.megatron_lm.replacing import replace_method

run_path = runpy.run_path


def run(*arguments: Any, **keywords: Any) -> Any:
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    defaults = CLIPViTModel.__init__.__defaults__ or ()
    CLIPViTModel.__init__.__defaults__ = tuple(
        WrappedTorchNorm if value is torch.nn.LayerNorm else value for value in defaults
    )
    replace_method(LLaVAModel, "__init__", _build_and_draw)
    return run_path(*arguments, **keywords)


def _build_and_draw(original: Any, model: Any, *sizes: Any, **more: Any) -> None:
    from megatron_zb.megatron_core.random_streams import initialise_by_global_name

    original(model, *sizes, **more)
    initialise_by_global_name([model], model.config, seed=1)


if __name__ == "__main__":
    runpy.run_path = run
    main(sys.argv[1:])
