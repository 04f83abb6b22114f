"""Wrong command lines and files, over all commands: one sentence each, which says what is right.

A row has the words that are given and a piece of the answer. Nearly all rows run in this process;
of a few the processor time of a process of their own is looked at, too.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from small_trees import checkout_tree
from traced_steps import profile, ran

from megatron_zb import files, launch
from megatron_zb.cli import ending
from megatron_zb.cli import main as cli
from megatron_zb.distill import flags as distillation
from megatron_zb.errors import UsageError
from megatron_zb.measured.profile import write_profile
from megatron_zb.measured.trace import trace_path, write_trace
from megatron_zb.train import arguments as training
from megatron_zb.train import sleeping_steps

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 3.0  # of the processor, until the sentence stands there
MOST_KILOBYTES = 500_000

Row = tuple[str, str]


def rows(table: str) -> list[Row]:
    """`words | piece` on each line; words as a shell reads them."""
    parts = (line.partition("|") for line in table.strip("\n").splitlines())
    return [(words.strip(), piece.strip()) for words, _, piece in parts]


# --- files

TABLES = {
    "empty.csv": ("", "the table has no passes"),
    "blank.csv": ("\n\n\n", "the table has no passes"),
    "one-row.csv": ("0F0,0B0\n", "a pipeline has a row for each of its 2 or more ranks"),
    "word.csv": ("0F0,0B0\n1F0,hello\n", "'hello' is no pass: write stage, F, I, W or B"),
    "letter.csv": ("0F0,0Z0\n1F0,1B0\n", "row 1, column 2: '0Z0' is no pass"),
    "negative.csv": ("0F0,0B-1\n1F0,1B0\n", "row 1, column 2"),
    "fraction.csv": ("0F0,0B0\n1F0.5,1B0\n", "row 2, column 1"),
    "huge.csv": ("0F99999999,0B0\n1F0,1B0\n", "a number of more than 7 digits"),
    "message.csv": ("0F0,0SEND_F0\n1F0,1B0\n", "is a message: give the compute-only table"),
    "gap.csv": ("0F0,0B0\n2F0,2B0\n", "no row runs stage 1"),
    "twice.csv": ("0F0,0B0\n0F0,0B0\n", "stage 0 lives on row 1"),
    "uneven.csv": ("0F0,0B0,2F0,2B0\n1F0,1B0\n", "every row must run equally many"),
    "no-backward.csv": ("0F0\n1F0\n", "completeness"),
    "before.csv": ("0B0,0F0\n1F0,1B0\n", "row 1, column 1"),
    "again.csv": ("0F0,0F0,0B0\n1F0,1B0\n", "row 1, column 2"),
    "deadlock.csv": ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock.csv"),
    "latin.csv": ("0F0,\xe90B0\n1F0,1B0\n", "it is no text in UTF-8"),
    "missing-microbatch.csv": ("0F0,0B0,0F2,0B2\n1F0,1B0,1F2,1B2\n", "microbatch 1"),
}

A_MODEL = (ROOT / "configs/models/gpt_1_5b.yaml").read_text(encoding="utf-8")
A_DEVICE = (ROOT / "configs/devices/h100_sxm.yaml").read_text(encoding="utf-8")
A_STUDENT = (ROOT / "configs/students/half_mlp.yaml").read_text(encoding="utf-8")

# A field of a valid file, what stands in its line instead, and a piece of the answer.
MODELS = [
    ("layers", "layers: 0", "'layers' is 0: input should be greater than 0; give, for example"),
    ("layers", "layers: -4", "'layers' is -4"),
    ("layers", "layers: many", "'layers' is 'many': input should be a valid integer"),
    ("layers", "layers: 22.5", "'layers' is 22.5"),
    ("layers", "layers: .nan", "'layers' is nan"),
    ("layers", "layers: [22]", "'layers' is a list"),
    ("layers", "layers:", "'layers' is empty"),
    ("layers", "layer: 22", "give, for example, layers: 32"),
    ("layers", "", "'layers' is missing: give, for example, layers: 32"),
    ("layers", "layers: 22\nsurprise: 1", "'surprise' is no field here"),
    ("layers", "layers: 22\nhiden_sizes: 8", "did you mean hidden_size"),
    ("layers", "layers: *one", "has an alias (*name): write the value out"),
    ("layers", "layers: !!python/object/apply:os.system ['true']", "is not YAML at line"),
    ("layers", "layers: 22\n1: 2", "1 is no field's name"),
    ("layers", "layers: {a: 22", "is not YAML at line"),
    ("layers", '"layers: 22', "model-"),
    ("layers", "layers: 22\n\tindented: 1", "is not YAML at line"),
    ("layers", "layers: 99999999999999999999", "'layers' is a huge number"),
    ("attention_heads", "attention_heads: true", "'attention_heads' is true"),
    ("attention_heads", "attention_heads: {}", "'attention_heads' is a dict"),
]
DEVICES = [
    ("size_gib", "size_gb: 80.0", "size_gib"),
    ("size_gib", "size_gib: -80.0", "'memory.size_gib' is -80.0"),
    ("size_gib", "size_gib: .inf", "'memory.size_gib' is inf"),
    ("size_gib", "size_gib: 80GiB", "'memory.size_gib' is '80GiB'"),
    ("gpus", "gpus: 0", "'node.gpus' is 0"),
    ("gpus", "gpus: 8.5", "'node.gpus' is 8.5"),
    ("gpus", "", "'node.gpus' is missing: give, for example, gpus: 8"),
    ("name", "nam: H100", "'name' is missing: give, for example, name: H100 SXM"),
]
STUDENTS = [
    ("name", "nam: half", "'name' is missing: give, for example, name: Half MLPs"),
    ("candidates", "candidate:", "'candidates' is missing: give, for example, candidates: ["),
]
_LINK = "links:\n- {source: 0, target: 1, seconds: 0.1}"
PROFILES = [
    ("version", "version: 2", "'version' is 2: input should be 1"),
    ("version", "", "'version' is missing"),
    ("version", "version: one", "'version' is 'one'"),
    ("pipeline_size", "pipeline_size: 3", "their ranks must be 0 to 2"),
    ("pipeline_size", "pipeline_size: 1", "'pipeline_size' is 1: input should be greater"),
    ("num_microbatches", "microbatches: 4", "num_microbatches"),
    ("schedule", "schedule: [", "is not YAML at line"),
    ("forward", "forward: -0.1", "forward' is -0.1"),
    ("forward", "forward: .inf", "forward' is inf"),
    ("forward", "forward: .nan", "forward' is nan"),
    ("forward", "forward: quick", "forward' is 'quick'"),
    ("forward", "", "forward' is missing"),
    ("layers", "layers: X", "'model.layers' is 'X'"),
    ("layers", "layers: 3", "stages: they have 2 layers and the model has 3"),
    ("held_for_weight", "held_for_weight: 99999999999", "more than activation"),
    ("links", "links: none", "'links' is 'none'"),
    ("links", "", "'links' is missing"),
    ("links", _LINK.replace("target: 1", "target: 7"), "give two different ranks of 0 to 1"),
    ("links", _LINK.replace("0.1", "-0.1"), "'links.0.seconds' is -0.1"),
    ("links", _LINK.replace("}", ""), "breaks off at line"),
    ("links", 'links: "[]', "breaks off at line"),
    ("links", "link", "breaks off at line"),
]
TRACES = [
    ("{", "", "the file"),
    ('"version":1', '"version":2', "version"),
    ('"F"', '"X"', "--pipeline-profile writes it anew"),
    ('"ranks"', '"rank"', "ranks"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all malformed files, and the current one."""
    place = tmp_path_factory.mktemp("malformed")
    for name, (text, _) in TABLES.items():
        (place / name).write_text(text, encoding="latin-1")
    (place / "folder.yaml").mkdir()
    (place / "folder.csv").mkdir()
    (place / "empty.yaml").write_text("")
    (place / "list.yaml").write_text("- 1\n- 2\n")
    (place / "word.yaml").write_text("hello\n")
    (place / "binary.yaml").write_bytes(bytes(range(256)))
    (place / "deep.yaml").write_text("a: " + "[" * 5000)
    (place / "long.yaml").write_text("a: 1\n" * 300_000)
    (place / "file").write_text("no folder\n")
    os.mkfifo(place / "pipe.yaml")
    with (place / "sparse.yaml").open("wb") as sparse:
        sparse.truncate(1 << 42)
    write_profile(profile(), place / "run.yaml")
    write_trace(ran(), place / "run.yaml")
    write_profile(profile(), place / "alone.yaml")
    checkout_tree(place / "old", "0.12.0")
    checkout_tree(place / "new", "0.16.1")
    (place / "broken.py").write_text("def (:\n")
    (place / "no_pretrain.py").write_text("print('hello')\n")
    (place / "pretrain.py").write_text("from megatron.training import pretrain\n")
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports may be slow; the lines that report them are no part of an answer."""
    monkeypatch.setattr(ending, "PATIENCE", 3600.0)


# --- megatron-zb

SHOW = """
 | COMMAND is missing: give one of show, export, plan, flags, quickstart, trace, check,
