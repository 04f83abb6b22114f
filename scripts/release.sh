#!/usr/bin/env bash
# Builds a release, installs it as a user does, and trains with it; see --help.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/_environment.sh
source scripts/_environment.sh

usage() {
    cat <<'END'
usage: scripts/release.sh [--output FOLDER] [--python VERSION] [--tag TAG] [--quick]

Builds what a release has, from the files of the commit that is checked out, and checks it as a user would
meet it:

  1. the release notes: the section of this version in CHANGELOG.md
  2. wheel and sdist (python -m build), checked by twine and by scripts/check_wheel.py, which lists the wheel's
     contents and refuses tests, pictures, caches and absolute paths
  3. the documentation (scripts/docs.sh), in a folder with the version
  4. an installation of the wheel in a new virtual environment, with the pinned versions of constraints/, in a
     temporary folder and with an empty home. There, with no clone on the path: megatron-zb --version, show,
     plan and quickstart, two iterations of megatron_zb.train on two CPU ranks, and, if
     MEGATRON_LM_PATH names a Megatron-LM checkout, two of its pretrain_gpt.py by megatron_zb.launch

Build tools have a temporary environment with the versions of constraints/release.txt. Nothing is uploaded.

options:
  --output FOLDER    where everything goes (default dist); older distributions there are refused
  --python VERSION   3.11 or 3.12; without it, the first of them that is on this machine
  --tag TAG          the tag to release, such as v0.1.0, which has to be that of the version
  --quick            leave out megatron-zb quickstart, which takes ten minutes
  -h, --help         this text

The last lines are the seconds of each step. Ends with exit status 0 only if every step has succeeded.
END
}

output=dist tag='' quick=''
check_words "-h --help --quick" "--output --python --tag" "$@"
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        --quick) quick=yes ;;
        --output=* | --python=* | --tag=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
        --output) output=$2; shift ;;
        --python) version=$2; shift ;;
        --tag) tag=$2; shift ;;
    esac
    shift
done

root=$PWD
release=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megatron_zb/__init__.py)
[[ -n $output ]] || fail "--output needs a folder, for example dist"
[[ -z $tag || $tag == "v$release" ]] || fail "--tag $tag is not v$release, the version in megatron_zb/__init__.py"
commit=$(git rev-parse --verify --quiet --short HEAD 2>/dev/null) || fail "this is no clone: a release is built from a commit"
[[ -z $(git status --porcelain --untracked-files=no) ]] \
    || fail "files differ from the commit that is checked out: commit them, or git stash"
mkdir -p "$output" || fail "--output $output cannot be made"
output=$(cd "$output" && pwd)
! compgen -G "$output/megatron_zb-*" >/dev/null || fail "$output has distributions: remove them, or give another --output"
if [[ -z ${version+given} ]]; then version=$(choose_python); fi
[[ -n $version ]] || fail "--python needs a version, for example 3.12"
constraints=$root/$(constraints_for "$version")
python=$(find_python "$version")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
took=()

# step NAME COMMAND...: runs a step and notes its seconds.
step() {
    local begun=$SECONDS
    say "$1"
    "${@:2}"
    took+=("$(printf '%5d s  %s' $((SECONDS - begun)) "$1")")
}

write_notes() {
    awk -v heading="## [$release]" 'index($0, heading) == 1 { on = 1; next } /^## \[/ { on = 0 } on' CHANGELOG.md \
        | sed '/./,$!d' >"$output/release-notes.md"
    [[ -s $output/release-notes.md ]] || fail "CHANGELOG.md has no section '## [$release]'"
}

build_distributions() {
    local tools=$scratch/tools
    "$python" -m venv "$tools"
    pinned_pip "$tools" constraints/release.txt --requirement constraints/release.txt
    mkdir "$scratch/tree"
    git archive "$commit" | tar --extract --directory "$scratch/tree" # without what git does not have
    "$tools/bin/python" -m build --no-isolation --outdir "$output" "$scratch/tree" >"$scratch/build.log" 2>&1 \
        || { tail -n 20 "$scratch/build.log" >&2; fail "the distributions could not be built"; }
    wheel=$(printf '%s\n' "$output/megatron_zb-$release"-*.whl)
    "$tools/bin/python" -m twine --no-color check --strict "$output"/megatron_zb-*
    "$tools/bin/python" scripts/check_wheel.py "$wheel"
}

build_docs() {
    scripts/docs.sh --quiet --site-dir "$output/docs/$release"
    tar --create --gzip --file "$output/megatron_zb-$release-docs.tar.gz" --directory "$output/docs" "$release"
}

install_wheel() {
    local extras=plots,fast
    [[ -z ${MEGATRON_LM_PATH-} ]] || extras+=,megatron-lm
    "$python" -m venv "$scratch/venv"
    mkdir "$scratch/home" "$scratch/work"
    pinned_pip "$scratch/venv" "$constraints" "${wheel}[$extras]"
}

# as_user COMMAND...: runs what the wheel has installed, in an empty folder, with an empty home and no clone on the path.
as_user() {
    (cd "$scratch/work" && env -i PATH="$scratch/venv/bin:/usr/bin:/bin" HOME="$scratch/home" LANG=C.UTF-8 \
        OMP_NUM_THREADS=1 "$@" </dev/null)
}

check_commands() {
    [[ $(as_user megatron-zb --version) == "megatron-zb $release" ]] || fail "megatron-zb --version is not $release"
    as_user python -c 'import megatron_zb, sys; sys.exit(not megatron_zb.__file__.startswith(sys.prefix))' \
        || fail "megatron_zb is not imported from the wheel"
    as_user megatron-zb show v-half -p 4 -m 8
    as_user megatron-zb plan --config gpt_1_5b --gpus 8 --schedules v-half,v-zb --top 3
}

# two_iterations MODULE ARGUMENT...: trains on two CPU ranks.
two_iterations() {
    as_user torchrun --standalone --nproc-per-node 2 -m "$@" --cpu --mock-data \
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 \
        --global-batch-size 4 --train-iters 2 --lr 1e-3 --pipeline-model-parallel-size 2 --pipeline-schedule v-half
}

train() { two_iterations megatron_zb.train --vocab-size 256; }

launch() {
    two_iterations megatron_zb.launch "$MEGATRON_LM_PATH/pretrain_gpt.py" --max-position-embeddings 64 \
        --tokenizer-type NullTokenizer --vocab-size 256 --split 90,5,5 --eval-iters 1 --eval-interval 1000
}

step "release notes" write_notes
step "wheel and sdist" build_distributions
step "documentation" build_docs
step "installation of the wheel" install_wheel
step "megatron-zb --version, show, plan" check_commands
step "two iterations of megatron_zb.train" train
if [[ -n ${MEGATRON_LM_PATH-} ]]; then
    step "two iterations of pretrain_gpt.py by megatron_zb.launch" launch
else
    say "NOT RUN: megatron_zb.launch, which needs a Megatron-LM checkout in MEGATRON_LM_PATH"
fi
if [[ -z $quick ]]; then
    step "megatron-zb quickstart" as_user megatron-zb quickstart
else
    say "NOT RUN: megatron-zb quickstart (--quick)"
fi
say "$output has megatron-zb $release, of $commit:"
(cd "$output" && ls -l -- *.whl *.gz release-notes.md)
printf '%s\n' "${took[@]}"
