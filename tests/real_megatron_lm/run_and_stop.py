"""The launcher, but a rank is stopped in its 3rd optimizer step, where no message is under way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from optimizer_steps import before_step, launch

RANK, STEP = 2, 3


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    launch(lambda: before_step(STEP, RANK, stop))
