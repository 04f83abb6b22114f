"""How commands end when they are stopped, when nobody reads, and when a package is missing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path

import pytest
from jobs import run_job
from live_processes import left_by
from traced_steps import profile, ran

from megatron_zb.cli import check, doctor, show, trace, verify
from megatron_zb.cli import main as cli
from megatron_zb.cli.ending import ended, report_if_slow
from megatron_zb.distill import cli as distillation
from megatron_zb.errors import UsageError, explain_missing_package
from megatron_zb.measured.profile import write_profile
from megatron_zb.measured.trace import write_trace
from megatron_zb.plan import cli as planning
from megatron_zb.train import quickstart

COMMAND = [sys.executable, "-m", "megatron_zb.cli"]
SIZES = ["-p", "4", "-m", "8"]
STUDENT = Path(__file__).resolve().parents[2] / "configs/students/half_mlp.yaml"


# --- Ctrl-C


def interrupted(*_arguments: object, **_keywords: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "where", "name"),
    [
        (["show", "v-half", *SIZES], show, "_timeline"),
        (["export", "v-half", *SIZES, "--format", "csv", "-o", "-"], show, "_timeline"),
        (["plan", "--config", "gpt_1_5b", "--gpus", "8"], planning, "run"),
        (["plan", "--profile", "x.yaml"], planning, "run_measured"),
        (["doctor"], doctor, "examine"),
    ],
)
def test_a_command_that_is_interrupted_says_one_line(
    words: list[str],
    where: object,
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, name, interrupted)
    assert cli.main(words) == 130
    assert capsys.readouterr().err == "megatron-zb: interrupted\n"


def test_a_trace_and_a_quickstart_that_are_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_zb.measured.trace.compare", interrupted)
    assert cli.main(["trace", "x.yaml"]) == 130
    monkeypatch.setattr(quickstart, "_quickstart", interrupted)
    assert cli.main(["quickstart", "--data-path", "x"]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["megatron-zb: interrupted"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--config", "llama3_70b", "--gpus", "512"],
        ["show", "v-half", "-p", "128", "-m", "200"],
    ],
)
def test_the_signal_ends_a_long_search(words: list[str]) -> None:
    """A real SIGINT to the command alone, while a real search runs; none of its processes stays."""
    process = subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job's may ignore it
    )
    assert process.stderr is not None
    process.stderr.readline()  # what takes long is told once it is on its way
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    lines = said.splitlines()
    assert lines[-1] == "megatron-zb: interrupted"
    assert "Traceback" not in said
    assert left_by([process.pid]) == ()


INTERRUPTED_AT_A_START = """
import signal, sys
from multiprocessing import util
from megatron_zb.cli import main as cli
from megatron_zb.plan import workers

spawn = util.spawnv_passfds

def interrupted(path, arguments, descriptors):
    started = spawn(path, arguments, descriptors)
    if "spawn_main" in str(arguments):
        signal.raise_signal(signal.SIGINT)
    return started

if __name__ == "__main__":
    util.spawnv_passfds = interrupted
    workers.AFTER = 0.0
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_signal_while_processes_start_leaves_none(tmp_path: Path) -> None:
    """A process has been forked, but has not been told yet what to do."""
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED_AT_A_START, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program, "plan", "--config", "gpt_1_5b", "--gpus", "8"],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job's may ignore it
    )
    assert done.returncode == 130
    assert done.stderr == "megatron-zb: interrupted\n"


