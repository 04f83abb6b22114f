#!/usr/bin/env bash
# Trains a small GPT with several schedules on CPU ranks and compares them; see --help.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/_environment.sh
source scripts/_environment.sh

usage() {
    cat <<'END'
usage: scripts/quickstart.sh [--python VERSION] [--output DIR] [--train-iters N]

Trains a small GPT over 4 pipeline ranks on the CPU, first with upstream Megatron and then with v-half,
v-min, v-zb and zb-h1, and compares losses, gradient norms and activation memory. Needs no GPU.

  1. makes a virtual environment (.venv with Python 3.11, .venv-3.12 with 3.12) and installs the
     package with the pinned versions of constraints/; skipped when that has been done and nothing has
     changed since
  2. runs megatron-zb quickstart, which an installed package has, too. It turns the source code of
     Python's standard library into a data set, DIR/text, and trains 5 times, about a minute each. Then it
     times steps of the same schedules whose stages sleep, half a minute: ranks that share cores fill
     one another's bubbles, ranks that sleep do not

Pictures of the schedules, logs and summary.json are written to DIR.

options:
  --python VERSION   3.11 or 3.12; without it, the first of them that is on this machine
  --output DIR       where pictures, logs and summary.json go (default runs/quickstart)
  --train-iters N    iterations of each run (default 36)
  -h, --help         this text

Ends with exit status 0 only when each schedule had the losses of upstream Megatron, bit for bit, and
its gradient norms but for rounding, when v-half and v-min held the memory that they promise, and
when the loss has fallen.
END
}

arguments=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        --python) version=${2-}; shift $(($# > 1)) ;;
        --python=*) version=${1#*=} ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
check_words "" "--output --train-iters" ${arguments[@]+"${arguments[@]}"}
if [[ -z ${version+given} ]]; then version=$(choose_python); fi
[[ -n $version ]] || fail "--python needs a version, for example 3.12"

venv=$(environment_name "$version")
ensure_environment "$venv" "$version" plots,fast,megatron-lm

exec "$venv/bin/python" -m megatron_zb.cli quickstart ${arguments[@]+"${arguments[@]}"}
