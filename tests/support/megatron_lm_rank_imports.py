"""Import what ranks of a real Megatron-LM job need, hooked as the launcher's --cpu does.

Imported once, by the process that ranks are forked off; nothing here starts a thread. Losses and
norms are printed with ten digits, where Megatron-LM prints seven and three behind the point.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import queue
import textwrap
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import kept_searches
import torch
from brief_searches import briefly

from megatron_zb import launch, schedules

torch.set_num_threads(1)
CHECKOUT = Path(os.environ["MEGATRON_LM_PATH"]).resolve()
# What a rank would import after its start, some of it in one version of Megatron-LM alone.
LATER = """
gpt_builders model_provider modelopt numba tensorboard.compat torch._dynamo torch.utils.tensorboard
transformers.models.auto megatron.core.models.gpt.experimental_attention_variant_module_specs
megatron.post_training.loss_func megatron.post_training.model_builder
megatron_zb.cli.check megatron_zb.cli.main megatron_zb.megatron_lm.checking
"""
DIGITS = [(":.6E}", ":.9E}"), ("norm:.3f}", "norm:.9E}")]
"""Formats of Megatron-LM's log, and what takes their place."""


def prepare() -> None:
    """Import and hook Megatron-LM, and let it print more digits."""
    launch._prepare([str(CHECKOUT / "pretrain_gpt.py")], True)
    for name in LATER.split():
        with suppress(ImportError):
            import_module(name)
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import training

    for function in (training.training_log, training.evaluate_and_print_results):
        rewrite(function, DIGITS)
    # For reports of the checkpoint's writers, Megatron-LM starts a process that imports all again.
    filesystem_async._results_queue = queue.Queue()
    for name in ("v-half", "auto"):  # compiles what searches schedules
        schedules.build(name, pipeline_size=2, num_microbatches=2)
    kept_searches.install()


def rewrite(function: Callable[..., Any], replaced: Iterable[tuple[str, str]]) -> None:
    """Replace text in the source of a function, wherever it has been copied to."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in replaced:
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(compile(source, function.__code__.co_filename, "exec", dont_inherit=True), made)
    function.__code__ = made[function.__name__].__code__


searches = briefly()
searches.__enter__()  # in every rank; orders are not what is looked at
prepare()
gc.collect()
gc.freeze()  # no rank goes through all of this again
atexit.register(gc.unfreeze)  # else libraries complain of what is left
