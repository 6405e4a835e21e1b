#!/usr/bin/env bash
# Fuzzes the readers: builds the programs of tests/fuzz and runs them from inputs that the tests'
# builders make and from what was found before (tests/fuzz/findings), as many at once as there are
# cores.
#   scripts/fuzz.sh [TARGET] [SECONDS]   one of them, or all, each for SECONDS (60). What they learn
#                                        is kept in build-sanitize/corpus.
#   scripts/fuzz.sh --short              all, each for a fixed number of runs from a fixed seed, as
#                                        CI does; nothing is kept
#   scripts/fuzz.sh --runs N [TARGET=N...] [--seconds S] [--jobs J]
#                                        all, until each has done N runs, or its own N, or S seconds
#                                        (600) are over; those of earlier calls count
#                                        (build-sanitize/runs). J processes (one a core) do the
#                                        fast targets first, in slices with a seed of their own.
# TARGET is the name of a file in tests/fuzz before _fuzz.cpp. Inputs that break a rule are left in
# build-sanitize/findings. OSCAR_FUZZ_BUILT=1: the programs and seeds in build-sanitize are used as
# they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -t all < <(cd tests/fuzz && ls -- *_fuzz.cpp | sed 's/_fuzz\.cpp$//')
usage() { sed -n '2,18p' "${BASH_SOURCE[0]}"; echo "targets: ${all[*]}"; exit 2; }
is_target() { [[ " ${all[*]} " == *" $1 "* ]]; }
is_count() { [[ $1 =~ ^[1-9][0-9]*$ ]]; }

mode=seconds targets=("${all[@]}") seconds=60 jobs=$(nproc)
declare -A goal
case "${1:-}" in
  --short)
    mode=short
    (($# == 1)) || usage
    ;;
  --runs)
    mode=runs seconds=600
    is_count "${2:-}" || usage
    for target in "${all[@]}"; do goal[$target]=$2; done
    shift 2
    while (($# > 0)); do
      case "$1" in
        --seconds) is_count "${2:-}" || usage; seconds=$2; shift ;;
        --jobs) is_count "${2:-}" || usage; jobs=$2; shift ;;
        *=*)
          is_target "${1%%=*}" && is_count "${1#*=}" || usage
          goal[${1%%=*}]=${1#*=}
          ;;
        *) usage ;;
      esac
      shift
    done
    ;;
  *)
    if [[ ${1:-} =~ ^[a-z] ]]; then
      is_target "$1" || usage
      targets=("$1")
      shift
    fi
    if is_count "${1:-}"; then
      seconds=$1
      shift
    fi
    (($# == 0)) || usage
    ;;
esac

# Of --short: the slow ones do less.
runs_of() {
  case "$1" in
    bundle | hdf5) echo 1000 ;;
    *) echo 5000 ;;
  esac
}

seeds=build-sanitize/seeds findings=build-sanitize/findings counts=build-sanitize/runs
if [[ -z ${OSCAR_FUZZ_BUILT:-} ]]; then
  scripts/build.sh sanitize --target fuzz
  rm -rf "$seeds"
  build-sanitize/bin/fuzz_seeds "$seeds"
fi
mkdir -p "$findings" "$counts"

# run TARGET CORPUS LOG OPTION...: what SECURITY.md promises for inputs of a few kilobytes; memory in
# proportion to each input is counted by the programs themselves. Nothing is cut off the seeds.
run() {
  local target=$1 corpus=$2 log=$3 inputs=("$seeds/$1") most=8192
  shift 3
  if [[ $target == hdf5 ]]; then most=65536; fi
  if [[ -d tests/fuzz/findings/$target ]]; then inputs+=("tests/fuzz/findings/$target"); fi
  OPENBLAS_NUM_THREADS=1 ASAN_OPTIONS=quarantine_size_mb=16:malloc_context_size=8 \
    "build-sanitize/bin/fuzz_$target" -timeout=30 -rss_limit_mb=2048 \
    -malloc_limit_mb=256 -max_len=$most -print_final_stats=1 -artifact_prefix="$findings/$target-" \
    "$@" "$corpus" "${inputs[@]}" >"$log" 2>&1
}

report_finding() {
  tail -n 60 "$2"
  echo "fuzz: $1 has a finding ($2)"
}

fuzz() {
  local target=$1 log=build-sanitize/$1.log status=0 corpus
  if [[ $mode == short ]]; then
    corpus=$(mktemp -d)
    run "$target" "$corpus" "$log" -runs="$(runs_of "$target")" -seed=1 || status=$?
    rm -rf "$corpus"
  else
    corpus=build-sanitize/corpus/$target
    mkdir -p "$corpus"
    run "$target" "$corpus" "$log" -max_total_time="$seconds" || status=$?
  fi
  if ((status != 0)); then
    report_finding "$target" "$log"
    return 1
  fi
  printf 'fuzz: %-18s %s\n' "$target" "$(sed -n 's/^Done \(.*\)/\1/p' "$log")"
}

