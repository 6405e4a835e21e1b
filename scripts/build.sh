#!/usr/bin/env bash
# Configures and builds one CMake preset with what scripts/setup.sh found:
#   scripts/build.sh PRESET [-D...] [--target NAME...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:--} != -* ]] || { sed -n 2,3p scripts/build.sh; exit 2; }
source .setup.env
preset=$1
shift
options=(-DPython3_EXECUTABLE="$OSCAR_PYTHON" -DCMAKE_MAKE_PROGRAM="$OSCAR_NINJA")
if [[ -n $CUDACXX ]]; then
  options+=(-DCMAKE_CUDA_COMPILER="$CUDACXX" -DCUDAToolkit_ROOT="$(dirname "$(dirname "$CUDACXX")")")
else
  options+=(-DOSCAR_WITH_CUDA=OFF)
fi
while (($# > 0)) && [[ $1 != --target ]]; do
  options+=("$1")
  shift
done
"$OSCAR_CMAKE" --preset "$preset" "${options[@]}" >"build-$preset.log" 2>&1 ||
  { cat "build-$preset.log"; exit 1; }
"$OSCAR_CMAKE" --build --preset "$preset" "$@" >>"build-$preset.log" 2>&1 ||
  { grep -A 40 -m 3 '^FAILED' "build-$preset.log" || tail -n 60 "build-$preset.log"; exit 1; }
echo "build: $preset is done (build-$preset.log)"
