#!/usr/bin/env bash
# Trains a Llama 3 with a pipeline schedule, on one host or many; see --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_pretrain.sh
source "$root/scripts/_pretrain.sh"

usage() {
    cat <<'END'
usage: [VARIABLE=VALUE ...] scripts/pretrain_llama.sh [OPTION ...] [MEGATRON ARGUMENT ...]

Trains Llama 3 8B on 2 tensor-parallel times 4 pipeline ranks; CONFIG=configs/models/llama3_70b.yaml with
other sizes trains the larger one. Run it on every host of the job; it prints the command that it runs.

END
    variables_help
}

case ${1-} in -h | --help) usage; exit ;; esac
: "${CONFIG:=$root/configs/models/llama3_8b.yaml}" "${TP:=2}" "${PP:=4}"
pretrain "$root" "$@"
