"""What the study measures: models, bundles, and the methods of every run. Nothing is run here."""
from dataclasses import dataclass, field

PAPER, OURS, DATA_FREE = "paper", "ours", "no data"

PER_HEAD = ("--preset", "paper", "--granularity", "per-head")
ALL_POSITIONS = 131072  # positions that the model serves; what --position-span is by default
AVERAGED = ("--position-span", str(ALL_POSITIONS))

EVEN = ("--row-weights", "even", "--key-centers", "one")

SHIPPED = "0.6"  # sigma of the outliers in datasets/tiny-gqa
SIGMAS = ("0", SHIPPED, "1.0")


@dataclass(frozen=True)
class Bundle:
    """Fitted by `oscar-bundle fit` from the statistics of all text, or, searched, by `oscar-calibrate`."""
    label: str
    origin: str
    options: tuple
    searched: bool = False


# By the name that --compare gives them.
BUNDLES = {
    "shared": Bundle("OSCAR, per layer", PAPER, ("--preset", "paper")),
    "perhead": Bundle("OSCAR, per KV head", PAPER, PER_HEAD),
    "released": Bundle("OSCAR, as released", PAPER, ("--preset", "released")),
    # One refinement of the per-head rotation.
    "perhead+center": Bundle("centring", OURS, PER_HEAD + ("--center", "on")),
    "perhead+positions": Bundle("averaging over served positions", OURS, PER_HEAD + AVERAGED),
    "perhead+balanced": Bundle("balanced transform", OURS, PER_HEAD + ("--method", "balanced")),
    "perhead+shaped": Bundle("shaped rounding", OURS, PER_HEAD + ("--rounding", "shaped")),
    "perhead+unbiased": Bundle("unbiased scale", OURS, PER_HEAD + ("--scale-correction", "unbiased")),
    "perhead+metric": Bundle("metric scale", OURS, PER_HEAD + ("--scale-correction", "metric")),
    "perhead+clip": Bundle("clip search", OURS, PER_HEAD + ("--clip", "search"), searched=True),
    # One after another: each has what those above it have.
    "step-positions": Bundle("+ averaging over served positions", OURS, PER_HEAD + ("--center", "on") + AVERAGED),
    "step-shaped": Bundle("+ shaped rounding", OURS, PER_HEAD + ("--center", "on", "--rounding", "shaped") + AVERAGED),
    "step-metric": Bundle("+ metric scale", OURS, PER_HEAD + ("--center", "on", "--rounding", "shaped",
                                                              "--scale-correction", "metric") + AVERAGED),
    "step-balanced": Bundle("+ balanced transform", OURS, ("--clip", "0.96,0.92") + EVEN),
    "step-weights": Bundle("+ rows by attention", OURS, ("--clip", "0.96,0.92", "--key-centers", "one")),
    "step-centres": Bundle("+ two key centres", OURS, ("--clip", "0.96,0.92")),
    "unsearched": Bundle("default, without search", OURS, ()),
    # The unsearched default without one of its parts.
    "no-balanced": Bundle("balanced transform (OSCAR's rotation instead)", OURS, ("--method", "oscar")),
    "hadamard-all": Bundle("balanced transform (Hadamard instead)", OURS, ("--method", "hadamard")),
    "no-heads": Bundle("transforms per KV head (one per layer instead)", OURS, ("--granularity", "shared")),
    "no-center": Bundle("centring", OURS, ("--center", "off")),
    "no-centres": Bundle("two key centres (one instead)", OURS, ("--key-centers", "one")),
    "no-weights": Bundle("two key centres and rows by attention (all alike instead)", OURS, EVEN),
    "no-positions": Bundle("averaging over served positions", OURS, ("--position-span", "0")),
    "no-shaped": Bundle("shaped rounding", OURS, ("--rounding", "plain")),
    "no-metric": Bundle("metric scale", OURS, ("--scale-correction", "none")),
    "orthogonal": Bundle("orthogonal, searched", OURS, ("--method", "orthogonal"), searched=True),
    "default": Bundle("default of this toolkit", OURS, (), searched=True),
}

# What --for fits of a serving stack, in its codec, and the paper's recipe there.
STACKS = ("sglang-v1", "sglang-v2", "vllm", "onnxruntime", "mlx")
for stack in STACKS:
    BUNDLES[f"for-{stack}"] = Bundle(f"--for {stack}", OURS, ("--for", stack), searched=True)
    BUNDLES[f"paper-{stack}"] = Bundle(f"the paper's on {stack}", PAPER,
                                       ("--preset", "paper", "--for", stack, "--search", "off"), searched=True)

# Methods that oscar-eval makes without a bundle, or from the portable part of `default`.
LABELS = {
    "bf16": ("BF16 cache", ""),
    "exact": ("codec off", ""),
    "identity": ("no rotation", DATA_FREE),
    "identity-clip": ("no rotation, clipped", DATA_FREE),
    "hadamard": ("Hadamard", DATA_FREE),
    "hadamard-clip": ("Hadamard, clipped", DATA_FREE),
    "portable": ("portable, per layer", OURS),
    "portable-perhead": ("portable, per KV head", OURS),
} | {name: (bundle.label, bundle.origin) for name, bundle in BUNDLES.items()}