shw | flags, quickstart, trace, check, verify, doctor (did you mean show?)
--verson | COMMAND is missing: give one of show
show | no schedule was asked for: give NAME, such as v-half, or --csv FILE
show v-half | v-half needs --pipeline-size P and --num-microbatches M
show v-half -p 4 | v-half needs --pipeline-size P and --num-microbatches M
show v-half -m 4 | v-half needs --pipeline-size P and --num-microbatches M
show gpipe -p 4 -m 8 --recompute 0.1 | gpipe has a fixed order, which keeps every activation
show zb-h1 -p 4 -m 8 --offload 0.1 | --offload: zb-h1 has a fixed order
show v-half -p 4 -m 8 --recompute 2 | --recompute is 2: the input of a stage takes less than
show --csv "" | --csv: the path is empty: give the name of a file or folder
show v-half -p 4 -m 8 -o "" | --output: the path is empty
show v-half -p 4 -m 8 -o missing/x.png | there is no folder 'missing': make it first
export v-half -p 4 -m 8 --format csv -o missing/deeper/x.csv | there is no folder 'missing/deeper'
plan --config "" --gpus 8 | --config: the path is empty
trace "" | PROFILE: the path is empty
show v-halv -p 4 -m 8 | did you mean v-half
show "" -p 4 -m 8 | unknown pipeline schedule ''
show v-half -p | --pipeline-size is given without a value: write --pipeline-size P
show v-half -p 4 -m | --num-microbatches is given without a value: write --num-microbatches M
show v-half -p 1 -m 8 | pipeline schedules need at least 2 pipeline ranks
show v-half -p 0 -m 8 | '0' is not a whole number of 1 or more
show v-half -p -4 -m 8 | '-4' is not a whole number of 1 or more
show v-half -p four -m 8 | 'four' is not a whole number of 1 or more
show v-half -p 4.0 -m 8 | '4.0' is not a whole number of 1 or more
show v-half -p 4 -m 1e3 | '1e3' is not a whole number of 1 or more
show v-half -p 4 -m ٣ | is not a whole number of 1 or more
show v-half -p 4 -m 99999999 | 99999999 is more than 1000000
show v-half -p 1000 -m 1000 | can be at most 32768; a schedule repeats itself
show v-half -p 2 -m 100000 | so that --num-microbatches 8 shows as much
show v-half -p 1000 -m 1000 | so that --pipeline-size 64 --num-microbatches 256 shows as much
show v-half -p 2000 -m 1 | a pipeline of 2000 ranks was asked for: give at most 1024
show v-half -p 4 -m 8 --microbatches 8 | did you mean --num-microbatches?
show v-half -p 4 -m 8 --pipelinesize 8 | did you mean --pipeline-size?
show v-half -p 4 -m 8 --quux | --help lists what there is
show v-half -p 4 -m 8 zb-h1 | unknown argument 'zb-h1'
show v-half -p 4 -m 8 --chunks 2 | interleaved, wave and auto have
show v-half -p 4 -m 8 --group-size 2 | interleaved has
show interleaved -p 4 -m 8 --chunks 0 | '0' is not a whole number of 1 or more
show interleaved -p 4 -m 8 --chunks two | 'two' is not a whole number
show interleaved -p 4 -m 8 --chunks 99999 | on 399996 stages are too many
show interleaved -p 4 -m 8 --group-size 0 | '0' is not a whole number of 1 or more
show v-half -p 4 -m 8 --memory-limit 0 | give, for example, 0.5
show v-half -p 4 -m 8 --memory-limit -1 | give, for example, 0.5
show v-half -p 4 -m 8 --memory-limit nan | give, for example, 0.5
show v-half -p 4 -m 8 --memory-limit inf | give, for example, 0.5
show v-half -p 4 -m 8 --memory-limit half | --memory-limit: 'half' is not a number, such as 0.5
show v-half -p 4 -m 8 --memory-limit 0.01 | cannot keep the memory limit of 0.01
show v-half -p 4 -m 8 --forward -1 | --forward: '-1' is not a time: give a number from 0 to 1e+12
show v-half -p 4 -m 8 --forward 1e308 | --forward: '1e308' is not a time: give a number from 0
show v-half -p 4 -m 8 --backward inf | --backward: 'inf' is not a time
show v-half -p 4 -m 8 --weight nan | --weight: 'nan' is not a time
show v-half -p 4 -m 8 --weight=-inf | --weight: '-inf' is not a time
show v-half -p 4 -m 8 --p2p 1e400 | --p2p: '1e400' is not a time
show v-half -p 4 -m 8 --p2p -0.1 | --p2p: '-0.1' is not a time
show v-half -p 4 -m 8 --forward long | --forward: 'long' is not a number
show v-half -p 4 -m 8 --forward 0 | forward is zero: give a positive time, such as 1.0
show v-half -p 4 -m 8 --backward 0 | backward is zero: give a positive time, such as 1.0
show v-half -p 4 -m 8 --forward | --forward is given without a value: write --forward T
show v-half -p 4 -m 8 -o | --output is given without a value: write --output FILE
show v-half -p 4 -m 8 -o - | give a name that ends in .png, .svg or .html
show v-half -p 4 -m 8 -o x.pdf | give a name that ends in .png, .svg or .html
show v-half -p 4 -m 8 -o picture | give a name that ends in .png, .svg or .html
show v-half -p 4 -m 8 -o file/x.png | is a file and no folder
show v-half -p 4 -m 8 -o file/x/y.html | is a file and no folder
show v-half -p 200 -m 200 -o x.png | can be at most 8192
show v-half -p 4 -m 8 --teacher 1 | only pipe-bd takes it, not v-half: leave it out
show v-half -p 4 -m 8 --steps 2 | only pipe-bd takes it, not v-half: leave it out
show v-half --csv run.csv | give either v-half or --csv FILE
show --csv none.csv | cannot read 'none.csv': No such file or directory
show --csv folder.csv | cannot read 'folder.csv': Is a directory
show --csv word.csv -p 4 | --csv FILE has its own sizes: leave the sizes out
show --csv word.csv -m 4 | --csv FILE has its own sizes: leave the sizes out
show --csv word.csv --chunks 2 | leave --chunks out
show --csv word.csv --memory-limit 1 | leave --memory-limit out
show --csv | --csv is given without a value: write --csv FILE
show pipe-bd -p 4 -m 8 --forward 2 | see --teacher and --student for times
show pipe-bd -p 4 -m 8 --chunks 2 | pipe-bd does not take it: leave it out
show pipe-bd -p 4 -m 8 --blocks 0 | --blocks is 0: give 1 or more
show pipe-bd -p 4 -m 8 --blocks 9999 | 9999 blocks are too many: give at most 512
show pipe-bd -p 4 -m 8 --blocks x | --blocks: 'x' is not a whole number, such as 8
show pipe-bd -p 4 -m 8 --teacher 1 2 --student 1 2 3 | give one time for all of them, or one for
show pipe-bd -p 4 -m 8 --teacher -1 | --teacher: '-1' is not a time
show pipe-bd -p 4 -m 8 --teacher 1e308 | --teacher: '1e308' is not a time
show pipe-bd -p 4 -m 8 --distribution 0-9:1 | --distribution 0-9:1
show pipe-bd -p 4 -m 8 --distribution x | distribution
show pipe-bd -p 4 -m 8 --steps 0 | steps
show pipe-bd -p 4 -m 8 --steps -1 | steps
show pipe-bd -p 4 -m 8 --run-ahead -1 | ahead
show pipe-bd -p 4 -m 8 -o x.html | give a name that ends in .png or .svg
show pipefusion -p 4 -m 8 | pipefusion needs --pipeline-size P, --patches M and --time-steps T
show pipefusion -p 4 --patches 8 --time-steps x | 'x' is not a whole number of 1 or more
show pipefusion -p 4 --patches 8 --time-steps 4 -m 8 | pipefusion does not take it: leave it out
"""
EXPORT = """
export | --format is missing: give one of csv, chrome-trace
export v-half -p 4 -m 8 -o x | --format is missing: give one of csv, chrome-trace
export v-half -p 4 -m 8 --format csv | --output is missing: give --output FILE
export v-half -p 4 -m 8 --format cvs -o x | give one of csv, chrome-trace (did you mean csv?)
export v-half -p 4 -m 8 --format -o x | --format is given without a value: write --format csv
export --format csv -o x | give NAME, such as v-half, or --csv FILE
export v-half --format csv -o x | needs --pipeline-size P and --num-microbatches M
export v-halv -p 4 -m 8 --format csv -o x | did you mean v-half
export v-half -p 4 -m 8 --format csv -o folder.csv | it is a folder: give the name of a file
export v-half -p 4 -m 8 --format csv -o file/x.csv | is a file and no folder
export v-half -p 4 -m 999999 --format csv -o x | their product can be at most 1048576
export v-half -p 4 -m 8 --format csv -o x --forward -1 | '-1' is not a time
export pipe-bd -p 4 -m 8 --format csv -o x | give --format chrome-trace
export --csv none.csv --format csv -o x | cannot read 'none.csv'
"""
PLAN = """
plan | --config is missing: give, for example, --config gpt_28b
plan --gpus 8 | --config is missing: give, for example, --config gpt_28b
plan --config gpt_1_5b | --gpus is missing: give, for example, --gpus 64
plan --config gpt_1_5b --gpus | --gpus is given without a value: write --gpus N
plan --config gpt_1_5b --gpus 0 | give, for example, --gpus 64
plan --config gpt_1_5b --gpus -8 | give, for example, --gpus 64
plan --config gpt_1_5b --gpus 8.0 | --gpus: '8.0' is not a whole number, such as 8
plan --config gpt_1_5b --gpus eight | --gpus: 'eight' is not a whole number, such as 8
plan --config gpt_1_5b --gpus 9999999999 | is not between 1 and 65536
plan --config gpt_1_5b --gpus 8 --top 10000001 | --top 10000001 is not between 1 and 10000000
plan --config gpt_1_5c --gpus 8 | give a file, or one of
plan --config none.yaml --gpus 8 | none.yaml cannot be read: No such file or directory
plan --config folder.yaml --gpus 8 | folder.yaml cannot be read: Is a directory
plan --config empty.yaml --gpus 8 | empty.yaml has no fields: write lines such as 'name:
plan --config list.yaml --gpus 8 | list.yaml has no fields: write lines such as 'name:
plan --config word.yaml --gpus 8 | word.yaml has no fields
plan --config binary.yaml --gpus 8 | binary.yaml is not YAML
plan --config deep.yaml --gpus 8 | deep.yaml has brackets within brackets 5000 deep: write lines
plan --config long.yaml --gpus 8 | long.yaml is larger than
plan --config gpt_1_5b --gpus 8 --gpu 9 | --gpu is short for several: write out --gpus, --gpu-memory
plan --config gpt_1_5b --gpus 8 --device h1 | give a file, or one of a100_80gb_sxm
plan --config gpt_1_5b --gpus 8 --device none.yaml | none.yaml cannot be read
plan --config gpt_1_5b --gpus 8 --gpu-memory 80 | '80' has no unit: give 80GiB
plan --config gpt_1_5b --gpus 8 --gpu-memory lots | give, for example, 80GiB
plan --config gpt_1_5b --gpus 8 --gpu-memory=-80GiB | give, for example, 80GiB
plan --config gpt_1_5b --gpus 8 --gpu-memory 0GiB | give, for example, 80GiB
plan --config gpt_1_5b --gpus 8 --gpu-memory 80GX | give, for example, 80GiB
plan --config gpt_1_5b --gpus 8 --gpu-memory nanGiB | give, for example, 80GiB
plan --config gpt_1_5b --gpus 8 --gpu-memory "" | give, for example, 80GiB
plan --config gpt_1_5b --gpus 8 --gpu-memory | write --gpu-memory SIZE
plan --config gpt_1_5b --gpus 8 --tensor 3 | --tensor can be 1, 2, 4 or 8
plan --config gpt_1_5b --gpus 8 --tensor 16 | --tensor can be 1, 2, 4 or 8
plan --config gpt_1_5b --gpus 8 --pipeline 3 | --pipeline can be 1, 2, 4 or 8
plan --config gpt_1_5b --gpus 8 --tensor 4 --pipeline 4 | --tensor can be 1 or 2
plan --config gpt_1_5b --gpus 8 --tensor 3 --pipeline 5 | leave one of them out
plan --config gpt_1_5b --gpus 8 --micro-batch-size 7 | --micro-batch-size can be 1, 2
plan --config gpt_1_5b --gpus 127 | --global-batch-size 127 can be
plan --config gpt_1_5b --gpus 8 --tensor two | give, for example, --tensor 2,4
plan --config gpt_1_5b --gpus 8 --tensor 0 | give, for example, --tensor 2,4
plan --config gpt_1_5b --gpus 8 --tensor 2;4 | give, for example, --tensor 2,4
plan --config gpt_1_5b --gpus 8 --pipeline -2 | give, for example, --pipeline 2,4
plan --config gpt_1_5b --gpus 8 --micro-batch-size 1.5 | give, for example, --micro-batch-size 2,4
plan --config gpt_1_5b --gpus 8 --recompute some | give one or more of none,selective,full
plan --config gpt_1_5b --gpus 8 --recompute "" | give one or more of none,selective,full
plan --config gpt_1_5b --gpus 8 --schedules v-halv | did you mean v-half
plan --config gpt_1_5b --gpus 8 --schedules "" | schedule
plan --config gpt_1_5b --gpus 8 --global-batch-size 0 | give, for example, --global-batch-size 512
plan --config gpt_1_5b --gpus 8 --global-batch-size x | 'x' is not a whole number, such as 8
plan --config gpt_1_5b --gpus 8 --seq-length 0 | give, for example, --seq-length 4096
plan --config gpt_1_5b --gpus 8 --tries 0 | give, for example, --tries 3
plan --config gpt_1_5b --gpus 8 --top 0 | give, for example, --top 8
plan --config gpt_1_5b --gpus 8 --top x | --top: 'x' is not a whole number, such as 8
plan --config gpt_1_5b --gpus 8 --format xml | --format 'xml' is unknown: give one of table, json
plan --config gpt_1_5b --gpus 8 --html x.htm | give a name that ends in .html
plan --config gpt_1_5b --gpus 8 --html - | give a name that ends in .html
plan --config gpt_1_5b --gpus 8 --html file/x.html | is a file and no folder
plan --config gpt_1_5b --gpus 8 --microbatches 4 | --microbatches needs --profile
plan --config gpt_1_5b --gpus 8 --memory-limit 0.5 | --memory-limit needs --profile
plan --config gpt_1_5b --gpus 8 --chart --format json | --chart cannot be combined with
plan --config gpt_1_5b --gpus 8 --student-config half_mlp --chart | --chart has no meaning for a
plan --config gpt_1_5b --gpus 8 --schedule v-half --gpuz 3 | did you mean --gpus?
plan --config gpt_1_5b --gpus 8 --student-config no | give a file, or one of fewer_kv_heads
plan --config gpt_1_5b --gpus 8 --student-config half_mlp --tensor 2 | leave it out, or leave out
plan --config gpt_1_5b --gpus 8 --student-config half_mlp --micro-batch-size x | give one, such as 1
plan --student-config half_mlp | --config is missing
plan --profile none.yaml | none.yaml cannot be read: No such file or directory
plan --profile folder.yaml | folder.yaml cannot be read: Is a directory
plan --profile empty.yaml | empty.yaml has no fields: write lines such as 'version: 1'
plan --profile run.yaml --gpus 8 | the run that was measured has decided it
plan --profile run.yaml --config gpt_1_5b | the run that was measured has decided it
plan --profile run.yaml --tensor 2 | the run that was measured has decided it
plan --profile run.yaml --microbatches 0 | --microbatches is 0: give 1 or more
plan --profile run.yaml --microbatches x | 'x' is not a whole number, such as 8
plan --profile run.yaml --memory-limit x | 'x' is not a number, such as 0.5
plan --profile run.yaml --memory-limit nan | give, for example, 0.5
plan --profile run.yaml --schedules nothing | unknown pipeline schedule 'nothing'
plan --profile run.yaml --top 0 | give, for example, --top 8
plan --profile run.yaml --chart | --chart needs --config
plan --profile run.yaml --html x.txt | give a name that ends in .html
"""
OTHERS = """
trace | PROFILE is missing: give PROFILE
trace none.yaml | none.yaml cannot be read: No such file or directory
trace folder.yaml | folder.yaml cannot be read: Is a directory
trace empty.yaml | empty.yaml has no fields
trace alone.yaml | --pipeline-profile writes it next to the profile
trace run.yaml run.yaml | unknown argument 'run.yaml'
trace run.yaml -o x.pdf | give a name that ends in .png, .svg, .html, .json
trace run.yaml -o - | give a name that ends in .png, .svg, .html, .json
trace run.yaml -o file/x.json | is a file and no folder
trace run.yaml --ouput x.png | did you mean --output?
flags | --config is missing: give --config NAME|FILE
flags --config nothing | give a file, or one of
flags --config none.yaml | none.yaml cannot be read
flags --config empty.yaml | empty.yaml has no fields
flags --config gpt_1_5b --scedule | did you mean --schedule?
flags --config gpt_1_5b more | unknown argument 'more'
doctor nowhere | there is no folder 'nowhere': give the path of a Megatron-LM checkout
doctor file | there is no folder 'file'
doctor folder.yaml | is not a Megatron-LM checkout: it has no megatron/core/package_info.py
doctor old new | unknown argument 'new'
doctor --fix | unknown argument '--fix'
doctor --jsn | did you mean --json?
doctor "" | MEGATRON_LM: the path is empty
flags --config folder.yaml | folder.yaml cannot be read: Is a directory
flags --config binary.yaml | binary.yaml is not YAML
flags --config list.yaml | list.yaml has no fields
flags --config word.yaml | word.yaml has no fields
flags --config deep.yaml | has brackets within brackets 5000 deep
flags --config long.yaml | long.yaml is larger than 1048576 bytes
flags --config | --config is given without a value: write --config NAME|FILE
flags --config "" | --config: the path is empty
flags --config gpt_1_5b --schedule --mock-data | not allowed with argument --schedule
trace binary.yaml | binary.yaml is not YAML
trace list.yaml | list.yaml has no fields
trace word.yaml | word.yaml has no fields
trace deep.yaml | has brackets within brackets 5000 deep
trace long.yaml | long.yaml is larger than 1048576 bytes
"""
_CHECKED = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 "
    "--lr 0.01 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --bf16 "
    "--transformer-impl local --pipeline-model-parallel-size 2 "
)
# More arguments of a training that is checked, after those above.
QUICKSTART = """
quickstart --data-path nowhere | make it with scripts/prepare_text.py --output-prefix nowhere
quickstart --data-path x --train-iters 0 | '0' is not a whole number of 1 or more
quickstart --data-path x --train-iters x | 'x' is not a whole number of 1 or more
quickstart --data-path x --trainiters 2 | did you mean --train-iters?
"""
CHECK = """
 | no schedule is chosen: add --pipeline-schedule, such as v-half
