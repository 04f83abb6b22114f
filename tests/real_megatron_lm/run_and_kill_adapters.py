"""The launcher, but rank 1 is killed in the 4th step of the adapters, before they are updated."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from unittest.mock import patch

from megatron_zb import launch

RANK, STEP = 1, 4


def kill_in_a_step() -> None:
    prepare = launch._prepare

    def prepared(*arguments: Any) -> Any:
        script = prepare(*arguments)
        from megatron_zb.lora.training import AdapterOptimizers

        select, steps = AdapterOptimizers.select, set()

        def counted(self: AdapterOptimizers, chunk: int, adapter: str) -> None:
            steps.add(tuple(own.scheduler.num_steps for own in self.each.values()))
            if len(steps) == STEP and int(os.environ["RANK"]) == RANK:
                os.kill(os.getpid(), signal.SIGKILL)
            select(self, chunk, adapter)

        patch.object(AdapterOptimizers, "select", counted).start()
        return script

    patch.object(launch, "_prepare", prepared).start()


if __name__ == "__main__":
    kill_in_a_step()
    launch.main(sys.argv[1:])
