"""Whether an engine's bundle was calibrated on the weights that vLLM has loaded, and loads again.

They are looked at before kernels pack them, in the worker that has them.
"""
import logging

from vllm.model_executor.models.utils import extract_layer_index

from .. import weights
from . import settings
from .backend import OscarAttention

logger = logging.getLogger("vllm.oscar_int2")


class Loaded:
    """The layers of one model over INT2 pages, as a worker has them."""

    def __init__(self, model, bundle):
        self.bundle, self.said = bundle, False
        self.attentions = {}  # {layer id: the module with the projections}
        for name, module in model.named_modules():
            if isinstance(getattr(module, "impl", None), OscarAttention):
                module.impl.loaded = self
                layer_id = extract_layer_index(name)
                self.attentions[layer_id] = model.get_submodule(name.rpartition(".")[0])

    def projections(self, layer_id):
        return weights.projections(self.attentions[layer_id], self.bundle.layers[layer_id])

    def check(self, config):
        """Raises BundleMismatchError for weights that the bundle was not calibrated on, unless the
        configuration accepts any."""
        model = config.model_config
        weights.check(self.bundle, {layer_id: self.projections(layer_id) for layer_id in self.attentions},
                      settings.weights_of(config), f"{settings.WEIGHTS}=any", model.model, model.revision,
                      logger)

    def again(self, layer_id):
        """Weights of a layer were loaded again: says once if they have become others. Requests go on."""
        if self.said:
            return
        found = weights.compare(self.bundle, {layer_id: self.projections(layer_id)})
        if found is None or found.differ:
            self.said = True
            logger.warning("OSCAR INT2: weights were loaded again, and %s (%s). The cache goes on with the "
                           "bundle's transforms: calibrate anew once training has ended",
                           "can't be compared with the bundle's" if found is None else
                           f"the bundle was calibrated on others: {found}", self.bundle.path)


def check(model, config):
    """Of a model whose weights have been loaded and not yet been packed."""
    loaded = Loaded(model, settings.bundle(config))
    if loaded.attentions:
        loaded.check(config)
