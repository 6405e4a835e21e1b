#!/usr/bin/env bash
# From a fresh clone to a proven 2-bit KV cache bundle of the embedded default model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS

scripts/setup.sh --without-torch
source .setup.env
options=()
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && [[ -n $CUDACXX ]]; then
  options+=(-DOSCAR_CUDA_ARCHITECTURES=native)
else
  options+=(-DOSCAR_WITH_CUDA=OFF)
fi
# What needs no torch compiles while torch is fetched.
scripts/setup.sh &
torch=$!
trap 'wait' EXIT
scripts/build.sh release "${options[@]}" -DOSCAR_WITH_TORCH=OFF
wait "$torch"
scripts/build.sh release "${options[@]}"

out=$PWD/quickstart
mkdir -p "$out"
echo
echo "== Calibrating the embedded default model (64K tokens, the preset's choices)"
build/bin/oscar-calibrate tiny-gqa datasets/tiny-gqa/calibration.jsonl "$out/tiny-gqa.h5" \
  --max-tokens 65536 --search off --force
echo
echo "== Verifying the bundle"
build/bin/oscar-bundle verify "$out/tiny-gqa.h5"
echo
echo "== Evaluating it: what 2 bits cost, without OSCAR, as published, and by default"
build/bin/oscar-eval tiny-gqa --bundle "$out/tiny-gqa.h5" --max-tokens 8192 \
  --compare bf16,identity,hadamard-clip,oscar,bundle --separators off --json "$out/tiny-gqa.json" \
  --html "$out/tiny-gqa.html"
echo
echo "Without --search off, oscar-calibrate also searches its choices on held-back text: closer still,"
echo "and the default for your own models."
echo "done in $((SECONDS - started)) s. Bundle: $out/tiny-gqa.h5, figures: $out/tiny-gqa.json"
echo "Report: $out/tiny-gqa.html"
