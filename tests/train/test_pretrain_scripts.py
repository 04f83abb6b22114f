"""The scripts that start a training: a command for every model, a sentence for every mistake."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_trees import checkout_tree

from megatron_zb.plan.model import read_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["pretrain_gpt", "pretrain_llama", "pretrain_moe", "pretrain_gpt_slurm"]
ALWAYS = ("llama2_7b", "gpt_1_5b", "qwen3_30b_a3b", "deepseek_v3_like")
"""Models with Megatron's own schedule, with one of ours, with experts, with latent attention."""
CONFIGS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in ALWAYS else pytest.mark.full)
    for path in sorted((ROOT / "configs" / "models").glob("*.yaml"))
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = checkout_tree(tmp_path_factory.mktemp("checkout"), "0.16.1")
    (root / "pretrain_gpt.py").touch()
    return root


def start(
    script: str, *arguments: str, variables: dict[str, str], python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [ROOT / "scripts" / f"{script}.sh", *arguments],
        env={**kept, "PYTHON": python, **variables},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def planned(script: str, checkout: Path, *arguments: str, **variables: str) -> list[str]:
    """The words of the command that a script would run."""
    given = {"MEGATRON_LM_PATH": str(checkout), "DATA_PATH": "mock", **variables}
    done = start(script, "--dry-run", *arguments, variables=given)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.splitlines()[-1])


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_model_has_a_command(config: Path, checkout: Path) -> None:
    words = planned("pretrain_gpt", checkout, CONFIG=str(config), PP="4", TP="2")
    model = read_model(config)
    assert value(words, "--num-layers") == str(model.layers)
    assert value(words, "--hidden-size") == str(model.hidden_size)
    assert value(words, "--pipeline-model-parallel-size") == "4"
    assert model.recommended is not None
    if model.recommended.schedule == "none":
        assert "--pipeline-schedule" not in words
    else:
        assert value(words, "--pipeline-schedule") == model.recommended.schedule
    assert ("--pipeline-vocabulary" in words) == model.recommended.vocabulary_parallel
    assert ("--num-experts" in words) == (model.experts is not None)
    assert ("--multi-latent-attention" in words) == (model.latent_attention is not None)
    assert words[words.index("-m") + 1] == "torch.distributed.run"
    assert str(checkout / "pretrain_gpt.py") == words[words.index("megatron_zb.launch") + 1]


def test_a_model_that_gains_nothing_says_how_to_have_a_schedule(checkout: Path) -> None:
    config = ROOT / "configs/models/llama2_7b.yaml"
    given = {"MEGATRON_LM_PATH": str(checkout), "DATA_PATH": "mock", "CONFIG": str(config)}
    done = start("pretrain_gpt", "--dry-run", variables=given)
    assert "--pipeline-schedule" not in done.stdout
    assert f"==> {config} recommends Megatron's own schedule; SCHEDULE=v-zb or" in done.stderr
    assert start("pretrain_gpt", "--dry-run", variables={**given, "SCHEDULE": "none"}).stderr == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_prints_its_command(script: str, checkout: Path) -> None:
    given = {"MASTER_ADDR": "first-host", "SCHEDULE": "v-half"}
    words = planned(script, checkout, "--log-interval", "7", **given)
    assert words[-2:] == ["--log-interval", "7"]
    assert value(words, "--pipeline-schedule") == "v-half"
    assert "--bf16" in words


def test_several_hosts(checkout: Path) -> None:
    place = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"}
    words = planned("pretrain_gpt", checkout, **place)
    assert value(words, "--nnodes") == "2"
    assert value(words, "--node-rank") == "1"
    assert value(words, "--master-addr") == "10.0.0.1"
    assert value(words, "--master-port") == "7000"
    assert "--standalone" not in words


def test_a_patched_checkout_runs_its_own_script(checkout: Path, tmp_path: Path) -> None:
    patched = tmp_path / "patched"
    shutil.copytree(checkout, patched)
    (patched / "megatron/training/initialize.py").write_text("import megatron_zb\n")
    words = planned("pretrain_gpt", patched, "--patched")
    assert "megatron_zb.launch" not in words
    assert str(patched / "pretrain_gpt.py") in words


