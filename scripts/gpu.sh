#!/usr/bin/env bash
# Runs what needs a GPU, one step after another: tests, a calibration and an evaluation, random traffic
# through vLLM, and what kernels and serving take. For a nightly run on a machine with a GPU.
#   scripts/gpu.sh [--results FOLDER] [--seconds S] [STEP...]
#   scripts/gpu.sh --list          the steps
# STEP may be a pattern, as 'vllm_*'; without one, all steps run. FOLDER (OUT, or gpu-results) gets gpu.log
# with what the steps print, as they print it, and gpu.txt with the table. A step is stopped after S (3600)
# seconds.
# OSCAR_BUILD names a build folder that is taken as it is; without it build-developer is built first.
# OSCAR_VLLM_VENV names a virtual environment with vLLM for CUDA; without it the steps of vLLM are
# skipped visibly. OSCAR_TRAFFIC_MINUTES (30) says how long the random traffic lasts.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

usage() { sed -n '2,12p' "${BASH_SOURCE[0]}"; exit 2; }
results=${OUT:-gpu-results} limit=3600 patterns=() list=0 found=0 failed=0
while (($# > 0)); do
  case "$1" in
    --results) results=${2:-}; [[ -n $results ]] || usage; shift ;;
    --seconds) limit=${2:-}; [[ $limit =~ ^[1-9][0-9]*$ ]] || usage; shift ;;
    --list) list=1 ;;
    -*) usage ;;
    *) patterns+=("$1") ;;
  esac
  shift
done

# note NAME SECONDS VERDICT [SUMMARY]: a line of the table.
note() {
  printf 'gpu: %-20s %5d s  %s  %s\n' "$1" "$2" "$3" "${4:-}" | tee -a "$results/gpu.txt"
}

# step NAME COMMAND...: runs the command, if the step is wanted.
step() {
  local name=$1 pattern wanted=0
  for pattern in "${patterns[@]:-*}"; do
    # shellcheck disable=SC2053
    [[ $name != $pattern ]] || wanted=1
  done
  ((wanted)) || return 0
  found=1
  if ((list)); then echo "$name"; else run_step "$@"; fi
}

run_step() {
  local name=$1 begun=$SECONDS status verdict summary
  printf '\n== %s: %s\n' "$name" "${*:2}" >>"$results/gpu.log"
  timeout -k 10 "$limit" "${@:2}" </dev/null 2>&1 | tee "$scratch/log" >>"$results/gpu.log"
  status=${PIPESTATUS[0]}
  # gtest's last lines, or unittest's.
  summary=$(grep -aE '^(Ran [0-9]+ test|OK|FAILED|\[  (PASSED|FAILED)  \] [0-9]+ test)' "$scratch/log" |
    paste -sd ' ')
  case "$status" in
    0) verdict=ok ;;
    77) verdict=skipped ;;
    124 | 137) verdict="stopped after $limit s" ;;
    *) verdict="failed ($status)" ;;
  esac
  if [[ $summary =~ Ran\ ([0-9]+)\ .*skipped=([0-9]+) && ${BASH_REMATCH[1]} == "${BASH_REMATCH[2]}" ]]; then
    verdict=skipped
  fi
  [[ $verdict == ok || $verdict == skipped ]] || failed=1
  note "$name" $((SECONDS - begun)) "$verdict" "$summary"
}

# vllm_step NAME COMMAND...
vllm_step() {
  if ((list)) || [[ -n $vllm ]]; then
    step "$@"
  else
    step "$1" bash -c 'echo "OSCAR_VLLM_VENV names no environment with vLLM for CUDA"; exit 77'
  fi
}

calibrate_and_evaluate() {
  local bundle=$scratch/tiny-gqa.h5 bin=$OSCAR_BIN
  set -e
  "$bin/oscar-calibrate" tiny-gqa datasets/tiny-gqa/calibration.jsonl "$bundle" --device cuda \
    --max-tokens 65536
  "$bin/oscar-bundle" verify "$bundle"
  "$bin/oscar-eval" tiny-gqa --bundle "$bundle" --corpus datasets/tiny-gqa/heldout.jsonl \
    --device cuda --max-tokens 8192 --compare bf16,oscar,bundle --separators off
}

# Held-out sequences as token ids, for benches that take them.
write_ids() {
  "$OSCAR_BIN/oscar-calibrate" tiny-gqa datasets/tiny-gqa/heldout.jsonl "$scratch/none.h5" --dry-run \
    --sequence-length 1024 --max-tokens 16384 --tokens-out "$scratch/ids.npy" >"$scratch/ids.log" 2>&1 ||
    { cat "$scratch/ids.log"; exit 1; }
}

bench_on_ids() {
  [[ -f $scratch/ids.npy ]] || write_ids
  "$OSCAR_PYTHON" "$1" datasets/tiny-gqa "${@:2}" "$scratch/ids.npy"
}

