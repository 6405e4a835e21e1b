"""The model `oscar_int2` of EleutherAI's lm-eval (0.4.13): its model `hf` over the 2-bit cache.

Log-likelihoods read their text through 2 bits, each token what its decode step would read (apply(...,
prompts="int2")). Generation is what transformers serves: prompts attend exactly, later tokens read the cache.
"""
import bisect
import logging

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from .bundle import load
from .errors import UnsupportedError
from .transformers import apply

LOGGER = logging.getLogger("oscar_int2")


@register_model("oscar_int2")
class OscarInt2LM(HFLM):
    """lm-eval's model `hf` behind apply().

    `pretrained`: a folder or a model's name. `bundle`: of that model. `demote_block`, `weights`: as of apply().
    `softmax_dtype`: of log probabilities and of their sum over a request; in bf16, as `hf` has them by default, a sum of
    some -1,750 has steps of 8, which is more than 2 bits cost. All other arguments are those of `hf`. Raises what apply()
    raises.
    """

    def __init__(self, pretrained, bundle, demote_block=None, weights="same", softmax_dtype="float32", **arguments):
        super().__init__(pretrained, softmax_dtype=softmax_dtype, **arguments)
        self._applied = {"bundle": load(bundle), "demote_block": demote_block, "weights": weights}
        self._format = None  # as served by how prompts are read
        self._counts = {"requests": 0, "requests_with_2_bit_rows": 0}
        self._prompts = None
        self._read_prompts("int2")

    def _read_prompts(self, how):
        """How passes over many tokens read their own rows from now on: "int2" or "exact"."""
        if self._prompts != how:
            apply(self.model, prompts=how, **self._applied)
            self._prompts, self._format = how, self.model.oscar_int2.scoring.format

    def _count(self, lengths):
        """Counts requests by the tokens that their last prediction reads, 0 where it reads no cache: of few tokens no row
        is in 2 bits."""
        self._counts["requests"] += len(lengths)
        self._counts["requests_with_2_bit_rows"] += sum(self._format.history_tokens(tokens) > 0 for tokens in lengths)

    def set_cache_hook(self, cache_hook):
        """lm-eval calls it where answers are to be stored. Raises UnsupportedError."""
        raise UnsupportedError("--use_cache is not served with the model oscar_int2: lm-eval finds stored answers by the request "
                               "alone, so those of BF16, of 2 bits and of other bundles would be mixed; leave it out")

    def _loglikelihood_tokens(self, requests, *arguments, **options):
        self._read_prompts("int2")
        # The last token is predicted, and never read. What is longer than the context loses its beginning.
        self._count([min(len(context) + len(continuation) - 1, self.max_length) for _, context, continuation in requests])
        return super()._loglikelihood_tokens(requests, *arguments, **options)

    def generate_until(self, requests, *arguments, **options):
        self._read_prompts("exact")
        return super().generate_until(requests, *arguments, **options)

    def _model_generate(self, context, *arguments, attention_mask, stop, **options):
        result = super()._model_generate(context, *arguments, attention_mask=attention_mask, stop=stop, **options)
        answers = [self._answer_tokens(ids, stop) for ids in result[:, context.shape[1]:].tolist()]
        # The first token of an answer is the exact prompt's; the last is not read.
        self._count([prompt + answer - 1 if answer > 1 else 0
                     for prompt, answer in zip(attention_mask.sum(1).tolist(), answers)])
        return result

    def _answer_tokens(self, ids, stop):
        """Tokens of an answer up to the end of sequence, or the end of the first text of `stop`: it may run on, since
        others of its batch do."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        ids = ids[:next((i for i, token in enumerate(ids, 1) if token in ends), len(ids))]
        return 1 + bisect.bisect_left(range(1, len(ids)), True,
                                      key=lambda tokens: any(text in self.tok_decode(ids[:tokens]) for text in stop))

    def get_model_info(self):
        """Also which bundle it was, and how many requests were long enough to read 2-bit rows."""
        if not self._counts["requests_with_2_bit_rows"]:
            exact = self._format.sink_tokens + self._format.recent_tokens + self._format.demote_block + 1
            LOGGER.warning("oscar_int2: no request reached %d tokens, so every row was exact: these results are the BF16 "
                           "baseline's. Take longer tasks, or more shots", exact)
        bundle = self._applied["bundle"]
        return super().get_model_info() | {"oscar_int2": {"bundle": bundle.path, "content_sha256": bundle.content_sha256,
                                                          **self._counts}}
