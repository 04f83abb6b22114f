"""The launcher, but rank 1 is killed after its 5th optimizer step, before that is validated."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from megatron_zb.launch import main
from megatron_zb.runtime.post_validation import StateExchange

RANK, STEP = 1, 5


def kill_before_the_verdict() -> None:
    steps = 0
    pass_on, full = StateExchange.pass_on, StateExchange.full

    def counted(self: StateExchange, partial: Any) -> None:
        nonlocal steps
        steps += 1
        pass_on(self, partial)

    def killed(self: StateExchange) -> Any:
        if steps == STEP and int(os.environ["RANK"]) == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        return full(self)

    StateExchange.pass_on, StateExchange.full = counted, killed  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_before_the_verdict()
    main(sys.argv[1:])
