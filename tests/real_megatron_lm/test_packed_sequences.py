"""Samples of several sequences, whose ends every stage has to know: the losses are upstream's.

Upstream without a stage between the first and the last is right in any case. Attention over packed
sequences is for GPUs alone, so that another one stands in: see packed_attention.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from conversations import make_conversations, make_tokenizer

from megatron_zb.megatron_lm.checkout import checkout_at
from real_megatron_lm.flag_runs import Logged, check_same, make_texts, train

PACKED = "--spec packed_layers LAYERS"
LAYERS = f"{PACKED} --position-embedding-type rope --num-layers 8"
EVALUATION = "--eval-interval 4 --eval-iters 2"
MADE_UP = "--mock-data --tokenizer-type --vocab-size"
"""Flags of the usual run that are left out."""
V_HALF, ZB_H1 = "--pipeline-schedule v-half", "--pipeline-schedule zb-h1"


@dataclass
class Runs:
    """Runs that go on from two iterations of Megatron's own schedule on two ranks."""

    checkout: Path
    folder: Path
    flags: str
    left_out: str = ""

    @cached_property
    def _start(self) -> Path:
        folder = self.folder / "start"
        saved = self._train(f"--save {folder} --save-interval 2 --exit-interval 2")
        assert saved.ended.code == 0, saved.error
        return folder

    @cached_property
    def upstream(self) -> Logged:
        return self.train("")

    def train(self, flags: str, pipeline: int = 2, ranks: int = 0) -> Logged:
        return self._train(f"{EVALUATION} --load {self._start} {flags}", pipeline, ranks)

    def _train(self, flags: str, pipeline: int = 2, ranks: int = 0) -> Logged:
        whole = f"{LAYERS} {self.flags} {flags}"
        if "--pipeline-slices" in flags:  # with Megatron's own attention
            whole = whole.replace(PACKED, "")
        return train(self.checkout, whole, ranks or pipeline, pipeline, self.left_out)

    def check(self, flags: str, pipeline: int) -> None:
        """Check that losses are upstream's to the last digit; norms, but for the order of sums."""
        run = self.train(flags, pipeline)
        check_same(run, self.upstream)
        assert run.losses == self.upstream.losses
        assert run.evaluations == self.upstream.evaluations != {}

    def check_sliced(self, flags: str, pipeline: int, upstream: Logged) -> None:
        """Check that losses on token slices of four ranks are upstream's but for rounding."""
        run = self.train(f"{flags} --pipeline-slices 4", pipeline, ranks=4)
        assert run.ended.code == 0, run.error
        assert run.losses == pytest.approx(upstream.losses, rel=1e-6)
        assert run.evaluations == pytest.approx(upstream.evaluations, rel=1e-6)


@pytest.fixture(scope="module")
def conversations(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    if (found := checkout_at(checkout)).version < (0, 17):
        pytest.skip(f"Megatron-LM {found.version_text} tells inner stages of no sequences")
    folder = tmp_path_factory.mktemp("sft")
    make_tokenizer(folder / "tokenizer")
    make_conversations(folder / "packs.jsonl")
    flags = (
        f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {folder / 'tokenizer'} "
        f"--data-path {folder / 'packs.jsonl'}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "cache"))
        yield Runs(checkout, folder, flags, MADE_UP)


full = pytest.mark.full


@pytest.mark.parametrize(
    ("flags", "pipeline"),
    [
        ("", 4),
        (V_HALF, 4),
        (ZB_H1, 4),
        ("--pipeline-schedule 1f1b", 4),
        (V_HALF, 2),
        pytest.param("--pipeline-schedule v-zb", 4, marks=full),
        pytest.param(ZB_H1, 2, marks=full),
        pytest.param("--pipeline-schedule 1f1b", 2, marks=full),
    ],
)
def test_fine_tuning_on_conversations(conversations: Runs, flags: str, pipeline: int) -> None:
    conversations.check(flags, pipeline)


def test_slices_of_conversations(conversations: Runs) -> None:
    conversations.check_sliced(V_HALF, 4, conversations.upstream)


@full
def test_tensor_parallel_ranks_are_told_of_conversations_in_slices(conversations: Runs) -> None:
    shared = "--tensor-model-parallel-size 2"  # pads the vocabulary
    upstream = conversations.train(shared, ranks=4)
    conversations.check_sliced(f"{shared} {ZB_H1}", 2, upstream)


@full
def test_prompts_have_no_loss_in_a_sharded_output_layer(conversations: Runs) -> None:
    run = conversations.train(f"{V_HALF} --pipeline-vocabulary on", pipeline=4)
    check_same(run, conversations.upstream)


@full
def test_tensor_parallel_ranks_are_told_of_conversations(conversations: Runs) -> None:
    shared = "--tensor-model-parallel-size 2"
    upstream = conversations.train(shared, ranks=4)
    assert upstream.losses, upstream.error
    for schedule in (V_HALF, f"{ZB_H1} --sequence-parallel"):
        check_same(conversations.train(f"{shared} {schedule}", ranks=4), upstream)


@full
def test_conversations_are_counted_once(conversations: Runs, tmp_path: Path) -> None:
    """In Megatron's own count, a rank with two chunks does twice the work."""
    found = []
    for number, schedule in enumerate(("", V_HALF, ZB_H1)):
        folder = tmp_path / str(number)
        flags = f"--log-progress --save {folder} --save-interval 5 {schedule}"
        assert conversations.train(flags).ended.code == 0
        progress = (folder / "progress.txt").read_text()
        found += re.findall(r"Floating-point operations: (\S+)", progress)
    assert len(found) == 3 and len(set(found)) == 1


@pytest.mark.parametrize(
    ("schedule", "pipeline"), [("v-half", 4), ("zb-h1", 4), pytest.param("v-half", 2, marks=full)]
)
def test_attention_within_documents(documents: Runs, schedule: str, pipeline: int) -> None:
    """Upstream itself has none on more than two ranks: its inner stages would read no data."""
    documents.check(f"--pipeline-schedule {schedule}", pipeline)


@pytest.mark.parametrize("schedule", ["v-half", pytest.param("zb-h1", marks=full)])
def test_slices_of_documents(documents: Runs, schedule: str) -> None:
    documents.check_sliced(f"--pipeline-schedule {schedule}", 4, documents.upstream)


@pytest.fixture(scope="module")
def documents(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    if (found := checkout_at(checkout)).version < (0, 19):
        pytest.skip(f"Megatron-LM {found.version_text} has no --dataloader-inter-document-masking")
    folder = tmp_path_factory.mktemp("documents")
    flags = f"--dataloader-inter-document-masking --data-path {make_texts(folder)}_a"
    return Runs(checkout, folder, flags, "--mock-data")
