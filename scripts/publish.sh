#!/usr/bin/env bash
# Makes one folder of a bundle, to hand on or to upload; it appears whole or not at all:
#   scripts/publish.sh MODEL BUNDLE [--eval REPORT.json]... [--base-model ORG/NAME] [--repo ORG/NAME]
#     [--answers ANSWERS.json] [--no-exports] [--allow CAUTION]... --out DIR (or -o DIR)
# MODEL      the bundle's model: a folder, a .gguf file or tiny-gqa
# --eval     a JSON report of oscar-eval on this bundle: the card's figures. Without one it has none
# --answers  what sample_answers.py --json wrote with this bundle or its serving profile, for card and page
# --base-model, --repo   on Hugging Face, the model and where the folder shall go
# --no-exports  no files of other serving stacks
# --allow    publish with this caution on the card: shared-text (calibration and evaluation share text)
#            or little-text (the calibration text is not enough)
# The folder: README.md (card), NAME.h5 (publish profile), NAME.serving.h5, evaluation.json and .html,
# exports/STACK/ for each stack that can take the bundle or its portable variant, index.json (the same
# for programs), SHA256SUMS.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "publish: $*" >&2; exit 2; }

reports=() places=() base= repo= target= answers=() allowed=() exports=1
while (($# > 0)); do
  case $1 in
    --eval | --answers | --base-model | --repo | --allow | --out | -o) (($# > 1)) || fail "$1 needs a value" ;;&
    --eval) reports+=("$2"); shift ;;
    --answers) answers=(--answers "$2"); shift ;;
    --base-model) base=$2; shift ;;
    --repo) repo=$2; shift ;;
    --out | -o) target=$2; shift ;;
    --no-exports) exports=0 ;;
    --allow) [[ $2 == shared-text || $2 == little-text ]] || fail "--allow takes shared-text or little-text, not $2"
      allowed+=(--allow "$2"); shift ;;
    -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//;/^set/!p}' "${BASH_SOURCE[0]}"; exit ;;
    -*) fail "there is no option $1 (--help)" ;;
    *) places+=("$1") ;;
  esac
  shift
done
((${#places[@]} == 2)) && [[ -n $target ]] || fail "give MODEL, BUNDLE and -o DIR (--help)"
model=${places[0]} bundle=${places[1]} target=${target%/}
[[ ! -e $target && ! -L $target ]] || fail "$target exists already; choose another name, or remove it"
[[ -z $repo || $repo =~ ^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$ ]] || fail "--repo is ORG/NAME, not $repo"

bin=${OSCAR_BIN:-$here/build/bin}
tool=$bin/oscar-bundle
[[ -x $tool ]] || tool=$(command -v oscar-bundle) || fail "no oscar-bundle in $bin or PATH"
python=${OSCAR_PYTHON:-python3}
name=$(basename "$bundle" .h5)
[[ $name =~ ^[A-Za-z0-9._-]+$ ]] || fail "the bundle's name becomes that of files: letters, digits, . _ -"
parent=$(dirname "$target")
[[ -d $parent ]] || fail "there is no folder $parent"
scratch=$(mktemp -d "$parent/.publish.XXXXXX.tmp")
trap 'rm -rf "$scratch"' EXIT

"$tool" verify "$bundle" >/dev/null || { "$tool" verify "$bundle" >&2 || exit 1; }
"$tool" strip "$bundle" "$scratch/$name.h5" --profile publish
"$tool" strip "$bundle" "$scratch/$name.serving.h5" --profile serving

card=("$scratch/$name.h5" --model "$model" "${answers[@]}" -o "$scratch/README.md")
[[ -z $base ]] || card+=(--base-model "$base")
count=0
for report in "${reports[@]}"; do
  count=$((count + 1))
  file=$scratch/evaluation$( ((count == 1)) || echo "-$count").json
  cp "$report" "$file"
  "$tool" report "$file" "${answers[@]}" -o "${file%.json}.html"
  card+=(--eval "$file")
done

if ((exports)); then
  mkdir "$scratch/exports"
  "$tool" inspect "$scratch/$name.h5" --json >"$scratch/inspect.json.tmp"
  for stack in $("$python" "$here/scripts/published.py" stacks "$scratch/inspect.json.tmp"); do
    "$tool" export "$scratch/$name.h5" --to "$stack" --reduce -o "$scratch/exports/$stack" >/dev/null
  done
  rm "$scratch/inspect.json.tmp"
  rmdir "$scratch/exports" 2>/dev/null || card+=(--exports "$scratch/exports")
fi
"$tool" card "${card[@]}"
"$python" "$here/scripts/published.py" cautions "$scratch/README.md" "${allowed[@]}"
"$tool" inspect "$scratch/$name.h5" --json |
  "$python" "$here/scripts/published.py" folder "$scratch" "$name" ${base:+--base-model "$base"}
chmod -R u=rwX,go=rX "$scratch"
sync -f "$scratch"
mv -T "$scratch" "$target"
trap - EXIT

echo "published   $target, $(du -sh "$target" | cut -f1)"
(cd "$target" && find . -type f | sort | sed 's|^\./|file        |')
echo "check       cd $target && sha256sum --check SHA256SUMS"
echo "upload      hf upload ${repo:-ORG/$name} $target ."
