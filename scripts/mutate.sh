#!/usr/bin/env bash
# Measures the tests: breaks the package at places that a seed draws, one at a time; see --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/_environment.sh
source scripts/_environment.sh

check_words "-h --help --nearby --wider" "--draw --seed --only --share --seconds --processes" "$@"
version=$(choose_python)
venv=$(environment_name "$version")
ensure_environment "$venv" "$version" test
ensure_transformer_engine "$venv"
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
exec "$venv/bin/python" tests/support/mutate.py "$@"
