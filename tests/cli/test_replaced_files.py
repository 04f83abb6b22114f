"""Files are written beside the older one and renamed: a failure leaves the older one as it was."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from traced_steps import profile, ran

from megatron_zb import files
from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.job.shared_build import Cache
from megatron_zb.measured.profile import write_profile
from megatron_zb.measured.trace import trace_path, write_trace
from megatron_zb.schedules import build
from megatron_zb.train import quickstart
from megatron_zb.train.checkpoint_directory import TRACKER, set_latest
from megatron_zb.train.log import RunLog

OLD = "an older file\n"
SIZES = ["-p", "4", "-m", "8"]


@contextmanager
def full_disk(most: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def command(*words: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        assert cli.main([*words, str(path)]) == 2

    return run


def fails(write: Callable[[Path], Any]) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with pytest.raises(UsageError, match=r"cannot write|cannot be written"):
            write(path)

    return run


def write_log(path: Path) -> None:
    log = RunLog(argparse.Namespace(log_file=str(path)), enabled=True, append=False)
    log.evaluation(1, 0.5)


WRITERS = {
    "a.png": command("show", "v-half", *SIZES, "--output"),
    "a.svg": command("show", "v-half", *SIZES, "--output"),
    "a.html": command("show", "v-half", *SIZES, "--output"),
    "a.csv": command("export", "v-half", *SIZES, "--format", "csv", "--output"),
    "a.json": command("export", "v-half", *SIZES, "--format", "chrome-trace", "--output"),
    "plan.html": command("plan", "--config", "gpt_1_5b", "--gpus", "4", "--tries", "1", "--html"),
    "run.yaml": fails(lambda path: write_profile(profile(), path)),
    "run.trace.json": fails(lambda path: write_trace(ran(), path)),
    "summary.json": fails(lambda path: quickstart._write_summary({}, {}, path)),
    TRACKER: fails(lambda path: set_latest(path.parent, 7)),
    "log.jsonl": fails(write_log),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_older_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(OLD)
    with full_disk():
        WRITERS[name](path)
    assert path.read_text() == OLD
    assert [each.name for each in tmp_path.iterdir()] == [name]
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "error" in line] == said[-1:]


def test_a_full_disk_leaves_a_folder_of_schedules(tmp_path: Path) -> None:
    request: dict[str, Any] = {"pipeline_size": 2, "num_microbatches": 2}
    schedule = build("zb-h1", **request)
    cache = Cache(tmp_path)
    with full_disk(), pytest.raises(UsageError, match="cannot write"):
        cache.write("zb-h1", request, schedule)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    write_profile(profile(), run)
    write_trace(ran(), run)
    for suffix in (".png", ".html", ".json"):
        path = tmp_path / f"step{suffix}"
        path.write_text(OLD)
        with full_disk():
            assert cli.main(["trace", str(run), "--output", str(path)]) == 2
        assert path.read_text() == OLD
        assert "cannot write" in capsys.readouterr().err
    assert trace_path(run).is_file()


def test_a_process_that_is_killed_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(OLD)
    program = (
        "import os, signal, sys, pathlib\n"
        "from megatron_zb import files\n"
        "def write(new):\n"
        "    new.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.replace(pathlib.Path(sys.argv[1]), write)\n"
    )
    subprocess.run([sys.executable, "-c", program, path], check=False)
    assert path.read_text() == OLD


def test_what_a_path_is_stays(tmp_path: Path) -> None:
    """A link leads where it did, modes stay, and devices and pipes are written into."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text(OLD)
    target.chmod(0o640)
    link.symlink_to(target)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o640)
    files.write_text(Path(os.devnull), "new")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(UsageError, match="cannot write '/dev/full': No space left on device"):
        files.write_text(Path("/dev/full"), "new")


def test_a_new_file_is_as_open_as_any(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    files.write_text(tmp_path / "deep" / "new", "text")
    modes = {path.stat().st_mode for path in (tmp_path / "usual", tmp_path / "deep" / "new")}
    assert len(modes) == 1
