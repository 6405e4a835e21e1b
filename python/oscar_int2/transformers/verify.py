"""apply(..., verify=True): the self-check of self_check.py in transformers."""
import torch
from transformers import AutoTokenizer

from .. import self_check
from ..transformers_version import CACHE
from .cache import OscarCache, refuse


class Verification:
    """A probe of a model, and its answers over BF16 rows: made before apply() changes the model."""

    def __init__(self, model, bundle, demote_block, verify):
        if model.training:
            refuse("verify=True of a model in training mode; model.eval() first")
        tokens = self_check.probe_tokens(bundle.quantizer.served(demote_block))
        room = int(bundle.model.rope.get("max_positions") or tokens) - 4 * self_check.QUOTE
        self.bundle = bundle
        self.probe = self_check.probe(min(tokens, max(room, self_check.QUOTE)), model.config.vocab_size,
                                      _encoder(model, verify))
        self.ids = torch.tensor([self.probe.prompt + self.probe.quote], device=model.device)
        quote = len(self.probe.quote)
        with torch.no_grad():
            self.exact = self._of_quote(model(self.ids, use_cache=False, logits_to_keep=quote + 1).logits[0, :-1])

    def _of_quote(self, logits):
        """Log probabilities of the quote's tokens, from logits [tokens, vocab]."""
        log_p = logits.float().log_softmax(-1)
        return log_p.gather(-1, self.ids[0, -len(log_p):, None])[:, 0].tolist()

    @torch.no_grad()
    def check(self, model):
        """The Result over the 2-bit cache, the quote's tokens fed in one by one. Raises SelfCheckError."""
        begin, end = len(self.probe.prompt), self.ids.shape[1]
        cache = OscarCache(model, 1, end)
        logits = [model(self.ids[:, :begin], **{CACHE: cache}, logits_to_keep=1).logits[0, -1]]
        for i in range(begin, end - 1):
            logits.append(model(self.ids[:, i:i + 1], **{CACHE: cache}).logits[0, -1])
        cache.check_rows()
        return self_check.check(self.bundle, self.probe, self.exact, self._of_quote(torch.stack(logits)))


def _encoder(model, verify):
    """Text to ids by a tokenizer: `verify` itself, or that of the model's folder. None: there is none."""
    tokenizer = verify
    if verify is True:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
        except Exception:  # each kind of folder without one fails in its own way
            return None
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
