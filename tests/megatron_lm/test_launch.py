"""The launcher, as somebody meets it who has not yet named the right script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zb import launch
from megatron_zb.errors import UsageError
from megatron_zb.job.settings import FLAGS, MEGATRON_LM
from megatron_zb.megatron_lm.checkout import Checkout
from megatron_zb.parsing import flag_of


def run_launcher(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_zb.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_teaches(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main([flag])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(launch.USAGE)
    assert all(f"\n  {flag_of(name)}" in printed for name in FLAGS[MEGATRON_LM])
    for word in ("torchrun", "SCRIPT", "--cpu", "--pipeline-schedule", "megatron-zb doctor"):
        assert word in launch.USAGE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no script was named: give a pretrain script"),
        (["--cpu"], "no script was named: give a pretrain script"),
        (["no/where.py", "--num-layers", "8"], "there is no file 'no/where.py'"),
        ([__file__], "is not a pretrain script: it does not import pretrain"),
        ([str(Path(__file__).parent)], "there is no file"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(arguments: list[str], words: str) -> None:
    done = run_launcher(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("megatron_zb: error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_python_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    launch._check_python(Checkout(Path("/Megatron-LM"), (0, 16, 1)))
    with pytest.raises(UsageError, match=r"0\.19\.1 in '/Megatron-LM' needs Python 3\.12 or newer"):
        launch._check_python(Checkout(Path("/Megatron-LM"), (0, 19, 1)))


_RUN = """
import pathlib, sys
from megatron_zb import launch
launch._prepare = lambda arguments, on_cpu: pathlib.Path(arguments[0])
launch.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2", True),
        ("Connection reset by peer", True),
        ("shapes do not match", False),
    ],
)
def test_a_rank_whose_peer_has_ended_says_so_in_one_sentence(
    message: str, is_lost: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"raise RuntimeError({message!r})\n")
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": "3"},
    )
    assert done.returncode == 1
    assert ("Traceback" not in done.stderr) is is_lost
    lost = "megatron_zb: error: rank 3 has lost the connection to another rank, which has ended"
    assert (lost in done.stderr) is is_lost
    assert (done.stderr.count("\n") == 1) is is_lost
