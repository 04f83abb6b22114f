"""Import what ranks with Transformer-Engine need: that first, over stand-ins for its kernels."""

from __future__ import annotations

import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import te_stand_in

from megatron_zb.cpu_ranks import run_on_cpu

te_stand_in.install()
run_on_cpu(training_loop=True)  # Transformer-Engine asks as much of a GPU as the training loop

import rank_imports  # noqa: E402, F401
