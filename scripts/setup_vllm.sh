#!/usr/bin/env bash
# Makes .venv-vllm, in which the tests of the vLLM plugin run: vLLM's engine for CPUs beside the torch of the
# other tests. Safe to run again. 1 GB besides torch; 20 s, plus the downloads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .venv-vllm/bin/python ]] || python3 -m venv .venv-vllm
scripts/install.sh .venv-vllm/bin/python vllm
echo "setup_vllm: ready"
