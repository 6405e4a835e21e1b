"""The decoder layers of any transformers model, one after another over all batches.

A pass whose layers do nothing tells what each layer is called with: angles, masks, whatever else. Then each layer runs
over all batches, so that its weights have to be on the device once. A last idle pass turns hidden states into logits.
"""
import contextlib

import torch

from ..errors import UnsupportedError


def text_config(model):
    """The config of the part that reads text."""
    return model.config.get_text_config(decoder=True)


def decoder_layers(model):
    """The decoder layers of a causal language model, in order."""
    count = text_config(model).num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = [module for part in (decoder, model) for module in (part.modules() if part is not None else ())
             if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no list of its {count} decoder layers")
    return found[0]


def compute_device(model, device):
    """Where layers run: `device`, or where the model's weights are."""
    if device is not None:
        return torch.device(device)
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    gpus = [d for d in devices if d.type != "cpu"]
    return gpus[0] if gpus else torch.device("cpu")


def is_spread(model):
    """Whether accelerate has put the model on several devices. It then runs in one pass, each layer where it lies."""
    return len({str(place) for place in getattr(model, "hf_device_map", {}).values()} - {"cpu", "disk"}) > 1


def run_layers(model, batches, device=None, visit=None, progress=None):
    """A Pass over `batches` of token ids [batch, T], run through all layers. `visit(index, batch, layer, arguments,
    keywords, run)`, where given, has to return run(), the layer's hidden states; it may call layer(*arguments,
    **keywords) besides. `progress(layer, layers)`, where given beside it, is called as a layer gets its first batch."""
    kind = WholePass if is_spread(model) else Pass
    made = kind(model, batches, device)

    def told(index, batch, *rest):
        if batch == 0:
            progress(index, len(made.layers))
        return visit(index, batch, *rest)

    made.run(told if progress else visit)
    return made


class Pass:
    """One pass of `model`, layer by layer. Decoder layers run on `device`."""

    def __init__(self, model, batches, device=None):
        self.model, self.batches = model, batches
        self.device = compute_device(model, device)
        self.layers = decoder_layers(model)
        self.hidden = []     # of each batch, what goes into the next layer
        self._arguments = []  # of each batch and layer, all others
        self._tuples = False

    @torch.no_grad()
    def run(self, visit):
        kept = _Kept(self.device)
        for ids in self.batches:
            calls = self._idle(ids)
            self.hidden.append(calls[0][0].to(self.device))
            self._arguments.append([kept.put((args, kwargs)) for _, args, kwargs in calls])
        for index, layer in enumerate(self.layers):
            with on_device(layer, self.device):
                for batch, (hidden, calls) in enumerate(zip(self.hidden, self._arguments)):
                    self.hidden[batch] = self._run_layer(layer, index, batch, hidden, calls[index], visit)
                    calls[index] = None

    def _run_layer(self, layer, index, batch, hidden, arguments, visit):
        args, kwargs = arguments

        def run():
            out = layer(hidden, *args, **kwargs)
            return out[0] if isinstance(out, tuple) else out

        return run() if visit is None else visit(index, batch, layer, (hidden, *args), kwargs, run)

    @torch.no_grad()
    def logits(self, batch):
        """[batch, T, vocab] of one batch, behind run()."""
        out = None

        def answer(_):
            return self.hidden[batch].to(out) if out is not None else self.hidden[batch]

        home = next(iter(self.model.get_output_embeddings().parameters())).device
        out = home if home.type != "meta" else self.device
        return self._idle(self.batches[batch], answer)[-1]

    def _idle(self, ids, answer=None):
        """Calls (hidden, args, kwargs) of the layers, which give back what they get; with `answer`, which gives what
        they give back instead, also the logits behind them."""
        home = self.model.get_input_embeddings().weight.device
        ids = ids.to(home if home.type != "meta" else self.device)
        own = [layer.forward for layer in self.layers]
        while True:
            idle = _Idle(answer, self._tuples)
            try:
                for layer in self.layers:
                    layer.forward = idle
                if answer is None:  # the head is not needed
                    self.model.base_model(ids, use_cache=False)
                else:
                    idle.calls.append(self.model(ids, use_cache=False).logits)
            except _OtherReturn:  # some layers of transformers 4 give back tuples
                if self._tuples:
                    raise UnsupportedError(f"{type(self.model).__name__}: its layers hand on more than hidden "
                                           "states") from None
                self._tuples = True
                continue
            finally:
                for layer, forward in zip(self.layers, own):
                    layer.forward = forward
            if len(idle.calls) != len(self.layers) + (answer is not None):
                raise UnsupportedError(f"{type(self.model).__name__} calls its {len(self.layers)} layers "
                                       f"{len(idle.calls)} times; each has to run once")
            return idle.calls


class WholePass(Pass):
    """The same batch by batch, each layer where it lies."""

    @torch.no_grad()
    def run(self, visit):
        own = [layer.forward for layer in self.layers]
        for batch, ids in enumerate(self.batches):
            self.hidden.append(None)
            try:
                for index, layer in enumerate(self.layers):
                    layer.forward = _Visited(self, index, batch, layer, own[index], visit)
                self.model.base_model(ids.to(self.model.get_input_embeddings().weight.device), use_cache=False)
            finally:
                for layer, forward in zip(self.layers, own):
                    layer.forward = forward


class _Visited:
    """The forward of a layer that is visited. Calls within a visit are the layer's own."""

    def __init__(self, whole, index, batch, layer, forward, visit):
        self.whole, self.index, self.batch, self.layer = whole, index, batch, layer
        self.own, self.visit, self.out = forward, visit, None

    def __call__(self, *args, **kwargs):
        self.layer.forward = self.own

        def run():
            self.out = self.layer(*args, **kwargs)
            return self.out[0] if isinstance(self.out, tuple) else self.out

        self.whole.hidden[self.batch] = (run() if self.visit is None else
                                         self.visit(self.index, self.batch, self.layer, args, kwargs, run))
        return self.out


class _OtherReturn(Exception):
    """A layer got no hidden states from the one before: layers give back tuples, or not."""


class _Idle:
    """The forward of a layer that does nothing."""

    def __init__(self, answer, tuples):
        self.answer, self.tuples, self.calls, self.shape = answer, tuples, [], None

    def __call__(self, hidden, *args, **kwargs):
        self.shape = self.shape or getattr(hidden, "shape", None)
        if not isinstance(hidden, torch.Tensor) or hidden.shape != self.shape:
            raise _OtherReturn
        self.calls.append((hidden, args, kwargs))
        given = hidden if self.answer is None else self.answer(hidden)
        return (given,) if self.tuples else given


class _Kept:
    """Tensors on one device, each content once: masks and angles of all batches are the same."""

    def __init__(self, device):
        self.device, self.known = device, {}

    def put(self, value):
        """`value` with its tensors there. Dictionaries stay the same objects: layers hand rows on in them."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(self.put(item) for item in value)
        if isinstance(value, dict):
            for name, item in value.items():
                value[name] = self.put(item)
        return value

    def _tensor(self, tensor):
        tensor = tensor.to(self.device)
        if tensor.dim() < 2 or tensor.requires_grad:
            return tensor
        same = self.known.setdefault((tensor.shape, tensor.dtype), [])
        found = next((other for other in same if torch.equal(other, tensor)), None)
        if found is None and len(same) < 4:  # hidden states differ: there is no use in keeping them
            same.append(tensor)
        return tensor if found is None else found


@contextlib.contextmanager
def on_device(layer, device):
    """The layer's weights on the device for as long as it lasts: moved there, or brought by accelerate's hooks once
    instead of at every call."""
    moved, brought = [], []
    for module in layer.modules():
        hook = getattr(module, "_hf_hook", None)
        if getattr(hook, "offload", False):
            hook.pre_forward(module)
            brought.append((module, hook, module.forward))
            module.forward = module._old_forward
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.device != device and tensor.device.type != "meta":
            moved.append((tensor, tensor.data))
            tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data
        for module, hook, forward in brought:
            module.forward = forward
            hook.post_forward(module, None)
