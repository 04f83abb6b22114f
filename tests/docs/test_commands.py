"""Every command on every page runs in a test: here, or in the test that a rule below names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from small_trees import checkout_tree
from traced_steps import profile, ran

from megatron_zb.cli import main as cli
from megatron_zb.measured.profile import write_profile
from megatron_zb.measured.trace import write_trace

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^ *```(?:\w+)?\n(.*?)^ *```", re.M | re.S)
PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:megatron-zb|torchrun|python|pip|sbatch|scripts/\S+|benchmarks/\S+)"
ARGUMENTS = (
    "--pipeline-model-parallel-size 2 --num-layers 16 --micro-batch-size 1 --global-batch-size 64 "
    "--seq-length 128 --hidden-size 256 --bf16 --num-attention-heads 4 "
    "--max-position-embeddings 128 --transformer-impl local --lr 1e-3 --train-iters 1 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1024"
)
ELSEWHERE = {
    r"torchrun .* --pipeline-adapters": "tests/real_megatron_lm/test_adapters.py",
    r"torchrun .*~/Megatron-LM/pretrain_\w+\.py --": "tests/real_megatron_lm/test_how_to.py",
    r"torchrun .*megatron_zb\.train --cpu --num-layers 8 --hidden-size 128 "
    r"--num-attention-heads 4 .*--mock-data": "tests/docs/test_readme.py",
    r"torchrun .*(?:megatron_zb\.distill |--save runs/teacher)": "tests/distill/"
    "test_distill_gpt.py",
    r"python -m megatron_zb.distill\.choice": "tests/distill/test_block_library.py",
    r".*(?:\$MODEL|runs/)": "tests/docs/test_case_study.py",
    r"(?:torchrun .*|python) examples/": "tests/docs/test_examples.py",
    r"torchrun --nproc-per-node 4 -m megatron_zb\.launch pretrain_gpt\.py \$MY_ARGUMENTS": "tests/"
    "docs/test_flags.py",
    r"megatron-zb verify": "tests/real_megatron_lm/test_verify.py",
    r"pip install": "scripts/release.sh",
    r"(?:MEGATRON_LM_PATH=\S+ )?scripts/test\.sh": "scripts/test.sh",
    r"MEGATRON_LM_PATH=.* scripts/pretrain_gpt\.sh": "tests/train/test_pretrain_scripts.py",
    r"scripts/gpu_check\.sh|benchmarks/gpu/": "tests/benchmarks/test_gpu_benchmarks.py",
    r"python benchmarks/pipe_bd": "tests/benchmarks/test_pipe_bd_benchmark.py",
    r"python benchmarks/": "tests/benchmarks/test_benchmarks.py",
    r"python docs/": "tests/docs/test_docs.py",
    r"scripts/fuzz\.py": "tests/real_megatron_lm/test_rounding.py",
}
"""Where what is not run here is run: a beginning of commands, and a file."""


def commands(page: Path) -> list[str]:
    """The commands of a page, each on one line, without comments."""
    found = []
    for block in FENCED.findall(page.read_text(encoding="utf-8")):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if re.match(rf"{PROGRAMS}\b", line.strip()):
                found.append(" ".join(re.sub(r" +# .*", "", line).split()))
    return found


COMMANDS = sorted({line for page in PAGES for line in commands(page)})


def file_elsewhere(line: str) -> str | None:
    return next((file for start, file in ELSEWHERE.items() if re.match(start, line)), None)


def is_for_launcher(line: str) -> bool:
    """Whether a command starts a training of the reader, whose arguments are left open."""
    return line.startswith("torchrun ") and bool(re.search(r"\$MY_ARGUMENTS|<your|…", line))


HERE = [line for line in COMMANDS if file_elsewhere(line) is None]
CHECKED = [line for line in HERE if is_for_launcher(line)]
RUN = [line for line in HERE if not is_for_launcher(line)]


def test_each_command_runs_somewhere() -> None:
    assert len(COMMANDS) > 80
    assert all(line.startswith("megatron-zb ") for line in RUN)
    for file in ELSEWHERE.values():
        assert (ROOT / file).is_file(), file
    used = {file_elsewhere(line) for line in COMMANDS} - {None}
    assert used == set(ELSEWHERE.values())
    for line in COMMANDS:  # what is run elsewhere is there
        if found := re.search(r"(?:python )?((?:scripts|benchmarks|docs|examples)/\S+)", line):
            assert (ROOT / found[1]).is_file(), line


def filled(line: str) -> list[str]:
    """The words of a command with a small training in place of what the reader puts in."""
    return shlex.split(re.sub(r"\$MY_ARGUMENTS|<your arguments>", ARGUMENTS, line))[1:]


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN)
@pytest.mark.usefixtures("brief_searches")
def test_a_command_of_the_pages_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    # Searches stay in this process, where they are brief.
    monkeypatch.setattr("megatron_zb.plan.workers.AFTER", float("inf"))
    words = [word.replace("~", str(tmp_path)) for word in filled(line)]
    if words[0] == "doctor":
        checkout_tree(tmp_path / "Megatron-LM", "0.16.1")
        assert cli.main(words) in (0, 1)  # 1 where this machine lacks something
        return
    if "run.yaml" in words:
        write_profile(profile(), Path("run.yaml"))
        write_trace(ran(), Path("run.yaml"))
    if "adapters.yaml" in words:
        page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
        listed, *_ = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
        Path("adapters.yaml").write_text(listed, encoding="utf-8")
    refused = "zb-h1" in words and "--overlap-moe-expert-parallel-comm" in words
    assert cli.main(words) == (2 if refused else 0)
    assert "".join(capsys.readouterr())


@pytest.mark.parametrize("line", CHECKED)
def test_flags_of_a_command_for_the_readers_training_are_those_of_an_example(line: str) -> None:
    """The examples of flags.md, whose flags tests/docs/test_flags.py parses and checks."""
    flags = line[line.index("--pipeline-schedule") :]
    examples = [e for e in commands(ROOT / "docs" / "flags.md") if e.endswith(flags)]
    assert examples, flags
