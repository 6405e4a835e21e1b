#!/usr/bin/env bash
# Makes scripts/locked/uv.lock from the groups of pyproject.toml beside it: every package that they need,
# with the sha256 of its files, for Linux and Python from 3.10 on (3.11 for some tests).
#   scripts/lock.sh [--upgrade]     --upgrade: the newest versions; else those locked are kept
# From PyPI itself: the file names where it found what it lists. Needs .uv, which scripts/setup.sh makes.
set -euo pipefail
case "$*" in
  "" | --upgrade) ;;
  *) sed -n '2,5p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/locked"
uv=../../.uv/bin/uv
"$uv" lock -q --default-index https://pypi.org/simple "$@"
# uv itself is installed by pip.
"$uv" export -q --frozen --only-group uv --no-header --no-annotate -o uv.txt
