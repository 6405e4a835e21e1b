#!/usr/bin/env bash
# Installs what is missing, builds everything with warnings as errors and runs all tests.
#   scripts/test.sh          all tests; those that need a GPU are skipped visibly without one
#   scripts/test.sh --gpu    the GPU tests only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
label=()
case "${1:-}" in
  "") ;;
  --gpu) label=(-L gpu) ;;
  *) sed -n '2,4p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac

step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

step "set-up"
scripts/setup.sh --tests
source .setup.env
ctest=$(dirname "$OSCAR_CMAKE")/ctest

step "layers and formatting"
"$OSCAR_PYTHON" scripts/check_layers.py
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror

step "build: developer preset, warnings are errors"
scripts/build.sh developer

step "tests"
"$ctest" --test-dir build-developer --output-on-failure --no-tests=error -j2 "${label[@]}"

if ((${#label[@]} == 0)); then
  step "clang-tidy"
  scripts/tidy.sh
  step "unit tests below the model under ASan and UBSan"
  scripts/build.sh sanitize
  "$ctest" --test-dir build-sanitize --output-on-failure --no-tests=error -j2 -L unit
  step "programs without CUDA kernels"
  # In the same folder: only sources that see CUDA are compiled again.
  scripts/build.sh developer -DOSCAR_WITH_CUDA=OFF -DOSCAR_BUILD_TESTS=OFF
fi
step "all passed"
