"""What jobs find imported besides rank_imports.py: what a training comes to import on its way.

Imported once, by the process that ranks are forked off; nothing here starts a thread.
"""

from __future__ import annotations

import rank_imports  # noqa: F401  # before Megatron
import torch._dynamo  # noqa: F401

import megatron_zb.distillation.launch
import megatron_zb.distillation.loop
import megatron_zb.megatron_core.adapter
import megatron_zb.training.launch  # noqa: F401
from megatron_zb import schedules

schedules.build("v-half", pipeline_size=2, num_microbatches=5)  # loads what has been compiled
