#!/usr/bin/env bash
# Builds the documentation as a site, with all links checked; see --help.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/_environment.sh
source scripts/_environment.sh

usage() {
    cat <<'END'
usage: scripts/docs.sh [--serve] [MKDOCS-ARGUMENT ...]

Builds the pages of docs/, README.md and the API from the docstrings into build/site, and ends with exit
status 1 where a link or an anchor leads nowhere. build/site/index.html opens from the disk.

  1. makes a virtual environment (.venv-docs) with the versions pinned in constraints/docs.txt; skipped when
     that has been done and nothing has changed since. The package itself is read, not installed
  2. mkdocs build --strict, which downloads nothing: no fonts, no scripts of others

options:
  --serve      serve them on 127.0.0.1:8000, and build anew what is changed
  -h, --help   this text

Everything else goes to mkdocs.
END
}

action=build
arguments=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        --serve) action=serve ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

check_words "-c --clean --dirty -s --strict --use-directory-urls --no-directory-urls -q --quiet -v --verbose -o --open
    --livereload --no-livereload --watch-theme" "-f --config-file -t --theme -d --site-dir -a --dev-addr -w --watch" \
    ${arguments[@]+"${arguments[@]}"}

venv=.venv-docs constraints=constraints/docs.txt
wanted=$(cksum <"$constraints")
if [[ ! -f $venv/.installed || $(<"$venv/.installed") != "$wanted" ]]; then
    say "making $venv with the versions of $constraints"
    python=$(find_python "$(choose_python)")
    "$python" -m venv --clear "$venv"
    pinned_pip "$venv" "$constraints" --requirement "$constraints"
    printf '%s\n' "$wanted" >"$venv/.installed"
fi

exec env NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" "$action" --strict ${arguments[@]+"${arguments[@]}"}
