#!/usr/bin/env bash
# Measures on one GPU what CI cannot; see --help.
set -euo pipefail

usage() {
    cat <<'END'
usage: benchmarks/gpu/run_all.sh --pack FOLDER [--for VERSION] [--with-numpy] [--python COMMAND]
       benchmarks/gpu/run_all.sh --output FILE.json [--carried FOLDER] [--device cpu] [--python COMMAND]

Asks a machine with one GPU what CI cannot answer, in less than 10 minutes, and writes one JSON file:

  1. benchmarks/gpu/queues.py, with 1 and 8 hardware queues, with lazy and eager loading of kernels:
     what stands still while a kernel spins, as a receive does until its message comes?
  2. benchmarks/gpu/one_gpu_training.py: do two and four ranks that share the GPU train to the losses
     of Megatron's own schedule, also with offload, recomputation, dropout, fp8, experts, unequal
     lengths? Over NCCL, too, if it is 2.31 or newer: LD_PRELOAD can put one before torch's.
  3. benchmarks/gpu/graphs.py: do steps replayed from Transformer-Engine's CUDA graphs give the same?
  4. benchmarks/gpu/random_states.py: does a recomputation draw the masks of the forward?
  5. benchmarks/gpu/quantized_gradients.py: in fp8 and fp4, does W give what a whole backward gives?
  6. benchmarks/split_backward.py and benchmarks/rank_memory.py: time and allocated memory of the split
     backward and of every rank.

Whatever needs Transformer-Engine is measured where it can be imported. Up to four that take
little memory and are not timed run at once.
Each has a time limit; one that hangs is killed with all its processes, and the next one begins. That
machine needs a torch that sees its GPU and this repository, but no network and no installation: what
else is needed is packed before, where there is a network, and carried there.

  1. with a network:   benchmarks/gpu/run_all.sh --pack FOLDER --for 3.12
  2. on the GPU:       benchmarks/gpu/run_all.sh --carried FOLDER --output results.json

options:
  --pack FOLDER      put megatron-core and what is imported with it into a new FOLDER (some 10 MiB)
  --for VERSION      the GPU machine's Python, such as 3.12 (default: the version of --python)
  --with-numpy       pack numpy, too, for a machine whose torch has none (some 20 MiB more)
  --carried FOLDER   what was packed; not needed where this repository and megatron-core are installed
  --output FILE      where the results go; what has been measured is in it if the rest fails
  --device cpu       tiny sizes on a CPU instead: says whether all this works, and nothing about a GPU
  --python COMMAND   the Python to use, the one that has torch on the GPU machine (default python3)
  -h, --help         this text

Ends with exit status 0 only when every benchmark has been measured and every training was right, 1 when
one was not, and 2 when nothing could be started.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=scripts/_environment.sh
source "$root/scripts/_environment.sh"

# Only what is imported, without what it asks for besides: torch is on the machine.
packages=(megatron-core einops packaging psutil rich markdown-it-py mdurl pygments
    pydantic pydantic-core annotated-types typing-extensions typing-inspection pyyaml)
archive=packages.tar.gz
largest=60 # MiB

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# version_of COMMAND: prints the version of a Python, such as 3.12.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null \
        || fail "$1 is not a Python: give --python COMMAND"
}

# pins_for VERSION: prints the file with the tested versions for that Python, or for the next older one.
pins_for() {
    local file files best=''
    mapfile -t files < <(printf '%s\n' "$root"/constraints/py3*.txt | sort -V)
    for file in "${files[@]}"; do
        if [[ -z $best || $(basename "$file" .txt) < "py${1//./}z" ]]; then best=$file; fi
    done
    printf '%s\n' "$best"
}

# platforms: prints pip's options for wheels that run on any Linux with glibc 2.28 or newer.
platforms() {
    local tag
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 \
        manylinux_2_12 manylinux2010 manylinux_2_5 manylinux1; do
        printf -- '--platform\n%s_%s\n' "$tag" "$(uname -m)"
    done
}

# pack PYTHON FOLDER VERSION: fills FOLDER.
pack() {
    local python=$1 folder=$2 version=$3 options size tree
    [[ $version =~ ^3\.[0-9]+$ ]] || fail "--for $version is not a version of Python such as 3.12"
    [[ ! -e $folder || -z $(ls -A "$folder") ]] || fail "$folder is not empty: give --pack a new folder"
    mapfile -t options < <(platforms)
    tree=$scratch/packages
    say "packing ${packages[*]} for Python $version into $folder"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-compile \
        --only-binary=:all: --implementation cp --python-version "$version" "${options[@]}" \
        --ignore-requires-python \
        --constraint "$(pins_for "$version")" --target "$tree" "${packages[@]}" </dev/null \
        || fail "pip could not get the packages for Python $version: its own message says why"
    rm -rf "${tree:?}/bin"
    mkdir -p "$folder"
    tar --create --gzip --file "$folder/$archive" --directory "$tree" .
    size=$(du -sm "$folder" | cut -f 1)
    ((size <= largest)) || fail "$folder has $size MiB, more than the $largest that are meant to be carried"
    say "$folder has $size MiB"
}

python=python3
device=cuda
parts=one-gpu called=run_all.sh # scripts/gpu_check.sh gives others
pack_folder='' carried='' output='' version=''
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        --with-numpy) packages+=(numpy); shift; continue ;;
        --pack | --for | --carried | --output | --device | --python | --parts | --called)
            (($# > 1)) && [[ -n $2 ]] || fail "$1 needs a value, see --help"
            ;;
        *) fail "$1 is not an option of this script, see --help" ;;
    esac
    case $1 in
        --pack) pack_folder=$2 ;;
        --for) version=$2 ;;
        --carried) carried=$2 ;;
        --output) output=$2 ;;
        --device) device=$2 ;;
        --python) python=$2 ;;
        --parts) parts=$2 ;;
        --called) called=$2 ;;
    esac
    shift 2
done

if [[ -n $pack_folder ]]; then
    [[ -z $carried$output ]] || fail "--pack goes alone: give --carried and --output on the GPU machine"
    [[ -n $version ]] || version=$(version_of "$python")
    pack "$python" "$pack_folder" "$version"
    exit
fi
[[ -n $output ]] || fail "give --pack FOLDER where there is a network, or --output FILE on the GPU machine"
[[ $device == cuda || $device == cpu ]] || fail "--device $device is neither cuda nor cpu"
version_of "$python" >/dev/null
path=$root
if [[ -n $carried ]]; then
    [[ -f $carried/$archive ]] || fail "$carried was not made by --pack: there is no $archive in it"
    mkdir "$scratch/packages"
    tar --extract --gzip --file "$carried/$archive" --directory "$scratch/packages" \
        || fail "$carried/$archive is damaged: pack it again"
    "$python" -m compileall -q -j 0 "$scratch/packages" || true # saves every process that time
    path=$scratch/packages:$root
fi

# No fusing by a compiler, for there may be none on the machine.
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 TORCHDYNAMO_DISABLE=1
"$python" "$root/benchmarks/gpu/measurements.py" --parts "$parts" --called "$called" \
    --device "$device" --output "$output"
