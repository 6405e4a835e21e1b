#!/usr/bin/env bash
# Installs what is missing, builds with warnings as errors and runs the tests.
#   scripts/test.sh                format and build, as CI does; what needs a GPU is skipped visibly without one
#   scripts/test.sh --stage NAME   one stage; stages can run side by side
#       format     layers, formatting, syntax of Python
#       build      programs and tests, with all CUDA kernels for one architecture and without; all tests
#                  but those of `nightly`
#       tidy       clang-tidy, below the model
#       sanitize   below the model, under ASan and UBSan: unit tests, and every reader of files on
#                  changed inputs, for a minute
#       nightly    tidy, sanitize, the wheel for all GPU architectures, the unit tests of what lies below
#                  the model as released, and tests of what `build` has built that take many minutes
# scripts/gpu.sh runs what needs a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stages=(format build)
case "${1:-} ${2:-}" in
  " ") ;;
  "--stage "format | "--stage "build | "--stage "tidy | "--stage "sanitize | "--stage "nightly) stages=("$2") ;;
  *) sed -n '2,14p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac

# Tests run side by side: threads of one that wait must not keep those of another from working.
export OMP_WAIT_POLICY=PASSIVE
# Some twenty tests import torch or transformers; uv and containers leave them uncompiled, which is
# half of the time that takes.
unset PYTHONDONTWRITEBYTECODE

# What each step took is printed at the end.
steps=() began=()
step() {
  printf '\n== %s (%d s)\n' "$1" "$SECONDS"
  steps+=("$1") began+=("$SECONDS")
}
print_times() {
  began+=("$SECONDS")
  for i in "${!steps[@]}"; do printf '%6d s  %s\n' $((began[i + 1] - began[i])) "${steps[i]}"; done
}

# run_tests FOLDER [OPTION...]
run_tests() {
  "$(dirname "$OSCAR_CMAKE")/ctest" --test-dir "$1" --output-on-failure --no-tests=error -j"$(nproc)" "${@:2}"
}

stage_format() {
  step "layers, formatting, syntax of Python"
  "$OSCAR_PYTHON" scripts/check_layers.py
  git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror
  git ls-files '*.py' | xargs -r "$OSCAR_PYTHON" -m py_compile
}

stage_tidy() {
  step "clang-tidy, below the model"
  scripts/tidy.sh
}

stage_sanitize() {
  step "build: tests and fuzzers below the model, with ASan and UBSan"
  scripts/build.sh sanitize
  step "unit tests under ASan and UBSan"
  run_tests build-sanitize -L unit
  step "readers of files on changed inputs"
  scripts/fuzz.sh --short
}

# The presets for one architecture name Hopper's: `architecture` has the option for another GPU.
architecture=()
if command -v nvidia-smi >/dev/null && capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader); then
  [[ $capability == 9.0* ]] || architecture=(-DOSCAR_CUDA_ARCHITECTURES=native)
fi

stage_build() {
  step "build: what needs no torch, which is installed meanwhile"
  # In the folder of the next steps, which compile again only what sees torch or CUDA.
  scripts/build.sh developer -DOSCAR_WITH_TORCH=OFF -DOSCAR_WITH_CUDA=OFF
  wait "$torch"
  step "build: programs without CUDA kernels"
  scripts/build.sh developer -DOSCAR_WITH_CUDA=OFF --target oscar-calibrate oscar-eval oscar-bundle
  step "build: programs and tests"
  scripts/build.sh developer "${architecture[@]}"
  step "tests"
  run_tests build-developer -LE nightly
}

stage_nightly() {
  stage_tidy
  stage_sanitize
  step "the wheel, with CUDA kernels for all architectures"
  scripts/build_wheel.sh "$(mktemp -d)"
  step "unit tests of what lies below the model, as released; each source alone"
  scripts/build.sh developer -DCMAKE_UNITY_BUILD=OFF "-DCMAKE_CXX_FLAGS_RELEASE=-O3 -D_GLIBCXX_ASSERTIONS" \
    "${architecture[@]}"
  run_tests build-developer -R core_tests
  step "tests that take many minutes"
  run_tests build-developer -L nightly
}

step "set-up"
scripts/setup.sh --tests --without-torch
source .setup.env
if [[ " ${stages[*]} " == *" build "* ]]; then
  { scripts/setup.sh --tests && scripts/setup_vllm.sh; } &
  torch=$!
  trap 'wait' EXIT
fi
for stage in "${stages[@]}"; do "stage_$stage"; done
printf '\n== all passed in %d s\n' "$SECONDS"
print_times
