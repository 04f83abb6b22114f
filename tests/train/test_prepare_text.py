"""Text to data set."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_text.py"


@dataclass(frozen=True)
class Ended:
    """How the script ended."""

    code: int
    stdout: str
    stderr: str


Prepare = Callable[..., Ended]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prepare:
    """Runs the script in this process, because importing Megatron takes seconds."""

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, *capsys.readouterr())

    return run


def documents(prefix: Path) -> list[list[int]]:
    """The tokens of every document, read as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix), mmap=True)
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_files_become_documents_of_bytes(prepare: Prepare, tmp_path: Path) -> None:
    """Directories by pattern and in order, other files as they are, empty ones left out."""
    folder = tmp_path / "notes"
    (folder / "deeper").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"\x00\xff")
    (folder / "a.md").write_text("hé")
    (folder / "deeper" / "c.py").write_text("c")
    (folder / "empty.txt").touch()
    (folder / "picture.png").write_text("left out")
    (tmp_path / "named.png").write_text("in")
    prefix = tmp_path / "new" / "text"
    done = prepare("--output-prefix", prefix, folder, tmp_path / "named.png")
    assert done.code == 0, done.stderr
    texts = ["hé".encode(), b"\x00\xff", b"c", b"in"]
    assert documents(prefix) == [[*text, 256] for text in texts]
    assert done.stdout == (
        f"{prefix}.bin and {prefix}.idx: 4 documents, 12 tokens, vocabulary 257\n"
    )
    assert sorted(os.listdir(prefix.parent)) == ["text.bin", "text.idx"]


def test_max_bytes_is_kept_to_the_byte(prepare: Prepare, tmp_path: Path) -> None:
    """The corpus without INPUT: the sources of Python's standard library."""
    prefix = tmp_path / "text"
    done = prepare("--output-prefix", prefix, "--max-bytes", "50000")
    assert done.code == 0, done.stderr
    tokens = documents(prefix)
    assert sum(len(document) - 1 for document in tokens) == 50000
    assert b"import " in bytes(tokens[0][:-1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing"], "missing is neither a file nor a directory: check the path"),
        (["folder"], "no files named *.txt or *.md or *.rst or *.py were found in folder"),
        (["folder", "--pattern", "*.c"], "unknown argument '--pattern'"),
        (["empty.txt"], "the corpus is empty: give files with text in them"),
        (["text.txt", "--max-bytes", "0"], "--max-bytes 0 leaves nothing"),
        (["text.txt", "--output-prefix", "out.bin"], "ends in a suffix that is added by itself"),
        (["text.txt", "--output-prefix", "text.txt/out"], "cannot be written: "),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(
    arguments: list[str],
    sentence: str,
    prepare: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_text("no text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_text("text")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = prepare("--output-prefix", "out", *arguments)
    assert done.code == 2
    assert done.stdout == ""
    said = done.stderr.splitlines()[-1]
    assert said.startswith("prepare_text: error: ")
    assert sentence in said
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


def test_a_failure_leaves_the_earlier_data_set(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    prefix = tmp_path / "out"
    assert prepare("--output-prefix", prefix, tmp_path / "text.txt").code == 0
    assert prepare("--output-prefix", prefix, tmp_path / "empty.txt").code == 2
    assert documents(prefix) == [[*b"text", 256]]
