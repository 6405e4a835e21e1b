"""Whether an engine's bundle was calibrated on the weights that vLLM has loaded, and loads again.

They are looked at before kernels pack them, in the worker that has them.
"""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.model_executor.models.utils import extract_layer_index

from .. import weight_samples, weights
from . import settings
from .backend import OscarAttention, first_kv_head

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.oscar_int2")


class Loaded:
    """The layers of one model over INT2 pages, as a worker has them: with tensor parallelism its part of
    the KV heads."""

    def __init__(self, model, config: VllmConfig):
        self.config, self.bundle, self.said = config, settings.bundle(config), False
        self.parts = {}  # {layer id: (the module with the projections, its first KV head, its KV heads)}
        self.impls = []
        for name, module in model.named_modules():
            if isinstance(getattr(module, "impl", None), OscarAttention):
                attention = model.get_submodule(name.rpartition(".")[0])
                projection = getattr(attention, "qkv_proj", None)
                first_head = first_kv_head(self.bundle.layers[extract_layer_index(name)].num_kv_heads,
                                           getattr(projection, "tp_size", 1), getattr(projection, "tp_rank", 0))
                self.parts[extract_layer_index(name)] = attention, first_head, module.impl.num_kv_heads
                self.impls.append(module.impl)

    def check(self):
        """Raises BundleMismatchError for weights that the bundle was not calibrated on, unless the
        configuration accepts any. Raises UnsupportedError as settings.check_files() does: files that were there for no
        configuration are there now."""
        settings.check_files(self.config)
        model = self.config.model_config
        dummy = self.config.load_config.load_format == "dummy"  # then the model's files say nothing
        if self.parts:
            weights.check(self.bundle, {layer_id: self._projections(layer_id) for layer_id in self.parts},
                          settings.weights_of(self.config), f"{settings.WEIGHTS}=any",
                          None if dummy else model.model, model.revision, logger)

    def watch(self):
        """From here on layers say when their weights are loaded again."""
        for impl in self.impls:
            impl.loaded = self

    def again(self, layer_id):
        """Weights of a layer were loaded again: says once if they have become others. Requests go on."""
        if self.said:
            return
        found = weight_samples.compare(self.bundle, {layer_id: self._projections(layer_id)})
        if found is None or found.differ:
            self.said = True
            logger.warning("OSCAR INT2: weights were loaded again, and %s (%s). The cache goes on with the "
                           "bundle's transforms: calibrate anew once training has ended",
                           "cannot be compared with the bundle's" if found is None else
                           f"the bundle was calibrated on others: {found}", self.bundle.path)

    def _projections(self, layer_id):
        attention, first_head, heads = self.parts[layer_id]
        return weight_samples.projections(attention, self.bundle.layers[layer_id], first_head, heads)
