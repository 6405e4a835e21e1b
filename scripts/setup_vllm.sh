#!/usr/bin/env bash
# Makes .venv-vllm, in which the tests of the vLLM plugin run: vLLM's engine for CPUs beside the
# torch of the other tests, as scripts/locked/vllm.txt lists them. Safe to run again. 1 GB besides
# torch; 20 s, plus the downloads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv-vllm/bin/python
wanted=$(grep == scripts/locked/vllm.in)
if [[ -x $python ]] && "$python" -c "
import importlib.metadata as m, sys
sys.exit(any(m.version(n) != v for n, _, v in (a.partition('==') for a in sys.argv[1:])))" \
    $wanted 2>/dev/null; then
  echo "setup_vllm: ready"
  exit
fi
[[ -x $python ]] || python3 -m venv .venv-vllm
echo "setup_vllm: installing" $wanted "into .venv-vllm"
locked=(-q --no-deps --require-hashes --only-binary :all:)
"$python" -m pip install --disable-pip-version-check "${locked[@]}" -r scripts/locked/uv.txt
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
"$python" -m uv pip install --python "$python" ${index:+--default-index "$index"} "${locked[@]}" \
  -r scripts/locked/vllm.txt
echo "setup_vllm: ready"
