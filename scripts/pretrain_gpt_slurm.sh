#!/usr/bin/env bash
#SBATCH --job-name=pretrain-gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Trains a GPT with a pipeline schedule on the hosts of a Slurm job; see --help.
set -euo pipefail

usage() {
    cat <<'END'
usage: [VARIABLE=VALUE ...] sbatch [--nodes N] [--gpus-per-node N] scripts/pretrain_gpt_slurm.sh \
           [OPTION ...] [MEGATRON ARGUMENT ...]

Runs scripts/pretrain_gpt.sh once on every host of the job, with hosts, ranks and the first host's
address filled in from Slurm; its variables and options are told by scripts/pretrain_gpt.sh --help. Submit
it from the root of this repository.

  SCRIPT       another of the pretrain scripts, such as scripts/pretrain_llama.sh
  CONTAINER    an image for srun's --container-image, if it is to run in one
  MOUNTS       for --container-mounts, such as /data:/data

  --dry-run    print the command of the first host and run nothing; needs no Slurm
  -h, --help   this text
END
}

fail() {
    printf 'pretrain_gpt_slurm.sh: error: %s\n' "$*" >&2
    exit 2
}

case ${1-} in -h | --help) usage; exit ;; esac
root=${SLURM_SUBMIT_DIR-$PWD} # sbatch runs a copy of this file
script=$root/${SCRIPT-scripts/pretrain_gpt.sh}
[[ -x $script ]] || fail "there is no $script: submit from the root of the repository"

export NNODES=${SLURM_JOB_NUM_NODES-${NNODES-2}}
export GPUS_PER_NODE=${SLURM_GPUS_ON_NODE-${GPUS_PER_NODE-8}}
export MASTER_PORT=${MASTER_PORT-$((20000 + ${SLURM_JOB_ID-0} % 10000))}
for argument in "$@"; do
    if [[ $argument == --dry-run ]]; then
        export MASTER_ADDR=${MASTER_ADDR-first-host} NODE_RANK=0
        exec "$script" "$@"
    fi
done
[[ -n ${SLURM_JOB_ID-} ]] || fail "this is no Slurm job: submit it with sbatch, or run scripts/pretrain_gpt.sh"
command -v srun >/dev/null || fail "there is no srun on PATH"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
in_container=()
[[ -z ${CONTAINER-} ]] || in_container+=("--container-image=$CONTAINER")
[[ -z ${MOUNTS-} ]] || in_container+=("--container-mounts=$MOUNTS")
# shellcheck disable=SC2016 # SLURM_NODEID is of each host
exec srun --kill-on-bad-exit=1 ${in_container[@]+"${in_container[@]}"} \
    bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' pretrain "$script" "$@"
