#!/usr/bin/env bash
# Builds the wheel of the toolkit into DIR (default: dist): the programs, the torch operators and the Python package,
# for this machine's C library and newer ones. Its version ends in +cu130 with CUDA kernels, for CUDA 13.0, or in +cpu.
#   scripts/build_wheel.sh [DIR]                   every shape of the kernels, for all GPU architectures
#   scripts/build_wheel.sh [DIR] --cpu             without kernels
#   scripts/build_wheel.sh [DIR] --build FOLDER    what that build holds: the operators, and programs if it has them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=dist build='' preset=wheel
while (($#)); do
  case "$1" in
    --build) build=$2; shift 2 ;;
    --cpu) preset=wheel-cpu; shift ;;
    -*) sed -n '2,6p' "${BASH_SOURCE[0]}"; exit 2 ;;
    *) out=$1; shift ;;
  esac
done

if [[ -z $build ]]; then
  scripts/setup.sh
  scripts/build.sh $preset
  build=build-$preset
fi
source .setup.env

staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
cp -r python/{pyproject.toml,README.md,oscar_int2,oscar_int2_programs.py,oscar_int2_vllm.py} \
  LICENSE THIRD_PARTY_NOTICES.md "$staged"
find "$staged" -name __pycache__ -prune -exec rm -r {} +
tools=$(mktemp -d)
trap 'rm -rf "$staged" "$tools"' EXIT
export PYTHONPATH=$tools PATH=$tools/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
scripts/install.sh "$OSCAR_PYTHON" --target "$tools" wheel

# The CUDA toolkit that compiled the kernels.
variant=cpu
if grep -q '^OSCAR_WITH_CUDA:BOOL=ON' "$build/CMakeCache.txt"; then
  variant=$(sed -n 's/^set(CMAKE_CUDA_COMPILER_TOOLKIT_VERSION "\([0-9]*\)\.\([0-9]*\).*/cu\1\2/p' \
    "$build"/CMakeFiles/*/CMakeCUDACompiler.cmake)
fi
sed -i "s/\"\$/+$variant\"/" "$staged/oscar_int2/_version.py"

library=$build/python/oscar_int2/liboscar_int2_ops.so
strip --strip-unneeded -o "$staged/oscar_int2/$(basename "$library")" "$library"
"$OSCAR_PYTHON" scripts/pack_programs.py "$build" "$staged"

# The newest symbol of the C library that is asked for names the platform.
glibc=$(find "$staged/oscar_int2" -type f \( -name '*.so*' -o -path '*/bin/*' \) -exec objdump -T {} + |
  grep -o 'GLIBC_2\.[0-9]*' | sort -t. -k2 -n | tail -n1)
platform=manylinux_2_${glibc#GLIBC_2.}_$(uname -m)
"$OSCAR_PYTHON" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$staged/dist" "$staged"
"$OSCAR_PYTHON" -m wheel tags --remove --python-tag py3 --abi-tag none \
  --platform-tag "$platform" "$staged"/dist/*.whl >/dev/null
mkdir -p "$out"
mv "$staged"/dist/*.whl "$out"
ls -l "$out"/*"+$variant"-*.whl
echo "build_wheel: done in $SECONDS s"
