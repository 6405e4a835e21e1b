#!/usr/bin/env bash
# Installs what OSCAR Toolkit needs to build and run, and writes the build environment to .setup.env.
# Safe to run again: what is there already is left alone, and a second run takes seconds.
#
#   scripts/setup.sh                    what the programs need
#   scripts/setup.sh --tests            also the independent references that the tests compare with
#   scripts/setup.sh --without-torch    what builds everything below the model
#
# OSCAR_PYTHON names a Python whose torch is to be used instead of a virtual environment here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Python packages are those of scripts/locked, by version and sha256.
TORCH_VERSION=$(sed -n 's/^torch = \["torch==\(.*\)"\]$/\1/p' scripts/locked/pyproject.toml)
SYSTEM_PACKAGES=(g++ make pkg-config ccache git libhdf5-dev libeigen3-dev
  libopenblas-dev libcli11-dev libfmt-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev zlib1g-dev
  libssl-dev python3-venv)
TEST_SYSTEM_PACKAGES=(libgtest-dev libgmock-dev clang clang-format libclang-rt-dev)

with_tests=0 with_torch=1
for argument in "$@"; do
  case "$argument" in
    --tests) with_tests=1 ;;
    --without-torch) with_torch=0 ;;
    *) sed -n '2,9p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
done

say() { printf 'setup: %s\n' "$*"; }

# One set-up at a time, for stages of the tests that start side by side.
exec 9>.setup.lock
! command -v flock >/dev/null || flock 9

install_system_packages() {
  local wanted=("${SYSTEM_PACKAGES[@]}") missing=() package
  ((with_tests)) && wanted+=("${TEST_SYSTEM_PACKAGES[@]}")
  if ! command -v dpkg-query >/dev/null; then
    say "this is no Debian or Ubuntu system; make sure these are installed: ${wanted[*]}"
    return
  fi
  for package in "${wanted[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
      missing+=("$package")
  done
  ((${#missing[@]} == 0)) && return
  say "installing system packages: ${missing[*]}"
  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || { say "no root and no sudo: ask for these packages"; exit 1; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null
}

has_torch() {
  "$1" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$TORCH_VERSION')" \
    2>/dev/null
}

# Sets `python`: one that has the pinned torch, or .venv's, where install_torch puts it.
choose_python() {
  for python in "${OSCAR_PYTHON:-}" "$PWD/.venv/bin/python" python3; do
    if [[ -n $python ]] && command -v "$python" >/dev/null && has_torch "$python"; then
      python=$(command -v "$python")
      return
    fi
  done
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  python=$PWD/.venv/bin/python
}

install_torch() {
  has_torch "$python" && return
  say "installing torch $TORCH_VERSION into .venv (about 5 GB with its CUDA libraries)"
  scripts/install.sh "$python" torch
}

version_at_least() { [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1) == "$1" ]]; }

# Sets `cmake`: the system's when recent enough for CUDA 13 with C++20, else the one from PyPI.
choose_cmake() {
  if command -v cmake >/dev/null && command -v ninja >/dev/null &&
    version_at_least 3.28 "$(cmake --version | sed -n 's/^cmake version //p')"; then
    cmake=$(command -v cmake)
    ninja=$(command -v ninja)
    return
  fi
  scripts/install.sh "$python" --missing build
  local scripts
  scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
  cmake=$scripts/cmake
  ninja=$scripts/ninja
}

# Sets `nvcc`: CUDA 13's, from the system or, with a GPU present or for tests, from PyPI.
choose_nvcc() {
  for nvcc in "${CUDACXX:-}" /usr/local/cuda/bin/nvcc "$(command -v nvcc || true)"; do
    [[ -n $nvcc && -x $nvcc ]] && "$nvcc" --version | grep -q 'release 13' && return
  done
  nvcc=
  if ((!with_tests)) && ! command -v nvidia-smi >/dev/null; then return; fi
  scripts/install.sh "$python" --missing cuda
  local toolkit
  toolkit=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
  [[ -e $toolkit/lib64 ]] || ln -s lib "$toolkit/lib64"
  [[ -e $toolkit/lib/libcudart.so ]] || ln -s libcudart.so.13 "$toolkit/lib/libcudart.so"
  [[ -e $toolkit/lib/libnvrtc.so ]] || ln -s libnvrtc.so.13 "$toolkit/lib/libnvrtc.so"
  nvcc=$toolkit/bin/nvcc
}

# Sets `clang_tidy`, for tests.
choose_clang_tidy() {
  clang_tidy=
  if ((!with_tests)); then return; fi
  scripts/install.sh "$python" --missing tidy
  clang_tidy=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clang-tidy
}

install_system_packages
choose_python
choose_cmake
choose_nvcc
choose_clang_tidy

cat >.setup.env <<ENVIRONMENT
# Written by scripts/setup.sh; read by the other scripts.
export OSCAR_PYTHON='$python'
export OSCAR_CMAKE='$cmake'
export OSCAR_NINJA='$ninja'
export CUDACXX='$nvcc'
export OSCAR_CLANG_TIDY='$clang_tidy'
ENVIRONMENT
if [[ -n $nvcc ]]; then compiler="CUDA from $nvcc"; else compiler="no CUDA compiler"; fi
if ((!with_torch)); then
  say "ready below the model ($compiler)"
  exit
fi
install_torch
if ((with_tests)); then
  scripts/install.sh "$python" --missing tests pyright
fi
say "ready (torch from $python, $compiler)"
