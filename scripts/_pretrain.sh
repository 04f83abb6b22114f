# shellcheck shell=bash
# Shared by the pretrain scripts beside it: from variables to the command that trains.
# Sourced, never run. The caller has `set -euo pipefail`.

say() { printf '==> %s\n' "$*"; }

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# whole_number NAME: ends with one sentence unless the variable of that name is a number of 1 or more.
whole_number() {
    [[ ${!1} =~ ^[1-9][0-9]*$ ]] || fail "$1 is '${!1}': give a whole number of 1 or more"
}

# variables_help: what all pretrain scripts read.
variables_help() {
    cat <<'END'
what is trained:
  MEGATRON_LM_PATH    a Megatron-LM checkout (needed)
  CONFIG              a model of configs/models
  SCHEDULE            a pipeline schedule, or none for Megatron's own (default: what CONFIG recommends)
  DATA_PATH           a data set that Megatron-LM's tools/preprocess_data.py has made, or mock (needed)
  TOKENIZER_TYPE      such as HuggingFaceTokenizer (needed with a data set)
  TOKENIZER_MODEL     such as meta-llama/Meta-Llama-3-8B; a model with a published tokenizer gets its
                      vocabulary: with another tokenizer, add --padded-vocab-size N
  TRAIN_ITERS, LR     iterations and learning rate (default 1000 and 1.5e-4)
  SAVE, LOAD          folders of checkpoints

how it is spread:
  TP, PP, EP          tensor-, pipeline- and expert-parallel sizes
  MICRO_BATCH_SIZE    samples of a microbatch (default 1)
  GPUS_PER_NODE       ranks on this host (default 8)
  NNODES, NODE_RANK   hosts of the job, and which this one is (default 1 and 0)
  MASTER_ADDR         address of the host with NODE_RANK 0 (needed with several hosts)
  MASTER_PORT         a free port there (default 29500)
  PYTHON              the Python to use (default python3)

options:
  --dry-run           print the command and run nothing
  --patched           MEGATRON_LM_PATH is a checkout that scripts/apply_patches.sh has patched: run its own
                      pretrain_gpt.py instead of the launcher
  --cpu               on CPU ranks over gloo, to try it out; not with --patched
  -h, --help          this text

All other arguments go to Megatron-LM. Ends with exit status 0 only when the training has.
END
}

# read_options ARGUMENT...: sets dry_run, patched, on_cpu and rest.
read_options() {
    dry_run='' patched='' on_cpu='' rest=()
    while (($#)); do
        case $1 in
            --dry-run) dry_run=yes ;;
            --patched) patched=yes ;;
            --cpu) on_cpu=yes ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
}

