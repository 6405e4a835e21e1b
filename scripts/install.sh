#!/usr/bin/env bash
# Installs groups of scripts/locked into a Python: what uv.lock lists and nothing else, as wheels that have
# one of its hashes, from pip's index.
#   scripts/install.sh PYTHON [--missing | --target FOLDER] GROUP...
# --missing: of these what PYTHON has in no version. uv, which does it, lies in .uv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
(($# > 1)) || { sed -n '2,5p' "${BASH_SOURCE[0]}"; exit 2; }
python=$1 missing=0 target=()
shift
case "$1" in
  --missing) missing=1; shift ;;
  --target) target=(--target "$2"); shift 2 ;;
esac
locked=(-q --no-deps --require-hashes --only-binary :all:)
pip=(-m pip --disable-pip-version-check install "${locked[@]}")

if ! cmp -s scripts/locked/uv.txt .uv/uv.txt; then
  python3 -m venv .uv
  .uv/bin/python "${pip[@]}" -r scripts/locked/uv.txt
  cp scripts/locked/uv.txt .uv
fi

list=$(mktemp)
trap 'rm -f "$list"' EXIT
.uv/bin/uv export -q --project scripts/locked --frozen --python "$python" "${@/#/--only-group=}" \
  --no-header --no-annotate -o "$list"
if ((missing)); then
  "$python" - "$list" <<'CHECK'
import importlib.metadata, re, sys
from pip._vendor.packaging.markers import Marker
have = {re.sub("[-_.]+", "-", found.metadata["Name"] or "").lower()
        for found in importlib.metadata.distributions()}
lacking = []
for entry in re.findall(r"^[^#\s].*(?:\n .*)*", open(sys.argv[1]).read(), re.M):
    package, marker = re.match(r"([^=]+)==[^ ]+(?: ; (.*))? \\\n", entry).groups()
    if package not in have and (marker is None or Marker(marker).evaluate()):
        lacking.append(entry)
open(sys.argv[1], "w").write("\n".join(lacking))
CHECK
  [[ -s $list ]] || exit 0
fi
echo "install: $*, for $python"
# uv fetches and unpacks side by side; where it cannot reach the index as pip can, pip does it.
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
.uv/bin/uv pip install --python "$python" ${index:+--default-index "$index"} "${locked[@]}" \
  "${target[@]}" -r "$list" || "$python" "${pip[@]}" "${target[@]}" -r "$list"
