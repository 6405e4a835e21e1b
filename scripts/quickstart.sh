#!/usr/bin/env bash
# From a fresh clone to a proven 2-bit KV cache bundle:
#   scripts/quickstart.sh          of the embedded model tiny-gqa, without further downloads
#   scripts/quickstart.sh --real   of SmolLM2-135M-Instruct, on real text: fetches 122 MB more
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "$*" in
  "") model=tiny-gqa ;;
  --real) model=smollm2 ;;
  *) sed -n '2,4p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
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
if [[ $model == smollm2 ]]; then
  PYTHONPATH=python "$OSCAR_PYTHON" -m oscar_int2 fetch smollm2 corpora
fi
scripts/build.sh release "${options[@]}" -DOSCAR_WITH_TORCH=OFF
wait "$torch"
scripts/build.sh release "${options[@]}"

# Text to calibrate on, tokens of it, texts to evaluate on, and tokens of each.
if [[ $model == smollm2 ]]; then
  calibration=corpora/documentation-calibration.jsonl tokens=32768
  texts=(corpora/documentation-heldout.jsonl corpora/prose-heldout.jsonl) measured=4096
else
  calibration=datasets/tiny-gqa/calibration.jsonl tokens=65536
  texts=(datasets/tiny-gqa/heldout.jsonl) measured=8192
fi
out=$PWD/quickstart
bundle=$out/$model.h5
mkdir -p "$out"
echo
echo "== Calibrating $model ($tokens tokens of $calibration, the preset's choices)"
build/bin/oscar-calibrate "$model" "$calibration" "$bundle" \
  --max-tokens "$tokens" --search off --force
echo
echo "== Verifying the bundle"
build/bin/oscar-bundle verify "$bundle"
for text in "${texts[@]}"; do
  report=$out/$model-$(basename "$text" .jsonl)
  echo
  echo "== Evaluating it on $text: what 2 bits cost, without OSCAR, as published, and by default"
  build/bin/oscar-eval "$model" --bundle "$bundle" --corpus "$text" --max-tokens "$measured" \
    --compare bf16,identity,hadamard-clip,oscar,bundle --separators off \
    --json "$report.json" --html "$report.html" --force
  echo "Figures: $report.json, report: $report.html"
done
echo
echo "Without --search off, as for your own models, oscar-calibrate also chooses clipping on held-back"
echo "text, which is closer still."
echo "done in $((SECONDS - started)) s. Bundle: $bundle"
