#!/usr/bin/env bash
#SBATCH --job-name=gpu-check
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=00:20:00
#SBATCH --output=%x-%j.log
# Measures the schedules on the GPUs of one host: `sbatch examples/slurm_gpu_check.sh` in the root of the repository.
# The log has the table, gpu_check-JOB.json the figures. `sbatch --gpus-per-node=4` takes fewer GPUs, and what follows
# the script goes to scripts/gpu_check.sh, such as --python COMMAND.
set -euo pipefail

cd "${SLURM_SUBMIT_DIR-$PWD}"
exec scripts/gpu_check.sh --output "gpu_check-${SLURM_JOB_ID-local}.json" "$@"
