"""The launcher, but rank 1 is killed in the middle of a step whose updates come late.

It has loaded a checkpoint of step 2 and saves one behind step 5. Its 4th update is that of step 6,
and comes in the middle of step 7.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from typing import Any
from unittest.mock import patch

from megatron_zb import launch

RANK, UPDATE = 1, 4


def kill_at_an_update() -> None:
    prepare = launch._prepare

    def prepared(*arguments: Any) -> Any:
        script = prepare(*arguments)
        from megatron_zb.megatron_core.late_updates import LateUpdates

        update, numbers = LateUpdates.update, count(1)

        def counted(self: LateUpdates, group: int) -> None:
            if next(numbers) == UPDATE and int(os.environ["RANK"]) == RANK:
                os.kill(os.getpid(), signal.SIGKILL)
            update(self, group)

        patch.object(LateUpdates, "update", counted).start()
        return script

    patch.object(launch, "_prepare", prepared).start()


if __name__ == "__main__":
    kill_at_an_update()
    launch.main(sys.argv[1:])
