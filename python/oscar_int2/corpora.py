"""A corpus that lies in memory (texts, rows, token ids) as files that programs and readers of corpora take."""
import contextlib
import json
import os
import pathlib
import re
import tempfile

import numpy as np

# Ends of names of corpus files, perhaps with a weight; and what a model writes itself.
_NAME = re.compile(r"\.(npy|h5|txt|jsonl|json|parquet)(\.gz|\.zst)?(:[\d.]+)?$|^self:\w+$", re.IGNORECASE)


def _is_file(item) -> bool:
    return isinstance(item, os.PathLike) or bool(_NAME.search(item)) or os.path.exists(re.sub(r":[\d.]+$", "", item))


def kind_of(corpus) -> str:
    """"files" (a path, several, or {path: weight}), "rows" (texts, or dictionaries as lines of .jsonl hold them) or "ids".

    A string in a list is a text if it has a blank in it, is no file, and does not end as names of corpus files do; beside such
    a text every other string is one too. Raises ValueError for a list that is empty or holds files beside texts, and for a
    text that is in no list."""
    if isinstance(corpus, str) and re.search(r"\s", corpus) and not any(map(_is_file, (corpus, *corpus.split(",")))):
        raise ValueError(f"corpus is a text ({corpus[:40]!r}) or a path that does not exist; texts go in as a list: [text]")
    if isinstance(corpus, (str, os.PathLike, dict)):
        return "files"
    if not isinstance(corpus, (list, tuple, np.ndarray)) and not hasattr(corpus, "detach"):
        raise TypeError(f"corpus is a {type(corpus).__name__}, expected a path, a list of paths or of texts, or token ids "
                        "[tokens] or [rows, tokens]")
    if not len(corpus):
        raise ValueError("corpus is empty, expected a path, a list of paths or of texts, or token ids")
    if all(isinstance(item, dict) for item in corpus):
        return "rows"
    if not all(isinstance(item, (str, os.PathLike)) for item in corpus):
        return "ids"
    files = [item for item in corpus if _is_file(item)]
    texts = [item for item in corpus if not _is_file(item) and re.search(r"\s", item)]
    if files and texts:
        raise ValueError(f"corpus holds files ({os.fspath(files[0])!r}) and texts ({texts[0][:40]!r}); give one of the two. "
                         "Texts that look like names of files go in as [{\"text\": ...}, ...]")
    return "rows" if texts else "files"


def in_memory(corpus):
    """A table of rows, such as a DataFrame of pandas or a Dataset of datasets, as a list of dictionaries without the cells
    that are empty; anything else as it is."""
    if isinstance(corpus, dict) or not hasattr(corpus, "to_dict"):
        return corpus
    rows = corpus.to_dict("records") if hasattr(corpus, "iterrows") else list(corpus)
    return [{name: cell for name, cell in row.items() if cell is not None and not (isinstance(cell, float) and cell != cell)}
            if isinstance(row, dict) else row for row in rows]


def _cell(cell):
    """A cell of a table that JSON has no form for: an array's numbers, anything else in words."""
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)


def _array(ids):
    return ids.detach().cpu().numpy() if hasattr(ids, "detach") else np.asarray(ids)


def rows_of(ids) -> list:
    """Token ids, [tokens] or [rows, tokens] with rows of any length, as int64 arrays [tokens]. Raises ValueError for others."""
    rows = [_array(row) for row in (ids if np.ndim(ids[0]) else [ids])]
    for row in rows:
        if row.ndim != 1 or len(row) and row.dtype.kind not in "iu":
            raise ValueError(f"expected token ids, [tokens] or [rows, tokens] of integers; found {row.dtype} {list(row.shape)}")
    return [row.astype(np.int64) for row in rows]


def write_rows(rows, folder) -> pathlib.Path:
    """Texts and rows as lines of a .jsonl file."""
    path = pathlib.Path(folder, "texts.jsonl")
    lines = (json.dumps(row if isinstance(row, dict) else {"text": row}, default=_cell) + "\n"
             for row in rows)  # arrays are cells of tables
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_ids(ids, folder) -> pathlib.Path:
    """Token ids as a .npy file; rows of several lengths as a folder of these, one for each length."""
    by_length, rows = {}, rows_of(ids)
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    if len(by_length) == 1:
        path = pathlib.Path(folder, "token_ids.npy")
        np.save(path, np.stack(rows) if len(rows) > 1 else rows[0])
        return path
    path = pathlib.Path(folder, "token_ids")
    path.mkdir()
    for length, rows in sorted(by_length.items()):
        np.save(path / f"rows_of_{length:07}.npy", np.stack(rows))
    return path


@contextlib.contextmanager
def as_files(corpus):
    """The corpus itself where it is files, else the path of a temporary one that holds it."""
    corpus = in_memory(corpus)
    kind = kind_of(corpus)
    with contextlib.ExitStack() as stack:
        if kind != "files":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="oscar-"))
            corpus = (write_rows if kind == "rows" else write_ids)(corpus, folder)
        yield corpus
