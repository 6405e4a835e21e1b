"""What a bundle leaves out because the rest of it says so (lib/oscar/bundle/derived.h), derived to
the same bits as there: every step is one rounded operation of float64, in the order of
lib/oscar/linalg/fixed_order.h, on many matrices side by side."""
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

FEATURE = "derived"
BALANCED = 3
METRIC_DAMPING = 0.01  # of lib/oscar/fit/metric.h
MOST_DIM = 512
UPPER = {"k_metric", "v_metric", "q_moment", "k_moment", "v_moment", "attn_out_moment", "o_proj_metric",
         "v_energy_moment", "q_attended_moment", "k_attended_moment", "v_attended_moment"}
# Of a derived dataset: the rule, the letter of its side, and the dataset that it is made of.
SOURCES = {"q_rotation": ("inverse", "k", "k_rotation"), "o_rotation": ("inverse", "v", "v_rotation"),
           "v_metric": ("output_metric", "v", "v_rotation"),
           "k_feedback": ("factor", "k", "k_metric"), "v_feedback": ("factor", "v", "v_metric")}


class Problem(ValueError):
    """What is wrong with a file's codings; the message names the object."""


def inverse(matrices):
    """A^-1 of float64 [n, d, d], by fixed_order_inverse's steps."""
    a = np.array(matrices, dtype=np.float64)
    count, d, _ = a.shape
    heads, taken = np.arange(count), []
    for k in range(d):
        row = k + np.abs(a[:, k:, k]).argmax(1)
        taken.append(row)
        a[heads, row], a[:, k] = a[:, k].copy(), a[heads, row]
        pivot = a[:, k, k].copy()
        if not np.isfinite(pivot).all() or (pivot == 0).any():
            raise Problem(f"a matrix has no inverse: a pivot of 0 or not finite in column {k}")
        a[:, k, k] = 1
        a[:, k] /= pivot[:, None]
        kept = a[:, k].copy()
        factor = a[:, :, k].copy()
        a[:, :, k] = 0
        a -= factor[:, :, None] * kept[:, None, :]
        a[:, k] = kept
    for k in reversed(range(d)):
        row = taken[k]
        left, right = a[:, :, k].copy(), a[heads, :, row]
        a[heads, :, row] = left
        a[:, :, k] = right
    return a


def udu_factor(matrices):
    """Unit upper triangular U of float64 [n, d, d], by udu_factor's steps."""
    m = np.array(matrices, dtype=np.float64)
    u = np.zeros_like(m)
    for j in reversed(range(m.shape[1])):
        pivot = m[:, j, j]
        if not (np.isfinite(pivot) & (pivot > 0)).all():
            raise Problem(f"a metric has no triangular factor: its pivot in column {j}")
        u[:, j, j] = 1
        u[:, :j, j] = m[:, :j, j] / pivot[:, None]
        m[:, :j, :j] -= u[:, :j, j, None] * m[:, None, :j, j]
    return u


def _product(a, b):
    total = np.zeros_like(a)
    for k in range(a.shape[2]):
        total += a[:, :, k, None] * b[:, k, None, :]
    return total


def _mean_diagonal(matrices):
    d = matrices.shape[1]
    diagonal = matrices[:, np.arange(d), np.arange(d)]
    return np.cumsum(diagonal, axis=1)[:, -1] / d  # one after another


def output_metric(partner, weight):
    """M of values from o_rotation and M_O, float64 [n, d, d]."""
    product = _product(_product(partner, weight), partner.swapaxes(1, 2))
    symmetric = 0.5 * (product + product.swapaxes(1, 2))
    mean = _mean_diagonal(symmetric)
    usable = np.isfinite(mean) & (mean > 0)
    metric = symmetric / np.where(usable, mean, 1)[:, None, None]
    metric[~usable] = np.eye(metric.shape[1])
    return metric


def feedback_factor(metric):
    """U of M + 0.01 mean(diag M) I, M as stored [n, d, d]."""
    damped = np.array(metric, dtype=np.float64)
    diagonal = np.arange(damped.shape[1])
    damped[:, diagonal, diagonal] += (METRIC_DAMPING * _mean_diagonal(damped))[:, None]
    return udu_factor(damped)