PUBLISHED = ("shared", "perhead", "released")  # "published" is the best of them on the same text
MAIN = ("identity", "identity-clip", "hadamard", "hadamard-clip", *PUBLISHED, "portable", "portable-perhead",
        "orthogonal", "unsearched", "default")
ALONE = ("perhead+center", "perhead+positions", "perhead+balanced", "perhead+shaped", "perhead+unbiased",
         "perhead+metric", "perhead+clip")
STEPS = ("perhead", "perhead+center", "step-positions", "step-shaped", "step-metric", "step-balanced", "step-weights",
         "step-centres", "unsearched", "default")
WITHOUT = ("no-balanced", "hadamard-all", "no-heads", "no-center", "no-centres", "no-weights", "no-positions",
           "no-shaped", "no-metric", "step-centres")
SEPARATED = (*MAIN, "no-centres", "no-weights")
SIDES = ("hadamard-clip", "perhead", "unsearched", "default")
CURVES = ("perhead", "unsearched")
WINDOWED = ("perhead", "default")
AT_OFFSETS = (*PUBLISHED, "portable", "orthogonal", "no-positions", "unsearched", "default")
PLANTED = ("identity", "hadamard-clip", *PUBLISHED, "portable", "unsearched", "default")
GROUPED = ("hadamard-clip", "perhead", "unsearched", "default")
NEEDLED = ("identity", "hadamard-clip", "perhead", "portable-perhead", "unsearched", "default")

WINDOWS = ("0/1", "4/64", "64/64", "64/128", "64/256", "128/512")
SECTIONS = ("main", "separators", "clip", "windows", "offsets", "groups", "planting", "stacks", "needles")


@dataclass(frozen=True)
class Scale:
    """How much is measured; 0 is all that there is."""
    calibration_tokens: int = 0
    tokens: int = 0
    chunk_len: int = 4096
    clips: tuple = ("0.86", "0.90", "0.92", "0.94", "0.96", "0.98", "0")  # 0: off
    offsets: tuple = (32768, 98304, 126976)
    groups: tuple = (64, 32)  # 128, all of a head, is in the main run
    stacks: tuple = STACKS
    needle_prompts: int = 400
    needle_length: int = 3968
    sections: tuple = SECTIONS


QUICK = Scale(calibration_tokens=8192, tokens=4096, chunk_len=1024, clips=("0.86", "0.92", "0.96", "0"),
              offsets=(98304,), groups=(32,), stacks=("vllm",), needle_prompts=0)


@dataclass(frozen=True)
class Run:
    """One call of oscar-eval on the model of `sigma`. separators: the text has one as every so-manieth token."""
    name: str
    methods: tuple
    sigma: str = SHIPPED
    options: tuple = field(default=())
    separators: int = 0

    def bundles(self) -> list:
        """Names of the bundles that the methods need, in the order of BUNDLES."""
        bases = {method.split("@")[0] for method in self.methods}
        if any(base.startswith("portable") for base in bases):
            bases.add("default")
        return [name for name in BUNDLES if name in bases]


def clip_name(method: str, side: str, ratio: str) -> str:
    """`method` with one side alone at INT2, clipped at `ratio`."""
    return f"{method}@{side}@clip:{ratio}/{ratio}"


def unique(names) -> tuple:
    return tuple(dict.fromkeys(names))


def runs(scale: Scale) -> list:
    """The calls that the sections of `scale` need; longest first."""
    made = {"main": [Run("main", unique(("exact", *MAIN, *ALONE, *STEPS, *WITHOUT,
                                         *(f"{m}@{side}" for m in SIDES for side in "kv"))))],
            "separators": [Run("separators", SEPARATED, separators=64)],
            "clip": [Run("clip", tuple(clip_name(m, side, r) for m in CURVES for side in "kv" for r in scale.clips))],
            "windows": [Run("windows", tuple(f"{m}@window:{w}" for m in WINDOWED for w in WINDOWS))],
            "offsets": [Run(f"offset {o}", ("exact", *AT_OFFSETS), options=("--position-offset", str(o)))
                        for o in scale.offsets],
            "groups": [Run(f"group {g}", GROUPED, options=("--quant-group-size", str(g))) for g in scale.groups],
            "planting": [Run(f"sigma {s}", ("exact", *PLANTED), sigma=s) for s in SIGMAS if s != SHIPPED],
            "stacks": [Run(f"stack {s}", (f"paper-{s}", f"for-{s}")) for s in scale.stacks],
            "needles": []}
    if scale.needle_prompts:
        made["needles"] = [Run("needles", NEEDLED, options=(
            "--tasks", "niah", "--needle-kinds", "multikey", "--needle-lengths", str(scale.needle_length),
            "--needle-prompts", str(scale.needle_prompts)))]
    return [run for section in SECTIONS if section in scale.sections for run in made[section]]


def wanted_bundles(planned: list) -> dict:
    """By sigma, the names of the bundles that the runs need, in the order of BUNDLES."""
    wanted = {}
    for run in planned:
        wanted.setdefault(run.sigma, set()).update(run.bundles())
    return {sigma: [name for name in BUNDLES if name in names] for sigma, names in wanted.items()}