--pipeline-schedule v-halv | did you mean v-half
--pipeline-schedule /dev/zero | unknown pipeline schedule '/dev/zero'
--pipeline-schedule binary.csv | unknown pipeline schedule 'binary.csv'
--pipeline-schedule folder.csv | unknown pipeline schedule 'folder.csv'
--pipeline-schedule | --pipeline-schedule is given without a value
--pipeline-schedule v-half --nonsense | unknown argument '--nonsense'
--pipeline-schedule v-half --num-layers x | --num-layers: 'x' is not a whole number, such as 8
--pipeline-schedule v-half --num-layers 3.5 | --num-layers: '3.5' is not a whole number
--pipeline-schedule v-half --num-layers | --num-layers is given without a value
--pipeline-schedule v-half --lr fast | --lr: 'fast' is not a number
"""
CHECK_ITSELF = """
check | the arguments of a training are missing: give them after --
check -- | the arguments of a training are missing: give them after --
check -- --pipeline-schedule v-half | needs a pipeline: give --pipeline-model-parallel-size of 2
check --gpus | --gpus is given without a value: write --gpus N
check --gpus 0 | --gpus: '0' is not a whole number of 1 or more
check --gpus x | --gpus: 'x' is not a whole number of 1 or more
check --megatron-version 0.1 | give one of 0.16, 0.17, 0.18, 0.19 (did you mean 0.19?)
check --megatron-version | --megatron-version is given without a value
check --megatron-lm | --megatron-lm is given without a value: write --megatron-lm CHECKOUT
"""
VERIFY = """
verify | the command chooses no schedule
verify -- | the command chooses no schedule
verify -- echo hello | the command chooses no schedule
verify -- torchrun pretrain.py | the command chooses no schedule
verify --iterations | --iterations is given without a value: write --iterations N
verify --iterations 0 -- x | --iterations: '0' is not a whole number of 1 or more
verify --iterations x -- x | --iterations: 'x' is not a whole number of 1 or more
verify --directory | --directory is given without a value: write --directory DIR
verify --directory "" -- x | --directory: the path is empty: give the name of a file or folder
"""


def of_files(
    valid: str, changes: list[tuple[str, str, str]], command: str, prefix: str
) -> list[tuple[str, str, str, str]]:
    """The name and the text of each changed file, the words, and a piece of the answer."""
    found = []
    for number, (field, new, piece) in enumerate(changes):
        line = re.search(rf"^[ -]*({field}:.*)$", valid, flags=re.MULTILINE)
        assert line is not None, field
        text = valid[: line.start(1)] + new + valid[line.end(1) :]
        name = f"{prefix}-{number}.yaml"
        found.append((name, text, command.format(name), piece))
    return found


FILES = [
    *of_files(A_MODEL, MODELS, "plan --config {} --gpus 8", "model"),
    *of_files(A_DEVICE, DEVICES, "plan --config gpt_1_5b --gpus 8 --device {}", "device"),
    *of_files(
        A_STUDENT, STUDENTS, "plan --config gpt_1_5b --gpus 8 --student-config {}", "student"
    ),
    *of_files(
        yaml.safe_dump(profile().model_dump(exclude_defaults=True), sort_keys=False),
        PROFILES,
        "plan --profile {}",
        "profile",
    ),
]
# Commands that read a file, and what they say of files that have no end or are far too large.
READERS = (
    "show --csv {}",
    "export --csv {} --format csv -o x",
    "plan --config {} --gpus 8",
    "plan --config gpt_1_5b --gpus 8 --device {}",
    "plan --config gpt_1_5b --gpus 8 --student-config {}",
    "plan --profile {}",
    "trace {}",
    "flags --config {}",
)
ODD_FILES = {
    "/dev/zero": "it is no regular file",
    "pipe.yaml": "it is no regular file",
    "sparse.yaml": "larger than",
}
# Commands that look for a folder, and what they print of anything else.
FOLDERS = (
    ("doctor {}", "there is no folder"),
    ("check --megatron-lm {} -- --pipeline-schedule v-half", "there is no folder"),
    ("verify --directory {} -- x --pipeline-schedule v-half", "cannot be used: File exists"),
)
COMMANDS = [
    *(
        row
        for table in (SHOW, EXPORT, PLAN, OTHERS, QUICKSTART, CHECK_ITSELF, VERIFY)
        for row in rows(table)
    ),
    *((f"check -- {_CHECKED}{words}", piece) for words, piece in rows(CHECK)),
    *((words.format(name), why) for words, why in FOLDERS for name in (*ODD_FILES, "binary.yaml")),
    *((f"show --csv {name}", piece) for name, (_, piece) in TABLES.items()),
    *((words.format(name), why) for words in READERS for name, why in ODD_FILES.items()),
]


def one_sentence(printed: str, program: str, piece: str) -> None:
    """One line, by its program, with the piece and without what only a developer reads."""
    assert printed.startswith(f"{program}: error: "), printed
    assert printed.endswith("\n")
    assert printed.count("\n") == 1
    assert "Traceback" not in printed
    assert piece in printed


@pytest.mark.parametrize(("words", "piece"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_commands(words: str, piece: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    one_sentence(printed.err, "megatron-zb", piece)


@pytest.mark.parametrize(("name", "text", "words", "piece"), FILES, ids=[row[0] for row in FILES])
def test_files(
    name: str, text: str, words: str, piece: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    assert cli.main(shlex.split(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    one_sentence(printed.err, "megatron-zb", piece)


@pytest.mark.parametrize(("old", "new", "piece"), TRACES)
def test_traces(
    old: str, new: str, piece: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "traced.yaml"
    write_profile(profile(), path)
    write_trace(ran(), path)
    text = trace_path(path).read_text(encoding="utf-8")
    trace_path(path).write_text(text.replace(old, new, 1), encoding="utf-8")
    assert cli.main(["trace", str(path)]) == 2
    one_sentence(capsys.readouterr().err, "megatron-zb", piece)


@pytest.mark.parametrize(
    "words",
    [
        "show v-half -p 4 -m 8 -o x.png",
        "export v-half -p 4 -m 8 --format csv -o x.csv",
        "plan --config gpt_1_5b --gpus 8 --html x.html",
        "trace run.yaml -o x.json",
    ],
)
def test_a_folder_in_which_nothing_may_be_written(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer of the system is made up: to root, every folder is writable."""
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    assert cli.main(shlex.split(words)) == 2
    one_sentence(capsys.readouterr().err, "megatron-zb", "nothing may be written")


