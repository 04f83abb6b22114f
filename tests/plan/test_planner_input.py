"""What megatron-zb plan reads: files of devices and models, and its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import ROOT, SMALL

from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.parsing import GIB, size_in_bytes
from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.model import ModelConfig

DEVICES = sorted((ROOT / "configs" / "devices").glob("*.yaml"))


@pytest.mark.parametrize("path", DEVICES, ids=lambda path: path.stem)
def test_every_device_is_whole_and_has_its_sources(path: Path) -> None:
    device = read_device(path)
    assert device.memory_bytes > device.reserved_bytes
    links = [*device.collectives, *device.messages]
    parts: list[Any] = [device.memory, device.node, device.matrix_products, device.attention]
    assert all(part.source for part in (*parts, device.memory_bandwidth, device.kernels))
    assert all(link.source for _, link in links)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("layers: 8", "layers: 0|'layers' is 0: .*greater than 0; give, for example, layers: 32"),
        ("layers: 8", "layers: -3|'layers' is -3: "),
        ("layers: 8", "layers: eight|'layers' is 'eight': .*layers: 32"),
        ("layers: 8", "layers: 8.5|'layers' is 8.5: "),
        ("layers: 8", "layers: yes|'layers' is true: "),
        ("layers: 8", "layers:|'layers' is empty: "),
        ("layers: 8", "layers: [1, 2]|'layers' is a list: "),
        ("layers: 8", "layer: 8|'layers' is missing: give, for example, layers: 32"),
        ("layers: 8", "layers: 8\nlayerz: 8|'layerz' is no field here: did you mean layers"),
        ("layers: 8", "layers: 8\nzzz: 8|'zzz' is no field here: the fields are name, "),
        ("layers: 8", "layers: " + "9" * 400 + "|'layers' is a huge number: "),
        ("attention_heads: 16", "attention_heads: 15|hidden_size 1024 cannot be divided by "),
        ("layers: 8", "layers: 8\nquery_groups: 3|cannot be divided by query_groups 3; give, "),
        ("layers: 8", "layers: 8\nexperts: {experts: 8}|'experts.top_k' is missing: .*top_k: 8"),
        (
            "layers: 8",
            "layers: 8\nexperts: {experts: 8, top_k: 9, ffn_hidden_size: 5}|'experts': top_k is 9",
        ),
        ("layers: 8", "layers: 8\nexperts: 8|'experts' is 8: "),
        ("layers: 8", "layers: 8\n5: 8|5 is no field's name"),
        ("name: small", "name: [|is not YAML at line"),
        ("name: small", "name: !!python/object/apply:os.system ['exit 1']|is not YAML at line 1"),
    ],
)
def test_a_wrong_field_is_named_with_a_right_value(change: str, sentence: str) -> None:
    new, words = sentence.split("|")
    with pytest.raises(UsageError, match=words) as raised:
        config.parse(SMALL.replace(change, new).encode(), "x.yaml", ModelConfig)
    assert str(raised.value).startswith("x.yaml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("raw", [b"", b"- 1", b"text", b"\xff\xfe\x00", b"a: &a [*a]", b"\x00"])
def test_what_is_no_list_of_fields_is_refused(raw: bytes) -> None:
    with pytest.raises(UsageError, match=r"x\.yaml"):
        config.parse(raw, "x.yaml", ModelConfig)


def test_nested_aliases_are_not_walked_into() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
    )
    with pytest.raises(UsageError):
        config.parse((bomb + "layers: *y\n").encode(), "x.yaml", ModelConfig)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("peak: 3.12e+14", "peak: 0.0", "'matrix_products.peak' is 0.0: .*peak: 3.12e\\+14"),
        ("efficiency: 0.78", "efficiency: 1.5", "'matrix_products.efficiency' is 1.5: "),
        ("size_gib: 79.14", "size_gib: .nan", "'memory.size_gib' is nan: .*size_gib: 79.1"),
        ("latency: 4.0e-05", "latency: -1", "'collectives.between_nodes.latency' is -1: "),
        ("gpus: 8", "", "'node.gpus' is missing: give, for example, gpus: 8"),
    ],
)
def test_a_wrong_figure_of_a_device_is_named(old: str, new: str, words: str) -> None:
    text = DEVICES[0].read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(UsageError, match=words):
        config.parse(text.replace(old, new, 1).encode(), "x.yaml", DeviceConfig)


_LINES = st.sampled_from(SMALL.splitlines())
_VALUES = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["{}", "[]", "{a: 1}", "!!binary x", "!!timestamp 9", "2001-99-01", "0b2", "~"]
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_text_is_answered_with_a_traceback(data: st.DataObject) -> None:
    lines = SMALL.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        field = lines[at].split(":")[0]
        lines[at] = f"{field}: {data.draw(_VALUES)}"
    raw = data.draw(st.one_of(st.just("\n".join(lines)), st.text(max_size=60)))
    encoded = raw.encode("utf-8", errors="surrogatepass")
    for kind in (ModelConfig, DeviceConfig):
        try:
            config.parse(encoded, "x.yaml", kind)
        except UsageError as error:
            assert str(error).startswith("x.yaml")
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "--gpus 0 is not between 1 and"),
        (["--gpus", "8", "--gpu-memory", "lots"], "--gpu-memory 'lots' is not a size of memory"),
        (["--gpus", "8", "--gpu-memory", "0GiB"], "give, for example, 80GiB"),
        (["--gpus", "8", "--gpu-memory", "1GiB"], "nothing fits into 1.0 GiB on 8 GPUs: the least"),
        (["--gpus", "11"], "among one another: --global-batch-size 22 can be"),
        (["--gpus", "8", "--global-batch-size", "-1"], "--global-batch-size -1 is not between"),
        (["--gpus", "8", "--seq-length", "0"], "--seq-length 0 is not between"),
        (["--gpus", "8", "--tensor", "x"], "--tensor 'x' is no list of sizes: give, for example"),
        (["--gpus", "8", "--tensor", "3"], "--tensor can be 1, 2, 4 or 8"),
        (["--gpus", "8", "--recompute", "some"], "--recompute 'some' is unknown: give one or more"),
        (["--gpus", "8", "--schedules", "v-halv"], "unknown pipeline schedule 'v-halv'"),
        (["--gpus", "8", "--schedules", "pipefusion"], "pipefusion is forward-only"),
        (["--gpus", "8", "--schedules", ","], "names no schedule"),
        (["--gpus", "8", "--tries", "0"], "--tries 0"),
        (["--gpus", "8", "--device", "none.yaml"], "none.yaml cannot be read: No such file"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    assert cli.main(["plan", "--config", str(path), "--schedules", "zb-h1", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    lines = [line for line in printed.err.splitlines() if not line.startswith("plan: looking at")]
    assert len(lines) == 1


def test_sizes_of_memory() -> None:
    assert size_in_bytes("80GiB", "x") == 80 * GIB
    assert size_in_bytes("80 GB", "x") == 80e9
    assert size_in_bytes("1.5tib", "x") == 1.5 * 2**40
