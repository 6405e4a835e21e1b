"""Statistics of any transformers model, collected through its attention interface, layer by layer."""
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from ..errors import UnsupportedError
from ..weight_samples import SAMPLES, is_plain, projections, sample, sample_vector
from .interface import exact_attention, observing
from .layers import run_layers, text_config
from .probe import LayerFacts, Rope, probe
from .record import settled_rope
from .sums import LayerSums, total

LARGEST_DIM = 256  # of a row that the codec takes


class _Part:
    """What is added up of one layer over a part of the text."""

    def __init__(self, facts, format, squares, device):
        self.sums = LayerSums(facts.shape, format, device)
        # [Hq, dv, dv] float64: sum of s^T s, s what outputs are multiplied by
        self.gate = torch.zeros_like(squares) if facts.gated else None
        self.gate_rows = 0

    def add_gate(self, gate):
        """Of s [batch, T, Hq, dv] float64."""
        s = gate.flatten(0, 1)
        self.gate += torch.einsum("njd,nje->jde", s, s)
        self.gate_rows += len(s)


@dataclass
class _Layer:
    facts: LayerFacts
    rope: Rope | None          # exact frequencies
    parameters: dict | None    # of it, as bundles hold them
    fitted: _Part              # of the text that is not held back
    held: _Part | None         # of that which is
    owner: int                 # the layer whose rows these are
    squares: torch.Tensor      # [Hq, dv, dv] float64: W_O,j W_O,j^T of each query head
    samples: tuple | None      # weight_samples()
    not_searched: str = ""     # why not

    def parts(self, all_text):
        return [part for part in (self.fitted, self.held if all_text else None) if part is not None]


class Collection:
    """The sums of one run, and what was found out about the layers. `rows`: the HeldBackRows of batches that are held back
    for the search. Raises UnsupportedError, naming the layer, for what is not calibrated."""

    def __init__(self, model, batches, format, device=None, progress=None, rows=None):
        self.model, self.format, self.rows = model, format, rows
        self.layers = [None] * text_config(model).num_hidden_layers  # None: no softmax attention
        self._places = {}  # of keys in the first batch: their layer
        run_layers(model, batches, device, self._visit, progress)
        self._choose()

    def _visit(self, index, batch, layer, arguments, keywords, run):
        if batch == 0:
            self.layers[index] = self._look(index, layer, arguments, keywords)
        found = self.layers[index]
        if found is None:
            return run()
        kept = {}

        def observe(call):
            kept["call"], kept["out"] = call, exact_attention(call)
            return kept["out"]

        hook = found.facts.output.register_forward_pre_hook(
            lambda _, args: kept.__setitem__("into", args[0])) if found.facts.gated else None
        try:
            with observing(observe):
                hidden = run()
        finally:
            if hook is not None:
                hook.remove()
        self._add(index, batch, found, **kept)
        return hidden

    def _look(self, index, layer, arguments, keywords):
        facts = probe(layer, index, arguments, keywords)
        if facts is None:
            return None
        heads, dk, dv = facts.shape
        rope = parameters = None
        if facts.rope is not None:
            rope, parameters = settled_rope(facts.rope, dk, text_config(self.model), arguments[0].shape[1])
        weight = output_weight(facts.output, facts.num_qo_heads * dv).double()
        by_head = weight.view(weight.shape[0], -1, dv).permute(1, 2, 0)
        squares = torch.bmm(by_head, by_head.mT)
        parts = [_Part(facts, self.format, squares, arguments[0].device) for _ in range(1 if self.rows is None else 2)]
        return _Layer(facts, rope, parameters, parts[0], parts[1] if self.rows is not None else None, index, squares,
                      weight_samples(facts, arguments[0].shape[-1]))

    def _add(self, index, batch, found, call, out, into=None):
        if batch == 0:
            if found.facts.shared:
                found.owner = self._places[call.k.data_ptr()]
            else:
                self._places[call.k.data_ptr()] = index
        owner = self.layers[found.owner]
        held, gate = self.rows is not None and batch >= self.rows.first_batch, None
        if found.facts.gated:
            rows = out.transpose(1, 2)  # [batch, T, Hq, dv]
            gate = torch.where(rows == 0, 0, into.reshape(rows.shape).double() / rows.double())
            (found.held if held else found.fitted).add_gate(gate)
        (owner.held if held else owner.fitted).sums.add(call, out, owner.rope.back, found.facts.window,
                                                        own_rows=found.owner == index)
        if held:
            self._hold_back(index, batch, found, call, None if gate is None else gate.transpose(1, 2))

    def _hold_back(self, index, batch, found, call, gate):
        """Keeps the rows of a held-back batch if the layer can be searched. The loss of a candidate has neither sinks nor
        soft caps (docs/mathematics.md, 9.2), and its queries are those of one layer."""
        if found.owner != index:
            self.layers[found.owner].not_searched = "other layers read the same keys and values"
        elif call.sinks is not None:
            found.not_searched = "attention has sinks"
        elif call.softcap is not None:
            found.not_searched = "scores have a soft cap"
        elif 0 < found.facts.window <= self.format.recent_tokens:
            found.not_searched = "the window fits into the recent tokens"
        else:
            if batch == self.rows.first_batch:
                self.rows.require_room(call, found.facts.gated, len(self.layers) - index)
            self.rows.add(index, batch, call, gate)

    def _choose(self):
        """What becomes of each layer: `kinds`, and `base`, whose shape and RoPE are the model's."""
        own = [i for i, layer in enumerate(self.layers) if layer is not None and layer.owner == i]
        if not own:
            raise UnsupportedError(f"{type(self.model).__name__} never called transformers' attention interface: it has "
                                   "attention code of its own, or none; it is not calibrated")
        full = [i for i in own if self.layers[i].facts.window == 0] or own[:1]
        base = next((i for i in full if len(self.layers[i].rope.inv_freq)), full[0])
        self.base = self.layers[base]
        self.kinds = []
        for i, layer in enumerate(self.layers):
            if i not in own:
                self.kinds.append("none")
                continue
            facts, turns = layer.facts, bool(len(layer.rope.inv_freq))
            same_shape = (facts.shape, facts.num_qo_heads) == (self.base.facts.shape, self.base.facts.num_qo_heads)
            same_rope = layer.rope.same(self.base.rope)
            if facts.window:
                self.kinds.append("sliding" if same_shape and same_rope and not facts.chunked else "local")
            elif not same_shape:
                raise UnsupportedError(f"layers {base} and {i} see all tokens and have different heads; a bundle has one "
                                       "shape of them")
            elif turns and not same_rope:
                raise UnsupportedError(f"layers {base} and {i} see all tokens and turn keys by different RoPE; a bundle "
                                       "has one")
            else:
                self.kinds.append("full")
        for dim in self.base.facts.shape[1:]:
            if dim > LARGEST_DIM or dim % 8:
                raise UnsupportedError(f"heads of {dim} dimensions; 2-bit rows have a multiple of 8, {LARGEST_DIM} at most")

    def metric(self, index, all_text=True):
        """M_O [Hkv, dv, dv] of all layers that read this layer's rows (math 1.2); with gates, the mean over tokens."""
        total = 0
        for layer in self.layers:
            if layer is not None and layer.owner == index:
                squares, parts = layer.squares, layer.parts(all_text)
                if layer.facts.gated:
                    squares = squares * (sum(part.gate for part in parts) / sum(part.gate_rows for part in parts))
                total = total + squares.view(self.layers[index].facts.shape[0], -1, *squares.shape[1:]).sum(1)
        return total.cpu().numpy()

    def searched_layers(self):
        """Of each layer what HeldBackRows.finish() takes."""
        for i, kind in enumerate(self.kinds):
            layer = self.layers[i]
            if kind not in ("full", "sliding"):
                yield ""
            else:
                yield layer.not_searched or (layer.facts.scaling, layer.facts.gated, layer.squares)

    def file_layers(self, all_text=True):
        """(attributes, datasets) of each layer, as record.write_statistics takes them; with all_text False, of the text
        that is not held back."""
        sampled = all(self.layers[i].samples is not None for i, kind in enumerate(self.kinds)
                      if kind in ("full", "sliding"))
        for i, kind in enumerate(self.kinds):
            layer = self.layers[i] if kind != "none" else self.base
            facts = layer.facts
            window = facts.window if kind in ("sliding", "local") else 0
            quantized = kind == "full" or kind == "sliding" and window > self.format.recent_tokens
            attributes = {"attention": kind, "sliding_window": window, "quantized": int(quantized),
                          "num_qo_heads": facts.num_qo_heads, "num_kv_heads": facts.shape[0],
                          "head_dim_k": facts.shape[1], "head_dim_v": facts.shape[2]}
            datasets = {}
            if kind in ("full", "sliding"):
                if not len(layer.rope.inv_freq) and len(self.base.rope.inv_freq):
                    attributes["turned"] = 0
                try:
                    sums = total([part.sums for part in layer.parts(all_text)], attended=quantized)
                except ValueError as error:
                    raise UnsupportedError(f"layer {i}: {error}") from error
                datasets = {f"statistics/{name}": value for name, value in sums.items()}
                datasets["statistics/o_proj_metric"] = self.metric(i, all_text)
                if sampled:
                    datasets["weight_samples"], datasets["vector_samples"] = (x.numpy() for x in layer.samples)
            yield attributes, datasets


