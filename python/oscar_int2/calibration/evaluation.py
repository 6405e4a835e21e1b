"""KL and perplexity of a transformers model over a bundle's 2-bit rows: attention gets them in place of exact ones.

Each query reads what a decode step of its token would read: rows that have left the exact windows by then as INT2, all
others exactly (docs/mathematics.md, 4.7 and 11). Rows go through the operators that servers write pages with.
"""
import logging
import math
import pathlib

import torch

from ..bundle import Bundle, load
from ..cache import row_problem
from ..codec import LayerCodec, StepTables
from ..errors import BundleMismatchError, CacheRowError
from ..weights import check_model as check_weights
from .cautions import UNIT_TOKENS, cautions_of, has_few_units, stored_convergence
from .corpus import read_corpus
from .interface import block_attention, exact_attention, observing
from .layers import decoder_layers, run_layers, text_config
from .model import batched, config_of, load_model, observed, require_one_rope, run_device, sequence_tokens, tokenizer_of
from .probe import is_handed_on, probe, seen_window
from .record import turns_by
from .shared_text import caution, overlap, repeated_share, stored_hashes
from .sums import int2_keys

FEWEST_TOKENS = 100  # that count: kFewestTokens of lib/oscar/eval/estimate.h
_log = logging.getLogger("oscar_int2")


def evaluate(model, bundle, corpus, *, sequence_length=None, max_tokens=None, batch_tokens=8192, first_position=None,
             weights="same", device=None, dtype=None, trust_remote_code=False, progress=None):
    """Predictions over the 2-bit rows of `bundle` (a Bundle or a path) beside those over exact rows, of the same model on
    the same ids. Other arguments are those of calibrate(); `progress` counts the layers of both runs. `first_position`: of
    the first token that counts; None: the first that reads a 2-bit row. `weights`: "same" refuses a bundle that was calibrated
    on other weights than the model has; "any" takes it and says so. Returns a dictionary: tokens, first_position,
    perplexity (of exact rows), int2_perplexity, kl (nats a token), top1 (share of tokens whose likeliest prediction is the
    same), and the standard errors perplexity_se, int2_perplexity_se, kl_se, None of less than 8 units of 512 tokens.
    `overlap` says how much of the text the bundle was calibrated on (shared_text.overlap); a notable share is also warned
    of, by the logger `oscar_int2`. `convergence` is the bundle's own (None: it has none), `units` and `sequences` count those,
    `repeated_share` says how much of the text are copies, `vocab_size` is the model's, and `cautions` what to beware of, as
    cautions.cautions_of gives it. Raises BundleMismatchError for a bundle of another model, ValueError where fewer than 100
    tokens count, for sequences beyond the model's context and for those that LongRoPE turns differently."""
    bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
    bundle.require_unedited()
    if pathlib.Path(bundle.path).exists():  # what it holds of its text is read there
        bundle.require_same_file()
    config = config_of(model, trust_remote_code)
    sequence_length = sequence_tokens(config, sequence_length)
    sequences, _ = read_corpus(corpus, lambda: tokenizer_of(model), sequence_length, max_tokens)
    device = run_device(model, device)
    model = load_model(model, device, dtype, trust_remote_code)
    check_model(bundle, model, weights)
    format = bundle.quantizer
    exact, longest = format.sink_tokens + format.recent_tokens + format.demote_block, max(map(len, sequences))
    first = exact if first_position is None else first_position
    if longest <= max(first, exact, 1):
        raise ValueError(f"no sequence is longer than {max(first, exact, 1)} tokens, and what comes before reads exact rows")
    counted = [ids for ids in sequences if len(ids) > max(first, 1)]
    require_one_rope(config, [len(ids) for ids in counted])
    tokens = sum(len(ids) - max(first, 1) for ids in counted)
    if tokens < FEWEST_TOKENS:
        raise ValueError(f"too few tokens for perplexity from position {max(first, 1)} on: expected at least {FEWEST_TOKENS} "
                         f"predicted tokens behind the first position, found {tokens}; give a longer corpus or longer "
                         "sequences (sequence_length)")
    batches = batched(counted, batch_tokens)
    if warning := bundle.beyond_positions(longest):
        _log.warning("oscar_int2: %s", warning)
    shared = overlap(stored_hashes(bundle.path), [ids for ids in sequences if len(ids) > first])
    if said := caution(shared, pathlib.Path(bundle.path).name):
        _log.warning("CAUTION: %s", said)
    copies = repeated_share(counted)
    with observed(model):
        exact = run_layers(model, batches, device, _exactly(bundle),
                           progress and (lambda layer, layers: progress(layer, 2 * layers)))
        coded = run_layers(model, batches, device, _over(Int2Rows(bundle, longest).of_layer),
                           progress and (lambda layer, layers: progress(layers + layer, 2 * layers)))
        units = [unit for batch, ids in enumerate(batches)
                 for unit in _compare(exact.logits(batch), coded.logits(batch), ids, max(first, 1))]
    found = {"tokens": tokens, "first_position": max(first, 1), "units": len(units), "sequences": len(counted),
             "repeated_share": copies, "overlap": shared, "convergence": stored_convergence(bundle.path),
             "vocab_size": text_config(model).vocab_size,
             **_figures(units, has_few_units(len(units), copies))}
    return found | {"cautions": cautions_of(found, format, pathlib.Path(bundle.path).name)}


