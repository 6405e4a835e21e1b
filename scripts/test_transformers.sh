#!/usr/bin/env bash
# Runs the tests of oscar_int2.transformers, and of calibration in transformers, with further versions of
# transformers beside the set-up's:
#   scripts/test_transformers.sh [BUILD_FOLDER]     default: build-developer
# Each lies in a folder of its own in .venv (some 150 MB, once), where it finds torch and the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .setup.env
build=$(realpath "${1:-build-developer}")
versions=(4.57.3 5.5.3 5.23.0 5.24.0)
for version in "${versions[@]}"; do
  folder=$(dirname "$(dirname "$OSCAR_PYTHON")")/transformers-$version
  if [[ ! -e $folder/done ]]; then
    rm -rf "$folder"
    scripts/install.sh "$OSCAR_PYTHON" --target "$folder" "transformers-${version//./-}"
    touch "$folder/done"
  fi
  printf '\n== transformers %s (%d s)\n' "$version" "$SECONDS"
  for test in test_transformers test_transformers_callers; do
    PYTHONPATH=$folder:tests HF_HUB_OFFLINE=1 OSCAR_BIN=$build/bin OSCAR_SOURCE=$PWD \
      "$OSCAR_PYTHON" "tests/serving/$test.py"
  done
  if [[ $version != 5.5.* ]]; then  # 4.57 in those of the families that it has
    PYTHONPATH=$folder:tests HF_HUB_OFFLINE=1 OSCAR_BIN=$build/bin OSCAR_SOURCE=$PWD \
      "$OSCAR_PYTHON" tests/parity/test_transformers_families.py
  fi
done
