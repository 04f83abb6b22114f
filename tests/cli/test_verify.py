"""``megatron-zb verify``: what it runs, what it compares, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_zb.cli import verify
from megatron_zb.cli.main import main
from megatron_zb.cli.verify import Command, first_difference, logged

# Stands in for a training: prints its arguments, then Megatron-LM's iteration lines.
SCRIPT = """
import sys
words = sys.argv[1:]
print("ARGUMENTS", words)
if "--fail" in words:
    sys.exit("ValueError: no such data")
last = int(words[words.index("--exit-interval") + 1])
loss = "4.8000{}" if "--pipeline-schedule" in words and "--wrong" in words else "4.9000{}"
for i in range(2, last + 1):
    print(f" iteration {i:8}/ 100 | lm loss: {loss.format(i)}E+00 | grad norm: 1.001 |")
"""


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return [sys.executable, str(script), "--lr", "1", "--pipeline-schedule", "v-half"]


def test_an_equal_run_ends_with_0(
    training: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    words = ["--directory", str(folder), "--", *training, "--save", "mine", "--log-interval=9"]
    assert main(["verify", "--iterations", "2", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "megatron-zb verify: equal: grad norm, lm loss of iterations 2 to 3"
    )
    for name in ("checkpoint", "without", "with"):
        given = (folder / f"{name}.log").read_text().splitlines()[0]
        assert "'mine'" not in given and "--log-interval=9" not in given
        assert ("--pipeline-schedule" in given) is (name == "with")
        assert ("'--load'" in given) is (name != "checkpoint")
        assert "'--hidden-dropout', '0'" in given


def test_a_difference_is_named(training: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *training, "--wrong"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "megatron-zb verify: different: iteration 2: lm loss is 4.90002E+00 without and "
        "4.80002E+00 with --pipeline-schedule v-half"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python3", "train.py"], "the command chooses no schedule"),
        (
            ["no-such-program", "--pipeline-schedule", "v-half"],
            "'no-such-program' cannot be started",
        ),
        (
            ["python3", "--pipeline-schedule", "v-half", "--load", "nowhere"],
            "--load nowhere has no",
        ),
    ],
)
def test_mistakes_end_with_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["verify", "--", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megatron-zb: error: {said}")
    assert error.count("\n") == 1


def test_a_run_that_fails_is_named_with_its_error(
    training: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--", *training, "--fail"]) == 2
    assert "the run 'checkpoint' ended with exit code 1: ValueError: no such data" in (
        capsys.readouterr().err
    )


def test_a_checkpoint_of_the_users_is_the_start(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40\n")
    words = ["torchrun", "train.py", f"--load={tmp_path}", "--pipeline-schedule", "zb-h1"]
    command = Command.of(words, ["--more"])
    assert command.start(tmp_path) == 40
    assert command.without == ["torchrun", "train.py", f"--load={tmp_path}", "--more"]
    assert command.resume(tmp_path, 43)[-2:] == ["--exit-interval", "43"]
    assert "--load" not in command.resume(tmp_path, 43)


def test_the_layouts_of_chunks_go_with_the_schedule() -> None:
    words = "torchrun a.py --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule auto --x 1"
    command = Command.of([*words.split(), "--enable-optimizer-post-validation"], [])
    assert command.without == ["torchrun", "a.py", "--x", "1"]


def test_what_is_logged_is_compared_by_its_digits() -> None:
    line = " iteration        2/      20 | lm loss: 4.853973E+00 | grad norm: {} | lr: 1E-3 |"
    one = logged(line.format("1.001"))
    assert one == {2: {"lm loss": "4.853973E+00", "grad norm": "1.001"}}
    assert first_difference(one, logged(line.format("1.002"))) is None
    far = first_difference(one, logged(line.format("1.003")))
    assert far == (2, "grad norm", ("1.001", "1.003"))
    other = {2: {"lm loss": "4.853972E+00", "grad norm": "1.001"}}
    assert first_difference(one, other) == (2, "lm loss", ("4.853973E+00", "4.853972E+00"))
    assert first_difference(one, {}) == (2, "grad norm", ("1.001", "not logged"))
    assert first_difference(one, {2: {"lm loss": "4.853973E+00"}}) is not None


@pytest.mark.parametrize("flag", sorted(verify._LEFT_OUT))
def test_an_argument_is_left_out_with_its_value(flag: str) -> None:
    """All of them take a value in Megatron-LM, but for a switch."""
    value = [] if flag == "--async-save" else ["7"]
    words = [
        "python",
        "train.py",
        flag,
        *value,
        "--num-layers",
        "4",
        "--pipeline-schedule",
        "v-half",
    ]
    command = Command.of(words, [])
    rest = ["python", "train.py", "--num-layers", "4"]
    assert command.scheduled == [*rest, "--pipeline-schedule", "v-half"]
    assert command.without == rest
