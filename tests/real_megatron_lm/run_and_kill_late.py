"""The launcher, but rank 1 is killed in the middle of a step whose updates come late.

It has loaded a checkpoint of step 2, so that its 4th update is that of step 6: one behind the
checkpoint of step 5, with passes of step 7 around it.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count

from megatron_zb.launch import main
from megatron_zb.megatron_core.late_updates import LateUpdates

_KILLED_AT = 4


def kill_at_an_update() -> None:
    update, calls = LateUpdates.update, count(1)

    def killed(self: LateUpdates, group: int) -> None:
        if next(calls) == _KILLED_AT and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, group)

    LateUpdates.update = killed  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_at_an_update()
    main(sys.argv[1:])
