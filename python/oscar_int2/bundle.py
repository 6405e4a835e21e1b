"""Rotation bundles: reading and checking them. lib/oscar/bundle/SCHEMA.md describes the file."""
import errno
import hashlib
import json
import logging
import math
import pathlib
import struct
from dataclasses import dataclass, field

import h5py
import numpy as np
import torch

from . import programs
from .errors import BundleError, BundleMismatchError
from .recipe import METADATA_DTYPES, CacheFormat, SideRecipe
from .rope import decoder_frequencies, inverse_frequencies, yarn_attention_factor
from .weight_samples import MATRICES, SAMPLES, VECTORS

LOGGER = logging.getLogger("oscar_int2")
FORMAT, FORMAT_VERSION = "oscar-rotation-bundle", 1
KNOWN_FEATURES = {"key_centres"}
LEAVES_OUT = "derived"  # feature of files of version 0.1, which do not store all tensors
BALANCED = 3  # of SideRecipe.kind
MOST_HEADS, MOST_DIM, MOST_LAYERS = 4096, 1024, 4096
# Largest entry that a transform times its inverse may be away from the identity.
INVERSE_LIMIT = 1e-5
_DTYPES = {"|u1": "u8", "<i4": "i32", "<i8": "i64", "<f4": "f32", "<f8": "f64"}


@dataclass(frozen=True)
class Model:
    """The checkpoint that was calibrated."""

    name: str
    architecture: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rope: dict          # parameters as run, max_positions among them
    config_sha256: str  # "" if unknown
    weights_fingerprint: str = ""  # of its files; "" if unknown
    file_sha256: str = ""          # of a GGUF file, "" of others
    # Of the weights that the transforms were fitted to, where these are others; "" where they are not
    fitted_weights_fingerprint: str = ""
    fitted_model: str = ""
    engine: str = ""  # what ran it, "" for this toolkit's own engine
    numerics: dict = field(default_factory=dict)  # what its config.json states of NUMERIC_KEYS; empty if unknown


@dataclass(frozen=True, repr=False)
class Layer:
    layer_id: int
    # "full", "sliding"; without transforms "local", a window in BF16, and "none", which holds no rows of its own
    attention: str
    sliding_window: int  # tokens, 0: none
    quantized: bool      # False: this layer keeps its rows in BF16
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    key: SideRecipe | None  # None: a layer without transforms
    value: SideRecipe | None
    # float32 [Hkv, 4, 16], bf16 numbers of W_Q, W_K, W_V, W_O (weights.py); None: not in the file
    weight_samples: torch.Tensor | None = None  # [num_kv_heads, 4, 16], of weight_samples.MATRICES
    vector_samples: torch.Tensor | None = None  # [num_kv_heads, 5, 16], of weight_samples.VECTORS
    turned: bool = True  # by the model's RoPE; False: its keys do not turn

    def __repr__(self):
        rows = "2 bits" if self.quantized else "BF16"
        sides = "".join(f", {name} {list(side.forward.shape)}" for name, side in (("key", self.key), ("value", self.value))
                        if side is not None)
        return f"<Layer {self.layer_id}: {self.attention} attention, rows in {rows}{sides}>"


