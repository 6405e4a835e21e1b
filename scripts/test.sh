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

# Tests run side by side: threads of one that wait must not keep those of another from working.
export OMP_WAIT_POLICY=PASSIVE

step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

step "set-up"
scripts/setup.sh --tests
source .setup.env
ctest=$(dirname "$OSCAR_CMAKE")/ctest

step "layers and formatting"
"$OSCAR_PYTHON" scripts/check_layers.py
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror
git ls-files '*.py' | xargs -r "$OSCAR_PYTHON" -m py_compile

if ((${#label[@]} == 0)); then
  step "build: programs without CUDA kernels"
  # In the folder of the next step, which compiles again only what sees CUDA.
  scripts/build.sh developer -DOSCAR_WITH_CUDA=OFF -DOSCAR_BUILD_TESTS=OFF
fi

step "build: developer preset, warnings are errors"
scripts/build.sh developer

step "tests"
"$ctest" --test-dir build-developer --output-on-failure --no-tests=error -j2 "${label[@]}"

if ((${#label[@]} == 0)); then
  step "clang-tidy, below the model"  # sources that include torch take four times as long
  git ls-files 'lib/oscar/*.cpp' 'apps/common/*.cpp' |
    grep -vE '^lib/oscar/(model|int2|calibrate|eval)/' | xargs scripts/tidy.sh
  step "unit tests below the model under ASan and UBSan"
  scripts/build.sh sanitize
  "$ctest" --test-dir build-sanitize --output-on-failure --no-tests=error -j2 -L unit
fi
step "all passed"
