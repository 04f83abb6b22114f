"""The launcher, with made-up samples of unequal lengths, which no flag of Megatron-LM gives.

Upstream's schedule and ours get the same samples, and messages tell their shapes.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from megatron_zb.launch import main
from megatron_zb.megatron_lm.replacing import replace_method

run_path = runpy.run_path


def run(*arguments: Any, **keywords: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import MockGPTDataset
    from megatron.core.transformer.transformer_config import TransformerConfig

    replace_method(MockGPTDataset, "__getitem__", _cut)
    replace_method(TransformerConfig, "__post_init__", _vary)
    return run_path(*arguments, **keywords)


def _cut(original: Any, dataset: Any, number: int | None) -> dict[str, Any]:
    """Cut a sample to three lengths in turns."""
    sample = original(dataset, number)
    length = len(sample["tokens"]) - 6 * ((number or 0) % 3)
    return {
        name: part[..., :length, :length] if name == "attention_mask" else part[:length]
        for name, part in sample.items()
    }


def _vary(original: Any, config: Any) -> None:
    config.variable_seq_lengths = True
    original(config)


if __name__ == "__main__":
    runpy.run_path = run
    main(sys.argv[1:])
