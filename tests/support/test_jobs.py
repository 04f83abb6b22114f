"""Jobs on forked ranks: their end, what they print, and what they leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job
from live_processes import is_alive, wait_until


def program(folder: Path, source: str) -> str:
    path = folder / "program.py"
    path.write_text(f"import os, subprocess, sys, time\nrank = os.environ['RANK']\n{source}\n")
    return str(path)


def test_ranks_have_their_words_and_their_output_is_told(tmp_path: Path) -> None:
    source = "print(rank, sys.argv[1], flush=True); print('!', file=sys.stderr, flush=True)"
    ended = run_job(2, program(tmp_path, source), ["word"], 60)
    assert (ended.code, ended.left) == (0, ())
    assert sorted(ended.stdout.splitlines()) == ["0 word", "1 word"]
    assert ended.stderr == "!\n!\n"


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    source = "sys.exit(3) if rank == '1' else time.sleep(100)"
    ended = run_job(2, program(tmp_path, source), [], 60)
    assert ended.code == 1
    assert ended.seconds < 50


def test_a_rank_that_is_killed_is_told_with_its_signal(tmp_path: Path) -> None:
    source = "os.kill(os.getpid(), 9) if rank == '1' else time.sleep(100)"
    ended = run_job(2, program(tmp_path, source), [], 60)
    assert (ended.code, ended.stderr) == (1, "rank 1: Signal 9 (SIGKILL)\n")


@pytest.mark.slow
def test_a_process_that_a_rank_leaves_behind_is_found_and_ended(tmp_path: Path) -> None:
    source = "print(subprocess.Popen(['sleep', '100']).pid, flush=True)"
    ended = run_job(1, program(tmp_path, source), [], 60)
    assert ended.left == (int(ended.stdout),)
    wait_until(lambda: not is_alive(ended.left[0]))


def test_a_job_that_does_not_end_fails(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="did not end in 2 s"):
        run_job(2, program(tmp_path, "time.sleep(100)"), [], 2)