@dataclass(frozen=True, repr=False)
class Bundle:
    """A rotation bundle. `layers[i].key.forward` is T [Hkv, d, d] of a layer's keys: a stored row is (x - mean) T.

    What load() reads is not to be edited in place: apply(), evaluate() and the like then raise BundleError. Matrices of your
    own become a bundle by import_rotation()."""

    path: str
    content_sha256: str
    serving_sha256: str  # of what is served: a full file and its serving profile have the same
    model: Model
    quantizer: CacheFormat  # that it was made for
    layers: dict  # layer_id: Layer, in order
    positions: int = 0  # that the fit was made for; 0: unknown
    _as_loaded: str = field(default="", init=False, compare=False)  # hash of all this behind load(); "": made otherwise

    def __repr__(self):
        quantized = sum(layer.quantized for layer in self.layers.values())
        return (f"<Bundle {self.path}: {self.model.name}, {quantized} of {self.model.num_layers} layers in 2 bits, "
                f"sha256 {self.content_sha256[:16]}>")

    def inspect(self):
        """What `oscar-bundle inspect --json` says of the file, as a dictionary."""
        self.require_same_file()
        return programs.run_for_json("oscar-bundle", ["inspect", self.path])[0]

    def statistics(self):
        """{layer_id: {name: array}}, float64 sums and counts under the names of lib/oscar/bundle/SCHEMA.md, such as
        `q_moment` [Hkv, d, d] and `count_q`. Nothing is divided. Raises BundleError where the file holds none."""
        self.require_same_file()
        with h5py.File(self.path) as file:
            groups = {layer_id: file.get(f"layers/{layer_id:03d}/statistics") for layer_id in self.layers}
            found = {layer_id: {name: data[()] for name, data in group.items()} for layer_id, group in groups.items() if group}
        if not found:
            raise BundleError(f"{self.path} holds no statistics: serving and publish profiles are stripped of them, and "
                              "no_statistics leaves them out. The full bundle that calibrate() wrote holds them")
        return found

    def require_unedited(self):
        """Raises BundleError if something in memory was edited since load() read it."""
        if self._as_loaded and self._as_loaded != _hash_of(self):
            raise BundleError(f"{self.path} was edited in memory since it was loaded, so it is no longer the bundle that "
                              "content_sha256 names. load() it again; own matrices become a bundle by import_rotation()")

    def require_as_in_file(self):
        """Raises BundleError unless the file is what load() read, and nothing in memory was edited since. For programs, which
        read the file."""
        self.require_unedited()
        if not self._as_loaded:
            raise BundleError(f"this Bundle is not the one that load() read from {self.path}, which is what the programs read. "
                              "Give a path; own matrices become a bundle by import_rotation()")
        self.require_same_file()

    def require_same_file(self):
        """Raises BundleError unless the file at `path` has the content that load() read."""
        try:
            with h5py.File(self.path) as file:
                found = file.attrs.get("content_sha256", b"")
        except OSError as error:
            raise BundleError(f"{self.path} can't be read any more: {error}") from error
        found = found.decode() if isinstance(found, bytes) else str(found)
        if found != self.content_sha256:
            raise BundleError(f"the file {self.path} has changed since it was loaded (evaluate(write_back=True) changes it, too): "
                              f"content_sha256 is {found[:12] or 'missing'} there and {self.content_sha256[:12]} here. load() it "
                              "again, or give the path")

    def check_model(self, config):
        """Raises BundleMismatchError unless a model of this transformers-like config has the shape
        and the positions that the bundle was made for. Weights are weights.check()'s."""
        self.check_shape(config)
        names = getattr(config, "architectures", None) or [None]
        self._check_fields(architecture=names[0])
        self.check_rope(config)
        self.check_numerics(config)

    def check_shape(self, config):
        """check_model()'s part about the shape. What a config doesn't state of all layers alike is left out."""
        heads, hidden = stated_by(config, "num_attention_heads"), config.hidden_size
        self._check_fields(num_layers=config.num_hidden_layers, num_qo_heads=heads,
                           num_kv_heads=stated_by(config, "num_key_value_heads") or heads,
                           head_dim=stated_by(config, "head_dim") or (hidden // heads if heads else None), hidden_size=hidden)

    def _check_fields(self, **theirs):
        """Those of `model`; None is not known."""
        for field, value in theirs.items():
            kept = getattr(self.model, field)
            if value is not None and kept != value:
                raise BundleMismatchError(
                    f"{self.path} is of another model: {field} is {value} here and {kept} in the bundle (of "
                    f"{self.model.name!r}); calibrate this model with oscar-calibrate")

    def check_numerics(self, config):
        """check_model()'s part about NUMERIC_KEYS. What either side doesn't state is left out."""
        for name, kept in self.model.numerics.items():
            value = stated_by(config, name)
            same = value == kept or (isinstance(kept, float) and isinstance(value, (int, float))
                                     and math.isclose(kept, value, rel_tol=1e-4))  # GGUF has 1e-6 as a float
            if value is not None and not same:
                raise BundleMismatchError(
                    f"{self.path} is of another model: its config has {name} {value} here and {kept} in the bundle (of "
                    f"{self.model.name!r}); put the config.json of the calibration back, or calibrate this model with "
                    "oscar-calibrate")

    def check_rope(self, config):
        """check_model()'s part about RoPE."""
        for field, value in rope_of(config).items():
            kept = self.model.rope.get(field, _ROPE_DEFAULTS.get(field))
            if value is not None and kept is not None and kept != value and not (
                    field == "attention_factor" and abs(kept - value) < 1e-6):  # worked out
                raise BundleMismatchError(
                    f"{self.path} is of other positions: RoPE's {field} is {value} here and "
                    f"{kept} in the bundle; calibrate with the RoPE that is served")

    def check_frequencies(self, model):
        """Raises BundleMismatchError if a model of transformers turns keys by other frequencies than the bundle says, where its
        config states what they are: a version may read less of a config than the model needs. Warns of rounded ones."""
        config = model.config.get_text_config(decoder=True)
        if not self.states_rope(config):
            return
        expected = torch.from_numpy(inverse_frequencies(self.model.rope, self.model.head_dim))
        for found in decoder_frequencies(model):
            if found.is_meta:
                continue
            close = 1e-4 if found.dtype == torch.float32 else 1e-2  # model.half() rounds them
            if found.shape != expected.shape or not torch.allclose(found.double().cpu(), expected, rtol=close, atol=0):
                raise BundleMismatchError(
                    f"{self.path} is of other positions: this model turns keys by other frequencies ({2 * len(found)} of a "
                    f"head's {self.model.head_dim} dimensions turn here, {2 * len(expected)} in the bundle); calibrate with the "
                    "RoPE that is served, by `python -m oscar_int2 calibrate` if it is that of this transformers")
        if warning := self.rounded_frequencies(model):
            LOGGER.warning("oscar_int2: %s", warning)

    def rounded_frequencies(self, model):
        """What it costs that a model of transformers turns keys by rounded frequencies, in a sentence; None where they are
        float32, as loading with dtype= leaves them. model.bfloat16() and model.half() round them, and keys turn away from
        the bundle's centers by the rounding error times their position."""
        config = model.config.get_text_config(decoder=True)
        most = (self.positions or int(self.model.rope.get("max_positions") or 0)) if self.centers_keys() else 0
        if not most or not self.states_rope(config):
            return None
        expected = torch.from_numpy(inverse_frequencies(self.model.rope, self.model.head_dim))
        for found in decoder_frequencies(model):
            if found.is_meta or found.dtype == torch.float32 or found.shape != expected.shape:
                continue
            off = (found.double().cpu() - expected).abs().max().item()
            if off * most > _RADIANS_OFF:
                return (f"RoPE's frequencies of this model are rounded to {str(found.dtype).removeprefix('torch.')}, as "
                        f"model.bfloat16() and model.half() leave them: from position {math.ceil(_RADIANS_OFF / off)} on keys "
                        f"turn by more than {_RADIANS_OFF} radians beside the centers in {self.path}, which are of exact ones; "
                        "load the model with dtype=torch.bfloat16 instead")
        return None

    def centers_keys(self):
        """Whether keys are coded about means or centers, which turn with their positions."""
        return any(layer.key is not None and (layer.key.mean.any() or layer.key.key_centers is not None)
                   for layer in self.layers.values())

    def states_rope(self, config):
        """Whether this config says what check_rope() compares: its kind of RoPE and the bundle's have parameters."""
        return {rope_of(config)["rope_type"], self.model.rope.get("rope_type")} <= _STATED_ROPE

    def beyond_positions(self, tokens):
        """What it costs to serve so many tokens a request, in sentences; None within the positions that
        the bundle was made for."""
        most = int(self.model.rope.get("max_positions") or 0)
        if self.centers_keys() and self.positions:  # means and centers of keys turn with their positions
            most = min(most or self.positions, self.positions)
        if not most or tokens <= most:
            return None
        return (f"room for {tokens} tokens a request is more than the {most} positions that {self.path} was "
                "made for. Rows beyond are coded worse: of the embedded model, KL to BF16 is 2.7 times as "
                f"large 32K positions beyond, and 3.2 times at 96K. Make room for {most} at most, or calibrate "
                f"for more (--position-span {tokens})")


# Keys of config.json that the forward pass depends on beside shape, RoPE and weights (model/checkpoint/config.h).
NUMERIC_KEYS = ("rms_norm_eps", "hidden_act", "hidden_activation", "query_pre_attn_scalar", "num_experts_per_tok",
                "norm_topk_prob", "routed_scaling_factor", "scoring_func", "n_group", "topk_group")
_ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "truncate": True}  # of what bundles leave out
_RADIANS_OFF = 0.5  # of a key beside the center that it is stored about
_STATED_ROPE = {"default", "linear", "llama3", "yarn"}


def stated_by(config, name):
    """A value of a config; None: it has none, or, in transformers, one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def rope_of(config):
    """RoPE of a config as transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) say. Of a config with a
    RoPE for each kind of layer, that of layers that see all tokens."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    found = dict(found.get("full_attention") or found)
    if not found:
        found = dict(getattr(config, "rope_scaling", None) or {})
        found.setdefault("rope_theta", getattr(config, "rope_theta", None))
    found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    turning, head_dim = getattr(config, "rotary_dim", None), stated_by(config, "head_dim")
    if found["partial_rotary_factor"] is None and turning and head_dim:  # MiniMax-M2
        found["partial_rotary_factor"] = turning / head_dim
    if found["rope_type"] == "yarn":
        found.setdefault("truncate", True)
        found["attention_factor"] = yarn_attention_factor(found)
    return {name: found.get(name)
            for name in ("rope_type", "attention_factor", "rope_theta", "factor", "partial_rotary_factor",
                         "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
                         "beta_fast", "beta_slow", "truncate", "long_factor", "short_factor")}


