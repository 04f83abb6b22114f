#!/usr/bin/env bash
# Trains a mixture of experts with a pipeline schedule, on one host or many; see --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_pretrain.sh
source "$root/scripts/_pretrain.sh"

usage() {
    cat <<'END'
usage: [VARIABLE=VALUE ...] scripts/pretrain_moe.sh [OPTION ...] [MEGATRON ARGUMENT ...]

Trains Qwen3 30B-A3B with its experts on 4 ranks times 4 pipeline ranks, on two hosts with 8 GPUs;
CONFIG=configs/models/deepseek_v3_like.yaml with other sizes trains a larger one. Run it on every host of
the job; it prints the command that it runs.

END
    variables_help
}

case ${1-} in -h | --help) usage; exit ;; esac
: "${CONFIG:=$root/configs/models/qwen3_30b_a3b.yaml}" "${PP:=4}" "${EP:=4}" "${NNODES:=2}"
pretrain "$root" "$@"
