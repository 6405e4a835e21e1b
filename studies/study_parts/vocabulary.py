"""The words of every study: texts, bundles, runs, steps, and the parts of the method that all models are measured with."""
from dataclasses import dataclass, field

PAPER, OURS, DATA_FREE = "paper", "ours", "no data"

PER_HEAD = ("--preset", "paper", "--granularity", "per-head")
EVEN = ("--row-weights", "even", "--key-centers", "one")
BACKENDS = ("sglang-v1", "sglang-v2", "vllm-pr46774", "onnxruntime", "mlx")


@dataclass(frozen=True)
class Bundle:
    """Fitted by `oscar-bundle fit` from the statistics of a text, or, searched, by `oscar-calibrate`."""
    label: str
    origin: str
    options: tuple
    searched: bool = False
    text: str = ""  # key of the plan's calibration texts; "": the first one
    tokens: int = 0  # of calibration; 0: as many as the size of the study says


@dataclass(frozen=True)
class Text:
    """A corpus to calibrate on or to measure. `label` is how tables call it."""
    label: str
    corpus: str  # files under the source folder as FILE[:WEIGHT],..., or "self": what the model writes itself


@dataclass(frozen=True)
class Run:
    """One call of oscar-eval. `separated` names the figures of the same text with a separator at every `gap`-th token;
    an empty `name` drops those of the text as it is."""
    name: str
    methods: tuple
    text: str = "heldout"
    variant: str = ""  # of the checkpoint
    options: tuple = field(default=())
    tokens: int = 0  # 0: as many as the size of the study says
    sequence_length: int = 0  # 0: as all
    separated: str = ""
    gap: int = 64

    def key(self) -> str:
        return self.name or self.separated

    def bundles(self, known: dict) -> list:
        """Names of the bundles that the methods need, in the order of `known`."""
        bases = {method.split("@")[0] for method in self.methods}
        if any(base.startswith("portable") for base in bases):
            bases.add("default")
        return [name for name in known if name in bases]


@dataclass(frozen=True)
class Size:
    """How much is measured; 0 is all that there is."""
    calibration_tokens: int = 0
    tokens: int = 0  # of a run, unless it says otherwise
    headline_tokens: int = 0  # read of each text of the headline
    sequence_length: int = 4096
    clips: tuple = ("0.86", "0.90", "0.92", "0.94", "0.96", "0.98", "0")  # 0: off
    offsets: tuple = ()
    groups: tuple = ()  # beside all of a head, which is in the main run
    backends: tuple = BACKENDS
    needle_prompts: int = 0
    needle_lengths: tuple = ()
    layer_tokens: int = 0  # of the map of layers
    layers: tuple = ()  # that are looked at alone
    long_sequence: int = 0  # tokens of a long context; 0: none


@dataclass(frozen=True)
class Plan:
    """What is particular to one model."""
    name: str  # as the command calls it
    title: str
    model: str  # under the source folder; a pattern of one file is allowed
    lead: str  # what was measured, in words
    fetch: str  # the command that brings model and texts
    calibration: dict  # texts by name, the first is that of all bundles that do not say otherwise
    texts: dict  # to measure, by name
    steps: dict  # name -> function of a Size that makes the runs, the most important first
    size: Size
    quick: Size
    positions: int  # that the model serves
    bundles: dict
    head_dim: int
    needles: str  # heading of their column
    separated: tuple  # names of the run with separators and of the same text without
    domains: tuple = ()  # texts of the headline, of which each also has a run with separators
    calibrated: str = ""  # on what the bundles are, and what they have not seen, in words
    crossed: dict = field(default_factory=dict)  # calibration text -> the default calibrated on it
    variants: dict = field(default_factory=dict)  # of the checkpoint: "" is the published one -> words

    def runs(self, size: Size, steps=None) -> list:
        """All runs of the named steps (of all)."""
        return [run for step, make in self.steps.items() if steps is None or step in steps for run in make(size)]

    def labels(self) -> dict:
        """Name -> (words, whose) of all methods."""
        return METHODS | {name: (bundle.label, bundle.origin) for name, bundle in self.bundles.items()}


