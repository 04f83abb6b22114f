"""Import what ranks need: torch, Megatron with its calls redirected to the CPU, the training.

Imported once, by the process that ranks are forked off; nothing here starts a thread. What torch
and the search of schedules would import and compile at their first use is there, too.
"""

from __future__ import annotations

import atexit
import gc
import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import torch

from megatron_zb.cpu_ranks import run_on_cpu

torch.set_num_threads(1)
run_on_cpu()

import kept_searches  # noqa: E402
import megatron.core.models.gpt  # noqa: E402, F401
import torch._dynamo  # noqa: E402  by the first optimizer

import megatron_zb.train.launch  # noqa: E402, F401
from megatron_zb import schedules  # noqa: E402

schedules.build("v-half", pipeline_size=2, num_microbatches=2)
kept_searches.install()
gc.collect()
gc.freeze()  # no rank goes through all of this again
atexit.register(gc.unfreeze)  # else libraries complain of what is left
