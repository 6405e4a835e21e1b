#!/usr/bin/env bash
# Stands in for the compiler in the tidy preset: clang-tidy on the one source of a command line,
# an empty object, and the headers that it depends on, so that a second run looks at what changed.
set -euo pipefail
flags=()
compiler=$1
shift
while (($# > 0)); do
  case "$1" in
    -o) object=$2; shift 2 ;;
    -c) source=$2; shift 2 ;;
    -MF) dependencies=$2; shift 2 ;;
    -MT) shift 2 ;;
    -MD) shift ;;
    *) flags+=("$1"); shift ;;
  esac
done
# Left out: the count of warnings in system headers.
"$OSCAR_CLANG_TIDY" --quiet "$source" -- "${flags[@]}" \
  2> >(grep -v 'warnings\? generated' >&2)
"$compiler" "${flags[@]}" -M -MT "$object" -MF "$dependencies" "$source"
"$compiler" -x c++ -c /dev/null -o "$object"
