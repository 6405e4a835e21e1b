#!/usr/bin/env bash
# Makes scripts/locked/NAME.txt, which the set-up installs, from what scripts/locked/NAME.in asks for:
# every package that it needs, in one version, with the sha256 of its files, for any platform and
# Python from 3.10 on (3.11 for some tests).
#   scripts/lock.sh [--upgrade]     --upgrade: the newest versions; else those locked are kept
# Needs a Python with uv: that of .setup.env once torch is installed, else python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "$*" in
  "" | --upgrade) ;;
  *) sed -n '2,6p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
python=python3
[[ ! -f .setup.env ]] || { source .setup.env; python=$OSCAR_PYTHON; }
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}

# The tests take what torch needs in the versions of torch.txt. Some lists leave out what theirs ask
# for: of bare.in it is not needed, and the transformers-*.in lie over what the set-up installs.
for name in torch uv build cuda tests bare wheel vllm transformers-{4.57.3,5.5.3,5.23.0}; do
  options=(--python-version 3.10)
  case "$name" in
    bare | transformers-*) options=(--python-version 3.11 --no-deps) ;;
    vllm) options+=(--override scripts/locked/vllm.overrides) ;;
  esac
  "$python" -m uv pip compile -q --universal --generate-hashes \
    --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command scripts/lock.sh \
    ${index:+--default-index "$index"} "${options[@]}" "$@" \
    "scripts/locked/$name.in" -o "scripts/locked/$name.txt"
done
