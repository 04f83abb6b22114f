"""``megatron-zb check``, and what is known of Megatron-LM's arguments."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as torch_checkpoint

from megatron_zb.cli import check as command
from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_core.versions import SERIES
from megatron_zb.megatron_lm import argument_table, checking
from megatron_zb.megatron_lm.argument_table import Argument, Verdict
from megatron_zb.parsing import separated

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--pipeline-model-parallel-size 4 --num-layers 16 --micro-batch-size 1 "
WHOLE = (
    "--hidden-size 64 --num-attention-heads 4 --max-position-embeddings 4096 --lr 1e-3 --bf16 "
    "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 "
    "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 4096"
)
RUN = f"--pipeline-schedule v-half {SIZES} --global-batch-size 8"


def checked(words: str, version: str = "0.19") -> checking.CheckReport:
    return checking.check(checking.parse(words.split(), version), version, build=None)


def refused(words: str, version: str = "0.19") -> list[str]:
    return [each.flag for each in checked(words, version).of(Verdict.REFUSED)]


def test_a_checkpoint_whose_state_is_not_of_its_weights_is_refused(tmp_path: Path) -> None:
    weight = torch.arange(128.0)
    state = {"w": weight, "optimizer.state.param.w": weight.roll(64)}
    torch_checkpoint.save(state, checkpoint_id=tmp_path / "iter_0000002", no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    words = f"{RUN} --use-distributed-optimizer --load {tmp_path}"
    assert refused(words) == ["--load"]
    assert refused(f"{words} --no-load-optim") == []
    assert refused(f"{words} --ckpt-step 3") == []  # which is on another machine
    assert refused(f"{words}/elsewhere") == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2" * 2000)
    assert refused(words) == ["--load"]


def test_every_argument_of_every_version_is_judged_or_refused() -> None:
    names = {argument.name for argument in argument_table.arguments()}
    judged = {word.partition("=")[0] for word in argument_table.judged()}
    assert judged <= names
    assert names - judged <= {name for row in refusals.rows() for name in row.when}
    assert len(names) > 800
    for series in SERIES:
        assert any(series.text in argument.versions for argument in argument_table.arguments())


def test_what_shows_a_verdict_is_there() -> None:
    findings = [
        argument_table.finding(*word.split("="))
        if "=" in word
        else argument_table.finding(word, None)
        for word in argument_table.judged()
    ]
    for finding in findings:
        if finding.verdict is not Verdict.UNSEEN:  # nothing may show what is unseen
            assert bool(finding.shown_by) == (finding.verdict is Verdict.PROVEN)
        assert not finding.shown_by or (ROOT / finding.shown_by).is_file()
        assert finding.why


def test_a_value_has_a_verdict_of_its_own() -> None:
    assert argument_table.finding("moe_token_dispatcher_type", "alltoall").verdict is Verdict.PROVEN
    assert argument_table.finding("moe_token_dispatcher_type", "flex").verdict is Verdict.UNSEEN


def test_of_several_values_the_one_least_known_counts() -> None:
    for values, verdict in (
        (["core_attn", "mlp"], Verdict.PROVEN),
        (["core_attn", "gdn_norm_out"], Verdict.UNSEEN),
    ):
        assert argument_table.finding("recompute_modules", values).verdict is verdict
    assert argument_table.finding("no_such_argument", []).verdict is Verdict.UNKNOWN


def test_what_is_refused_is_refused_with_all_reasons() -> None:
    assert checked(RUN).runs
    report = checked(f"{RUN} --use-megatron-fsdp --defer-embedding-wgrad-compute --bf16")
    assert not report.runs
    assert {each.flag for each in report.of(Verdict.REFUSED)} == {
        "--use-megatron-fsdp",
        "--defer-embedding-wgrad-compute",
    }
    assert all(each.finding.why for each in report.checked)
    assert "--bf16" in {each.flag for each in report.of(Verdict.PROVEN)}


def test_a_refusal_is_of_a_placement_and_of_a_version() -> None:
    pattern = "--hybrid-override-pattern M*M*"
    assert refused(f"{RUN} {pattern}", "0.16") == [pattern]
    assert refused(f"{RUN.replace('v-half', 'zb-h1')} {pattern}", "0.16") == []
    assert refused(f"{RUN} {pattern}", "0.19") == []
    for flag in ("--reset-attention-mask", "--full-validation"):
        hybrid = f"{RUN.replace('v-half', 'zb-h1')} {flag} {pattern}"
        assert refused(hybrid, "0.16") == [flag]
        assert refused(f"{RUN} {flag}", "0.16") == []
        assert refused(f"{RUN} {flag} --hybrid-layer-pattern M*M*", "0.19") == []
    assert refused(f"{RUN} --sft", "0.16") == ["--sft"]
    assert refused(f"{RUN} --sft", "0.19") == []


def test_operations_are_served_in_experts_alone() -> None:
    words, experts = f"{RUN} --use-transformer-engine-op-fuser", "--num-experts 8"
    assert refused(words) == ["--use-transformer-engine-op-fuser"]
    assert refused(f"{words} {experts} --moe-paged-stash") == []
    assert refused(f"{words} {experts} --moe-ncclep-zero-copy") == ["--moe-ncclep-zero-copy"]


def test_post_validation_has_refusals_of_its_own() -> None:
    words = f"{RUN} --qk-clip"
    assert refused(words) == []
    assert refused(f"{words} --enable-optimizer-post-validation") == ["--qk-clip"]


def test_recomputation_and_offload_have_refusals_of_their_own() -> None:
    words = f"{RUN} --fp8-format hybrid --pipeline-vocabulary auto"
    assert refused(words) == []
    report = checked(f"{words} --pipeline-recompute auto --pipeline-offload auto")
    reasons = {each.flag: each.finding.why for each in report.of(Verdict.REFUSED)}
    assert set(reasons) == {"--fp8-format hybrid", "--pipeline-vocabulary auto"}
    assert all(why.startswith("with --pipeline-offload auto: ") for why in reasons.values())


def test_what_the_start_would_refuse_is_refused() -> None:
    """The schedule is built, with the sizes of the run."""
    args = checking.parse(RUN.replace("--num-layers 16", "--num-layers 7").split(), "0.19")
    report = checking.check(args, "0.19")
    (found,) = report.of(Verdict.REFUSED)
    assert "7 layers cannot be placed on 8 stages" in found.finding.why


def test_an_argument_that_no_known_version_has_is_not_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = Argument("new_thing", ("--new-thing",), "true", False, frozenset({"0.19"}))
    known = argument_table.arguments()
    monkeypatch.setattr(argument_table, "arguments", lambda: (*known, new))
    monkeypatch.setattr(checking, "_parser", checking._parser.__wrapped__)
    (found,) = checked(f"{RUN} --new-thing").of(Verdict.UNKNOWN)
    assert found.flag == "--new-thing"
    parser = argument_table.parser_of("0.19")
    monkeypatch.setattr(argument_table, "arguments", lambda: known)
    assert argument_table.new_arguments(parser) == {"new_thing": False}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{RUN} --no-such-flag", "unknown argument '--no-such-flag'"),
        (f"{RUN} --num-layers many", "--num-layers: 'many' is not a whole number"),
        (SIZES, "no schedule is chosen: add --pipeline-schedule"),
        (RUN.replace("v-half", "v-halv"), "unknown pipeline schedule 'v-halv'"),
        (RUN.replace("v-half", "pipefusion"), "pipefusion is forward-only"),
        ("--pipeline-schedule v-half --num-layers 8", "needs a pipeline"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=sentence):
        checked(words)
    assert cli.main(["check", *words.split()]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    installed = ".".join(metadata.version("megatron-core").split(".")[:2])
    whole = [*RUN.split(), *WHOLE.split()]  # a core with a training loop validates it, too
    assert cli.main(["check", "--gpus", "8", *whole, "--tp-comm-overlap"]) == 0
    printed = capsys.readouterr().out
    assert "--tp-comm-overlap" in printed
    assert "runs with --pipeline-schedule v-half: " in printed
    assert f"(Megatron {installed}, " in printed
    assert cli.main(["check", "--megatron-version", "0.17", "--gpus", "8", *RUN.split()]) == 0
    assert "(Megatron 0.17, as asked)" in capsys.readouterr().out
    assert cli.main(["check", "--json", "--", *RUN.split(), "--use-torch-fsdp2"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["megatron"], found["runs"]) == (installed, False)
    (argument,) = (a for a in found["arguments"] if a["verdict"] == "refused")
    assert argument["argument"] == "--use-torch-fsdp2"
    assert argument["why"]


def test_words_of_the_training_need_no_dashes_before_them() -> None:
    own = argparse.ArgumentParser()
    command.add_arguments(own)
    assert separated(["--json", "--gpus", "8", "--bf16"], own) == [
        "--json",
        "--gpus",
        "8",
        "--",
        "--bf16",
    ]
    assert separated(["--gpus=8", "--", "--bf16"], own) == ["--gpus=8", "--", "--bf16"]
    assert separated(["--help"], own) == ["--help"]


def test_the_parser_has_the_defaults_of_megatron() -> None:
    args = argument_table.parser_of("0.19").parse_args([])
    assert isinstance(args, argparse.Namespace)
    assert (args.tensor_model_parallel_size, args.add_bias_linear, args.bf16) == (1, True, False)
    assert not hasattr(argument_table.parser_of("0.16").parse_args([]), "moe_paged_stash")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("name: a, batch: 8, steps: 4, learning_rate: 1e-4", None),
        ("name: a, batch: 8, steps: 4, learning_rate: 1e-4, rnk: 4", "no field here: did you mean"),
        ("name: a, batch: 8, steps: 4", "adapter a has no learning_rate"),
    ],
)
def test_the_file_of_adapters_is_read(tmp_path: Path, entry: str, said: str | None) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text(f"adapters: [{{{entry}}}]")
    words = (
        "--pipeline-schedule 1f1b --pipeline-model-parallel-size 2 --num-layers 4 "
        "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        f"--micro-batch-size 1 --mock-data --load base --pipeline-adapters {file}"
    )
    report = checking.check(checking.parse(words.split(), "0.16"), "0.16")
    assert report.runs == (said is None)
    refused = [each.finding.why for each in report.of(Verdict.REFUSED)]
    assert len(refused) == (said is not None)
    assert said is None or said in refused[0]
