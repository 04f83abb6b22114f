#!/usr/bin/env bash
# Patches a Megatron-LM checkout so that its own scripts take --pipeline-schedule; see --help.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'END'
usage: scripts/apply_patches.sh [--reverse] [--check] MEGATRON_LM

Patches the Megatron-LM checkout in the folder MEGATRON_LM, so that its pretrain scripts, started as
usual, take --pipeline-schedule. Finds the version, and changes nothing unless the whole patch fits. A
version that is newer than all patches gets the newest, and a warning.

options:
  --reverse    take the patch out again
  --check      only say whether the patch fits
  -h, --help   this text

The patched scripts import megatron_zb, so install it into their environment: pip install .
Without --pipeline-schedule a patched checkout runs exactly as it did before.
END
}

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# version_of FOLDER: prints the version of its megatron-core, such as 0.16.1; nothing if there is none.
version_of() {
    local file=$1/megatron/core/package_info.py
    [[ -f $file ]] || return 0
    sed -n -E 's/^(MAJOR|MINOR|PATCH) = ([0-9]+)$/\2/p' "$file" | paste -s -d .
}

# series_of VERSION: prints 0.16 of 0.16.1.
series_of() { cut -d . -f 1,2 <<<"$1"; }

# newest VERSION...: prints the newest of some versions.
newest() { printf '%s\n' "$@" | sort -V | tail -n 1; }

# patch_for VERSION: prints the patch for its series, or the newest one if all are older, or ends with one sentence.
patch_for() {
    local patch known=()
    for patch in "$here"/patches/core_v*.patch; do
        local version=${patch##*/core_v}
        version=${version%.patch}
        known+=("$version")
        if [[ $(series_of "$version") == "$(series_of "$1")" ]]; then
            printf '%s\n' "$patch"
            return
        fi
    done
    if [[ $(newest "${known[@]}" "$1") == "$1" ]]; then
        printf "%s: warning: the Megatron-LM in '%s' has version %s, which is newer than all that were checked: %s\n" \
            "$(basename "$0")" "$checkout" "$1" "the patch for core_v$(newest "${known[@]}") is taken" >&2
        printf '%s/patches/core_v%s.patch\n' "$here" "$(newest "${known[@]}")"
        return
    fi
    fail "the Megatron-LM in '$checkout' has version $1, which no patch here is for:" \
        "there are patches for core_v$(joined="${known[*]}"; printf '%s' "${joined// / and core_v}")"
}

# fits ARGUMENT...: whether git could apply the patch with these arguments.
fits() { git -C "$checkout" apply --check "$@" "$patch" 2>/dev/null; }

checkout='' reverse='' check=''
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        --reverse) reverse=--reverse ;;
        --check) check=yes ;;
        -*) fail "unknown option $1: --help lists the options" ;;
        *)
            [[ -z $checkout ]] || fail "give one Megatron-LM checkout, not both '$checkout' and '$1'"
            checkout=$1
            ;;
    esac
    shift
done

[[ -n $checkout ]] || fail "give the path of a Megatron-LM checkout"
[[ -d $checkout ]] || fail "there is no folder '$checkout': give the path of a Megatron-LM checkout"
command -v git >/dev/null || fail "git, which applies the patch, is not installed"
checkout=$(cd "$checkout" && pwd)
version=$(version_of "$checkout")
[[ -n $version ]] || fail "'$checkout' is not a Megatron-LM checkout: it has no megatron/core/package_info.py"
patch=$(patch_for "$version")
name=$(basename "$patch")

# git applies paths relative to the root of a repository, even from a folder inside it
GIT_CEILING_DIRECTORIES=$(dirname "$checkout")
export GIT_CEILING_DIRECTORIES

if [[ -n $reverse ]]; then
    fits --reverse || fail "'$checkout' has not been patched with $name, or has been changed since"
    done="taken out of"
else
    ! fits --reverse || fail "'$checkout' has been patched already; --reverse takes the patch out"
    fits || fail "$name does not fit '$checkout' (version $version): its megatron/training has been changed"
    done="applied to"
fi
if [[ -n $check ]]; then
    printf '%s fits %s (version %s)\n' "$name" "$checkout" "$version"
    exit
fi
git -C "$checkout" apply ${reverse:+"$reverse"} "$patch"
printf '%s %s %s (version %s)\n' "$name" "$done" "$checkout" "$version"
