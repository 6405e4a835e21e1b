#!/usr/bin/env bash
# Fuzzes the readers: builds the programs of tests/fuzz and runs them from inputs that the tests'
# builders make and from what was found before (tests/fuzz/findings), as many at once as there are
# cores.
#   scripts/fuzz.sh [TARGET] [SECONDS]   one of them, or all, each for SECONDS (60). What they learn
#                                        is kept in build-sanitize/corpus.
#   scripts/fuzz.sh --short              all, each for a fixed number of runs from a fixed seed, as
#                                        CI does; nothing is kept
# TARGET is the name of a file in tests/fuzz before _fuzz.cpp. Inputs that break a rule are left in
# build-sanitize/findings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t all < <(cd tests/fuzz && ls -- *_fuzz.cpp | sed 's/_fuzz\.cpp$//')
usage() { sed -n '2,10p' "${BASH_SOURCE[0]}"; echo "targets: ${all[*]}"; exit 2; }

short=0 targets=("${all[@]}") seconds=60
if [[ ${1:-} == --short ]]; then
  short=1
  shift
elif [[ ${1:-} =~ ^[a-z] ]]; then
  [[ " ${all[*]} " == *" $1 "* ]] || usage
  targets=("$1")
  shift
fi
if ((!short)) && [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
  seconds=$1
  shift
fi
(($# == 0)) || usage

# Of --short: the slow ones do less.
runs_of() {
  case "$1" in
    hdf5) echo 50 ;;
    bundle | export_manifest) echo 200 ;;
    gguf | report | tokenizer) echo 1000 ;;
    *) echo 5000 ;;
  esac
}

scripts/build.sh sanitize --target fuzz
seeds=build-sanitize/seeds findings=build-sanitize/findings
rm -rf "$seeds"
build-sanitize/bin/fuzz_seeds "$seeds"
mkdir -p "$findings"

# What SECURITY.md promises for inputs of a few kilobytes; memory in proportion to each input is
# counted by the programs themselves.
limits=(-timeout=30 -rss_limit_mb=2048 -malloc_limit_mb=256 -max_len=8192)
fuzz() {
  local target=$1 log=build-sanitize/$1.log status=0 corpus amount inputs=("$seeds/$1")
  if [[ -d tests/fuzz/findings/$target ]]; then inputs+=("tests/fuzz/findings/$target"); fi
  if ((short)); then
    corpus=$(mktemp -d)
    amount=(-runs="$(runs_of "$target")" -seed=1)
  else
    corpus=build-sanitize/corpus/$target
    mkdir -p "$corpus"
    amount=(-max_total_time="$seconds")
  fi
  OPENBLAS_NUM_THREADS=1 "build-sanitize/bin/fuzz_$target" "${limits[@]}" "${amount[@]}" \
    -print_final_stats=1 -artifact_prefix="$findings/$target-" "$corpus" "${inputs[@]}" \
    >"$log" 2>&1 || status=$?
  if ((short)); then rm -rf "$corpus"; fi
  if ((status != 0)); then
    tail -n 60 "$log"
    echo "fuzz: $target has a finding ($log)"
    return 1
  fi
  printf 'fuzz: %-18s %s\n' "$target" "$(sed -n 's/^Done \(.*\)/\1/p' "$log")"
}

running=0 failed=0
for target in "${targets[@]}"; do
  if ((running >= $(nproc))); then
    wait -n || failed=1
    running=$((running - 1))
  fi
  fuzz "$target" &
  running=$((running + 1))
done
for ((; running > 0; --running)); do wait -n || failed=1; done
exit "$failed"