def has_other_attention(config):
    """Whether a config of transformers has layers with a sliding window, or other than full attention."""
    layers = getattr(config, "layer_types", None)
    return bool(set(layers) - {"full_attention"} if layers else getattr(config, "sliding_window", None))


def load(path):
    """Reads a bundle and checks it whole: names, shapes, dtypes, finite values, the hash of its
    content, and that every transform has the inverse beside it. Statistics and portable variants
    are hashed and left in the file.

    Raises BundleError for anything else than a sound bundle, OSError for a file that can't be
    opened. Links to other files, external storage and foreign filters are refused unread; HDF5
    itself parses the file in this process, so files from strangers belong through
    `oscar-bundle inspect` first, which reads them in a child with limits.
    """
    if not isinstance(path, (str, pathlib.PurePath)) or not str(path):
        raise TypeError(f"a bundle is a Bundle or the path of a .h5 file, found {path!r}")
    path = str(pathlib.Path(path))
    if pathlib.Path(path).is_dir():
        inside = sorted(str(file) for file in pathlib.Path(path).glob("*.h5"))
        raise BundleError(f"{path} is a folder; " + (f"name the bundle in it: {' or '.join(inside)}" if inside else
                                                     "a bundle is a .h5 file, and it holds none"))
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(errno.ENOENT, "no bundle there; oscar-calibrate MODEL TEXT BUNDLE.h5 makes "
                                              "one", path)
    try:
        with torch.device("cpu"), h5py.File(path, "r") as file:  # servers load under another default
            return _Reader(path, file).bundle()
    except OSError as error:
        if pathlib.Path(path).is_file():
            raise BundleError(f"{path} can't be read as HDF5, or is damaged: {error}") from error
        raise