# bench_flashinfer PYTHON...: with the first that has it.
bench_flashinfer() {
  local python
  for python in "$@"; do
    [[ -n $python ]] && "$python" -c 'import flashinfer' 2>/dev/null || continue
    exec "$python" benchmarks/bench_flashinfer.py --points 1x32K,8x32K
  done
  echo "no Python here has FlashInfer"
  exit 77
}

all_steps() {
  local file name part kv
  step selftest "$OSCAR_BIN/oscar-bench" selftest
  step kernels "$OSCAR_BIN/kernel_tests" --gtest_brief=1
  step calibrate "$OSCAR_BIN/calibrate_gpu_tests" --gtest_brief=1
  step evaluate "$OSCAR_BIN/eval_gpu_tests" --gtest_brief=1
  for file in $(grep -l '^class OnCuda' tests/*/test_*.py); do
    name=${file##*/test_}
    step "${name%.py}" "$OSCAR_PYTHON" "$file" OnCuda
  done
  step programs bash -c "$(declare -f calibrate_and_evaluate); calibrate_and_evaluate"
  for file in tests/serving/vllm/test_vllm_*.py; do
    name=${file##*/test_}
    vllm_step "${name%.py}" "$vllm" "$file"
  done
  for name in drafts faults graphs plugin prefixes traffic; do
    vllm_step "vllm_${name}_second_runner" env OSCAR_VLLM_RUNNER=2 "$vllm" "tests/serving/vllm/test_vllm_$name.py"
  done
  for part in "attention --points 1x32K 8x32K 8x100K" quantize transform history \
    "calibrate datasets/tiny-gqa/calibration.jsonl"; do
    # shellcheck disable=SC2086
    step "bench_${part%% *}" "$OSCAR_BIN/oscar-bench" $part
  done
  step bench_generator "$OSCAR_PYTHON" benchmarks/bench_serving.py --points 1x32K,8x32K \
    --caches int2,bf16
  step bench_transformers bash -c "$(declare -f write_ids bench_on_ids)
    bench_on_ids benchmarks/bench_transformers.py"
  step eval_served bash -c "$(declare -f write_ids bench_on_ids)
    bench_on_ids benchmarks/eval_served.py rotation_zoo/tiny-gqa/tiny-gqa.serving.h5"
  step bench_flashinfer bash -c "$(declare -f bench_flashinfer); bench_flashinfer '$OSCAR_PYTHON' '$vllm'"
  for kv in int2 bf16; do
    vllm_step "bench_vllm_$kv" "$vllm" benchmarks/bench_vllm.py --kv "$kv" --points 1x32768,8x32768 \
      --step-tokens 16384
  done
}

# Programs, and the Python that tests and benches run with.
prepare() {
  if [[ -z ${OSCAR_BUILD:-} ]]; then
    local architecture=()
    [[ $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader) == 9.0* ]] ||
      architecture=(-DOSCAR_CUDA_ARCHITECTURES=native)
    scripts/setup.sh --tests || exit
    scripts/build.sh developer "-DCMAKE_CXX_FLAGS_RELEASE=-O3 -D_GLIBCXX_ASSERTIONS" "${architecture[@]}" || exit
  fi
  [[ ! -f .setup.env ]] || source .setup.env
  export OSCAR_PYTHON=${OSCAR_PYTHON:-python3} OSCAR_SOURCE=$PWD HF_HUB_OFFLINE=1
  local build=${OSCAR_BUILD:-build-developer}
  [[ -f $build/CMakeCache.txt ]] || { echo "gpu: $build is no build folder (OSCAR_BUILD)"; exit 2; }
  build=$(realpath "$build")
  export OSCAR_BIN=$build/bin PYTHONPATH=$PWD/tests:$build/python${PYTHONPATH:+:$PYTHONPATH}
  OSCAR_KERNELS=$(sed -n 's/^OSCAR_KERNELS:STRING=//p' "$build/CMakeCache.txt") && export OSCAR_KERNELS
  "$OSCAR_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { echo "gpu: torch of $OSCAR_PYTHON finds no CUDA device"; exit 2; }
  vllm=${OSCAR_VLLM_VENV:-}/bin/python
  "$vllm" -c 'import sys, vllm; from vllm.platforms import current_platform as p; sys.exit(not p.is_cuda())' \
    >/dev/null 2>&1 || vllm=
}

if ((list)); then
  OSCAR_BIN= OSCAR_PYTHON= vllm=
  all_steps
  exit
fi
prepare
mkdir -p "$results" && results=$(realpath "$results") && rm -f "$results"/gpu.{log,txt} || exit
scratch=$(mktemp -d)
export scratch
trap 'rm -rf "$scratch"' EXIT
all_steps
((found)) || { echo "gpu: no step is called ${patterns[*]} (scripts/gpu.sh --list)"; exit 2; }
exit "$failed"
