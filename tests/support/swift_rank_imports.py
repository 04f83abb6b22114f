"""Import what ranks of ms-swift need, whose models have Transformer-Engine's layers.

Imported once, by the process that ranks are forked off; nothing here starts a thread.
"""

from __future__ import annotations

import os
import warnings

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import te_stand_in

from megatron_zb.cpu_ranks import run_on_cpu

te_stand_in.install()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # It has torch.jit compile functions that make tensors, which it could not do on a CPU's terms.
    import swift.sequence_parallel  # noqa: F401

    run_on_cpu(training_loop=True)
    import swift_trainer  # noqa: F401

import rank_imports  # noqa: E402, F401