class _Reader:
    """One open file; every message names it and the object."""

    def __init__(self, path, file):
        self.path, self.file = path, file
        self.objects = self._objects()

    def refuse(self, where, what):
        raise BundleError(f"{self.path}: {where}: {what}")

    def _objects(self):
        """{path: group or dataset}, refusing what leads out of the file."""
        found, folders = {"/": self.file}, [("/", self.file)]
        while folders:
            folder, group = folders.pop()
            for name in group:
                path = f"{folder.rstrip('/')}/{name}"
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    self.refuse(path, "links are not followed")
                item = group[name]
                if isinstance(item, h5py.Group):
                    folders.append((path, item))
                elif not isinstance(item, h5py.Dataset):
                    self.refuse(path, "neither group nor dataset")
                elif item.is_virtual or item.external:
                    self.refuse(path, "its data lie outside the file")
                elif item.dtype.str not in _DTYPES:
                    self.refuse(path, f"dtype {item.dtype} is not one of a bundle")
                else:
                    filters = item.id.get_create_plist()
                    codes = {filters.get_filter(i)[0] for i in range(filters.get_nfilters())}
                    if codes - {1, 2, 3}:  # deflate, shuffle, Fletcher32
                        self.refuse(path, "it uses a filter that no bundle has")
                found[path] = item
        return found

    def attribute(self, where, name, kind, default=None):
        attributes = self.objects[where].attrs if where in self.objects else {}
        if name not in attributes:
            if default is not None:
                return default
            self.refuse(where, f"attribute {name} is missing")
        value = attributes[name]
        if kind is str and isinstance(value, (bytes, str)):
            return value.decode() if isinstance(value, bytes) else value
        if kind is int and isinstance(value, np.integer):
            return int(value)
        self.refuse(where, f"attribute {name} is {value!r}, expected {kind.__name__}")

    def parsed(self, where, name, kind):
        try:
            value = json.loads(self.attribute(where, name, str))
        except ValueError as error:
            self.refuse(where, f"attribute {name} is not JSON: {error}")
        if not isinstance(value, kind):
            self.refuse(where, f"attribute {name} is not a JSON {kind.__name__}")
        return value

    def count(self, where, name, least, most, default=None):
        value = self.attribute(where, name, int, default)
        if not least <= value <= most:
            self.refuse(where, f"attribute {name} is {value}, expected {least} to {most}")
        return value

    def tensor(self, where, name, dtype, shape, required=True):
        path = f"{where}/{name}"
        if path not in self.arrays:
            if required or path in self.objects:
                self.refuse(path, "is a group" if path in self.objects else "is missing")
            return None
        values = self.arrays[path]
        if values.dtype != np.dtype(dtype) or values.shape != shape:
            self.refuse(path, f"expected {dtype} {list(shape)}, found {values.dtype} "
                              f"{list(values.shape)}")
        if not np.isfinite(values).all():
            self.refuse(path, "holds a value that is not finite")
        return torch.from_numpy(np.ascontiguousarray(values))

    def bundle(self):
        form = self.attribute("/", "format", str)
        if form != FORMAT:
            self.refuse("/", f"is {form!r}, no rotation bundle ({FORMAT!r})")
        version = self.attribute("/", "format_version", int)
        if version != FORMAT_VERSION:
            self.refuse("/", f"format_version {version}, this package reads {FORMAT_VERSION}")
        features = set(self.parsed("/", "required_features", list))
        if LEAVES_OUT in features:
            self.refuse("/", "written by version 0.1, which left tensors out; oscar-bundle rewrite IN OUT writes "
                             "it as this package reads it")
        unknown = features - KNOWN_FEATURES
        if unknown:
            self.refuse("/", f"needs a reader of {', '.join(map(str, sorted(unknown)))}: update oscar_int2")
        self.arrays = _arrays(self.objects)
        stored, computed = self.attribute("/", "content_sha256", str), self.hash()
        if stored != computed:
            self.refuse("/", f"content_sha256 is {stored[:12]}..., the content has {computed[:12]}...: the file was "
                             "edited or damaged; copy it anew, and oscar-bundle verify says whether it is whole")
        model, quantizer = self.model(), self.quantizer()
        groups = sorted(p for p in self.objects if p.startswith("/layers/") and p.count("/") == 2)
        layers = {}
        for where in groups:
            layer = self.layer(where, model)
            if layer.layer_id in layers or layer.layer_id >= model.num_layers:
                self.refuse(where, f"layer_id {layer.layer_id} is taken or beyond the model's layers")
            layers[layer.layer_id] = layer
        if len(layers) != model.num_layers:
            self.refuse("/layers", f"{len(layers)} layers of a model of {model.num_layers}")
        serving = self.hash(_is_served)
        made = Bundle(self.path, stored, serving, model, quantizer, dict(sorted(layers.items())), self.positions())
        object.__setattr__(made, "_as_loaded", _hash_of(made))
        return made

    def hash(self, counts=lambda path: True):
        return _content_sha256(self.objects, self.arrays, counts)

    def positions(self):
        """Those of the fit, or of the sequences that it was collected from."""
        for where, name in (("/", "position_span"), ("/corpus", "chunk_len")):
            attributes = getattr(self.objects.get(where), "attrs", {})
            if int(attributes.get(name, 0)):
                return self.count(where, name, 1, 1 << 40)
        return 0

    def model(self):
        where = "/model"
        sizes = {name: self.count(where, name, 1, most) for name, most in (
            ("num_layers", MOST_LAYERS), ("num_qo_heads", MOST_HEADS), ("num_kv_heads", MOST_HEADS),
            ("hidden_size", 1 << 24))}
        dims = [self.count(where, f"head_dim_{side}", 8, MOST_DIM) for side in "kv"]
        if dims[0] != dims[1]:
            self.refuse(where, f"keys of {dims[0]} and values of {dims[1]} dimensions: no page holds both")
        texts = {name: self.attribute(where, name, str)
                 for name in ("name", "architecture", "config_sha256", "weights_fingerprint")}
        texts |= {name: self.attribute(where, name, str)
                  for name in ("file_sha256", "fitted_weights_fingerprint", "fitted_model", "engine")
                  if name in self.objects[where].attrs}
        numerics = self.parsed(where, "numerics", dict) if "numerics" in self.objects[where].attrs else {}
        return Model(**sizes, **texts, head_dim=dims[0], rope=self.parsed(where, "rope", dict), numerics=numerics)

    def quantizer(self):
        where = "/quantizer"
        for name, expected in (("clip_span", "head_row"), ("zero", "code_units"), ("ties", "up"),
                               ("metadata_rounding", "before_coding")):
            value = self.attribute(where, name, str, expected)
            if value != expected:
                self.refuse(where, f"{name} is {value!r}: fitted for another backend's codec; this "
                                   "package writes rows by this toolkit's rules; calibrate without "
                                   "--for, in Python for_ (or for oscar_int2)")
        self.count(where, "bits", 2, 2)
        metadata = self.attribute(where, "metadata_dtype", str)
        if metadata not in METADATA_DTYPES:
            self.refuse(where, f"metadata_dtype is {metadata!r}")
        return CacheFormat(metadata_dtype=METADATA_DTYPES[metadata], **{
            name: self.count(where, name, least, 1 << 24) for name, least in (
                ("quant_group_size", 0), ("sink_tokens", 0), ("recent_tokens", 0), ("demote_block", 1))})

    def layer(self, where, model):
        heads = self.count(where, "num_kv_heads", 1, MOST_HEADS)
        dims = [self.count(where, f"head_dim_{side}", 8, MOST_DIM) for side in "kv"]
        attention = self.attribute(where, "attention", str)
        fitted = attention not in ("local", "none")
        if fitted and dims != [model.head_dim] * 2:
            self.refuse(where, f"rows of {dims} dimensions in a model of {model.head_dim}")
        return Layer(
            layer_id=self.count(where, "layer_id", 0, MOST_LAYERS),
            attention=attention,
            sliding_window=self.count(where, "sliding_window", 0, 1 << 30, 0),
            quantized=bool(self.count(where, "quantized", 0, 1)),
            num_qo_heads=self.count(where, "num_qo_heads", 1, MOST_HEADS, model.num_qo_heads),
            num_kv_heads=heads, head_dim=dims[0],
            key=self.side(where, "k", "q_rotation", heads, dims[0]) if fitted else None,
            value=self.side(where, "v", "o_rotation", heads, dims[0]) if fitted else None,
            weight_samples=self.tensor(where, "weight_samples", "<f4", (heads, len(MATRICES), SAMPLES),
                                       required=False) if fitted else None,
            vector_samples=self.tensor(where, "vector_samples", "<f4", (heads, len(VECTORS), SAMPLES),
                                       required=False) if fitted else None,
            turned=bool(self.count(where, "turned", 0, 1, 1)))

    def side(self, where, letter, partner, heads, d):
        def tensor(name, dtype, *shape, required=True):
            return self.tensor(where, f"{letter}_{name}", dtype, (heads, *shape), required)

        forward = tensor("rotation", "<f4", d, d)
        inverse = self.tensor(where, partner, "<f4", (heads, d, d), required=False)
        if inverse is None:
            inverse = forward if letter == "k" else forward.transpose(1, 2).contiguous()
        side = SideRecipe(
            kind=tensor("kind", "u1"), forward=forward, partner=inverse, mean=tensor("mean", "<f4", d),
            clip_ratio=tensor("clip_ratio", "<f4"), scale_correction=tensor("scale_correction", "u1"),
            feedback=tensor("feedback", "<f4", d, d, required=False),
            metric=tensor("metric", "<f4", d, d, required=False),
            key_centers=tensor("centres", "<f4", 2, d, required=False) if letter == "k" else None)
        self.check_side(f"{where}/{letter}_rotation", side, letter)
        return side

    def check_side(self, where, side, letter):
        forward, partner = side.forward.double(), side.partner.double()
        product = partner.mT @ forward if letter == "k" else forward @ partner
        identity = torch.eye(forward.shape[1], dtype=torch.float64)
        away = (product - identity).abs().amax((1, 2))
        turned = (forward.mT @ forward - identity).abs().amax((1, 2))
        away = torch.where(side.kind == BALANCED, away, torch.maximum(away, turned))
        if away.max() > INVERSE_LIMIT:
            self.refuse(where, f"with its inverse {away.max():.2g} away from the identity, "
                               f"allowed {INVERSE_LIMIT:g}")
        if side.scale_correction.max() > 2 or side.kind.max() > BALANCED:
            self.refuse(where, "a head's kind or scale correction is unknown")
        if (side.scale_correction == 2).any() and side.metric is None:
            self.refuse(where, f"{letter}_metric is missing, and a scale correction needs it")
        if side.feedback is not None:
            diagonal = side.feedback.diagonal(dim1=1, dim2=2)
            if not torch.equal(side.feedback.triu(1) + torch.diag_embed(torch.ones_like(diagonal)),
                               side.feedback):
                self.refuse(where, f"{letter}_feedback is not unit upper triangular")
        if not ((side.clip_ratio >= 0) & (side.clip_ratio <= 1)).all():
            self.refuse(where, "a clipping ratio is outside 0 to 1")


