#!/usr/bin/env bash
# Builds the wheel of the Python package oscar_int2 into DIR (default: dist): operators with every
# shape of the kernels, for all GPU architectures, for this machine's C library and newer ones.
#   scripts/build_wheel.sh [DIR] [--build FOLDER]    FOLDER: a build whose library is to be packed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=dist build=
while (($#)); do
  case "$1" in
    --build) build=$2; shift 2 ;;
    -*) sed -n '2,4p' "${BASH_SOURCE[0]}"; exit 2 ;;
    *) out=$1; shift ;;
  esac
done

scripts/setup.sh
source .setup.env
if [[ -z $build ]]; then
  scripts/build.sh wheel --target oscar_torch_ops
  build=build-wheel
fi
library=$build/python/oscar_int2/liboscar_int2_ops.so

staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
cp -r python/pyproject.toml python/README.md LICENSE python/oscar_int2 python/oscar_int2_vllm.py "$staged"
find "$staged" -name __pycache__ -prune -exec rm -r {} +
strip --strip-unneeded -o "$staged/oscar_int2/$(basename "$library")" "$library"

# The newest symbol of the C library that is asked for names the platform.
glibc=$(objdump -T "$library" | grep -o 'GLIBC_2\.[0-9]*' | sort -t. -k2 -n | tail -n1)
platform=manylinux_2_${glibc#GLIBC_2.}_$(uname -m)
export PYTHONPATH=$staged/tools PIP_DISABLE_PIP_VERSION_CHECK=1
scripts/install.sh "$OSCAR_PYTHON" --target "$PYTHONPATH" wheel
"$OSCAR_PYTHON" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$staged/dist" "$staged"
"$OSCAR_PYTHON" -m wheel tags --remove --python-tag py3 --abi-tag none \
  --platform-tag "$platform" "$staged"/dist/*.whl >/dev/null
mkdir -p "$out"
mv "$staged"/dist/*.whl "$out"
ls -l "$out"/*.whl
