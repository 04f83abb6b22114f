"""The words of README, docs and help texts: the field's terms, and none that stand for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_zb.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]

AVOIDED = {
    r"made again": "recomputed",
    r"cut output|output layer (?:that )?is cut|cut along the vocabulary": "vocabulary parallel",
    r"stock": "Megatron's own schedule",
    r"of (?:its|one's) own": "the noun without it",
    r"alone[.;:]": "only, before its word",
    r"tells?|told": "lists, names, reports",
    r"says?|said": "lists, names, reports",
    r"stays?": "is, remains",
    r"knows?": "has, supports",
    r"basins?": "local optima",
    r"activations? (?:is|are|was|were)? ?dropped": "recomputed",
    r"moved to the host": "offloaded",
    r"exchange between experts": "expert all-to-all",
}
# Names in the code that stand for the field's terms.
AVOIDED_NAMES = {
    r"dice": "rng",
    r"blame": "predecessor, of the critical path",
    r"hops?|forward_hop|backward_hop": "latency, p2p",
    r"stock": "upstream",
    r"cuts_vocabulary|Cut(?:Output|Embedding|Vocabulary)": "vocabulary parallel",
    r"overlaps_exchange|with_exchange": "all-to-all",
    r"is_joined|joined_flags": "paired",
    r"(?:with|has|search|paired|sliced)_states|State(?:Runner|Search)|state_search": "recompute",
    r"(?:if|least_if|with_none)_(?:dropped|moved)|(?:place|polish)_moves": "recompute, offload",
    r"MovedActivations|DroppedActivations": "OffloadedActivations, recomputed",
    r"(?:is|why_not|try|without)_cut|cuts_embedding|Cutting": "sharded",
    r"told_\w+|\w+_told|said_of_\w+": "a verb that is what the function does",
    r"class (?:Take|Broken|Desk|Meeting|Concerned|Served)": "receive, violation, rendezvous, scope",
}
PACKAGES = sorted(path for path in ROOT.glob("megatron_zb*") if path.is_dir())
# Reasons that the package prints for refusals, which docs/support.md lists as they are.
TERMS = """
1F1B, activation memory, allocator, autograd, bit-identical, bubble, checkpoint, chunk,
context parallelism, copy engine, critical path, CUDA graph, data-parallel, deadlock, deterministic,
distributed optimizer, expert all-to-all, expert parallelism, gradient norm, gradient reduction,
heuristic, hill climbing, input gradient, interleaved, list scheduler, local search, loss scale,
lower bound, makespan, microbatch, multi-token prediction, offload, optimizer state,
overlapped forward-backward, p2p latency, Pareto front, placement, recomputation, reload,
RNG state, sequence parallelism, split backward, steady state, tensor parallelism, thread block,
tied embedding, virtual stage, vocabulary parallel, warm-up, watchdog, weight gradient
""".replace("\n", " ").split(",")


def prose(text: str) -> str:
    """Text on one line, without code and addresses, which name things as they are."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    return " ".join(text.split())


def avoided(text: str) -> list[str]:
    """Each avoided word with its neighbours, and the term to write."""
    found = []
    for words, instead in AVOIDED.items():
        for hit in re.finditer(rf"\b(?:{words})(?!\w)", text, re.I):
            around = text[max(0, hit.start() - 30) : hit.end() + 30]
            found.append(f"...{around}...: write '{instead}'")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_word_that_stands_for_a_term(page: Path) -> None:
    assert avoided(prose(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_code_has_no_name_that_stands_for_a_term(package: Path) -> None:
    found = []
    for file in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".js")):
        source = file.read_text(encoding="utf-8")
        for names, instead in AVOIDED_NAMES.items():
            hits = {hit[0] for hit in re.finditer(rf"\b(?:{names})\b", source)}
            found += [f"{file.relative_to(ROOT)}: {hit}: write '{instead}'" for hit in hits]
    assert PACKAGES and found == []


@pytest.mark.parametrize(
    "command",
    ["show", "export", "plan", "trace", "flags", "check", "verify", "doctor", "quickstart"],
)
def test_a_help_text_has_no_word_that_stands_for_a_term(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert avoided(prose(capsys.readouterr().out)) == []


@pytest.mark.parametrize("term", [term.strip() for term in TERMS])
def test_the_docs_use_the_term_of_the_field(term: str) -> None:
    words = r"[\s-]".join(map(re.escape, re.split(r"[\s-]", term)))
    assert any(re.search(words, page.read_text(encoding="utf-8"), re.I) for page in DOCS)


def test_an_avoided_word_is_found() -> None:
    assert len(avoided("A cut output layer stays; the stock run keeps its inputs alone.")) == 4
    assert avoided("The layer-wise loop knows-how") != []
    assert avoided("unknown stockings, sayings and tellers; alone on its stage") == []
