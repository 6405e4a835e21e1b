"""The model `oscar_int2` of EleutherAI's lm-eval (0.4.13): its model `hf` over the 2-bit cache.

Log-likelihoods read their text through 2 bits, each token what its decode step would read (apply(...,
prompts="int2")). Generation is what transformers serves: prompts attend exactly, later tokens read the cache.
"""
import logging

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from .bundle import load
from .transformers import apply

LOGGER = logging.getLogger("oscar_int2")


@register_model("oscar_int2")
class OscarInt2LM(HFLM):
    """lm-eval's model `hf` behind apply().

    `pretrained`: a folder or a model's name. `bundle`: of that model. `demote_block`, `weights`: as of apply().
    All other arguments are those of `hf`. Raises what apply() raises.
    """

    def __init__(self, pretrained, bundle, demote_block=None, weights="same", **arguments):
        super().__init__(pretrained, **arguments)
        self._applied = {"bundle": load(bundle), "demote_block": demote_block, "weights": weights}
        self._format = self._applied["bundle"].quantizer.served(demote_block)
        self._counts = {"requests": 0, "requests_with_2_bit_rows": 0}
        self._prompts = None
        self._read_prompts("int2")

    def _read_prompts(self, how):
        """How passes over many tokens read their own rows from now on: "int2" or "exact"."""
        if self._prompts != how:
            apply(self.model, prompts=how, **self._applied)
            self._prompts = how

    def _count(self, lengths):
        """Counts requests by their tokens: a short one has no row in 2 bits."""
        self._counts["requests"] += len(lengths)
        self._counts["requests_with_2_bit_rows"] += sum(self._format.history_tokens(tokens) > 0 for tokens in lengths)

    def _loglikelihood_tokens(self, requests, *arguments, **options):
        self._read_prompts("int2")
        self._count([len(context) + len(continuation) for _, context, continuation in requests])
        return super()._loglikelihood_tokens(requests, *arguments, **options)

    def generate_until(self, requests, *arguments, **options):
        self._read_prompts("exact")
        return super().generate_until(requests, *arguments, **options)

    def _model_generate(self, context, *arguments, attention_mask, **options):
        result = super()._model_generate(context, *arguments, attention_mask=attention_mask, **options)
        added = result.shape[1] - context.shape[1]
        self._count([tokens + added for tokens in attention_mask.sum(1).tolist()])
        return result

    def get_model_info(self):
        """Also which bundle it was, and how many requests were long enough to read 2-bit rows."""
        if not self._counts["requests_with_2_bit_rows"]:
            exact = self._format.sink_tokens + self._format.recent_tokens + self._format.demote_block
            LOGGER.warning("oscar_int2: no request reached %d tokens, so every row was exact: these results are the BF16 "
                           "baseline's. Take longer tasks, or more shots", exact)
        bundle = self._applied["bundle"]
        return super().get_model_info() | {"oscar_int2": {"bundle": bundle.path, "content_sha256": bundle.content_sha256,
                                                          **self._counts}}
