"""--pipeline-vocabulary auto: the faster of a whole output layer and one that is sharded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from drawn_sizes import every_value
from measured_runs import profile
from megatron_arguments import parsed
from torch.distributed import HashStore

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.job.shared_build import SharedBuild
from megatron_zb.measured.balance import costs_beside, ends_of, of_arguments
from megatron_zb.measured.profile import write_profile
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.features.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("brief_searches")

LARGE = 128 * 4096  # rows: 128 hidden sizes, some ten layers
USUAL: dict[str, Any] = {
    "untie_embeddings_and_output_weights": True,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 1024,
}
NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "vocab_size": 8192,
}


def adapter(line: str, build: catalog.Build = catalog.build, **upstream: Any) -> PipelineAdapter:
    return adapter_of(parsed(f"--pipeline-schedule {line}", **{**USUAL, **upstream}), build)


def is_vocabulary_parallel(found: PipelineAdapter) -> bool:
    kinds = {str(p.kind) for rank in found.schedule.ranks for p in rank}
    assert ("O" in kinds) is (found.costs.feature(Vocabulary) is not None)
    return "O" in kinds


def said(found: PipelineAdapter) -> str:
    """The last of the start-up lines."""
    return found.describe().splitlines()[-1].strip()


def seconds(found: PipelineAdapter, **upstream: Any) -> float:
    ends = ends_of(parsed("", **{**USUAL, **upstream}))
    assert ends is not None
    layers = tuple(letters.count("t") for letters in found.layer_layout.letters)
    costs = costs_beside(
        found.schedule.placement, layers, ends, sharded=is_vocabulary_parallel(found)
    )
    return schedules.simulate(found.schedule, costs).makespan


@pytest.mark.parametrize("name", ["v-half", "zb-h1", "1f1b"])
def test_a_large_output_layer_is_sharded_and_a_tiny_one_is_not(name: str) -> None:
    large = adapter(f"{name} --pipeline-vocabulary auto", vocab_size=LARGE)
    assert is_vocabulary_parallel(large)
    assert said(large).startswith("the output layer is vocabulary parallel: ")
    assert "less time than whole, simulated for an embedding that counts for 0.00" in said(large)
    # putting the parts of four ranks together takes longer than an output layer of 128 rows
    tiny = adapter(f"{name} --pipeline-vocabulary auto", vocab_size=128)
    assert not is_vocabulary_parallel(tiny)
    assert said(tiny).startswith("the output layer stays whole: sharded, a step would take ")


@pytest.mark.parametrize(
    ("name", "rows"),
    every_value(["v-zb", "v-half", "zb-1p", "interleaved"], [128, 32_000, 64_000, 128_000, LARGE]),
)
def test_auto_is_never_slower_than_either(name: str, rows: int) -> None:
    of = {
        asked: seconds(
            adapter(f"{name} --pipeline-vocabulary {asked}", vocab_size=rows), vocab_size=rows
        )
        for asked in ("on", "off", "auto")
    }
    assert of["auto"] == min(of["on"], of["off"])


@pytest.mark.parametrize(
    ("upstream", "words"),
    [
        ({}, "its size is not known before the tokenizer is read: give --vocab-size"),
        ({"cross_entropy_loss_fusion": True}, "--cross-entropy-loss-fusion: the loss is put toget"),
        ({"multi_latent_attention": True}, "what it takes cannot be counted for this model"),
        (
            {"make_vocab_size_divisible_by": 2, "vocab_size": 8190},
            "its 8190 rows cannot be sharded evenly for 4 pipeline ranks: make "
            "--make-vocab-size-divisible-by a multiple of 4",
        ),
    ],
)
def test_what_cannot_be_sharded_stays_whole_and_says_why(
    upstream: dict[str, Any], words: str
) -> None:
    size = {} if not upstream else {"vocab_size": LARGE}
    found = adapter("v-half --pipeline-vocabulary auto", **{**size, **upstream})
    assert not is_vocabulary_parallel(found)
    assert said(found).startswith("the output layer stays whole: ")
    assert words in said(found)


@pytest.mark.parametrize(
    ("upstream", "words"),
    [
        ({"mtp_detach_heads": True}, "the weight would get the gradient of multi-token prediction"),
        ({"cuda_graph_impl": "transformer_engine"}, "its passes are not captured"),
        ({"enable_optimizer_post_validation": True}, "the forwards that run again have no passes"),
    ],
    ids=["detached", "graphs", "post-validation"],
)
def test_what_cannot_be_combined_is_refused_in_a_sentence(
    upstream: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        adapter("v-half --pipeline-vocabulary on", vocab_size=LARGE, **upstream)
    said, [name] = str(refused.value), upstream
    assert said.startswith(f"--{name.replace('_', '-')}")
    assert "cannot be combined with --pipeline-vocabulary on: " in said and words in said
    assert "\n" not in said


def test_rows_are_those_of_megatrons_padding() -> None:
    """9001 rows are padded to 9088 on one tensor-parallel rank, and 2 times 4608 on two."""
    more: dict[str, Any] = {"tensor_model_parallel_size": 2, "world_size": 8}
    for sizes in ({}, more):
        found = adapter("zb-h1 --pipeline-vocabulary auto", vocab_size=9001, **sizes)
        assert "cannot be sharded" not in said(found)
    padded: dict[str, Any] = {"padded_vocab_size": 9002, "make_vocab_size_divisible_by": 2}
    odd = adapter("zb-h1 --pipeline-vocabulary auto", **padded)
    assert "its 9002 rows cannot be sharded" in said(odd)


def test_a_memory_limit_that_only_a_whole_one_keeps_leaves_it_whole() -> None:
    """A refused schedule is a reason, not an error, and the limit is kept."""

    def build(name: str, **request: Any) -> schedules.Schedule:
        if request["costs"].feature(Vocabulary) is not None:
            raise UsageError("v-half cannot keep the memory limit of 0.5 of 1F1B: rank 1 needs 0.6")
        return catalog.build(name, **request)

    line = "v-half --pipeline-vocabulary auto --pipeline-memory-limit 0.75"
    found = adapter(line, build, vocab_size=LARGE)
    assert not is_vocabulary_parallel(found)
    assert said(found).endswith(
        "stays whole: v-half cannot keep the memory limit of 0.5 of 1F1B: rank 1 needs 0.6"
    )
    kept = adapter(line, vocab_size=LARGE)
    assert is_vocabulary_parallel(kept)
    timeline = schedules.simulate(kept.schedule, kept.costs)
    assert max(timeline.peak_memory) <= 0.75 * 4 + 1e-9


def test_off_and_nothing_build_what_they_built() -> None:
    for line in ("v-half", "v-half --pipeline-vocabulary off"):
        found = adapter(line, vocab_size=LARGE)
        assert not is_vocabulary_parallel(found)
        assert "output layer" not in said(found).split(")")[-1]


def test_measured_ends_decide_where_there_are_any(tmp_path: Path) -> None:
    """A profile with an output layer of thirty layers, and one in which it takes nothing."""
    sizes: dict[str, Any] = {**NARROW, "seq_length": 32, "vocab_size": 128}
    for output, expected in ((30.0, True), (0.0, False)):
        path = tmp_path / f"run{output}.yaml"
        write_profile(profile(output=output), path)
        line = f"v-half --pipeline-vocabulary auto --pipeline-layer-layout {path}"
        found = adapter(line, **sizes)
        assert is_vocabulary_parallel(found) is expected
        assert f"(measured, {path})" in said(found)
        ends = of_arguments(str(path), parsed("", **sizes))
        assert ends.shard_overhead.adding > 0
        assert ends.output == pytest.approx(output)


def test_layers_are_balanced_without_an_output_layer_that_is_sharded() -> None:
    line = "v-half --pipeline-layer-layout auto --pipeline-vocabulary"
    letters = [adapter(f"{line} {asked}", **NARROW) for asked in ("on", "off")]
    assert str(letters[0].layer_layout) == "Ett|tt|tt|tt|tt|tt|tt|ttL"
    assert str(letters[1].layer_layout) == "E|ttt|ttt|ttt|tt|tt|ttt|L"
    assert "an output layer that counts for 0.00" in letters[0].describe()
    wide = adapter(f"{line} auto", vocab_size=LARGE)
    assert is_vocabulary_parallel(wide)
    assert str(wide.layer_layout) == str(letters[0].layer_layout)


def test_every_rank_comes_to_the_same() -> None:
    """Rank 0 alone builds: two schedules, of which all ranks take the same."""
    for rows, expected in ((LARGE, True), (128, False)):
        found, built = on_ranks(3, vocab_size=rows)
        assert [is_vocabulary_parallel(one) for one in found] == [expected] * 3
        assert len({interchange.digest(one.schedule) for one in found}) == 1
        assert len({said(one) for one in found}) == 1
        assert built == [0, 0]


def test_every_rank_hears_why_sharding_is_refused() -> None:
    found, built = on_ranks(2, refused="no", vocab_size=LARGE)
    assert [said(one) for one in found] == ["the output layer stays whole: no"] * 2
    assert built == [0, 0]


def on_ranks(
    count: int, *, refused: str = "", **upstream: Any
) -> tuple[list[PipelineAdapter], list[int]]:
    """The adapters of so many ranks, and the ranks that have built a schedule for them."""
    store, built = HashStore(), []

    def of(rank: int) -> PipelineAdapter:
        def build(name: str, **request: Any) -> schedules.Schedule:
            built.append(rank)
            if refused and request["costs"].feature(Vocabulary) is not None:
                raise UsageError(refused)
            return catalog.build(name, **request)

        shared = SharedBuild(lambda: store, rank, count, build, seconds=60)
        return adapter("v-half --pipeline-vocabulary auto", shared, **upstream)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(of, range(count))), built
