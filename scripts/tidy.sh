#!/usr/bin/env bash
# clang-tidy (.clang-tidy) on the sources of the programs and layers: scripts/tidy.sh [FILE...]
# Reads the command lines of the developer build, which has to be configured.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# clang can't read g++'s precompiled headers; every source names its includes itself.
commands=build-developer/tidy
mkdir -p "$commands"
sed -E 's/-Winvalid-pch -include [^ ]*cmake_pch\.hxx//' build-developer/compile_commands.json \
  >"$commands/compile_commands.json"
files=("$@")
((${#files[@]} > 0)) || mapfile -t files < <(git ls-files 'lib/*.cpp' 'apps/*.cpp' 'kernels/torch/*.cpp')
command -v clang-tidy >/dev/null || { echo "tidy: clang-tidy is missing: scripts/setup.sh --tests"; exit 1; }
# Left out: the count of warnings in system headers, which are not shown.
printf '%s\n' "${files[@]}" | xargs -P "$(nproc)" -n 2 clang-tidy -p "$commands" --quiet \
  2> >(grep -v 'warnings generated' >&2) || { echo "tidy: see the warnings above"; exit 1; }
echo "tidy: ${#files[@]} sources are clean"
