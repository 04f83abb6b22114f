"""The launcher, printing in which order every rank captures the graphs of its layers.

A CPU has no graphs: Megatron's function that captures is called before the first step, with a
helper that prints the order which it would hand to Transformer-Engine, and has a layer without any.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

from megatron_zb.launch import main


class Helper:
    """What Megatron's function and the launcher's ask of a ``TECudaGraphHelper``."""

    def __init__(self, model: list[Any], microbatches: int) -> None:
        from megatron.core.utils import get_model_config

        self.config = get_model_config(model[0])
        # one, of no chunk: Megatron 0.19 captures nothing where there is none
        self.flattened_callables: list[Any] = [SimpleNamespace(cuda_graphs=[])]
        self.callables_per_chunk: list[Any] = []
        self._chunks, self._table = len(model), [None] * (microbatches * len(model))

    def _start_capturing(self) -> float:
        return 0.0

    def _get_cuda_graph_input_data(self) -> tuple[Any, ...]:
        from megatron.core.transformer import cuda_graphs

        order = cuda_graphs.convert_schedule_table_to_order(0, self._chunks, self._table)
        sys.stdout.write(f"\nrank {os.environ['RANK']} captures {order}\n")
        sys.stdout.flush()
        return [], {}

    def _finish_capturing(self, start: float) -> None: ...


def capture_before_the_first_step() -> None:
    from megatron.core.transformer import cuda_graphs
    from megatron.training import training
    from megatron.training.global_vars import get_args

    module: Any = cuda_graphs
    module.make_graphed_callables = lambda *_, **__: ()
    train = training.train

    def train_captured(forward_step_func: Any, model: Any, *args: Any, **keywords: Any) -> Any:
        helper: Any = Helper(model, get_args().global_batch_size // get_args().micro_batch_size)
        cuda_graphs.TECudaGraphHelper.create_cudagraphs(helper)
        return train(forward_step_func, model, *args, **keywords)

    training.train = train_captured


if __name__ == "__main__":
    import runpy

    run_path = runpy.run_path

    def run(*arguments: Any, **keywords: Any) -> Any:
        capture_before_the_first_step()
        return run_path(*arguments, **keywords)

    runpy.run_path = run
    main(sys.argv[1:])
