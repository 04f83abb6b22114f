"""What ranks find imported: torch, Megatron with its calls redirected to the CPU, the training.

Imported once, by the process that ranks are forked off; nothing here starts a thread.
"""

from __future__ import annotations

import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import torch

from megatron_zb.megatron_core.cpu import run_on_cpu

torch.set_num_threads(1)
run_on_cpu()

import kept_searches  # noqa: E402
import megatron.core.models.gpt  # noqa: E402, F401

import megatron_zb.training.loop  # noqa: E402, F401

kept_searches.install()
