#!/usr/bin/env bash
# Checks and tests the package in an environment of its own; see --help.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/test.sh [--quick | --faults | --trainers | --everything] [--python VERSION] [--megatron SERIES]
                       [--megatron-main CHECKOUT] [--tests-only] [--full] [--draw SEED] [PYTEST-ARGUMENT ...]

Checks and tests megatron-zb on the CPU; needs no GPU and nothing but a Python and a network.

  1. makes a virtual environment (.venv with Python 3.11, .venv-3.12 with 3.12) and installs the
     package with the pinned versions of constraints/; skipped when that has been done and nothing has
     changed since. A folder of its own in there gets the Python modules of Transformer-Engine, for
     its tests
  2. ruff, mypy and codespell
  3. pytest; the distributed tests run over gloo on CPU ranks

options:
  --quick            a part for the inner loop: the rules of schedules, messages, layers and subpackages, a small model's
                     gradients; no ruff, mypy or codespell
  --python VERSION   3.11 or 3.12, those that constraints/ has pins for: each has its megatron-core, 3.11 has 0.16 and
                     3.12 has 0.19. Without it, the first of them that is on this machine
  --megatron SERIES  a series that patches/ has one for, such as 0.17: with the Python whose pins have it, else with
                     the newest, in an environment of its own, and the version that the patch is for
  --megatron-main CHECKOUT
                     the tests of equality with the Megatron-LM of a checkout that has no release, such as its main
                     branch: with the newest Python, and the checkout's megatron.core in place of the installed one
  --tests-only       no ruff, mypy or codespell
  --full             every combination of schedules, models and ranks, and larger sizes; without it each thing
                     is tried in a few, of the slow ones by a part that the commit draws; the end says how
                     many were not
  --draw SEED        another part of the slow tests, by any text, or all of them (all)
  --faults           all faults that a job may suffer (about 30 minutes), and nothing else; what was seen is
                     written to faults.jsonl
  --trainers         the training steps of Megatron-Bridge, verl and ms-swift, in .venv-trainers with Python 3.12, and
                     nothing else; the first time installs them (minutes)
  --everything       all of it: the ordinary run with --full, all faults, the trainers, and with the Megatron-LM at
                     MEGATRON_LM_PATH, a clone with its tags, all of it on every series of Megatron, with its real
                     pretrain_gpt.py; needs a browser, too, and takes hours
  -h, --help         this text

environment:
  MEGATRON_LM_PATH   a Megatron-LM checkout of the series that is tested, which tests/real_megatron_lm then
                     trains with; without it those tests are skipped

Everything else goes to pytest:
  scripts/test.sh -k validate                 the tests whose names contain "validate"
  scripts/test.sh -x tests/support/test_ranks.py      one file, stop at the first failure

Ends with exit status 0 only when every step passed.
END
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/_environment.sh
source scripts/_environment.sh

# What --quick runs: a minute and a half at most.
readonly GRADIENTS=tests/megatron_core/test_gradient_parity.py::test_gradients_equal_megatrons
readonly QUICK=(
    tests/test_subpackages.py tests/job/test_comparable.py tests/runtime/test_runtime.py tests/runtime/test_device_waits.py
    tests/schedules/test_layout.py tests/distill/test_pipe_bd_schedule.py tests/megatron_lm/test_adapter_of_arguments.py
    tests/schedules/test_schedules.py
    "${GRADIENTS}[2 ranks, tied-1f1b]" "${GRADIENTS}[2 ranks, tied-interleaved]" "${GRADIENTS}[2 ranks, tied-zb-h1]"
    "${GRADIENTS}[2 ranks, tied-v-half]"
    -k 'not auto and not within_its_memory and not brute_force'
)

# What --megatron-main runs: gradients, weights and logs beside Megatron's own schedules.
readonly EQUALITY=(
    tests/megatron_core/test_gradient_parity.py tests/megatron_core/test_feature_matrix.py
    tests/megatron_core/test_random_streams.py tests/megatron_core/test_expert_metrics.py
    tests/real_megatron_lm/test_schedules.py tests/real_megatron_lm/test_checkpoints.py
)

