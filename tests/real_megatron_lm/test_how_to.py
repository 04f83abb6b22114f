"""How-to pages: their commands train with the real scripts, and log what the pages show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from conversations import make_conversations, make_tokenizer
from jobs import try_job
from rank_process import Kind

from megatron_zb.megatron_lm.checkout import checkout_at

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECONDS = 400
IN_THIS_PROCESS = ("--num-workers", "0")  # forked ranks cannot start those that read data
ATTENTION = ("--spec", "packed_layers", "LAYERS")
STARTED = re.compile(
    r"torchrun --nproc-per-node (\d) -m megatron_zb\.launch (?:--cpu )?~/Megatron-LM/(\S+) (.*)"
)


def command_of(page: str) -> tuple[int, str, list[str]]:
    """Return the number of ranks, the script and its arguments of the command of a page."""
    text = (DOCS / page).read_text(encoding="utf-8").replace("\\\n", " ")
    [found] = STARTED.findall(text)
    return int(found[0]), found[1], shlex.split(found[2])


def lines_of(page: str) -> list[str]:
    """Return the lines that a page says to be in the log."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [line for block in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
            for line in block.splitlines()]  # fmt: skip


def trained(checkout: Path, page: str, *more: str, program: str = "megatron_zb.launch") -> str:
    """Run the command of a page on CPU ranks to its end, and return what it printed."""
    ranks, script, words = command_of(page)
    given = [str(checkout / script), "--cpu", *words, *IN_THIS_PROCESS, *more]
    ended = try_job(ranks, program, given, SECONDS, Kind.MEGATRON_LM)
    assert (ended.code, ended.hung) == (0, False), ended.stderr
    losses = re.findall(r"iteration +\d+/ +\d+ .*? lm loss: (\S+)", ended.stdout)
    assert len(losses) == 5
    assert all(0 < float(loss) < 10 for loss in losses)
    return ended.stdout


def without_figures(text: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", "#", text)


@pytest.mark.parametrize("page", ["pre_training.md", "moe.md", "long_context.md"])
def test_the_command_of_a_page_logs_what_the_page_shows(checkout: Path, page: str) -> None:
    shown = lines_of(page)
    assert shown
    warm_up = any("--pipeline-warm-up:" in line for line in shown)  # a CPU needs the flag
    printed = trained(checkout, page, *(("--pipeline-warm-up", "on") if warm_up else ()))
    for line in shown:  # searches are brief here, and may find another order
        assert without_figures(line) in without_figures(printed), line


def test_packed_conversations_are_trained_as_the_page_says(checkout: Path, tmp_path: Path) -> None:
    """Attention over packed sequences is for GPUs; one in torch stands in: packed_attention.py."""
    if checkout_at(checkout).version < (0, 17):
        pytest.skip("the page is for Megatron-LM 0.17 and newer")
    make_tokenizer(tmp_path / "tokenizer")
    make_conversations(tmp_path / "packs.jsonl")
    replaced = {"$TOKENIZER": tmp_path / "tokenizer", "$CONVERSATIONS": tmp_path / "packs.jsonl"}
    ranks, script, words = command_of("fine_tuning.md")
    words = [str(replaced.get(word, word)) for word in words]
    given = [str(checkout / script), "--cpu", *words, *IN_THIS_PROCESS, *ATTENTION]
    ended = try_job(ranks, "megatron_zb.launch", given, SECONDS, Kind.MEGATRON_LM)
    assert (ended.code, ended.hung) == (0, False), ended.stderr
    assert len(re.findall(r" lm loss: (\S+)", ended.stdout)) == 5


def test_a_model_with_images_is_trained_as_the_page_says(checkout: Path) -> None:
    """Without Transformer-Engine, the encoder gets Megatron's wrapper of torch's layer norm."""
    trained(checkout, "models.md", program=str(Path(__file__).with_name("run_with_norm.py")))