IMPORTING = """
import sys
from megatron_zb.cli.ending import ended

def command():
    try:
        import interrupted
    except BaseException:  # as what C code or a callback of the import system does with it
        pass

sys.exit(ended("megatron-zb", command))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_during_an_import_ends_the_command(tmp_path: Path, name: str, code: int) -> None:
    imported = f"import signal\nsignal.raise_signal(signal.{name})\n"
    (tmp_path / "interrupted.py").write_text(imported, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job's may ignore it
    )
    words = {130: "interrupted", 143: "terminated"}
    assert (done.returncode, done.stderr) == (code, f"megatron-zb: {words[code]}\n")


# --- nobody reads


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["show", "zb-h1", "-p", "8", "-m", "200"], ["show", "--help"], ["doctor"]]
)
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode().splitlines()
    process.wait(120)
    slow = ("putting the passes of", "examining the installation")
    assert [line for line in said if not line.startswith(slow)] == []
    assert process.returncode in (0, 1)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_sentence(unbuffered: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "flags", "--config", "gpt_1_5b"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},  # empty: as if it were not there
        )
    assert done.returncode == 2
    assert done.stderr == (
        "megatron-zb: error: the output cannot be written: No space left on device\n"
    )


def test_a_file_that_cannot_be_used_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise PermissionError(13, "Permission denied", "x.yaml")

    assert ended("tool", fail) == 2
    said = capsys.readouterr().err
    assert said == "tool: error: 'x.yaml' cannot be used: Permission denied\n"


# --- slow commands


def test_what_takes_long_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with report_if_slow("counting", after=0.01):
        time.sleep(0.5)
    assert capsys.readouterr().err == "counting ...\n"
    with report_if_slow("counting", after=60):
        pass
    assert capsys.readouterr().err == ""
    printed = ""
    with report_if_slow("counting", after=0.01, every=0.01):
        while not re.search(r"^counting \.\.\. \d+ s$", printed, re.M):
            time.sleep(0.01)
            printed += capsys.readouterr().err
    assert printed.startswith("counting ...\n")  # no terminal is needed


def test_show_and_export_say_what_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []

    def watch(what: str) -> AbstractContextManager[None]:
        told.append(what)
        return report_if_slow(what)

    monkeypatch.setattr(show, "report_if_slow", watch)
    assert cli.main(["show", "v-half", *SIZES, "-o", str(tmp_path / "x.png")]) == 0
    assert told == [
        "putting the passes of 8 microbatches on 4 ranks in order",
        f"drawing {tmp_path / 'x.png'}",
    ]
    table = ["export", "v-half", *SIZES, "--format", "csv", "-o", str(tmp_path / "x.csv")]
    assert cli.main(table) == 0
    assert told[2:] == told[:1]


def test_other_slow_commands_report_what_they_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    reported: list[str] = []

    def watch(what: str) -> AbstractContextManager[None]:
        reported.append(what)
        return report_if_slow(what, after=3600)

    for module in (check, cli, distillation, trace, verify):
        monkeypatch.setattr(module, "report_if_slow", watch)
    profiled = tmp_path / "run.yaml"
    write_profile(profile(), profiled)
    write_trace(ran(), profiled)
    for words, code, steps in (
        ("check -- --pipeline-schedule v-half", 2, ["checking the arguments"]),
        ("verify -- ./none --pipeline-schedule v-half", 2, ["training for 'checkpoint'"]),
        (f"trace {profiled}", 0, [f"simulating the step of {profiled}"]),
        ("doctor", None, ["examining the installation"]),
        (
            "plan --config llama3_8b --gpus 8 --student-config half_mlp",
            0,
            ["distributing the blocks"],
        ),
    ):
        reported.clear()
        assert cli.main(words.split()) == code or code is None
        assert reported == steps


# --- packages


def test_a_missing_package_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError) as error, explain_missing_package():
        import yaml  # noqa: F401
    said = str(error.value)
    assert said.startswith(f"the package pyyaml is not installed, which {__file__} imports in line")
    assert f"run {sys.executable} -m pip install pyyaml" in said
    assert "megatron-zb doctor" in said


def test_a_missing_part_of_a_package_keeps_its_error() -> None:
    with pytest.raises(ModuleNotFoundError), explain_missing_package():
        import_module("json.nothing")


@pytest.mark.parametrize("module", ["megatron_zb.train", "megatron_zb.distill"])
def test_training_without_megatron_core(module: str, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").touch()
    words = f"--cpu --data-path {tmp_path / 'text'} --micro-batch-size 1 --global-batch-size 4 "
    words += "--train-iters 2 --lr 0.01 "
    if module.endswith("distill"):
        words += f"--teacher-load {tmp_path} --student-config {STUDENT}"
    else:
        words += "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    program = (
        "import runpy, sys\n"
        "sys.modules['megatron'] = None\n"
        f"sys.argv[1:] = {words.split()!r}\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("megatron_zb: error: the package megatron-core>=0.16 is not")
    assert "pip install 'megatron-core>=0.16'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_launcher_names_what_a_script_imports_in_vain(tmp_path: Path) -> None:
    """A tree that looks like Megatron-LM, whose training loop imports what nobody has."""
    from small_trees import checkout_tree, write

    root = checkout_tree(tmp_path, "0.16.1")
    write(root / "megatron/training/arguments.py", "import a_package_that_nobody_has\n")
    done = run_job(None, "megatron_zb.launch", [str(root / "pretrain_gpt.py")], 120)
    assert done.code == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(  # after warnings of Megatron's own imports
        "megatron_zb: error: the package a_package_that_nobody_has is not installed, which "
        f"{root / 'megatron/training/arguments.py'} imports in line 1: run "
    )


SLOW_PLAN = """
import sys
from megatron_zb.cli import main as cli
from megatron_zb.plan import cli as planning, workers

if __name__ == "__main__":
    planning._Progress.AFTER = workers.AFTER = 0.0
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_slow_plan_goes_on_where_its_progress_meets_a_full_disk(tmp_path: Path) -> None:
    program = tmp_path / "slow_plan.py"
    program.write_text(SLOW_PLAN, encoding="utf-8")
    words = "plan --config gpt_1_5b --gpus 8 --tries 1 --schedules v-zb,zb-h1".split()
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, str(program), *words]
        buffered = {n: v for n, v in os.environ.items() if n != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=full, timeout=120, check=False, env=buffered
        )
    assert done.returncode == 0
    assert b"zb-h1" in done.stdout
