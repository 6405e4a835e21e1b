#!/usr/bin/env bash
# Runs the tests of the CUDA kernels, all instantiations, under compute-sanitizer: accesses that are
# out of bounds or misaligned, misused barriers, memory that is read and was never written, hazards in
# shared memory.
#   scripts/sanitize_kernels.sh [--seconds S] [--jobs J] [TOOL...]
# TOOL is memcheck, synccheck, initcheck or racecheck; all of them, in this order, otherwise. J (4)
# processes, each with some of the tests, share the GPU; what has not ended after S (3600) seconds in
# all is stopped and counts as failed. GTEST_FILTER chooses tests. Needs a GPU and compute-sanitizer
# (COMPUTE_SANITIZER, on PATH, or in the CUDA toolkit). KERNEL_TESTS: a program that is built already.
# What the tools say is left in build-kernels/sanitize.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,11p' "${BASH_SOURCE[0]}"; exit 2; }
seconds=3600 jobs=4 tools=()
while (($# > 0)); do
  case "$1" in
    --seconds | --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage
      if [[ $1 == --jobs ]]; then jobs=$2; else seconds=$2; fi
      shift
      ;;
    memcheck | racecheck | synccheck | initcheck) tools+=("$1") ;;
    *) usage ;;
  esac
  shift
done
if ((${#tools[@]} == 0)); then tools=(memcheck synccheck initcheck racecheck); fi

program=${KERNEL_TESTS:-}
if [[ -z $program ]]; then
  scripts/build.sh kernels
  source .setup.env
  program=build-kernels/bin/kernel_tests
fi
sanitizer=${COMPUTE_SANITIZER:-$(PATH=$PATH:$(dirname "${CUDACXX:-/usr/local/cuda/bin/nvcc}") \
  command -v compute-sanitizer)} || { echo "sanitize: no compute-sanitizer"; exit 2; }
logs=build-kernels/sanitize
rm -rf "$logs"
mkdir -p "$logs"

# Whether the tool works here at all: one small test.
check_tool() {
  local log=$logs/first.log
  timeout 120 "$sanitizer" --tool memcheck --error-exitcode 9 "$program" \
    --gtest_filter=DequantizeRowsErrors.* >"$log" 2>&1 || true
  if grep -q '^========= ERROR SUMMARY: 0 errors' "$log" && grep -q 'PASSED.* 1 test' "$log" &&
    ! grep -q SKIPPED "$log"; then
    return
  fi
  cat "$log"
  echo "sanitize: compute-sanitizer does not work here"
  exit 1
}

# begin TOOL SHARD
begin() {
  local tool=$1 shard=$2 left=$((seconds - SECONDS)) options=()
  case "$tool" in
    memcheck) options=(--leak-check full) ;;
    initcheck) export OSCAR_TEST_UNINITIALISED=1 ;;
    racecheck) export OSCAR_TEST_SANITIZER=1 ;;  # the slowest: tests/support/slowed.h
  esac
  GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard exec timeout -k 10 $((left > 1 ? left : 1)) \
    "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 9 --print-limit 50 \
    --port $((49152 + 10 * begun)) --launch-timeout 120 "$program" >"$logs/$tool.$shard.log" 2>&1
}

declare -A tool_of shard_of begun_of
failed=0
# end PROCESS STATUS: a line of the table.
end() {
  local name=${tool_of[$1]}.${shard_of[$1]} tests errors verdict=ok
  local log=$logs/$name.log
  tests=$(grep -c '^\[       OK \]' "$log" || true)
  errors=$(sed -n 's/^========= \(ERROR\|RACECHECK\) SUMMARY: //p' "$log" | tail -n 1)
  if (($2 == 124 || $2 == 137)); then
    verdict="not done: $(grep '^\[ RUN' "$log" | tail -n 1)"
  elif (($2 != 0)); then
    verdict="failed ($2)"
  fi
  if [[ $verdict != ok ]]; then failed=1; fi
  printf 'sanitize: %-9s %3d of %d  %4d s  %3d tests passed  %s  %s\n' "${tool_of[$1]}" \
    $((shard_of[$1] + 1)) "$shards" $((SECONDS - begun_of[$1])) "$tests" "${errors:-no summary}" \
    "$verdict"
}

SECONDS=0
check_tool
shards=$((3 * jobs))  # more than processes, since some tests take long
running=0 begun=0     # each tool that runs has ports of its own
for tool in "${tools[@]}"; do
  for ((shard = 0; shard < shards; ++shard)); do
    if ((running >= jobs)); then
      status=0
      wait -n -p process || status=$?
      end "$process" "$status"
      running=$((running - 1))
    fi
    begin "$tool" "$shard" &
    tool_of[$!]=$tool shard_of[$!]=$shard begun_of[$!]=$SECONDS
    running=$((running + 1)) begun=$((begun + 1))
  done
done
for ((; running > 0; --running)); do
  status=0
  wait -n -p process || status=$?
  end "$process" "$status"
done
for tool in "${tools[@]}"; do
  printf 'sanitize: %-9s %d tests passed, %d kinds of reports (%s)\n' "$tool" \
    "$(cat "$logs/$tool".*.log | grep -c '^\[       OK \]' || true)" \
    "$(cat "$logs/$tool".*.log | grep -E '^========= (Invalid|Error|Uninit|Barrier|Leaked|Race|Warning|Program hit)' | sort -u | wc -l)" \
    "$logs/$tool.*.log"
done
exit "$failed"
