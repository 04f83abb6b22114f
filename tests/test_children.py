"""Processes end with the one that has started them, also where that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import left_by

SEARCHING = """
import os, sys, time
from megatron_zb.plan.workers import workers

def busy(item):
    print(item, flush=True)
    while True:  # as a search, which looks at no pipe
        pass

if __name__ == "__main__":
    with workers(3, after=0.0) as each:
        list(each(busy, range(4)))  # of which a pool of two takes three at once, and starts two
"""

STARTING = """
import subprocess, sys
from pathlib import Path
from megatron_zb.train.watched_run import run

print("started", flush=True)
program = "import time; print('ready', flush=True); time.sleep(600)"
run([sys.executable, "-c", program], printed=Path(sys.argv[1]), records=Path("none"), show=print)
"""

LAUNCHING = """
import os, subprocess, sys

program = (
    "from megatron_zb.children import end_with_launcher; end_with_launcher();"
    "print('ready', flush=True); import time; time.sleep(600)"
)
environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
subprocess.run([sys.executable, "-c", program], env=environment)
"""


def started(program: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, str(path), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(("program", "lines"), [(SEARCHING, 3), (LAUNCHING, 1)])
def test_nothing_is_left_by_a_process_that_is_killed(
    program: str, lines: int, tmp_path: Path
) -> None:
    process = started(program, tmp_path)
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left_by([process.pid]) == ()


def test_a_training_ends_with_the_program_that_watches_it(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    process = started(STARTING, tmp_path, str(printed))
    while not printed.is_file() or "ready" not in printed.read_text():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert left_by([process.pid]) == ()
