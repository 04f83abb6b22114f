#!/usr/bin/env bash
# Distils a GPT block by block (Pipe-BD), on one host or many; see --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

usage() {
    cat <<'END'
usage: [VARIABLE=VALUE ...] scripts/distill_gpt.sh [OPTION ...] [ARGUMENT ...]

Trains the blocks of a student on what the blocks of a teacher read and say, and writes the stitched
student as a checkpoint of Megatron. Run it on every host of the job; it prints the command that it runs.

  python scripts/prepare_text.py --max-bytes 4000000 --output-prefix runs/text
  torchrun --nproc-per-node 2 -m megatron_zb.train --cpu --pipeline-model-parallel-size 2 \
      --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --data-path runs/text \
      --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --save runs/teacher
  TEACHER=runs/teacher DATA_PATH=runs/text GPUS_PER_NODE=2 TRAIN_ITERS=10 scripts/distill_gpt.sh --cpu

what is trained:
  TEACHER             a torch_dist checkpoint of a GPT (needed)
  STUDENT             shapes of the student's blocks (default configs/students/half_mlp.yaml)
  DATA_PATH           prefix of a data set in Megatron's format (needed)
  TRAIN_ITERS, LR     steps and learning rate (default 1000 and 1e-3)
  MICRO_BATCH_SIZE    samples of a microbatch (default 1)
  GLOBAL_BATCH_SIZE   samples of a step (default 8 microbatches)
  DISTRIBUTION        which blocks run on how many ranks, as 0-3:1,4-7:2 (default: timed and chosen)
  SAVE, LOAD          folders of the distillation's own checkpoints
  SAVE_STUDENT        folder of the finished student (default runs/student)

how it is spread:
  GPUS_PER_NODE       ranks on this host (default 8)
  NNODES, NODE_RANK   hosts of the job, and which this one is (default 1 and 0)
  MASTER_ADDR         address of the host with NODE_RANK 0 (needed with several hosts)
  MASTER_PORT         a free port there (default 29500)
  PYTHON              the Python to use (default python3)

options:
  --dry-run           print the command and run nothing
  --cpu               on CPU ranks over gloo, in float32; bfloat16 on GPUs otherwise
  -h, --help          this text

All other arguments go to python -m megatron_zb.distill. Ends with exit status 0 only when the
distillation has.
END
}

# read_options ARGUMENT...: sets dry_run, on_cpu and rest.
read_options() {
    dry_run='' on_cpu='' rest=()
    while (($#)); do
        case $1 in
            -h | --help) usage; exit ;;
            --dry-run) dry_run=yes ;;
            --cpu) on_cpu=yes ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
}

# check_variables: fills in defaults and ends with one sentence where something is missing.
check_variables() {
    local name
    : "${PYTHON:=python3}" "${NNODES:=1}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_PORT:=29500}"
    : "${STUDENT:=$root/configs/students/half_mlp.yaml}" "${SAVE_STUDENT:=runs/student}"
    : "${MICRO_BATCH_SIZE:=1}" "${TRAIN_ITERS:=1000}" "${LR:=1e-3}"
    for name in NNODES GPUS_PER_NODE MASTER_PORT MICRO_BATCH_SIZE TRAIN_ITERS; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}': give a whole number of 1 or more"
    done
    : "${GLOBAL_BATCH_SIZE:=$((8 * MICRO_BATCH_SIZE))}"
    if ! [[ $NODE_RANK =~ ^[0-9]+$ ]] || ((NODE_RANK >= NNODES)); then
        fail "NODE_RANK is '$NODE_RANK': give a number from 0 to $((NNODES - 1))"
    fi
    ((NNODES == 1)) || [[ -n ${MASTER_ADDR-} ]] \
        || fail "MASTER_ADDR is missing: give the address of the host with NODE_RANK 0"
    [[ -n ${TEACHER-} ]] || fail "TEACHER is missing: give the folder of a teacher's checkpoint"
    [[ -d $TEACHER ]] || fail "TEACHER is '$TEACHER', which is no folder: give that of a teacher's checkpoint"
    [[ -f $STUDENT ]] || fail "STUDENT is '$STUDENT', which is no file: those of this package are in $root/configs/students"
    [[ -n ${DATA_PATH-} ]] || fail "DATA_PATH is missing: give the prefix of a data set"
    [[ -f $DATA_PATH.idx && -f $DATA_PATH.bin ]] \
        || fail "DATA_PATH is '$DATA_PATH': there is no $DATA_PATH.idx or no $DATA_PATH.bin"
    "$PYTHON" -c 'import megatron_zb' >/dev/null 2>&1 || fail "$PYTHON cannot import megatron_zb: install it, or give PYTHON"
}

# distillation_command: sets command, after its words are known to be understood.
distillation_command() {
    local words parse='import sys
from megatron_zb.cli.ending import ended
from megatron_zb.distill.flags import parser
sys.exit(ended(sys.argv[1], lambda: parser().parse_args(sys.argv[2:]) and 0))'
    words=(--teacher-load "$TEACHER" --student-config "$STUDENT")
    if [[ -n $on_cpu ]]; then words+=(--cpu); else words+=(--bf16); fi
    words+=(--data-path "$DATA_PATH" --split "99,1,0" --eval-iters 10)
    words+=(--micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE")
    words+=(--train-iters "$TRAIN_ITERS" --lr "$LR" --lr-decay-style cosine)
    [[ -z ${DISTRIBUTION-} ]] || words+=(--distribution "$DISTRIBUTION")
    [[ -z ${LOAD-} ]] || words+=(--load "$LOAD")
    [[ -z ${SAVE-} ]] || words+=(--save "$SAVE" --save-interval 100)
    words+=(--save-student "$SAVE_STUDENT" ${rest[@]+"${rest[@]}"})
    "$PYTHON" -c "$parse" "$(basename "$0")" "${words[@]}" || exit 2
    command=("$PYTHON" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES")
    if ((NNODES == 1)); then
        command+=(--standalone)
    else
        command+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    fi
    command+=(-m megatron_zb.distill "${words[@]}")
}

read_options "$@"
check_variables
distillation_command
printf '%q ' "${command[@]}"
printf '\n'
[[ -z $dry_run ]] || exit 0
exec "${command[@]}"
