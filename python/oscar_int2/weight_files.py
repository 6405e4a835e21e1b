"""The files that a model's weights lie in: where they are, whether they are whole, and their fingerprint
(lib/oscar/io/weight_source.cpp)."""
import functools
import hashlib
import json
import pathlib
import struct

_ENDS = 4096  # bytes at each end of a tensor that a fingerprint covers
GGUF_SOURCE = "oscar_gguf.json"  # beside the weights of `python -m oscar_int2 dequantize`: what they were made of


def files_of(model, revision=None):
    """The folder with safetensors, or the GGUF file, of a path or of a name in the hub's cache; None."""
    if not model:
        return None
    path = pathlib.Path(model)
    if not path.exists():
        try:
            from huggingface_hub import try_to_load_from_cache
            found = try_to_load_from_cache(str(model), "config.json", revision=revision)
        except (ImportError, ValueError):  # a name that the hub can't have
            return None
        if not isinstance(found, str):
            return None
        path = pathlib.Path(found).parent
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    names = ("model.safetensors.index.json", "model.safetensors")
    return path if any((path / name).is_file() for name in names) else None


def problem_of_files(model, revision, tied):
    """Why a server would load other weights than the calibrated ones, though files_of() names the same files, or none;
    "": nothing is wrong. `tied`: the model's output matrix is its embedding."""
    folder = files_of(model, revision)
    if folder is None or folder.suffix == ".gguf":
        return ""
    stamps = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.glob("*.safetensors*")))
    return _problem_of_stamped(folder, tied, stamps)


@functools.lru_cache(maxsize=8)
def _problem_of_stamped(folder, tied, stamps):
    try:
        index, tensors = folder / "model.safetensors.index.json", tensors_of(folder)
        if (folder / "model.safetensors").is_file() and index.is_file():
            others = set(json.loads(index.read_text())["weight_map"].values()) - {"model.safetensors"}
            if others:
                return (f"{folder} holds two sets of them. oscar-calibrate and transformers read model.safetensors, vLLM the files "
                        f"that the index names, {min(others)} first; take away those that are not the model's")
        embedding, head = (next((tensors[name] for name in sorted(tensors) if name.endswith(end)), None)
                           for end in ("embed_tokens.weight", "lm_head.weight"))
        if tied and embedding and head and not _equal(embedding, head):
            return (f"{folder} has an output matrix (lm_head.weight) that is not the embedding. oscar-calibrate and transformers 5 "
                    "compute with it, vLLM with the embedding, since config.json ties them: set tie_word_embeddings to false, or "
                    "take lm_head.weight away")
    except (OSError, KeyError, ValueError) as error:
        return str(error)
    if not tied and embedding and not any("lm_head" in name or "output" in name for name in tensors):
        return (f"{folder} has no output matrix (lm_head), and config.json does not tie it to the embedding "
                "(tie_word_embeddings)")
    return ""


def _equal(one, other):
    """Whether two of tensors_of() hold the same numbers."""
    (path, base, entry), (other_path, other_base, other_entry) = one, other
    if any(entry[key] != other_entry[key] for key in ("dtype", "shape")):
        return False
    (begin, end), (other_begin, _) = entry["data_offsets"], other_entry["data_offsets"]
    with open(path, "rb") as first, open(other_path, "rb") as second:
        first.seek(base + begin)
        second.seek(other_base + other_begin)
        for place in range(begin, end, 1 << 20):
            count = min(1 << 20, end - place)
            if first.read(count) != second.read(count):
                return False
    return True


def tensors_of(folder):
    """{name: (file, its header's end, entry)} of the tensors in a folder's safetensors files. Raises OSError for a file that
    is not there, ValueError for one that is no whole file of that format."""
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if not (folder / shards[0]).is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    entries = {}
    for shard in shards:
        with open(folder / shard, "rb") as file:
            start, length = file.read(8), (folder / shard).stat().st_size
            size, = struct.unpack("<Q", start) if len(start) == 8 else (length,)
            if 8 + size > length:
                raise ValueError(f"{folder / shard} is no file of safetensors: cut short, or a pointer of Git LFS")
            header = json.loads(file.read(size))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
            if 8 + size + end > length:
                raise ValueError(f"{folder / shard} is cut short: {length} bytes of {8 + size + end}")
        for name, entry in header.items():
            if name != "__metadata__":
                entries[name] = (folder / shard, 8 + size, entry)
    return entries


def fingerprint(folder, all_bytes=False):
    """That of SafetensorsWeights::fingerprint (lib/oscar/io/safetensors.cpp)."""
    digest = hashlib.sha256()
    for name, (path, base, entry) in sorted((name.encode(), place) for name, place in tensors_of(folder).items()):
        digest.update(b"%d %s\n" % (len(name), name))
        digest.update(f"{entry['dtype']}\n{list(entry['shape'])}\n".encode())
        begin, end = entry["data_offsets"]
        with open(path, "rb") as file:
            whole = all_bytes or end - begin <= 2 * _ENDS
            for first, last in ((begin, end),) if whole else ((begin, begin + _ENDS), (end - _ENDS, end)):
                file.seek(base + first)
                for place in range(first, last, 1 << 20):
                    digest.update(file.read(min(1 << 20, last - place)))
    return digest.hexdigest()


def write_gguf_source(folder, file):
    """Leaves in a folder of dequantized weights what GGUF file they were made of, and their fingerprint as they are now."""
    (folder / GGUF_SOURCE).write_text(json.dumps({"file": file.name, "sha256": sha256_of(file),
                                                  "weights_fingerprint": fingerprint(folder)}, indent=1) + "\n")


def is_of_gguf(folder, sha256):
    """Whether a folder's weights are those of a GGUF file, as dequantize wrote them; None: the folder does not say."""
    try:
        source = json.loads((folder / GGUF_SOURCE).read_text())
        return source["sha256"] == sha256 and is_of(folder, source["weights_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_of(folder, made):
    """Whether a fingerprint is that of a folder's files, of whichever kind it is."""
    stamps = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.glob("*.safetensors")))
    return _is_of_stamped(folder, made, stamps)


@functools.lru_cache(maxsize=8)  # a model that is not of the bundle is read whole
def _is_of_stamped(folder, made, stamps):
    return fingerprint(folder) == made or fingerprint(folder, all_bytes=True) == made


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