def output_weight(output, width):
    """[hidden, width] of a linear output projection, as it acts: quantized weights are read by what they do."""
    if isinstance(output, torch.nn.Linear) and is_plain(output.weight, (output.out_features, width)):
        return output.weight.data
    weight = next(output.parameters())
    dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else torch.bfloat16
    inputs = torch.cat((torch.eye(width, device=weight.device, dtype=dtype),
                        torch.zeros(1, width, device=weight.device, dtype=dtype)))
    with torch.no_grad():
        acts = output(inputs[None])[0].double()
    return (acts[:-1] - acts[-1]).T


def weight_samples(facts, hidden):
    """float32 [Hkv, 4, 16] of W_Q, W_K, W_V and W_O, and [Hkv, 5, 16] of their biases and norms, bf16 numbers
    (lib/oscar/bundle/weight_samples.h). None where the attention module has no such matrices."""
    heads, dk, dv = facts.shape
    if dk != dv:
        return None
    layer = SimpleNamespace(num_kv_heads=heads, num_qo_heads=facts.num_qo_heads, head_dim=dk)
    found = projections(facts.attention, layer)
    rows = [facts.num_qo_heads * dk, heads * dk, heads * dv]
    shapes = [*((n, hidden) for n in rows), (hidden, facts.num_qo_heads * dv)]
    if not all(is_plain(matrix, shape) for matrix, shape in zip(found[:4], shapes)):
        return None
    matrices = [sample(matrix.data, heads, by_columns=i == 3) for i, matrix in enumerate(found[:4])]
    vectors = [torch.zeros(heads, SAMPLES, device=matrices[0].device) if vector is None else
               sample_vector(vector.data, heads, dk) for vector in found.vectors]
    return tuple(torch.stack([one.float() for one in taken], 1).bfloat16().float().cpu()
                 for taken in (matrices, vectors))