# --- python -m megatron_zb. ...

_TRAINING = (
    "--cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 0.01 --data-path none "
    "--pipeline-model-parallel-size 2 "
)
TRAINING = """
 | --data-path none: there is no file none.bin
--num-layers | --num-layers is given without a value: write --num-layers N
--num-layers x | --num-layers: 'x' is not a whole number, such as 8
--num-layers 0 | --num-layers is 0: it must be greater than 0
--num-layers 5 | 4 or 6 can, or give --pipeline-layer-layout
--hidden-size 33 | 32 or 36 would be
--num-attention-heads 3 | 30 or 33 would be
--lr fast | --lr: 'fast' is not a number, such as 0.5
--lr -1 | --lr is -1.0: it must be 0 or greater
--global-batch-size 0 | --global-batch-size is 0
--micro-batch-size 3 | 3 or 6 would be
--train-iters 2.5 | --train-iters: '2.5' is not a whole number
--pipeline-schedule v-halv | did you mean v-half
--pipeline-schedule | --pipeline-schedule is given without a value
--pipeline-memory-limit 0.5 | --pipeline-memory-limit needs --pipeline-schedule
--pipeline-profile x.yaml | --pipeline-profile needs --pipeline-schedule
--pipeline-model-parallel-size 3 | start torchrun with --nproc-per-node 3
--pipelin-schedule v-half | did you mean --pipeline-schedule?
--split 0,1 | such as 90,10,0
--fp16 | unknown argument '--fp16': did you mean --bf16?
--sequence-parallel | unknown argument '--sequence-parallel'
--overlap-grad-reduce | unknown argument '--overlap-grad-reduce'
--tokenizer-type NullTokenizer | unknown argument '--tokenizer-type'
--save-interval 2 | --save-interval needs --save
--finetune | --finetune needs --load
--min-lr 1 | --min-lr 1.0 is above --lr 0.01: it must not be
--recompute-granularity full | unknown argument '--recompute-granularity'
--lr-decay-style bent | give one of
--transformer-impl local | unknown argument '--transformer-impl'
--cpu=yes | --cpu takes no value
--data-path /dev/zero | there is no file /dev/zero.bin
--data-path binary.yaml | there is no file binary.yaml.bin
--data-path folder.yaml | there is no file folder.yaml.bin
--pipeline-schedule /dev/zero | unknown pipeline schedule '/dev/zero'
--pipeline-schedule sparse.yaml | unknown pipeline schedule 'sparse.yaml'
--pipeline-schedule v-half --pipeline-layer-layout pipe.yaml | there is no such file: give one that
--pipeline-schedule v-half --pipeline-layer-layout folder.yaml | there is no such file: give one
--pipeline-schedule v-half --pipeline-layer-layout none.yaml | there is no such file: give one that
"""
DISTILLATION = """
 | --teacher-load is missing: give --teacher-load DIR
--teacher-load old | --student-config is missing: give --student-config FILE
--teacher-load | --teacher-load is given without a value
--teacher-load nowhere | there is no such directory
--teacher-load /dev/zero | there is no such directory
--teacher-load pipe.yaml | there is no such directory
--teacher-load sparse.yaml | there is no such directory
--teacher-load binary.yaml | there is no such directory
--loss angle | give one of mse, normalised-mse, cosine
--train-iters 0 | --train-iters is 0: it must be greater than 0
--run-ahead 0 | --run-ahead is 0: it must be 1 or greater
--run-ahead x | --run-ahead: 'x' is not a whole number
--num-layers 4 | unknown argument '--num-layers'
--distributon 0-3:1 | did you mean --distribution?
"""
_DISTILLATION = (
    "--cpu --teacher-load old --student-config half_mlp --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 2 --lr 0.01 --data-path none "
)
LAUNCH = """
 | give a pretrain script of a Megatron-LM checkout
nowhere.py | there is no file 'nowhere.py': give the path of a pretrain script
old | there is no file 'old'
file | 'file' cannot be read as Python
broken.py | 'broken.py' cannot be read as Python
no_pretrain.py | it does not import pretrain from megatron.training
pretrain.py | does not lie in a Megatron-LM checkout
/dev/zero | there is no file '/dev/zero'
pipe.yaml | there is no file 'pipe.yaml'
folder.yaml | there is no file 'folder.yaml'
binary.yaml | 'binary.yaml' cannot be read as Python
empty.yaml | it does not import pretrain from megatron.training
word.yaml | it does not import pretrain from megatron.training
sparse.yaml | 'sparse.yaml' cannot be read as Python: [Errno 27] it is larger than 16 MiB
old/pretrain_gpt.py | has version 0.12.0, which is older than all that are known here
"""
MODULES = """
sleeping_steps --schedules v-halv | did you mean v-half
sleeping_steps --schedules 1f1b | --num-microbatches is missing: give --num-microbatches M
"""
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "sleeping_steps": sleeping_steps.main,
}


