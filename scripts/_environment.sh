# shellcheck shell=bash
# Shared by the scripts beside it: finds a Python, makes a virtual environment, installs the package.
# Sourced, never run. The caller has `set -euo pipefail` and stands in the root of the repository.

say() { printf '==> %s\n' "$*"; }

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# check_words SWITCHES VALUED ARGUMENT...: ends with one sentence unless every argument is one of the switches, or one
# of the valued options with its value. Both are lists of words; -k stands for -kTEXT, too.
check_words() {
    local switches valued word
    switches=" ${1//$'\n'/ } " valued=" ${2//$'\n'/ } "
    shift 2
    while (($#)); do
        word=${1%%=*}
        if [[ $switches == *" $1 "* ]]; then
            shift
        elif [[ $valued == *" $word "* ]]; then
            [[ $1 == *=* ]] || (($# > 1)) || fail "$1 needs a value, see --help"
            if [[ $1 == *=* ]]; then shift; else shift 2; fi
        elif [[ $1 == -[a-zA-Z]?* && ($valued == *" ${1:0:2} "* || $switches == *" ${1:0:2} "*) ]]; then
            shift
        else
            fail "unknown argument '$1': --help lists what there is"
        fi
    done
}

# is_python COMMAND VERSION: COMMAND is a Python of that version which can make virtual environments.
is_python() {
    "$1" -c "
import ensurepip, sys, venv
sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

# pyenv_python VERSION: prints the newest Python of that version among pyenv's, if pyenv is here.
pyenv_python() {
    command -v pyenv >/dev/null 2>&1 || return 0
    local name
    name=$(pyenv versions --bare 2>/dev/null | grep -E "^${1//./\\.}(\.[0-9]+)?$" | sort -V | tail -n 1) || return 0
    printf '%s/bin/python\n' "$(pyenv prefix "$name")"
}

# python_command VERSION: prints a command for that Python, or fails.
python_command() {
    local candidate
    for candidate in "python$1" python3 python "$(pyenv_python "$1")"; do
        if [[ -n $candidate ]] && is_python "$candidate" "$1"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# no_python VERSION...: ends with one sentence.
no_python() {
    local names
    names=$(printf ' or %s' "$@")
    fail "no Python ${names# or } with the venv and ensurepip modules is on PATH or under pyenv; install one" \
        "(Debian and Ubuntu: python${*: -1} and python${*: -1}-venv)"
}

# find_python VERSION: prints a command for that Python, or ends with one sentence.
find_python() { python_command "$1" || no_python "$1"; }

# choose_python: prints the first version with pins in constraints/ that this machine has, and says which on stderr;
# ends with one sentence if there is none.
choose_python() {
    local version pinned
    mapfile -t pinned < <(printf '%s\n' constraints/py3*.txt | sort -V | sed 's/.*py3\(.*\)\.txt/3.\1/')
    for version in "${pinned[@]}"; do
        if is_python "$(environment_name "$version")/bin/python" "$version" || python_command "$version" >/dev/null; then
            say "Python $version (the first on this machine of ${pinned[*]}; --python VERSION takes another)" >&2
            printf '%s\n' "$version"
            return
        fi
    done
    no_python "${pinned[@]}"
}

# environment_name VERSION [CORE]: prints the folder of the virtual environment for that Python, and for that
# megatron-core if it is not the pinned one.
environment_name() {
    local name=.venv-$1
    if [[ $1 == 3.11 ]]; then name=.venv; fi
    printf '%s\n' "$name${2:+-megatron-$2}"
}

# constraints_for VERSION [CORE]: prints the file of pinned versions for that Python, with that megatron-core in
# place of the pinned one if given, or ends with one sentence.
constraints_for() {
    local file="constraints/py${1//./}.txt" changed=build/py${1//./}-megatron-${2-}.txt
    [[ -f $file ]] || fail "there is no $file, so Python $1 is not one" \
        "this project is tested with; those are the files in constraints/"
    if [[ -n ${2-} ]]; then
        mkdir -p build
        sed "s/^megatron-core==.*/megatron-core==$2/" "$file" >"$changed"
        file=$changed
    fi
    printf '%s\n' "$file"
}

# what_is_installed EXTRA CONSTRAINTS: changes whenever an install would put something else in place.
what_is_installed() {
    { printf '%s\n' "$PWD" "$1"; cat setup.py pyproject.toml megatron_zb/__init__.py "$2"; } | cksum
}

# pinned_pip VENV CONSTRAINTS ARGUMENT...: pip install, with one line for each package it looks at.
pinned_pip() {
    "$1/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --constraint "$2" "${@:3}" </dev/null \
        | sed -n -u -E -e 's/^ *(Collecting [^ ]+).*/    \1/p' -e 's/^(Installing) collected.*/    \1/p' \
        | with_progress
}

# with_progress: prints the lines that it reads, and the elapsed seconds after each 10 s without a line.
with_progress() {
    local line status begun=$SECONDS
    while true; do
        status=0
        IFS= read -r -t "${PROGRESS_SECONDS:-10}" line || status=$?
        if ((status == 0)); then
            printf '%s\n' "$line"
        elif ((status > 128)); then
            printf '    ... %d s\n' $((SECONDS - begun))
        else
            break
        fi
    done
}

# install_package VENV EXTRA CONSTRAINTS: installs this tree, editable, with the pinned versions.
install_package() {
    say "installing megatron-zb[$2] with the versions of $3 (PyTorch is large: the first time takes minutes)"
    pinned_pip "$1" "$3" setuptools
    pinned_pip "$1" "$3" --no-build-isolation --editable ".[$2]"
}

# ensure_environment VENV VERSION EXTRA [CORE]: afterwards VENV has the package, its dependencies and EXTRA.
ensure_environment() {
    local venv=$1 version=$2 extra=$3 constraints python wanted stamp
    constraints=$(constraints_for "$version" "${4-}")
    stamp=$venv/.installed-$extra
    wanted=$(what_is_installed "$extra" "$constraints")
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && is_python "$venv/bin/python" "$version"; then
        return
    fi
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || ! is_python "$venv/bin/python" "$version"; then
        python=$(find_python "$version")
        say "making $venv with Python $version"
        "$python" -m venv --clear "$venv"
    fi
    install_package "$venv" "$extra" "$constraints"
    printf '%s\n' "$wanted" >"$stamp"
}

# ensure_transformer_engine VENV: afterwards VENV/transformer-engine has its Python modules, and
# VENV/transformer-engine-2.14 older ones. Only the tests look for them there: megatron-core would take one
# that it can import for a whole one.
ensure_transformer_engine() {
    local name folder versions
    for name in transformer-engine transformer-engine-2.14; do
        folder=$1/$name versions=constraints/$name.txt
        if cmp --silent "$versions" "$folder/.installed"; then
            continue
        fi
        say "installing the Python modules of Transformer-Engine for its tests ($name)"
        rm -rf "$folder"
        pinned_pip "$1" "$versions" --no-deps --target "$folder" --requirement "$versions"
        cp "$versions" "$folder/.installed"
    done
}

# ensure_trainers VENV: afterwards VENV has Megatron-Bridge, verl and ms-swift, without those of their dependencies that
# no test of them imports.
ensure_trainers() {
    local versions=constraints/trainers.txt installed=$1/.installed-trainers
    if cmp --silent "$versions" "$installed"; then
        return
    fi
    say "installing Megatron-Bridge, verl and ms-swift with the versions of $versions"
    pinned_pip "$1" "$versions" --no-deps --requirement "$versions"
    cp "$versions" "$installed"
}