def part_bundles(positions: int) -> dict:
    """Every part of the method alone, one after another, and the default without each, for a model that serves
    `positions`. By the name that --compare gives them."""
    averaged = ("--position-span", str(positions))
    bundles = {
        "shared": Bundle("OSCAR, per layer", PAPER, ("--preset", "paper")),
        "perhead": Bundle("OSCAR, per KV head", PAPER, PER_HEAD),
        "released": Bundle("OSCAR, as released", PAPER, ("--preset", "released")),
        # One refinement of the per-head rotation.
        "perhead+center": Bundle("centering", OURS, PER_HEAD + ("--center", "on")),
        "perhead+positions": Bundle("averaging over served positions", OURS, PER_HEAD + averaged),
        "perhead+balanced": Bundle("balanced transform", OURS, PER_HEAD + ("--method", "balanced")),
        "perhead+shaped": Bundle("shaped rounding", OURS, PER_HEAD + ("--rounding", "shaped")),
        "perhead+unbiased": Bundle("unbiased scale", OURS, PER_HEAD + ("--scale-correction", "unbiased")),
        "perhead+metric": Bundle("metric scale", OURS, PER_HEAD + ("--scale-correction", "metric")),
        "perhead+clip": Bundle("clip search", OURS, PER_HEAD + ("--clip", "search"), searched=True),
        # One after another: each has what those above it have.
        "step-positions": Bundle("+ averaging over served positions", OURS, PER_HEAD + ("--center", "on") + averaged),
        "step-shaped": Bundle("+ shaped rounding", OURS,
                              PER_HEAD + ("--center", "on", "--rounding", "shaped") + averaged),
        "step-metric": Bundle("+ metric scale", OURS, PER_HEAD + ("--center", "on", "--rounding", "shaped",
                                                                  "--scale-correction", "metric") + averaged),
        "step-balanced": Bundle("+ balanced transform", OURS, ("--clip", "0.96,0.92") + EVEN),
        "step-weights": Bundle("+ rows by attention", OURS, ("--clip", "0.96,0.92", "--key-centers", "one")),
        "step-centres": Bundle("+ two key centers", OURS, ("--clip", "0.96,0.92")),
        "unsearched": Bundle("default, without search", OURS, ()),
        # The unsearched default without one of its parts.
        "no-balanced": Bundle("balanced transform (OSCAR's rotation instead)", OURS, ("--method", "oscar")),
        "hadamard-all": Bundle("balanced transform (Hadamard instead)", OURS, ("--method", "hadamard")),
        "no-heads": Bundle("transforms per KV head (one per layer instead)", OURS, ("--granularity", "shared")),
        "no-center": Bundle("centering", OURS, ("--center", "off")),
        "no-centres": Bundle("two key centers (one instead)", OURS, ("--key-centers", "one")),
        "no-weights": Bundle("two key centers and rows by attention (all alike instead)", OURS, EVEN),
        "no-positions": Bundle("averaging over served positions", OURS, ("--position-span", "0")),
        "no-shaped": Bundle("shaped rounding", OURS, ("--rounding", "plain")),
        "no-metric": Bundle("metric scale", OURS, ("--scale-correction", "none")),
        "no-recall": Bundle("repeated stretches (text as it came instead)", OURS, ("--recall", "off", "--search", "off"), searched=True),
        "orthogonal": Bundle("orthogonal, searched", OURS, ("--method", "orthogonal"), searched=True),
        "default": Bundle("default of this toolkit", OURS, (), searched=True),
    }
    # What --for fits of a backend, in its codec, and the paper's recipe there.
    for backend in BACKENDS:
        bundles[f"for-{backend}"] = Bundle(f"--for {backend}", OURS, ("--for", backend), searched=True)
        bundles[f"paper-{backend}"] = Bundle(f"the paper's on {backend}", PAPER,
                                           ("--preset", "paper", "--for", backend, "--search", "off"), searched=True)
    return bundles


