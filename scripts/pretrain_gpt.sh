#!/usr/bin/env bash
# Trains a GPT with a pipeline schedule, on one host or many; see --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_pretrain.sh
source "$root/scripts/_pretrain.sh"

usage() {
    cat <<'END'
usage: [VARIABLE=VALUE ...] scripts/pretrain_gpt.sh [OPTION ...] [MEGATRON ARGUMENT ...]

Trains a model of configs/models with Megatron-LM's own pretrain_gpt.py and a schedule of this package.
Run it on every host of the job; it prints the command that it runs. Without a variable, the model is
configs/models/gpt_6_2b.yaml, on 8 pipeline ranks.

  MEGATRON_LM_PATH=~/Megatron-LM DATA_PATH=mock scripts/pretrain_gpt.sh --dry-run

END
    variables_help
}

case ${1-} in -h | --help) usage; exit ;; esac
: "${CONFIG:=$root/configs/models/gpt_6_2b.yaml}" "${PP:=8}"
pretrain "$root" "$@"
