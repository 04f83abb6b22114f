#!/usr/bin/env bash
#SBATCH --job-name=llama3-8b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Trains Llama 3 8B on four hosts: fill in the paths, then `sbatch examples/slurm_job.sh` in the root of the
# repository. `bash examples/slurm_job.sh --dry-run` prints the command of the first host; it needs no Slurm.
set -euo pipefail

export MEGATRON_LM_PATH=${MEGATRON_LM_PATH-$HOME/Megatron-LM}
export SCRIPT=scripts/pretrain_llama.sh
export CONFIG=configs/models/llama3_8b.yaml
export PP=4
export DATA_PATH=${DATA_PATH-mock} # or the prefix of a data set, with TOKENIZER_TYPE and TOKENIZER_MODEL
export SAVE=${SAVE-$PWD/runs/llama3-8b}
export LOAD=$SAVE # goes on from the last checkpoint when the job is submitted again

exec "${SLURM_SUBMIT_DIR-$PWD}/scripts/pretrain_gpt_slurm.sh" --pipeline-timeout 300 "$@"
