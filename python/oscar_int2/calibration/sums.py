"""Sums of a layer's rows, as lib/oscar/calibrate/collector.h defines them: float64, on the device of the rows.

They are plain products of torch. The sums take some 2% of the products of a layer, and float64 is what the C++ engine
adds in, too (docs/mathematics.md, 2.1 and 2.6).
"""
import torch

from .interface import weights

# docs/mathematics.md, 14.2: constants of lib/oscar/attention/received_attention.h.
QUERY_STRIDE, QUERY_STEP = 16, 7
EVEN_SHARE, SINK_FACTOR = 0.1, 10.0
SCORES = 1 << 25      # that are in memory at a time
SUMS = ("q", "k", "v", "attn_out")


class LayerSums:
    """Of one layer. `shape`: num_kv_heads, head_dim_k, head_dim_v. `format`: CacheFormat, whose windows say which rows
    a query reads as INT2."""

    def __init__(self, shape, format, device):
        self.heads, self.dims = shape[0], {"q": shape[1], "k": shape[1], "v": shape[2], "attn_out": shape[2]}
        self.format, self.device = format, device
        self.count_q = self.count_kv = 0
        self.values = {}
        for name in SUMS:
            d = self.dims[name]
            self.values[f"{name}_moment"] = self._zeros(d, d)
            self.values[f"{name}_sum"] = self._zeros(d)
            if name != "attn_out":
                self.values[f"{name}_attended_moment"] = self._zeros(d, d)
                self.values[f"{name}_attended_weight"] = self._zeros()
        for name in ("k_attended_sum", "k_sink_sum"):
            self.values[name] = self._zeros(self.dims["k"])
        self.values["v_attended_sum"] = self._zeros(self.dims["v"])
        self.values["k_sink_weight"] = self._zeros()

    def _zeros(self, *shape):
        return torch.zeros(self.heads, *shape, dtype=torch.float64, device=self.device)

    def add(self, call, out, before_rope, window, own_rows=True):
        """Adds the rows of one Call and their attention output [batch, Hq, T, dv]. `before_rope`: turns keys
        [..., T, dk] back to position 0, in float32. `window`: keys that a query sees, 0 for all. `own_rows` False: keys
        and values are another layer's, whose sums these are; only queries and outputs are added, and attention."""
        rows = {"q": call.q, "attn_out": out} | ({"k": call.k, "v": call.v} if own_rows else {})
        for name, x in rows.items():
            for head, flat in enumerate(_by_kv_head(x, self.heads)):
                flat = flat.double()
                self.values[f"{name}_moment"][head] += flat.T @ flat
                self.values[f"{name}_sum"][head] += flat.sum(0)
        tokens = call.k.shape[0] * call.k.shape[2]
        self.count_q += tokens * (call.q.shape[1] // self.heads)
        self.count_kv += tokens if own_rows else 0
        if window == 0 or window > self.format.recent_tokens:  # else no row ever is INT2
            self._add_attended(call, before_rope)

    def _add_attended(self, call, before_rope):
        """Rows weighted by the attention that sampled queries pay to them as INT2 rows (math 2.6)."""
        tokens = call.k.shape[2]
        places = sampled_queries(self.format, tokens, call)
        if not len(places):
            return
        batch, add = call.k.shape[0], self.values
        key, value = (torch.zeros(batch, self.heads, tokens, device=call.k.device, dtype=torch.float32)
                      for _ in range(2))
        step = max(1, SCORES // (batch * call.q.shape[1] * tokens))
        for part in places.split(step):
            q = call.q[:, :, part]
            visible = call.visible(part)
            int2 = visible & int2_keys(self.format, part, tokens)
            p = weights(call, q.float(), call.k.float(), visible) * int2  # [batch, Hkv, group, n, T]
            squares = p * p
            rest = p - squares
            even = int2 / int2.sum(1, keepdim=True)
            for total, attention in ((key, rest), (value, squares)):
                total += (1 - EVEN_SHARE) * attention.sum((2, 3))
                total += EVEN_SHARE * (attention.sum((2, 4))[..., None] * even).sum(2)
            _add_weighted(q.reshape(batch, self.heads, -1, q.shape[-1]), rest.sum(-1).flatten(2), add, "q")
        sink, end = self.format.sink_tokens, self.format.sink_tokens + self.format.history_tokens(tokens)
        is_sink = torch.zeros_like(key)
        is_sink[..., sink:end] = key[..., sink:end] > SINK_FACTOR * key[..., sink:end].mean(-1, keepdim=True)
        keys = before_rope(call.k)
        _add_weighted(keys, key, add, "k")
        _add_weighted(call.v, value, add, "v")
        sinks = (key * is_sink).double()
        add["k_sink_sum"] += torch.einsum("bht,bhtd->hd", sinks, keys.double())
        add["k_sink_weight"] += sinks.sum((0, 2))


def total(parts, attended):
    """{name in the file: numpy array} of lib/oscar/bundle/SCHEMA.md but o_proj_metric, of the LayerSums of parts of a text.
    Raises ValueError naming a sum that is not finite."""
    found = {}
    for name in parts[0].values:
        if not attended and ("attended" in name or "sink" in name):
            continue
        value = sum(part.values[name] for part in parts).cpu()
        if not value.isfinite().all():
            raise ValueError(f"{name} is not finite: weights or activations overflow")
        if name.endswith("moment"):
            value = value.triu() + value.triu(1).mT + 0.0  # no -0
        found[name] = value.numpy()
    return found | {name: sum(getattr(part, name) for part in parts) for name in ("count_q", "count_kv")}


def sampled_queries(format, tokens, call):
    """Positions [n] of one query of every stride, at another place of each, that read INT2 rows."""
    m = torch.arange(-(-tokens // QUERY_STRIDE), device=call.k.device)
    places = QUERY_STRIDE * m + QUERY_STEP * m % QUERY_STRIDE
    places = places[places < tokens]
    return places[(call.visible(places) & int2_keys(format, places, tokens)).any(-1)]


def int2_keys(format, queries, tokens):
    """bool [n, tokens]: keys that queries at these positions read as INT2, if they see them (math 4.7)."""
    keys = torch.arange(tokens, device=queries.device)
    end = format.sink_tokens + format.history_tokens(queries + 1)
    return (keys >= format.sink_tokens) & (keys < end[:, None])


def _by_kv_head(x, heads):
    """Rows [batch * group * T, d] of each KV head in turn; x [batch, H, T, d]."""
    return (part.reshape(-1, x.shape[-1]) for part in x.chunk(heads, 1))


def _add_weighted(rows, weight, add, name):
    """Sums of w x^T x, w x and w: rows [batch, Hkv, n, d], weight [batch, Hkv, n]."""
    for head in range(rows.shape[1]):
        x, w = rows[:, head].reshape(-1, rows.shape[-1]).double(), weight[:, head].reshape(-1, 1).double()
        weighted = x * w
        add[f"{name}_attended_moment"][head] += weighted.T @ x
        add[f"{name}_attended_weight"][head] += w.sum()
        if name != "q":
            add[f"{name}_attended_sum"][head] += weighted.sum(0)