def check_model(bundle, model, accepted):
    """Raises BundleMismatchError for a bundle of another model, as far as config and weights tell. `accepted`: the weights,
    as `weights` of evaluate()."""
    if type(model).__name__ != bundle.model.architecture:
        raise BundleMismatchError(f"{bundle.path} is of a {bundle.model.architecture}, and the model is a "
                                  f"{type(model).__name__}")
    config = text_config(model)
    bundle.check_shape(config)
    if bundle.states_rope(config):
        bundle.check_rope(config)
    attentions = {i: module for i, layer in enumerate(decoder_layers(model)) for module in list(layer.modules())[::-1]
                  if hasattr(module, "o_proj") and (hasattr(module, "q_proj") or hasattr(module, "qkv_proj"))}
    check_weights(bundle, model, attentions, accepted, "evaluate")


def _exactly(bundle):
    """A visit of run_layers() with exact attention. Raises BundleMismatchError where a layer sees other tokens, or turns keys
    otherwise than the bundle says: a config may state another RoPE than this transformers runs."""
    def visit(index, batch, layer, arguments, keywords, run):
        told = bundle.layers[index]

        def attend(call):
            tokens = call.q.shape[2]
            found, kept = (min(width or tokens, tokens) for width in (seen_window(call, index)[0], told.sliding_window))
            if told.attention != "none" and found != kept:  # those without rows of their own
                raise BundleMismatchError(f"{bundle.path} is of another model: layer {index} sees {found} tokens here and "
                                          f"{kept} in the bundle, of texts of {tokens}")
            return exact_attention(call)

        if batch == 0 and told.key is not None:
            rope, dim, tokens = probe(layer, index, arguments, keywords).rope, told.head_dim, arguments[0].shape[1]
            if rope is not None and not turns_by(rope, bundle.model.rope if told.turned else {"rope_type": "none"}, dim, tokens):
                raise BundleMismatchError(f"{bundle.path} is of other positions: keys of layer {index} turn by other RoPE here "
                                          "than in the bundle; calibrate with the RoPE that is served")
        with observing(attend if batch == 0 else exact_attention):
            return run()
    return visit


def _over(attention_of):
    """A visit of run_layers() in which each layer attends by attention_of(index, batch, keywords)(call)."""
    def visit(index, batch, layer, arguments, keywords, run):
        with observing(attention_of(index, batch, keywords)):
            return run()
    return visit


