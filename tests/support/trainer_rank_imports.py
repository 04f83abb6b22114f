"""Import what ranks of real trainers need: Megatron-Bridge and verl.

Both find names of Transformer-Engine, see te_names.py.
Imported once, by the process that ranks are forked off; nothing here starts a thread.
"""

from __future__ import annotations

import os
import warnings

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import te_names

from megatron_zb.cpu_ranks import run_on_cpu

run_on_cpu(training_loop=True)  # trainers ask as much of a GPU
te_names.install()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron_bridge_trainer  # noqa: F401
    import verl_trainer  # noqa: F401

import rank_imports  # noqa: E402, F401
