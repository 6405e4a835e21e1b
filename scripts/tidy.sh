#!/usr/bin/env bash
# clang-tidy (.clang-tidy) on what CI checks, or on the sources that are named: scripts/tidy.sh [FILE...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .setup.env
[[ -x ${OSCAR_CLANG_TIDY:-} ]] || { echo "tidy: clang-tidy is missing: scripts/setup.sh --tests"; exit 1; }
if (($# == 0)); then
  # Everything below the model; sources that include torch take four times as long.
  exec scripts/build.sh tidy
fi
# A folder of its own, where the model's layers have command lines too.
"$OSCAR_CMAKE" --preset tidy -B build-tidy/sources -DCMAKE_MAKE_PROGRAM="$OSCAR_NINJA" \
  -DPython3_EXECUTABLE="$OSCAR_PYTHON" -DOSCAR_WITH_TORCH=ON >build-tidy.log 2>&1 ||
  { cat build-tidy.log; exit 1; }
# Left out: the count of warnings in system headers, which are not shown.
printf '%s\n' "$@" | xargs -P "$(nproc)" -n 2 "$OSCAR_CLANG_TIDY" -p build-tidy/sources --quiet \
  2> >(grep -v 'warnings\? generated' >&2) || { echo "tidy: see the warnings above"; exit 1; }
echo "tidy: $# sources are clean"
