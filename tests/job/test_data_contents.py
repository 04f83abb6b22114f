"""What a run trains on is known again by its contents, and told from everything else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.job import data_contents
from megatron_zb.job.data_contents import ALLOW_OTHER_FLAG, blend_entries, check_resume, record


def data_set(prefix: Path, tokens: bytes = b"abcd", index: bytes = b"index") -> str:
    prefix.parent.mkdir(exist_ok=True)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return str(prefix)


def of_data(*words: str, split: str = "90,10,0", tokenizer: str | None = None) -> Any:
    return record({"--data-path": words}, {"--tokenizer-model": tokenizer}, {"--split": split})


@pytest.mark.parametrize(
    ("words", "entries"),
    [
        (["a"], [("", "a")]),
        (["a", "b"], [("", "a"), ("", "b")]),
        (["0.3", "a", "0.7", "b"], [("0.3", "a"), ("0.7", "b")]),
        (["1", "2"], [("1", "2")]),
        (["a", "1", "b"], [("", "a"), ("", "1"), ("", "b")]),
    ],
)
def test_the_words_of_a_blend(words: list[str], entries: list[tuple[str, str]]) -> None:
    assert list(blend_entries(words)) == entries


def test_the_same_data_elsewhere_goes_on(tmp_path: Path) -> None:
    here, there = data_set(tmp_path / "a" / "text"), data_set(tmp_path / "b" / "moved")
    check_resume(of_data(here), of_data(there), "iter_2")
    check_resume(of_data("0.5", here, "0.5", there), of_data("0.5", there, "0.5", here), "iter_2")


def test_a_checkpoint_without_a_record_goes_on(tmp_path: Path) -> None:
    check_resume(None, of_data(data_set(tmp_path / "text")), "iter_2")


@pytest.mark.parametrize("what", ["tokens", "index", "more", "weight", "split", "tokenizer"])
def test_other_data_is_refused(tmp_path: Path, what: str) -> None:
    before, other = data_set(tmp_path / "a" / "text"), str(tmp_path / "b" / "text")
    (tmp_path / "vocab").write_text("one")
    stored = of_data("1", before, tokenizer=str(tmp_path / "vocab"))
    split = "80,20,0" if what == "split" else "90,10,0"
    data_set(
        Path(other),
        b"abce" if what == "tokens" else b"abcd",
        b"indey" if what == "index" else b"index",
    )
    words = ["2" if what == "weight" else "1", other, *(["1", other] if what == "more" else [])]
    if what == "tokenizer":
        (tmp_path / "vocab").write_text("two")
    now = of_data(*words, split=split, tokenizer=str(tmp_path / "vocab"))
    with pytest.raises(UsageError) as refused:
        check_resume(stored, now, "iter_2")
    said = str(refused.value)
    flag = {"split": "--split", "tokenizer": "--tokenizer-model"}.get(what, "--data-path")
    assert said.startswith(f"the checkpoint iter_2 was trained with {flag} ")
    assert ALLOW_OTHER_FLAG in said
    assert said.count("\n") == 0


def test_what_lies_elsewhere_is_known_by_its_name(tmp_path: Path) -> None:
    check_resume(of_data("s3://a/text"), of_data("s3://a/text"), "iter_2")
    with pytest.raises(UsageError, match="s3://b/text"):
        check_resume(of_data("s3://a/text"), of_data("s3://b/text"), "iter_2")


def test_hosts_see_what_others_have(tmp_path: Path) -> None:
    prefix = data_set(tmp_path / "text")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text("{}")
    found = data_contents.to_agree_on(of_data(prefix, tokenizer=str(tmp_path / "tokenizer")))
    assert set(found) == {
        f"the contents of --data-path {prefix}:",
        f"the contents of --tokenizer-model {tmp_path / 'tokenizer'}:",
    }
    assert found[f"the contents of --data-path {prefix}:"].startswith("4 bytes (")
    (tmp_path / "tokenizer" / "vocab.json").write_text("[]")
    os.remove(f"{prefix}.idx")
    other = data_contents.to_agree_on(of_data(prefix, tokenizer=str(tmp_path / "tokenizer")))
    assert all(found[name] != other[name] for name in found)
    assert other[f"the contents of --data-path {prefix}:"] == "nothing"


@pytest.mark.parametrize("changed", [0, 10**6, 2 * 10**9])
def test_little_of_a_large_file_is_read(tmp_path: Path, changed: int) -> None:
    """A sparse file of 2 GB; a change is seen where a block is, and always at both ends."""
    path = tmp_path / "text.bin"
    with path.open("wb") as file:
        file.truncate(2 * 10**9 + 1)
    before = data_contents.of_file(path)
    with path.open("r+b") as file:
        file.seek(changed)
        file.write(b"x")
    assert (data_contents.of_file(path) == before) == (changed == 10**6)