# --- --runs ---

# A target is left alone after so many slices that ended with a finding.
most_findings=5
declare -A done_runs active promised rate slices found
declare -A target_of log_of begun_of asked_of  # by process

# The target that is done soonest, so that most are done when time is over; one that has not been
# timed comes first. Empty when all of what is left to do is being done.
next_target() {
  local target rest best=-1
  next=
  for target in "${targets[@]}"; do
    rest=$((goal[$target] - done_runs[$target] - promised[$target]))
    if ((rest <= 0 || found[$target] >= most_findings)); then continue; fi
    if ((rate[$target] == 0)); then
      if ((active[$target] > 0)); then continue; fi
      rest=0
    else
      rest=$((rest * 1000 / rate[$target]))
    fi
    if ((best < 0 || rest < best)); then best=$rest next=$target; fi
  done
  [[ -n $next ]]
}

# A slice is a part of what is left, and at least five seconds; at most a minute, the first one less.
begin_slice() {
  local target=$1 left=$((seconds - SECONDS)) slice rest runs most=60 log
  local corpus=build-sanitize/corpus/$target
  slice=$((slices[$target] += 1))
  log=build-sanitize/$target.$slice.log
  rest=$((goal[$target] - done_runs[$target] - promised[$target]))
  if ((rate[$target] == 0)); then
    runs=$rest most=15
  else
    runs=$((rest / jobs + 1))
    if ((runs < 5 * rate[$target])); then runs=$((5 * rate[$target])); fi
    if ((runs > 60 * rate[$target])); then runs=$((60 * rate[$target])); fi
    if ((runs > rest)); then runs=$rest; fi
  fi
  mkdir -p "$corpus"
  # Every second one without libFuzzer's weighing of inputs, which takes up to a third of the time.
  run "$target" "$corpus" "$log" -seed=$((1000 * slice + ${#target})) -entropic=$((slice % 2)) \
    -runs=$runs -max_total_time=$((left < most ? left : most)) &
  target_of[$!]=$target log_of[$!]=$log begun_of[$!]=${EPOCHREALTIME/[.,]/} asked_of[$!]=$runs
  active[$target]=$((active[$target] + 1))
  promised[$target]=$((promised[$target] + runs))
}

# end_slice PROCESS STATUS
end_slice() {
  local target=${target_of[$1]} log=${log_of[$1]} runs milliseconds
  milliseconds=$(((${EPOCHREALTIME/[.,]/} - begun_of[$1]) / 1000 + 1))
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  active[$target]=$((active[$target] - 1))
  promised[$target]=$((promised[$target] - asked_of[$1]))
  done_runs[$target]=$((done_runs[$target] + ${runs:-0}))
  rate[$target]=$((${runs:-0} * 1000 / milliseconds + 1))
  if (($2 == 0)); then
    rm "$log"
  else
    found[$target]=$((found[$target] + 1))
    report_finding "$target" "$log"
  fi
  echo "${done_runs[$target]} ${slices[$target]} ${found[$target]}" >"$counts/$target"
}

fuzz_runs() {
  local target next status process
  for target in "${targets[@]}"; do
    done_runs[$target]=0 slices[$target]=0 found[$target]=0
    active[$target]=0 promised[$target]=0 rate[$target]=0
    if [[ -f $counts/$target ]]; then
      read -r done_runs[$target] slices[$target] found[$target] <"$counts/$target"
    fi
  done
  SECONDS=0
  local running=0
  while :; do
    if ((running < jobs && SECONDS + 2 < seconds)) && next_target; then
      begin_slice "$next"
      running=$((running + 1))
      continue
    fi
    if ((running == 0)); then break; fi
    status=0
    wait -n -p process || status=$?
    end_slice "$process" "$status"
    running=$((running - 1))
  done
  for target in "${targets[@]}"; do
    printf 'fuzz: %-18s %9d runs of %9d, %d slices with a finding\n' "$target" "${done_runs[$target]}" \
      "${goal[$target]}" "${found[$target]}"
    if ((found[$target] > 0)); then failed=1; fi
  done
}

running=0 failed=0
if [[ $mode == runs ]]; then
  fuzz_runs
  exit "$failed"
fi
for target in "${targets[@]}"; do
  if ((running >= jobs)); then
    wait -n || failed=1
    running=$((running - 1))
  fi
  fuzz "$target" &
  running=$((running + 1))
done
for ((; running > 0; --running)); do wait -n || failed=1; done
exit "$failed"