class Int2Rows:
    """Attention over rows that went through a bundle's codec. `positions`: of the longest sequence, where these are
    more than the bundle's."""

    def __init__(self, bundle, positions=0):
        self.bundle, self.positions, self.codecs, self.places = bundle, positions, {}, {}

    def of_layer(self, index, batch, keywords):
        def attend(call):
            owner = self.places.get((batch, call.k.data_ptr())) if is_handed_on(keywords, call.k) else index
            self.places[batch, call.k.data_ptr()] = owner
            layer = self.bundle.layers[owner]
            if layer.key is None or not layer.quantized:
                return exact_attention(call)
            return self.attend(owner, call)
        return attend

    def attend(self, owner, call):
        """[batch, Hq, T, dv]: queries over the rows of layer `owner`."""
        format, tokens = self.bundle.quantizer, call.k.shape[2]
        history = format.history_tokens(tokens)
        if not history:
            return exact_attention(call)
        coded = [self.coded(owner, k, v, history) for k, v in zip(call.k, call.v)]
        k, v = (torch.cat((rows.float(), torch.stack(back)), 2) for rows, back in zip((call.k, call.v), zip(*coded)))
        behind = slice(format.sink_tokens, format.sink_tokens + history)

        def visible(queries):
            seen, int2 = call.visible(queries), int2_keys(format, queries, tokens)
            return torch.cat((seen & ~int2, (seen & int2)[:, behind]), 1)

        return block_attention(call, k, v, visible)

    def coded(self, owner, k, v, history):
        """What INT2 makes of the rows behind the sink: k and v [Hkv, T, d] to float32 [Hkv, history, d], in the model's
        basis."""
        heads, tokens, d = k.shape
        codec = self.codecs.get(owner)
        if codec is None:
            codec = self.codecs[owner] = LayerCodec(self.bundle, owner, k.device, positions=self.positions)
        format = codec.format
        pages = codec.pages(format.history_pages(tokens), 1, format.sink_tokens + format.ring_tokens())

        def ints(*values):
            return torch.tensor(values, dtype=torch.int32, device=k.device)

        tables = StepTables(
            block_table=torch.arange(len(pages.pool), dtype=torch.int32, device=k.device)[None],
            query_start_loc=ints(0, tokens), old_len=ints(0), seq_lens=ints(tokens), old_history=ints(0),
            new_history=ints(history), status=ints(0), max_new_rows=tokens, max_new_history=history)
        codec.append(pages, tables, *codec.transform_kv(*(x.transpose(0, 1).bfloat16().contiguous() for x in (k, v))))
        if int(tables.status[0]):
            raise CacheRowError(f"layer {owner}: {row_problem(int(tables.status[0]))}")
        rows = codec.read_history(pages, tables, 0, history).float().transpose(1, 2)  # [2, Hkv, history, d]
        layer = self.bundle.layers[owner]
        return tuple(x @ inverse.to(k.device) + side.mean[:, None].to(k.device) for x, side, inverse in (
            (rows[0], layer.key, layer.key.partner.mT), (rows[1], layer.value, layer.value.partner)))


def _compare(exact, coded, ids, first):
    """Units [n, 4] of tokens: NLL over exact rows, over 2-bit rows, KL, and whether the likeliest token is the same."""
    for p, q, row in zip(exact, coded, ids):
        target = row[first:, None].to(p.device)
        p, q = (x[first - 1:-1].float().log_softmax(-1) for x in (p, q.to(p.device)))
        columns = torch.stack((-p.gather(-1, target)[:, 0], -q.gather(-1, target)[:, 0], (p.exp() * (p - q)).sum(-1),
                               (p.argmax(-1) == q.argmax(-1)).float()), 1).double().cpu()
        yield from columns.split(UNIT_TOKENS)


def _figures(units, few):
    counts = torch.tensor([len(unit) for unit in units], dtype=torch.float64)
    sums = torch.stack([unit.sum(0) for unit in units])
    mean = sums.sum(0) / counts.sum()
    errors = [None] * 4
    if not few:
        away = sums - counts[:, None] * mean  # of a ratio of sums, units drawn at random
        errors = (away.square().sum(0) * len(units) / (len(units) - 1)).sqrt().div(counts.sum()).tolist()
    nll, int2_nll, kl, top1 = mean.tolist()
    found = {"perplexity": math.exp(nll), "int2_perplexity": math.exp(int2_nll), "kl": kl, "top1": top1}
    for i, name in enumerate(("perplexity", "int2_perplexity", "kl")):
        scale = found[name] if i < 2 else 1
        found[f"{name}_se"] = None if errors[i] is None else errors[i] * scale
    return found
