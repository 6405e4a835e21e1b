"""Text that is held back for the search, and a run as oscar-calibrate takes it over: sums, and rows of that text.

oscar-calibrate searches (lib/oscar/calibrate/recording.h). The folder's files are those of lib/oscar/calibrate/SCHEMA.md.
"""
import json
import shutil
from dataclasses import dataclass

from safetensors.torch import save_file

# lib/oscar/calibrate/search/candidates.h, which refuses any other split
FEWEST_QUERIES, FEWEST, MOST = 128, 2, 8


@dataclass(frozen=True)
class Split:
    """Indices of a corpus's sequences, ascending; held back ones in the order in which the search sees them."""

    fit: list
    held: list


def hold_back(lengths, format):
    """(Split, why nothing is held back, or ""), of sequences of so many tokens (docs/mathematics.md, 9.1)."""
    shortest = format.sink_tokens + format.recent_tokens + FEWEST_QUERIES
    usable = [i for i, tokens in enumerate(lengths) if tokens >= shortest]
    if len(usable) < 2 * FEWEST:
        return Split(list(range(len(lengths))), []), (
            f"choices are those of the preset: to hold text back for a search, at least {2 * FEWEST} sequences of {shortest} "
            f"tokens are needed, and there {'is' if len(usable) == 1 else 'are'} {len(usable)}")
    held = usable[-min(max(len(lengths) // 4, FEWEST), MOST, len(usable) // 2):]
    search, confirm = held[-2::-2][::-1], held[::-2][::-1]
    return Split([i for i in range(len(lengths)) if i not in set(held)], search + confirm), ""


class HeldBackRows:
    """Files of the rows that attention gets of held-back sequences. `sequences`: their indices in the corpus, in the order
    in which batches from number `first_batch` on hold them."""

    def __init__(self, folder, sequences, batches, first_batch):
        self.folder, self.first_batch = folder, first_batch
        self.tokens = sum(ids.numel() for ids in batches[first_batch:])
        self.of_batch, begin = {}, 0
        for number, ids in enumerate(batches[first_batch:], first_batch):
            self.of_batch[number] = sequences[begin:begin + len(ids)]
            begin += len(ids)

    def require_room(self, call, gated, layers):
        """Raises OSError where the disk has no room for such rows of so many layers."""
        heads, width = call.q.shape[1], call.q.shape[3] + gated * call.v.shape[3]
        token = heads * width + call.k.shape[1] * (call.k.shape[3] + call.v.shape[3])
        needed, free = layers * self.tokens * token * call.q.element_size(), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(f"rows of the {self.tokens} tokens that are held back for the search take up to "
                          f"{needed / 1e9:.1f} GB beside the bundle, where {free / 1e9:.1f} GB are free; make room, or leave "
                          "the search out: search=\"off\" (--search off)")

    def add(self, layer, batch, call, gate=None):
        """The rows of one layer and batch. `gate` [batch, Hq, T, dv]: what outputs were multiplied by."""
        rows = {"q": call.q, "k": call.k, "v": call.v} | ({} if gate is None else {"gate": gate.to(call.q.dtype)})
        for place, sequence in enumerate(self.of_batch[batch]):
            save_file({name: x[place].contiguous().cpu() for name, x in rows.items()},
                      self.folder / f"layer-{layer:03}-sequence-{sequence}.safetensors")

    def finish(self, lengths, layers):
        """Writes the index. `layers`: of each (sm_scale, gated, output metric of query heads [Hq, dv, dv]), or why it is
        not searched, "" for one without rows of its own."""
        for index, layer in enumerate(layers):
            if not isinstance(layer, str):
                save_file({"output_metric": layer[2].float().contiguous().cpu()},
                          self.folder / f"layer-{index:03}.safetensors")
        told = [{"not_searched": layer} if isinstance(layer, str) else {"sm_scale": layer[0], "gated": layer[1]}
                for layer in layers]
        (self.folder / "recording.json").write_text(json.dumps({
            "format": "oscar-recording", "version": 1, "sequence_lengths": lengths, "layers": told}))
