#!/usr/bin/env bash
# Distils a library of blocks on 2 CPU ranks, chooses one for each layer and trains the student; see --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

usage() {
    cat <<'END'
usage: [PYTHON=python3] scripts/block_library.sh [FOLDER]

Takes 5 minutes on 2 CPU cores. In FOLDER (default runs/blocks):

  1. trains a teacher of 6 layers on the source code of Python's standard library
  2. distils a library of 3 candidates for each layer, and a uniform student, as many steps each
  3. chooses one block of teacher or library for each layer, with 60 % of the weights of the layers
  4. trains both students end to end, equally long, and prints held-out losses before and after

A second run in the same FOLDER continues with what is missing there.
END
}

for word in "$@"; do
    case $word in
        -h | --help) usage; exit ;;
        -*) fail "unknown argument '$word': --help lists what there is" ;;
    esac
done
(($# < 2)) || fail "give one FOLDER, not both '$1' and '$2'"
python=${PYTHON:-python3} folder=${1:-runs/blocks} hidden=96
export OMP_NUM_THREADS=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

"$python" -c 'import megatron_zb' >/dev/null 2>&1 || fail "$python cannot import megatron_zb: install it, or give PYTHON"

on_ranks() { "$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m "$@"; }

model=(--cpu --num-layers 6 --hidden-size "$hidden" --num-attention-heads 6 --seq-length 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --micro-batch-size 8 --global-batch-size 16)
text=(--data-path "$folder/text" --eval-iters 8 --split "90,10,0" --lr-decay-style cosine)

# train NAME ARGUMENT...: trains or evaluates, logs to NAME.jsonl, and does nothing if that is done.
train() {
    local name=$1
    shift
    [[ ! -e $folder/$name.done ]] || return 0
    rm -f "$folder/$name.jsonl"
    on_ranks megatron_zb.train "${model[@]}" "${text[@]}" --log-file "$folder/$name.jsonl" "$@"
    touch "$folder/$name.done"
}

# distil NAME: trains the candidates of NAME.yaml.
distil() {
    on_ranks megatron_zb.distill --cpu --teacher-load "$folder/teacher" "${text[@]}" \
        --student-config "$folder/$1.yaml" --save-library "$folder/$1" --train-iters 100 --lr 2e-3 \
        --micro-batch-size 4 --global-batch-size 16 --log-interval 50
}

# student NAME ARGUMENT...: evaluates a student, and trains it end to end.
student() {
    local name=$1
    shift
    train "$name-before" --load "$folder/$name-student" --finetune --skip-train --train-iters 1 --lr 0 "$@"
    train "$name-after" --load "$folder/$name-student" --finetune --train-iters 60 --lr 1e-3 \
        --eval-interval 60 --log-interval 20 "$@"
}

mkdir -p "$folder"
[[ -e $folder/text.idx ]] ||
    "$python" "$root/scripts/prepare_text.py" --max-bytes 4000000 --output-prefix "$folder/text"
train teacher --ffn-hidden-size "$hidden" --train-iters 400 --lr 4e-3 --save "$folder/teacher" \
    --eval-interval 400 --log-interval 100

cat >"$folder/library.yaml" <<'END'
name: three candidates a layer
candidates:
  - {name: narrow, mlp: {ffn_hidden_size: 6}}
  - {name: third, mlp: {ffn_hidden_size: 34}}
  - {name: no-attention, attention: {kind: no_op}}
END
# 4 matrices of attention, and 3 of an MLP with 1/16 of the width: 60 % of the teacher's weights
cat >"$folder/uniform.yaml" <<'END'
name: all layers alike
candidates:
  - {name: narrow, mlp: {ffn_hidden_size: 6}}
END
distil library
distil uniform
choose=("$python" -m megatron_zb.distill.choice --parameters 60%)
"${choose[@]}" --library "$folder/library" --output "$folder/choice.json" --save-student "$folder/chosen-student"
student chosen --ffn-hidden-size "$hidden" \
    --heterogeneous-layers-config-path "$folder/chosen-student/layers.json"
"${choose[@]}" --library "$folder/uniform" --save-student "$folder/uniform-student"
student uniform --ffn-hidden-size 6

"$python" - "$folder" <<'END'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
def loss(name):
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line][-1]
print(f"held-out loss of the teacher: {loss('teacher'):.4f}")
for name in ("chosen", "uniform"):
    before, after = loss(f"{name}-before"), loss(f"{name}-after")
    print(f"{name} student: {before:.4f}, after training end to end {after:.4f}")
END
