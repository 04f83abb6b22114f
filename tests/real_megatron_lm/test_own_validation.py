"""What Megatron-LM's own validation ends, `megatron-zb check` refuses, in its words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_zb.cli import main as cli

RUN = """
--pipeline-schedule v-half --pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 64
--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1
--global-batch-size 8 --lr 1e-3 --train-iters 5 --bf16
"""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", None),
        ("--fp8-format hybrid --tensor-model-parallel-size 2 --sequence-parallel", None),
        ("--position-embedding-type rope --transformer-impl transformer_engine", None),
        ("--num-experts 4 --disable-bias-linear --moe-permute-fusion", None),
        ("--mtp-num-layers 1", "is not supported with learned_absolute position embedding"),
        ("--seq-length 64", "max_position_embeddings (32) must be greater than or equal to"),
        ("--num-attention-heads 5", "assert args.hidden_size % args.num_attention_heads == 0"),
        ("--moe-token-dispatcher-type nope", "invalid choice: 'nope'"),
    ],
)
def test_check_validates_as_megatron_lm_does(
    checkout: Path, capsys: pytest.CaptureFixture[str], more: str, words: str | None
) -> None:
    line = ["check", "--json", "--megatron-lm", str(checkout), "--", *RUN.split(), *more.split()]
    code = cli.main(line)
    found = json.loads(capsys.readouterr().out)
    assert found["validated_by"].startswith(found["megatron"])
    refused = [each["why"] for each in found["arguments"] if each["verdict"] == "refused"]
    if words is None:
        assert (code, found["runs"], refused) == (0, True, [])
        return
    (why,) = refused
    assert (code, found["runs"]) == (2, False)
    assert words in why
    assert "\n" not in why


def test_a_patched_checkout_is_validated_like_any_other(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the flags of this package already."""
    patched = tmp_path / "patched"
    shutil.copytree(checkout, patched, ignore=shutil.ignore_patterns(".git", "tests"))
    start = patched / "megatron" / "training" / "__init__.py"
    start.write_text(start.read_text() + "\nimport megatron_zb\n\nmegatron_zb.install()\n")
    for words, refused in (("", 0), ("--seq-length 64", 1)):
        line = ["check", "--json", "--megatron-lm", str(patched), "--", *RUN.split()]
        cli.main([*line, *words.split()])
        found = json.loads(capsys.readouterr().out)
        assert [a["verdict"] for a in found["arguments"]].count("refused") == refused


def test_without_a_checkout_check_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_zb.megatron_lm import own_process

    monkeypatch.setattr(own_process, "installed", lambda: None)
    assert cli.main(["check", *RUN.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Megatron-LM has not validated the arguments itself: give --megatron-lm" in said


def test_a_checkout_of_another_version_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["check", "--megatron-version", "0.17", "--megatron-lm", str(checkout), *RUN.split()]
    assert cli.main(line) == 2
    assert "--megatron-version is 0.17, but --megatron-lm" in capsys.readouterr().err