# check_words ROOT: ends with one sentence where a word of rest is a flag of which neither the checkout, nor any
# Megatron-LM that is known here, nor this package has anything.
check_words() {
    local word name
    for word in ${rest[@]+"${rest[@]}"}; do
        [[ $word == --* ]] || continue
        word=${word%%=*} name=${word#--}
        grep -qsF -e "${name#no-}" -e "${name//-/_}" "$1/megatron_zb/megatron_lm/arguments.csv" "$1/megatron_zb/job/settings.py" \
            || grep -qrsF --include=*.py -e "$name" -e "${name//-/_}" "$MEGATRON_LM_PATH" \
            || fail "unknown argument '$word': the Megatron-LM in '$MEGATRON_LM_PATH' does not have it, nor does this package"
    done
}

# check_variables ROOT: fills in defaults and ends with one sentence where something is missing.
check_variables() {
    local root=$1 name
    : "${PYTHON:=python3}" "${NNODES:=1}" "${NODE_RANK:=0}" "${GPUS_PER_NODE:=8}" "${MASTER_PORT:=29500}"
    : "${TP:=1}" "${PP:=1}" "${EP:=1}" "${MICRO_BATCH_SIZE:=1}" "${TRAIN_ITERS:=1000}" "${LR:=1.5e-4}"
    for name in NNODES GPUS_PER_NODE MASTER_PORT TP PP EP MICRO_BATCH_SIZE TRAIN_ITERS; do
        whole_number "$name"
    done
    if ! [[ $NODE_RANK =~ ^[0-9]+$ ]] || ((NODE_RANK >= NNODES)); then
        fail "NODE_RANK is '$NODE_RANK': give a number from 0 to $((NNODES - 1))"
    fi
    ((NNODES == 1)) || [[ -n ${MASTER_ADDR-} ]] \
        || fail "MASTER_ADDR is missing: give the address of the host with NODE_RANK 0"
    ((NNODES * GPUS_PER_NODE % (TP * PP) == 0)) \
        || fail "$((NNODES * GPUS_PER_NODE)) ranks cannot be divided by TP $TP times PP $PP"
    [[ -n ${MEGATRON_LM_PATH-} ]] || fail "MEGATRON_LM_PATH is missing: give a Megatron-LM checkout"
    [[ -f $MEGATRON_LM_PATH/pretrain_gpt.py ]] \
        || fail "MEGATRON_LM_PATH is '$MEGATRON_LM_PATH', which has no pretrain_gpt.py"
    [[ -f $CONFIG ]] || fail "CONFIG is '$CONFIG', which is no file: those of this package are in $root/configs/models"
    [[ -n ${DATA_PATH-} ]] || fail "DATA_PATH is missing: give the prefix of a data set, or mock"
    if [[ $DATA_PATH != mock ]]; then
        [[ -f $DATA_PATH.idx && -f $DATA_PATH.bin ]] || fail "DATA_PATH is '$DATA_PATH': there is no $DATA_PATH.idx or no $DATA_PATH.bin"
        [[ -n ${TOKENIZER_TYPE-} ]] || fail "TOKENIZER_TYPE is missing: give the tokenizer of the data set"
    fi
    [[ -z $patched || -z $on_cpu ]] || fail "--cpu is the launcher's: leave out --patched"
    [[ -z $patched ]] || grep -qs megatron_zb -r --include=*.py "$MEGATRON_LM_PATH/megatron/training" \
        || fail "'$MEGATRON_LM_PATH' is not patched: run scripts/apply_patches.sh $MEGATRON_LM_PATH first"
    "$PYTHON" -c 'import megatron_zb' >/dev/null 2>&1 || fail "$PYTHON cannot import megatron_zb: install it, or give PYTHON"
}

# training_command: sets command.
training_command() {
    local model schedule words save_or_load data=()
    [[ $DATA_PATH != mock ]] || data=(--mock-data)
    model=$("$PYTHON" -m megatron_zb.cli flags --config "$CONFIG" ${data[@]+"${data[@]}"}) || exit 2
    mapfile -t model <<<"$model"
    schedule=${SCHEDULE-$("$PYTHON" -m megatron_zb.cli flags --config "$CONFIG" --schedule)} || exit 2
    [[ $schedule != none || -n ${SCHEDULE+given} ]] \
        || say "$CONFIG recommends Megatron's own schedule; SCHEDULE=v-zb or another name runs one of this package" >&2
    command=("$PYTHON" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES")
    if ((NNODES == 1)); then
        command+=(--standalone)
    else
        command+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    fi
    if [[ -n $patched ]]; then
        command+=("$MEGATRON_LM_PATH/pretrain_gpt.py")
    else
        command+=(-m megatron_zb.launch "$MEGATRON_LM_PATH/pretrain_gpt.py")
    fi
    [[ -z $on_cpu ]] || command+=(--cpu)
    command+=("${model[@]}" --micro-batch-size "$MICRO_BATCH_SIZE")
    command+=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP")
    ((TP == 1)) || command+=(--sequence-parallel)
    ((EP == 1)) || command+=(--expert-model-parallel-size "$EP")
    if ((PP > 1)) && [[ -n $schedule && $schedule != none ]]; then
        read -ra words <<<"$schedule"  # the schedule, and flags that are recommended with it
        command+=(--pipeline-schedule "${words[@]}")
    fi
    if [[ $DATA_PATH != mock ]]; then
        command+=(--data-path "$DATA_PATH" --tokenizer-type "$TOKENIZER_TYPE")
        [[ -z ${TOKENIZER_MODEL-} ]] || command+=(--tokenizer-model "$TOKENIZER_MODEL")
    fi
    # In single precision, Megatron's distributed optimizer cannot resume from its own checkpoint.
    [[ -n $on_cpu ]] || command+=(--bf16 --use-distributed-optimizer)
    command+=(--overlap-grad-reduce --split "99,1,0" --ckpt-format torch_dist)
    command+=(--train-iters "$TRAIN_ITERS" --lr "$LR" --lr-decay-style cosine --clip-grad 1.0)
    command+=(--log-interval 1 --eval-interval 100 --eval-iters 10)
    for save_or_load in save load; do
        local name=${save_or_load^^}
        [[ -z ${!name-} ]] || command+=("--$save_or_load" "${!name}")
    done
    [[ -z ${SAVE-} ]] || command+=(--save-interval 100)
    command+=(${rest[@]+"${rest[@]}"})
}

# pretrain ROOT ARGUMENT...: everything.
pretrain() {
    local root=$1
    shift
    read_options "$@"
    check_variables "$root"
    check_words "$root"
    local command
    training_command
    # Megatron-LM wants its kernels in the order in which they were launched.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-1}
    printf '%q ' "${command[@]}"
    printf '\n'
    [[ -z $dry_run ]] || exit 0
    exec "${command[@]}"
}
