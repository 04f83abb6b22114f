#!/usr/bin/env bash
# Measures schedules on this machine's GPUs and checks that they train as Megatron does; see --help.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/gpu_check.sh [--output FILE.json] [--python COMMAND] [--carried FOLDER] [--cpu]

Measures this package on a machine with one or more GPUs, in at most ten minutes, without a network:

  1. what stands still on a GPU while a kernel spins, as a receive does until its message comes
  2. what waiting receives do to a matrix product beside them: NCCL's where there are several GPUs
  3. whether v-half, v-zb and zb-h1 train to Megatron's losses and weights, bit for bit: over NCCL where
     there are several GPUs, and on one GPU with messages through the memory of the host
  4. F, B, W and BW of one real layer, Megatron's and Transformer-Engine's: (F+B+W) / (F+BW)
  5. the allocated peak of every rank under v-zb, v-half and v-min, as a share of 1F1B's
  6. on 2 to 8 GPUs, with a model that fills them: tokens per second, the allocated peak and the bubble, from
     the recorded passes, of Megatron's 1F1B, its interleaved schedule with the fastest of 2, 4, ... chunks,
     v-half, v-zb, zb-h1, and auto in the memory of 1F1B; beside each what megatron-zb plan predicts

It prints a table, another one to paste for part 6, and writes one JSON file, without names of hosts and folders. A part that fails
leaves the others alone; what no time is left for is "not measured". Attach the file to an issue or a
discussion of this repository: docs/performance.md has a row for each machine.

The Python needs a torch that sees the GPUs, megatron-core, and what megatron-core imports. Where there is
no network, benchmarks/gpu/run_all.sh --pack makes a folder to carry there.

options:
  --output FILE      the JSON file (default gpu_check.json)
  --python COMMAND   the Python to use (default: that of .venv if there is one, else python3)
  --carried FOLDER   what benchmarks/gpu/run_all.sh --pack has made
  --cpu              tiny sizes on CPU ranks instead: says whether all this works, and nothing about a GPU
  -h, --help         this text

Ends with exit status 0 if nothing failed, 1 if something did, 2 when nothing could be started.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/_environment.sh
source "$root/scripts/_environment.sh"

python=python3
if [[ -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
output=gpu_check.json device=cuda more=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        --cpu) device=cpu; shift; continue ;;
        --output | --python | --carried)
            (($# > 1)) && [[ -n $2 ]] || fail "$1 needs a value, see --help"
            ;;
        *) fail "$1 is not an option of this script, see --help" ;;
    esac
    case $1 in
        --output) output=$2 ;;
        --python) python=$2 ;;
        --carried) more=(--carried "$2") ;;
    esac
    shift 2
done
exec "$root/benchmarks/gpu/run_all.sh" --parts check --called gpu_check.sh \
    --device "$device" --output "$output" --python "$python" "${more[@]}"