# Methods that oscar-eval makes without a bundle, or from the portable part of `default`.
METHODS = {
    "bf16": ("BF16 cache", ""),
    "exact": ("codec off", ""),
    "identity": ("no rotation", DATA_FREE),
    "identity-clip": ("no rotation, clipped", DATA_FREE),
    "hadamard": ("Hadamard", DATA_FREE),
    "hadamard-clip": ("Hadamard, clipped", DATA_FREE),
    "portable": ("portable, per layer", OURS),
    "portable-perhead": ("portable, per KV head", OURS),
}

PUBLISHED = ("shared", "perhead", "released")  # "published" is the best of them on the same text
MAIN = ("identity", "identity-clip", "hadamard", "hadamard-clip", *PUBLISHED, "portable", "portable-perhead",
        "orthogonal", "unsearched", "default")
ALONE = ("perhead+center", "perhead+positions", "perhead+balanced", "perhead+shaped", "perhead+unbiased",
         "perhead+metric", "perhead+clip")
STEPS = ("perhead", "perhead+center", "step-positions", "step-shaped", "step-metric", "step-balanced", "step-weights",
         "step-centres", "unsearched", "default")
WITHOUT = ("no-balanced", "hadamard-all", "no-heads", "no-center", "no-centres", "no-weights", "no-positions",
           "no-shaped", "no-metric", "no-recall", "step-centres")
SEPARATED = (*MAIN, "no-centres", "no-weights")
SIDES = ("hadamard-clip", "perhead", "unsearched", "default")
CURVES = ("perhead", "unsearched")
WINDOWED = ("perhead", "default")
AT_OFFSETS = (*PUBLISHED, "portable", "orthogonal", "no-positions", "unsearched", "default")
GROUPED = ("hadamard-clip", "perhead", "unsearched", "default")
LONG = ("exact", "hadamard-clip", *PUBLISHED, "portable", "unsearched", "default")
WINDOWS = ("0/1", "4/64", "64/64", "64/128", "64/256", "128/512")
# Methods of whose layers and heads the bundle holds a predicted error.
PREDICTED = ("perhead+clip", "portable", "portable-perhead", "orthogonal", "unsearched", "default")

LAYER_ERRORS = ("--layer-errors",)


def clip_name(method: str, side: str, ratio: str) -> str:
    """`method` with one side alone at INT2, clipped at `ratio`."""
    return f"{method}@{side}@clip:{ratio}/{ratio}"


def unique(names) -> tuple:
    return tuple(dict.fromkeys(names))


def main_run(**given) -> Run:
    """All parts on one text."""
    methods = unique(("exact", *MAIN, *ALONE, *STEPS, *WITHOUT, *(f"{m}@{side}" for m in SIDES for side in "kv")))
    return Run("main", methods, **given)


def clip_runs(size: Size) -> list:
    return [Run("clip", tuple(clip_name(m, side, r) for m in CURVES for side in "kv" for r in size.clips))]


def window_runs(size: Size) -> list:
    return [Run("windows", tuple(f"{m}@window:{w}" for m in WINDOWED for w in WINDOWS))]


def offset_runs(size: Size) -> list:
    return [Run(f"offset {o}", ("exact", *AT_OFFSETS), options=("--position-offset", str(o), *LAYER_ERRORS))
            for o in size.offsets]


def group_runs(size: Size) -> list:
    return [Run(f"group {g}", GROUPED, options=("--quant-group-size", str(g))) for g in size.groups]


def backend_runs(size: Size) -> list:
    return [Run(f"stack {s}", (f"paper-{s}", f"for-{s}"), options=LAYER_ERRORS) for s in size.backends]


def needle_runs(size: Size, methods: tuple, kinds: tuple) -> list:
    if not size.needle_prompts:
        return []
    return [Run("needles", methods, options=(
        "--tasks", "niah", "--needle-kinds", ",".join(kinds), "--needle-lengths", ",".join(map(str, size.needle_lengths)),
        "--needle-prompts", str(size.needle_prompts)))]