def test_choices(checkout: Path, tmp_path: Path) -> None:
    for end in ("idx", "bin"):
        (tmp_path / f"text.{end}").touch()
    data = {"DATA_PATH": str(tmp_path / "text"), "TOKENIZER_TYPE": "GPT2BPETokenizer"}
    words = planned("pretrain_gpt", checkout, "--cpu", SCHEDULE="none", SAVE="/x", EP="2", **data)
    assert "--pipeline-schedule" not in words
    assert "--cpu" in words
    assert "--bf16" not in words
    assert value(words, "--save") == "/x"
    assert value(words, "--data-path") == str(tmp_path / "text")
    assert value(words, "--expert-model-parallel-size") == "2"
    assert "--mock-data" not in words


@pytest.mark.parametrize(
    ("changed", "arguments", "sentence"),
    [
        ({"MEGATRON_LM_PATH": ""}, [], "MEGATRON_LM_PATH is missing"),
        ({"MEGATRON_LM_PATH": "/no/where"}, [], "which has no pretrain_gpt.py"),
        ({"DATA_PATH": ""}, [], "DATA_PATH is missing"),
        ({"DATA_PATH": "/no/data"}, [], "there is no /no/data.idx"),
        ({"CONFIG": "/no/config"}, [], "CONFIG is '/no/config', which is no file"),
        ({"CONFIG": str(ROOT / "README.md")}, [], "README.md"),
        ({"TP": "two"}, [], "TP is 'two': give a whole number"),
        ({"PP": "3"}, [], "8 ranks cannot be divided by TP 1 times PP 3"),
        ({"NNODES": "2"}, [], "MASTER_ADDR is missing"),
        ({"NODE_RANK": "1"}, [], "NODE_RANK is '1': give a number from 0 to 0"),
        ({}, ["--patched"], "is not patched: run scripts/apply_patches.sh"),
        ({}, ["--patched", "--cpu"], "--cpu is the launcher's"),
        ({"PYTHON": "no-such-python"}, [], "no-such-python cannot import megatron_zb"),
    ],
)
def test_a_mistake_is_one_sentence(
    changed: dict[str, str], arguments: list[str], sentence: str, checkout: Path
) -> None:
    given = {"MEGATRON_LM_PATH": str(checkout), "DATA_PATH": "mock", **changed}
    done = start("pretrain_gpt", "--dry-run", *arguments, variables=given)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_slurm_wants_a_job() -> None:
    done = start("pretrain_gpt_slurm", variables={})
    assert done.returncode == 2
    assert "this is no Slurm job" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches(script: str) -> None:
    done = start(script, "--help", variables={})
    assert done.returncode == 0
    assert "usage: " in done.stdout
    assert "--dry-run" in done.stdout


@pytest.mark.slow
def test_shell_scripts_are_clean() -> None:
    folders = ("scripts", "benchmarks", "examples")
    scripts = [ROOT / ".ci" / "run", *(s for name in folders for s in ROOT.glob(f"{name}/**/*.sh"))]
    assert len(scripts) > 5
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_flag_that_nobody_has_is_refused(checkout: Path) -> None:
    """Arguments of a changed checkout, and abbreviations, go to Megatron-LM."""
    given = {"MEGATRON_LM_PATH": str(checkout), "DATA_PATH": "mock"}
    done = start("pretrain_gpt", "--dry-run", "--sed", "7", "--seeed=7", variables=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pretrain_gpt.sh: error: unknown argument '--seeed': ")
    (checkout / "megatron" / "own.py").write_text("group.add_argument('--our-own-seeed')")
    words = planned("pretrain_gpt", checkout, "--our-own-seeed", "7", "--pipeline-verify")
    assert words[-3:] == ["--our-own-seeed", "7", "--pipeline-verify"]
