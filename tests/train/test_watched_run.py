"""Running a command and following what it logs, with real processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.train.watched_run import NewRecords, RunFailed, run

WRITE_SLOWLY = """
import json, sys, time
with open(sys.argv[1], "w") as file:
    for i in range(3):
        file.write(json.dumps({"iteration": i})[:5]); file.flush(); time.sleep(0.3)
        file.write(json.dumps({"iteration": i})[5:] + "\\n"); file.flush(); time.sleep(0.3)
"""


def run_python(program: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    records = folder / "records.jsonl"
    command = [sys.executable, "-c", program, str(records)]
    run(command, printed=folder / "printed.log", records=records, show=seen.append, **options)
    return seen


def test_records_are_seen_once_and_whole_while_the_command_runs(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    times: list[float] = []

    def show(record: dict[str, Any]) -> None:
        seen.append(record)
        times.append(time.monotonic())

    records = tmp_path / "records.jsonl"
    run(
        [sys.executable, "-c", WRITE_SLOWLY, str(records)],
        printed=tmp_path / "printed.log",
        records=records,
        show=show,
    )
    assert seen == [{"iteration": i} for i in range(3)]
    assert times[2] - times[0] > 0.6


def test_a_failure_has_the_status_and_the_last_words(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        run_python("import sys; print('some words', flush=True); sys.exit('last words')", tmp_path)
    assert "exit status 1" in str(caught.value)
    assert str(tmp_path / "printed.log") in str(caught.value)
    assert str(caught.value).endswith("some words\nlast words")


@pytest.mark.slow
def test_a_failure_of_ranks_is_not_hidden_by_torchruns_report(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text("raise SystemExit('what is wrong')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(rank)]
    with pytest.raises(RunFailed) as caught:
        run(
            command,
            printed=tmp_path / "printed.log",
            records=tmp_path / "records.jsonl",
            show=lambda record: None,
        )
    assert str(caught.value).endswith("what is wrong")


def test_a_silent_command_is_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    program = "import time; print('started', flush=True); time.sleep(100)"
    with pytest.raises(RunFailed, match=r"(?s)nothing was logged for 2 s.*started$"):
        run_python(program, tmp_path, longest_silence=2)
    assert time.monotonic() - start < 30


def test_the_command_sees_no_gpu_and_one_thread(tmp_path: Path) -> None:
    program = (
        "import os, json, sys; open(sys.argv[1], 'w').write(json.dumps("
        "{n: os.environ[n] for n in ('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')}) + '\\n')"
    )
    assert run_python(program, tmp_path) == [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}]


def test_a_file_that_is_not_there_yet_has_no_records(tmp_path: Path) -> None:
    new_records = NewRecords(tmp_path / "later.jsonl")
    assert new_records() == []
    (tmp_path / "later.jsonl").write_text('{"iteration": 1}\n{"itera')
    assert new_records() == [{"iteration": 1}]
    assert new_records() == []