class Content:
    """Datasets and attributes of a file as if nothing had been left out, from its objects {path:
    group or dataset of h5py}. Arrays are read when they are asked for, derived ones kept."""

    def __init__(self, objects):
        self.objects = objects
        self.paths = {path for path, item in objects.items() if hasattr(item, "dtype")}
        self.codings, self.features, self._derived = {}, None, {}
        features = self._json("/", "required_features")
        if not isinstance(features, list) or FEATURE not in features:
            return
        others = [name for name in features if name != FEATURE]
        self.features = json.dumps(others, separators=(",", ":"), ensure_ascii=False).encode()
        for group, item in objects.items():
            if group in self.paths or "coding" not in item.attrs:
                continue
            codings = self._json(group, "coding")
            if not isinstance(codings, dict):
                raise Problem(f"{group}: attribute coding is no JSON object")
            for name, rule in codings.items():
                if rule not in {"upper" if name in UPPER else None, SOURCES.get(name, [None])[0]} - {None}:
                    raise Problem(f"{group}: coding {rule!r} of {name} is not known")
                self.codings[f"{group}/{name}"] = rule
        self.paths |= self.codings.keys()

    def _json(self, where, name):
        """None for what is missing or no JSON: whoever needs it will say so."""
        value = self.objects[where].attrs.get(name)
        try:
            return json.loads(value) if isinstance(value, (bytes, str)) else None
        except ValueError:
            return None

    def attributes(self, path):
        """{name: value}, without what says how the file is stored."""
        found = dict(self.objects[path].attrs) if path in self.objects else {}
        if self.features is not None:
            found.pop("coding", None)
            if path == "/":
                found["required_features"] = self.features
        return found

    def array(self, path):
        rule = self.codings.get(path)
        if rule is None:
            return np.asarray(self.objects[path][()])
        if path not in self._derived:
            self._derived[path] = self._upper(path) if rule == "upper" else self._from_source(path, rule)
        return self._derived[path]

    def derive_all(self):
        """Works out whatever is left out, on the machine's cores: numpy lets go of the interpreter."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for wanted in ("upper", "inverse", "output_metric", "factor"):  # sources first
                for _ in pool.map(self.array, [p for p, rule in self.codings.items() if rule == wanted]):
                    pass

    def _upper(self, path):
        rows = self._stored(path, 2, "<f4", "<f8")
        d = int((2 * rows.shape[1]) ** 0.5)
        if d * (d + 1) // 2 != rows.shape[1]:
            raise Problem(f"{path}: holds no upper triangles")
        full = np.empty((len(rows), d, d), rows.dtype)
        above, right = np.triu_indices(d)
        full[:, above, right] = full[:, right, above] = rows
        return full

    def _stored(self, path, rank, *dtypes):
        item = self.objects.get(path)
        shape = getattr(item, "shape", ())
        if len(shape) != rank or 0 in shape or item.dtype.str not in dtypes:
            raise Problem(f"{path}: is missing, or of another shape or dtype")
        return np.ascontiguousarray(item[()])

    def _whole(self, path):
        """A dataset that others are derived from, [heads, d, d]; null where it is missing."""
        return self.array(path) if path in self.paths else None

    def _from_source(self, path, rule):
        group, _, dataset = path.rpartition("/")
        _, letter, name = SOURCES[dataset]
        matrices, kinds = self._whole(f"{group}/{name}"), self.objects.get(f"{group}/{letter}_kind")
        shape = getattr(matrices, "shape", ())
        if (len(shape) != 3 or shape[1] != shape[2] or shape[1] > MOST_DIM or 0 in shape
                or matrices.dtype != np.float32 or getattr(kinds, "shape", None) != shape[:1]):
            raise Problem(f"{path}: can't be derived from {name}, its shape or the heads' kinds")
        try:
            if rule == "factor":
                result = feedback_factor(matrices)
            elif rule == "output_metric":
                partner = self._whole(f"{group}/o_rotation")
                weight = self._whole(f"{group}/statistics/o_proj_metric")
                partner = matrices.swapaxes(1, 2) if partner is None else partner
                if getattr(weight, "shape", None) != shape or partner.shape != shape:
                    raise Problem("o_rotation or o_proj_metric is missing or of another shape")
                result = output_metric(partner.astype(np.float64), weight)
            else:
                result = (matrices if letter == "k" else matrices.swapaxes(1, 2)).astype(np.float64)
                balanced = kinds[()] == BALANCED
                found = inverse(matrices[balanced])
                result[balanced] = found.swapaxes(1, 2) if letter == "k" else found
        except Problem as error:
            raise Problem(f"{path}: {error}") from None
        with np.errstate(over="ignore"):
            result = np.ascontiguousarray(result).astype("<f4")
        if path in self.objects:
            steps = self._stored(path, 3, "<i4")
            if steps.shape != shape:
                raise Problem(f"{path}: corrections of another shape")
            result = (result.view("<u4") + steps.view("<u4")).view("<f4")
        return result