def refused(parse: Callable[[], object], piece: str) -> None:
    with pytest.raises(UsageError) as error:
        parse()
    assert "\n" not in str(error.value)
    assert piece in str(error.value)


@pytest.mark.parametrize(("words", "piece"), rows(TRAINING))
def test_training(words: str, piece: str, folder: Path) -> None:
    refused(lambda: training.parse(shlex.split(_TRAINING + words), world_size=2), piece)


@pytest.mark.parametrize(("words", "piece"), rows(DISTILLATION))
def test_distillation(words: str, piece: str, folder: Path) -> None:
    whole = words if "is missing" in piece else _DISTILLATION + words
    refused(lambda: distillation.parse(shlex.split(whole)), piece)


@pytest.mark.parametrize(("words", "piece"), rows(LAUNCH))
def test_the_launcher(words: str, piece: str, folder: Path) -> None:
    refused(lambda: launch._prepare(shlex.split(words), on_cpu=True), piece)


@pytest.mark.parametrize(("words", "piece"), rows(MODULES))
def test_modules(words: str, piece: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = shlex.split(words)
    assert PROGRAMS[name](rest) == 2
    one_sentence(capsys.readouterr().err, name, piece)


# --- scripts/*.sh

SCRIPTS = """
quickstart.sh --python | --python needs a version, for example 3.12
quickstart.sh --python 2.7 | there is no constraints/py27.txt
quickstart.sh --bogus | unknown argument '--bogus': --help lists what there is
quickstart.sh runs | unknown argument 'runs': --help lists what there is
quickstart.sh --train-iters | --train-iters needs a value, see --help
release.sh --bogus | unknown argument '--bogus': --help lists what there is
release.sh --output | --output needs a value, see --help
release.sh --tag v9.9 | --tag v9.9 is not v0.1.0, the version in megatron_zb/__init__.py
docs.sh --srict | unknown argument '--srict': --help lists what there is
mutate.sh --drow 3 | unknown argument '--drow': --help lists what there is
block_library.sh --bogus | unknown argument '--bogus': --help lists what there is
block_library.sh one two | give one FOLDER, not both 'one' and 'two'
PYTHON=nowhere block_library.sh x | nowhere cannot import megatron_zb: install it, or give PYTHON
test.sh --quik | unknown argument '--quik': --help lists what there is
test.sh tests/nothing.py | unknown argument 'tests/nothing.py': it is no test file
test.sh -k name --bogus=3 | unknown argument '--bogus=3'
gpu_check.sh --bogus | --bogus is not an option of this script
test.sh --python | --python needs a version, for example 3.12
test.sh --python=4.0 | those are the files in constraints/
test.sh --megatron | --megatron needs a series that there is a patch for
test.sh --megatron=0.15 | --megatron needs a series that there is a patch for
test.sh --python 3.12 --megatron 0.16 | give --megatron or --python, not both
test.sh --megatron-main /nowhere | there is no megatron/core in '/nowhere'
test.sh --python 3.12 --megatron-main . | give --megatron-main or --python, not both
apply_patches.sh | give the path of a Megatron-LM checkout
apply_patches.sh nowhere | there is no folder 'nowhere': give the path
apply_patches.sh --revers old | unknown option --revers: --help lists the options
apply_patches.sh old new | give one Megatron-LM checkout, not both 'old' and 'new'
apply_patches.sh folder.yaml | is not a Megatron-LM checkout
apply_patches.sh old | has version 0.12.0, which no patch here is for
pretrain_gpt.sh --dry-run | MEGATRON_LM_PATH is missing: give a Megatron-LM checkout
TP=two pretrain_gpt.sh --dry-run | TP is 'two': give a whole number of 1 or more
TP=3 pretrain_llama.sh --dry-run | 8 ranks cannot be divided by TP 3 times PP 4
PP=0 pretrain_moe.sh --dry-run | PP is '0': give a whole number of 1 or more
NNODES=2 pretrain_gpt.sh --dry-run | MASTER_ADDR is missing: give the address of the host
NODE_RANK=1 pretrain_gpt.sh --dry-run | NODE_RANK is '1': give a number from 0 to 0
MEGATRON_LM_PATH=new pretrain_gpt.sh | DATA_PATH is missing: give the prefix of a data set, or mock
MEGATRON_LM_PATH=new DATA_PATH=x pretrain_gpt.sh | there is no x.idx or no x.bin
MEGATRON_LM_PATH=new CONFIG=x pretrain_gpt.sh | CONFIG is 'x', which is no file
MEGATRON_LM_PATH=new DATA_PATH=mock pretrain_gpt.sh --patched --cpu | leave out --patched
pretrain_gpt_slurm.sh | submit
distill_gpt.sh | TEACHER is missing: give the folder of a teacher's checkpoint
TEACHER=x distill_gpt.sh | TEACHER is 'x', which is no folder
TEACHER=old STUDENT=x distill_gpt.sh | STUDENT is 'x', which is no file
TEACHER=old distill_gpt.sh | DATA_PATH is missing: give the prefix of a data set
LR=1 TRAIN_ITERS=x TEACHER=old distill_gpt.sh | TRAIN_ITERS is 'x': give a whole number
"""


@pytest.mark.parametrize(("words", "piece"), rows(SCRIPTS))
def test_scripts(words: str, piece: str, folder: Path) -> None:
    parts = shlex.split(words)
    at = next(i for i, part in enumerate(parts) if part.endswith(".sh"))
    given = dict(part.split("=", 1) for part in parts[:at])
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [ROOT / "scripts" / parts[at], *parts[at + 1 :]],
        env={**kept, **given},
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    one_sentence(done.stderr, parts[at], piece)


# --- all of it

EVERYTHING = [
    *COMMANDS,
    *FILES,
    *TRACES,
    *(row for table in (TRAINING, DISTILLATION, LAUNCH, MODULES, SCRIPTS) for row in rows(table)),
]


def test_there_are_so_many_rows() -> None:
    assert len(EVERYTHING) >= 430
    commands = Counter(words.split()[0] for words, _ in COMMANDS if words)
    commands.update(row[2].split()[0] for row in FILES)
    for name in ("show", "export", "plan", "trace", "flags", "check", "verify", "doctor"):
        assert commands[name] >= 9, name


SAMPLE = [
    ["megatron_zb.cli", *shlex.split(words)]
    for words in (
        "show v-half -p 1000 -m 1000",
        "show v-half -p 4 -m 8 --forward 1e308",
        "export v-half -p 4 -m 999999 --format csv -o x",
        "plan --config gpt_1_5b --gpus 8 --tensor 3",
        "plan --config deep.yaml --gpus 8",
        "show --csv /dev/zero",
        "show --csv sparse.yaml",
        "trace none.yaml",
        "quickstart --data-path nowhere",
    )
] + [
    ["megatron_zb.launch", "nowhere.py"],
]


# Runs a command and prints its seconds and kilobytes: those of a child include its parent's pages.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(code)
"""


@pytest.mark.parametrize("words", SAMPLE, ids=[" ".join(words) for words in SAMPLE])
def test_a_process_ends_soon_and_small(words: list[str], folder: Path) -> None:
    """Processor time, since other processes of a machine take time, too."""
    command = [sys.executable, "-c", _MEASURE, sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    seconds, kilobytes = map(float, done.stdout.split())
    assert seconds < MOST_SECONDS
    assert kilobytes < MOST_KILOBYTES