def content_sha256(objects):
    """The hash of lib/oscar/bundle/encode.h over {path: h5py object}."""
    return _content_sha256(objects, _arrays(objects))


def _hash_of(bundle):
    """Of what a Bundle holds in memory."""
    hasher = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            hasher.update(f"{value.dtype}{list(value.shape)}".encode())
            hasher.update(value.detach().cpu().contiguous().numpy())
        elif isinstance(value, (Layer, SideRecipe)):
            for part in vars(value).values():
                add(part)
        else:
            hasher.update(repr(value).encode())

    for value in (bundle.model, bundle.quantizer, bundle.positions, list(bundle.layers), *bundle.layers.values()):
        add(value)
    return hasher.hexdigest()


def _is_served(path):
    """Whether the serving profile of `oscar-bundle strip` has this object (lib/oscar/bundle/edit.cpp)."""
    parts = path.split("/")
    return (path != "/corpus/ngram_hashes" and parts[1] not in ("portable", "evaluation")
            and "statistics" not in parts)


def _arrays(objects):
    return {path: np.asarray(item[()]) for path, item in objects.items() if isinstance(item, h5py.Dataset)}


def _content_sha256(objects, arrays, counts=lambda path: True):
    hasher = hashlib.sha256()

    def add(*fields):
        for field in fields:
            field = field.encode() if isinstance(field, str) else field
            hasher.update(struct.pack("<Q", len(field)))
            hasher.update(field)

    add("oscar-content-1")
    for path in sorted(filter(counts, arrays), key=str.encode):
        values = arrays[path]
        shape = ",".join(map(str, values.shape))
        add("dataset", path, _DTYPES[values.dtype.str], shape, values.tobytes())
    for path in sorted(filter(counts, objects), key=str.encode):
        attributes = objects[path].attrs
        for name in sorted(attributes, key=str.encode):
            if path == "/" and (name in ("content_sha256", "created_utc") or name.startswith("tool_")):
                continue
            add("attribute", path, name, *_attribute_fields(path, name, attributes[name]))
    return hasher.hexdigest()


def _attribute_fields(path, name, value):
    if isinstance(value, (bytes, str)):
        return "str", value if isinstance(value, bytes) else value.encode()
    if isinstance(value, np.int64):
        return "i64", struct.pack("<q", int(value))
    if isinstance(value, np.float64):
        return "f64", struct.pack("<d", float(value))
    raise BundleError(f"{path}: attribute {name} has type {type(value).__name__}")