everything() {
    [[ -e ${MEGATRON_LM_PATH-}/.git ]] || fail "--everything needs MEGATRON_LM_PATH, a clone of Megatron-LM with its tags"
    local browser
    browser=$(command -v chromium || command -v google-chrome || command -v microsoft-edge) ||
        fail "--everything needs chromium, google-chrome or microsoft-edge on PATH"
    say "the browser is $browser"
    checkouts=$(mktemp -d)  # not local: the trap is at the end of the script
    trap 'rm -rf "$checkouts"' EXIT
    local core full=(--full)  # with the first alone
    for core in $(cores); do
        git clone --quiet --branch "core_v$core" "$MEGATRON_LM_PATH" "$checkouts/$core"
        MEGATRON_LM_PATH=$checkouts/$core scripts/test.sh --megatron "${core%.*}" --draw all ${full[@]+"${full[@]}"}
        full=()
    done
    scripts/test.sh --tests-only --faults
    scripts/test.sh --trainers
}

# cores: prints the versions of Megatron that there are patches for, such as 0.16.1, the oldest first.
cores() { printf '%s\n' patches/core_v*.patch | sed 's/.*core_v\(.*\)\.patch/\1/' | sort -V; }

# choose_megatron SERIES: sets core and version for that series, or ends with one sentence; core stays empty where
# a Python has pins for it.
choose_megatron() {
    local pins
    core=$(cores | grep "^${1//./\\.}\.[0-9]*$") ||
        fail "--megatron needs a series that there is a patch for, for example 0.16: patches/ is for" \
            "$(cores | paste -s -d ' ')"
    pins=$(grep -l "^megatron-core==${1//./\\.}\." constraints/py3*.txt || true)
    if [[ -n $pins ]]; then core=; else pins=$(printf '%s\n' constraints/py3*.txt | sort -V | tail -n 1); fi
    pins=${pins#*py3}
    version=3.${pins%.txt}
}

# What pytest takes, with the options of its plugins and of tests/conftest.py.
readonly SWITCHES="-x -q -qq -v -vv -s -l -h --full --exitfirst --quiet --verbose --collect-only --co --lf --last-failed
    --ff --failed-first --nf --new-first --sw --stepwise --sw-skip --pdb --trace --showlocals --setup-plan --setup-show
    --fixtures --markers --cache-clear --no-header --no-summary --strict-markers --strict-config --full-trace"
readonly VALUED="-k -m -n -p -o -r -c -W --maxfail --tb --durations --durations-min --deselect --ignore --ignore-glob
    --capture --show-capture --color --basetemp --rootdir --confcutdir --import-mode --junitxml --junit-xml --log-level
    --log-cli-level --log-file --override-ini --pythonwarnings --cache-show --dist --numprocesses --maxprocesses --timeout"

# check_arguments ARGUMENT...: ends with one sentence unless pytest takes every argument: an option, or a test that exists.
check_arguments() {
    local options=() word
    while (($#)); do
        word=${1%%=*}
        if [[ $1 == -* ]]; then
            options+=("$1")
            if [[ " $VALUED " == *[[:space:]]"$word"[[:space:]]* && $1 != *=* ]] && (($# > 1)); then
                options+=("$2")
                shift
            fi
        else
            [[ -e ${1%%::*} ]] || fail "unknown argument '$1': it is no test file, see --help"
        fi
        shift
    done
    check_words "$SWITCHES" "$VALUED" ${options[@]+"${options[@]}"}
}

core=
checks=yes
draw=$(git rev-parse HEAD 2>/dev/null || echo 0)
faults=
quick=
trainers=
arguments=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        --python) version=${2-}; shift $(($# > 1)) ;;
        --python=*) version=${1#*=} ;;
        --megatron) megatron=${2-}; shift $(($# > 1)) ;;
        --megatron=*) megatron=${1#*=} ;;
        --megatron-main) main=${2-}; shift $(($# > 1)) ;;
        --megatron-main=*) main=${1#*=} ;;
        --tests-only) checks=no ;;
        --draw) draw=${2-}; shift $(($# > 1)) ;;
        --draw=*) draw=${1#*=} ;;
        --faults) faults=yes ;;
        --quick) quick=yes checks=no ;;
        --trainers) trainers=yes checks=no ;;
        --everything) everything; exit ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

check_arguments ${arguments[@]+"${arguments[@]}"}
if [[ -n ${megatron+given} ]]; then
    [[ -z ${version+given} ]] || fail "give --megatron or --python, not both: each series has its Python"
    choose_megatron "$megatron"
fi
if [[ -n ${main+given} ]]; then
    [[ -z ${version+given} ]] || fail "give --megatron-main or --python, not both: a checkout needs the newest"
    [[ -e $main/megatron/core/package_info.py ]] ||
        fail "--megatron-main needs a Megatron-LM checkout: there is no megatron/core in '$main'"
    main=$(cd "$main" && pwd)
    version=$(printf '%s\n' constraints/py3*.txt | sort -V | tail -n 1)
    version=${version#*py3} version=3.${version%.txt}
    checks=no
    export MEGATRON_LM_PATH=$main PYTHONPATH=$main
fi
if [[ -n $trainers ]]; then
    [[ -z ${version+given} ]] || fail "leave out --python and --megatron: the trainers have theirs"
    version=3.12
fi
[[ -n $draw ]] || fail "--draw needs a seed, for example 1, or all"
if [[ -z ${version+given} ]]; then version=$(choose_python); fi
[[ -n $version ]] || fail "--python needs a version, for example 3.12"
venv=$(environment_name "$version" "$core")
extras='test'
[[ -z ${MEGATRON_LM_PATH-} ]] || extras=test,megatron-lm
if [[ -n $trainers ]]; then
    venv=.venv-trainers
    ensure_environment "$venv" "$version" test ""
    ensure_transformer_engine "$venv"
    ensure_trainers "$venv"
    arguments+=(tests/trainers)
else
    ensure_environment "$venv" "$version" "$extras" "$core"
    ensure_transformer_engine "$venv"
fi

# Tests start hundreds of interpreters, which would all compile the package anew.
unset PYTHONDONTWRITEBYTECODE
# Tests run on CPU ranks, several per core: no GPU, and one thread each.
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1

if [[ $checks == yes ]]; then
    say "ruff"
    "$venv/bin/python" -m ruff check --quiet .
    "$venv/bin/python" -m ruff format --check --quiet .
    # Several workers would compile the same. mypy leaves a core free.
    "$venv/bin/python" tests/support/compiled_searches.py &
    compiling=$!
    trap 'kill "$compiling" 2>/dev/null || true' EXIT
    say "mypy"
    "$venv/bin/python" -m mypy --no-error-summary
    say "codespell"
    "$venv/bin/codespell"
    say "compiling searches"
    wait "$compiling"
fi
if [[ -n ${main+given} ]]; then
    named=
    for word in ${arguments[@]+"${arguments[@]}"}; do [[ ! -e ${word%%::*} ]] || named=yes; done
    [[ -n $named ]] || arguments+=("${EQUALITY[@]}")
    say "megatron.core and Megatron-LM are the checkout's:" \
        "$(git -C "$main" log -1 --format='%h of %cs' 2>/dev/null || echo 'no commit')"
fi
if [[ -n $quick ]]; then
    arguments=("${QUICK[@]}" ${arguments[@]+"${arguments[@]}"})
elif [[ -z ${arguments[*]-} || ${arguments[*]} == --full ]]; then
    # everything, or of slow tests those that the commit draws: a file to each of several workers, which do not wait
    # for each other; one more than there are cores, for those whose ranks wait
    workers=$(($(getconf _NPROCESSORS_ONLN) + 1))
    arguments+=(-n $((workers < 8 ? workers : 8)) --dist loadfile)
    [[ $draw == all ]] || arguments+=(--draw "$draw")
fi
if [[ -n $faults ]]; then
    export MEGATRON_ZB_FAULTS=$PWD/faults.jsonl
    rm -f "$MEGATRON_ZB_FAULTS"
    arguments+=(tests/faults)
fi
say "pytest"
begin=$SECONDS
"$venv/bin/python" -m pytest ${arguments[@]+"${arguments[@]}"} </dev/null
say "pytest took $((SECONDS - begin)) s${quick:+ (--quick)}"
