"""What a model or a Generator serves with, now: status()."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    cache: str                # "INT2", or "BF16": nothing of this package is in use
    bundle: str = ""          # path
    content_sha256: str = ""  # of the bundle
    model: str = ""           # name of the model that was calibrated
    bits: int = 16            # of a number of a cached row that has left the exact windows
    prompts: str = "exact"    # how prompts, and passes without a cache, read their own rows: or "int2"
    demote_block: int = 1     # tokens that leave the exact window at once
    weights: str = ""         # as apply() or Generator found them. "same": attention's agree with the bundle's samples, and the
                              #   files with its fingerprint; "same attention": of the others nothing is known; "other files":
                              #   they are others; "same files": only files could be compared; "any": others, accepted;
                              #   "not compared"
    tokens_int2: int = 0      # held now as 2-bit rows, over all requests,
    tokens_exact: int = 0     #   and in the exact windows
    last_int2: int = 0        # the same of the last run, each request at its end. A run is a generate(), a run() of a
    last_exact: int = 0       #   Generator, or a pass without a cache with prompts="int2", which reads these rows
    refused: int = 0          # requests until now of which a row could not be held
    self_check: str = ""      # what the self-check of apply(..., verify=True) found

    def __str__(self):
        if self.cache == "BF16":
            return "oscar_int2: BF16, no bundle is in use"
        return (f"oscar_int2: {self.bits} bits by {self.bundle} (of {self.model!r}, content_sha256 "
                f"{self.content_sha256[:12]}), weights as found: {self.weights}; prompts={self.prompts!r}, "
                f"demote_block={self.demote_block}; {self.tokens_int2} tokens held in 2 bits, {self.tokens_exact} exactly; "
                f"last run: {self.last_int2} in 2 bits, {self.last_exact} exactly; {self.refused} requests refused for a "
                f"row; self-check: {self.self_check or 'not run'}")


def status(served):
    """The Status of a model of transformers, with oscar_int2.transformers.apply() or without, or of a
    Generator; waits for the device. Raises TypeError for anything else: what vLLM serves, its log and /metrics say."""
    while not hasattr(served, "oscar_int2") and hasattr(served, "_orig_mod"):
        served = served._orig_mod  # of torch.compile
    if not any(hasattr(served, name) for name in ("paged_caches", "oscar_int2", "named_parameters")):
        raise TypeError(f"status() takes a model of transformers or a Generator, found a {type(served).__name__}; of vLLM its log "
                        "and /metrics say it, and of a file load()")
    state = served if hasattr(served, "paged_caches") else getattr(served, "oscar_int2", None)
    if state is None or state.bundle is None:
        return Status("BF16")
    held = [paged.held_tokens() for paged in state.paged_caches()]
    bundle, verified = state.bundle, getattr(state, "verified", None)
    return Status("INT2", bundle.path, bundle.content_sha256, bundle.model.name, 2, state.prompts,
                  bundle.quantizer.served(state.demote_block).demote_block, state.weights, sum(int2 for int2, _ in held),
                  sum(exact for _, exact in held), *state.last, state.refused, str(verified or ""))
