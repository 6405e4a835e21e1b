"""The fit against a float64 reference in numpy: eigenspaces, transforms, metrics, served positions."""
import json
import os
import pathlib
import subprocess
import unittest

import numpy as np

PROGRAM = pathlib.Path(os.environ["OSCAR_BIN"]) / "oscar-test-fit"
SEED = 20260
FLOOR = 1e-6
SERVED_INVERSE = 2e-2  # kInverseLimitBf16Balanced of fit/fit.h
HADAMARD, OSCAR, BALANCED = 1, 2, 3


# ---- the reference -------------------------------------------------------------------------------

def inverse_frequencies(rotary_dim, theta):
    return theta ** (-2.0 * np.arange(rotary_dim // 2) / rotary_dim)


def rotate(rows, offset, rotary_dim, theta):
    """Rows turned by `offset` more positions, as transformers' rotate_half does it."""
    half = rotary_dim // 2
    angle = offset * inverse_frequencies(rotary_dim, theta)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = rows[:, :half], rows[:, half:rotary_dim]
    return np.concatenate(
        [first * cos - second * sin, second * cos + first * sin, rows[:, rotary_dim:]], axis=1)


def hadamard(d):
    b = d & -d
    m = d // b
    sylvester = np.array([[1.0]])
    while sylvester.shape[0] < b:
        sylvester = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    result = np.zeros((d, d))
    for i in range(d):
        block = i % m
        result[i, block * b:(block + 1) * b] = sylvester[i // m] / np.sqrt(b)
    return result


def permutation(d):
    if d & (d - 1):
        return np.arange(d)
    bits = d.bit_length() - 1
    return np.array([d - 1 - int(format(c, f"0{bits}b")[::-1] or "0", 2) for c in range(d)])


def raised(values):
    return np.maximum(values, FLOOR * values.max())


def to_bf16(x):
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def even_cost_mixing(costs):
    """Q with an even D in Q^T diag(costs) Q = U D U^T: the largest cost turned with the smallest, and so on."""
    d = len(costs)
    if d % 2:
        return np.eye(d)
    order = np.argsort(-costs, kind="stable")
    a, b = order[:d // 2], order[::-1][:d // 2]
    larger, smaller = np.sqrt(costs[a]), np.sqrt(costs[b])
    sine, cosine = np.sqrt(smaller / (larger + smaller)), np.sqrt(larger / (larger + smaller))
    turn = np.zeros((d, d))
    pairs = np.arange(d // 2)
    turn[a, pairs], turn[b, pairs] = cosine, sine
    turn[a, d // 2 + pairs], turn[b, d // 2 + pairs] = -sine, cosine
    return turn @ np.kron(np.eye(2), even_cost_mixing(np.sqrt(costs[a] * costs[b])))


def balanced(covariance, weight):
    """The transform for shaped rounding: the first exponent whose matrices serve in bf16."""
    values, vectors = np.linalg.eigh(covariance)
    values = raised(values)
    root = vectors @ np.diag(values ** 0.5) @ vectors.T
    inverse_root = vectors @ np.diag(values ** -0.5) @ vectors.T
    d_values, w = np.linalg.eigh(root @ weight @ root)
    d_values = raised(d_values)
    # The sign rule of `eigh`: the entry of largest magnitude is positive.
    w = w * np.sign(w[np.abs(w).argmax(axis=0), np.arange(len(w))])
    for exponent in (0.1, 0.15, 0.25):
        t = inverse_root @ w @ np.diag(d_values ** exponent) @ even_cost_mixing(d_values ** (1 - 2 * exponent))
        t /= np.sqrt(np.trace(t.T @ covariance @ t) / len(t))
        served = to_bf16(t)
        deviation = np.abs(served @ to_bf16(np.linalg.inv(served)) - np.eye(len(t))).max()
        if deviation <= SERVED_INVERSE:
            break
    return t, d_values


# ---- running the program --------------------------------------------------------------------

def synthetic_rows(rng, heads, tokens, d, mean):
    rows = []
    for _ in range(heads):
        mixing = rng.normal(size=(d, d)) / np.sqrt(d) + np.eye(d)
        scale = np.exp(0.6 * rng.normal(size=d))
        rows.append(rng.normal(size=(tokens, d)) @ mixing * scale + mean * rng.normal(size=d))
    return np.stack(rows)


def make_case(rng, heads=2, d=64, tokens=1500):
    return {
        "q": synthetic_rows(rng, heads, 2 * tokens, d, 0.5),
        "k": synthetic_rows(rng, heads, tokens, d, 2.0),
        "v": synthetic_rows(rng, heads, tokens, d, 0.3),
        "o": synthetic_rows(rng, heads, 2 * tokens, d, 0.3),
        "m_o": np.stack([w @ w.T for w in rng.normal(size=(heads, d, 3 * d))]),
    }


def moment(rows):
    return np.einsum("hti,htj->hij", rows, rows)


def fit(case, kind=OSCAR, center=False, shared=False, span=0, rotary_dim=None, theta=1e4):
    heads, _, d = case["q"].shape
    header = {
        "heads": heads, "d": d, "rotary_dim": d if rotary_dim is None else rotary_dim,
        "theta": theta, "count_q": case["q"].shape[1], "count_kv": case["k"].shape[1],
        "kind": kind, "center": center, "shared": shared, "span": span,
    }
    parts = [moment(case["q"]), moment(case["k"]), moment(case["v"]), moment(case["o"]),
             case["m_o"]] + [case[name].sum(axis=1) for name in "qkvo"]
    payload = json.dumps(header).encode() + b"\n"
    payload += b"".join(np.ascontiguousarray(p, dtype="<f8").tobytes() for p in parts)
    done = subprocess.run([PROGRAM], input=payload, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode())
    line, raw = done.stdout.split(b"\n", 1)
    numbers = np.frombuffer(raw, dtype="<f8")
    result = json.loads(line)
    at = 0

    def take(*shape):
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return numbers[at - size:at].reshape(shape)

    square, row = (heads, d, d), (heads, d)
    result.update(query=take(*square), key=take(*square), key_mean=take(*row))
    for side in ("K", "V"):
        result[side] = {"forward": take(*square), "partner": take(*square), "eigenvalues": take(*row),
                        "metric": take(*square), "feedback": take(*square)}
    result["rotation_f64"] = take(d, d)
    assert at == len(numbers)
    return result


# ---- comparisons ----------------------------------------------------------------------------

class FitParity(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(SEED)

    def assert_same_eigenspaces(self, rotation, c, tolerance):
        """rotation = U H P for some eigenbasis U of c: compared by projector per eigenspace."""
        d = len(c)
        values, vectors = np.linalg.eigh(c)
        unshuffled = np.empty_like(rotation)
        unshuffled[:, permutation(d)] = rotation
        u = unshuffled @ hadamard(d).T
        gap = 1e-6 * values[-1]
        start = 0
        for end in range(1, d + 1):
            if end == d or values[end] - values[end - 1] > gap:
                ours = u[:, start:end] @ u[:, start:end].T
                theirs = vectors[:, start:end] @ vectors[:, start:end].T
                self.assertLess(np.abs(ours - theirs).max(), tolerance, f"space {start}:{end}")
                start = end

    def check_oscar(self, case, shared):
        result = fit(case, shared=shared)
        count_q = case["q"].shape[1]
        for side, rows in (("K", case["q"]), ("V", case["o"])):
            c = moment(rows) / count_q
            if shared:
                c = np.broadcast_to(c.mean(axis=0), c.shape)
            for head in range(len(c)):
                values = np.linalg.eigvalsh(c[head])
                error = np.abs(result[side]["eigenvalues"][head] - values).max()
                self.assertLess(error, 1e-10 * values[-1])
                # The stored matrices are f32.
                self.assert_same_eigenspaces(result[side]["forward"][head], c[head], 1e-5)
        rotation = result["rotation_f64"]
        d = len(rotation)
        self.assertLess(np.abs(rotation.T @ rotation - np.eye(d)).max(), 1e-12)
        self.assert_same_eigenspaces(rotation, moment(case["q"])[0] / count_q, 1e-8)

    def test_oscar_rotation_equals_the_reference(self):
        for d in (8, 64, 96, 128):
            for shared in (False, True):
                with self.subTest(d=d, shared=shared):
                    self.check_oscar(make_case(self.rng, d=d), shared)

    def test_degenerate_eigenvalues_agree_as_spaces(self):
        case = make_case(self.rng, d=64)
        for name in "qo":
            # Orthonormal rows scaled so that C has eigenvalues 4 (x24), 1 (x32) and 9 (x8).
            basis, _ = np.linalg.qr(self.rng.normal(size=(64, 64)))
            scale = np.repeat([2.0, 1.0, 3.0], [24, 32, 8])
            count = case[name].shape[1]
            rows = np.zeros((count, 64))
            rows[:64] = np.sqrt(count) * scale[:, None] * basis.T
            case[name] = np.stack([rows] * 2)
        self.check_oscar(case, False)

    def test_balanced_transform_equals_the_reference(self):
        for d in (16, 96, 128):
            case = make_case(self.rng, d=d)
            result = fit(case, kind=BALANCED, center=True)
            self.assertEqual(result["kinds"], [[BALANCED] * 2] * 2, result["fallbacks"])
            count_q, count_kv = case["q"].shape[1], case["k"].shape[1]
            for head in range(2):
                c_q = case["q"][head].T @ case["q"][head] / count_q
                for side, rows, weight in (("K", case["k"][head], c_q),
                                           ("V", case["v"][head], case["m_o"][head])):
                    centered = rows - rows.mean(axis=0)
                    covariance = centered.T @ centered / count_kv
                    expected, d_values = balanced(covariance, weight)
                    ours = result[side]["forward"][head]
                    # Ours is theirs rounded to bf16: every entry within half a step of 2^-7.
                    self.assertLessEqual((np.abs(ours - expected) / np.abs(expected)).max(),
                                         2.0 ** -8 * (1 + 1e-6))
                    theirs = expected @ expected.T
                    self.assertLess(np.abs(ours @ ours.T - theirs).max(),
                                    2.0 ** -8 * np.abs(theirs).max())
                    self.assertFalse((ours.astype(np.float32).view(np.uint32) & 0xffff).any())
                    error = np.abs(result[side]["eigenvalues"][head] - d_values).max()
                    self.assertLess(error, 1e-9 * d_values[-1])
                    condition = np.linalg.cond(ours)
                    found = result["conditions"]["KV".index(side)][head]
                    self.assertLess(abs(found / condition - 1), 1e-6)
                    self.check_metric(result[side], head, weight, side)

    def check_metric(self, side_result, head, weight, side):
        partner = side_result["partner"][head]
        d = len(partner)
        m = partner.T @ weight @ partner if side == "K" else partner @ weight @ partner.T
        m = m / (np.trace(m) / d)
        self.assertLess(np.abs(side_result["metric"][head] - m).max(), 1e-6 * np.abs(m).max())
        damped = m + 0.01 * np.eye(d)
        upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        u = upper / np.diag(upper)
        self.assertLess(np.abs(side_result["feedback"][head] - u).max(), 1e-5 * np.abs(u).max())

    def test_position_average_equals_moments_of_rows_at_shifted_positions(self):
        for d, rotary_dim, theta, span in ((16, 16, 1e2, 1100), (32, 16, 1e4, 1024),
                                           (12, 8, 1e3, 2000)):
            with self.subTest(d=d, rotary_dim=rotary_dim):
                case = make_case(self.rng, d=d, tokens=200)
                result = fit(case, center=True, span=span, rotary_dim=rotary_dim, theta=theta)
                for head in range(2):
                    q, k = case["q"][head], case["k"][head]
                    # Three quarters on all positions, one on the first sixteenth of them.
                    early = span // 16
                    weight = np.full(span + 1, .75 / (span + 1))
                    weight[:early + 1] += .25 / (early + 1)
                    c_q, second, k_mean = 0, 0, 0
                    for p in range(span + 1):
                        turned_q, turned_k = (rotate(x, p, rotary_dim, theta) for x in (q, k))
                        c_q = c_q + weight[p] * turned_q.T @ turned_q / len(q)
                        second = second + weight[p] * turned_k.T @ turned_k / len(k)
                        k_mean = k_mean + weight[p] * turned_k.mean(axis=0)
                    c_k = second - np.outer(k_mean, k_mean)
                    for found, expected in ((result["query"][head], c_q),
                                            (result["key"][head], c_k),
                                            (result["key_mean"][head], k_mean)):
                        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
                        self.assertLess(error, 1e-9)

    def test_hostile_statistics_stay_finite_with_a_reason(self):
        repeated = make_case(self.rng, d=32)
        for name in "qkvo":
            repeated[name][0] = repeated[name][0, :1]
        zero = make_case(self.rng, d=32)
        for name in ("q", "k", "v", "o", "m_o"):
            zero[name][0] = 0
        few = make_case(self.rng, d=32, tokens=3)
        decades = make_case(self.rng, d=32)
        for name in "qkvo":
            decades[name][0] *= 10.0 ** (-6 * np.arange(32) / 31)
        huge = make_case(self.rng, d=32)
        for name in "qkvo":
            huge[name][0] += 1e7
        for name, case in (("repeated", repeated), ("zero", zero), ("few", few),
                           ("decades", decades), ("huge mean", huge)):
            for kind in (OSCAR, BALANCED):
                with self.subTest(case=name, kind=kind):
                    result = fit(case, kind=kind, center=True, span=4096)
                    for i, side in enumerate("KV"):
                        for part in result[side].values():
                            self.assertTrue(np.isfinite(part).all())
                        for head in range(2):
                            fell_back = result["kinds"][i][head] != kind
                            self.assertEqual(fell_back, result["fallbacks"][i][head] != "")
                            product = result[side]["forward"][head].T @ result[side]["partner"][head]
                            if side == "V":
                                product = (result[side]["forward"][head]
                                           @ result[side]["partner"][head])
                            self.assertLess(np.abs(product - np.eye(32)).max(), 1e-5)
        self.assertEqual(fit(zero, kind=BALANCED)["kinds"][0][0], HADAMARD)

    def test_statistics_without_tokens_or_with_nan_are_refused_by_name(self):
        case = make_case(self.rng, d=8, tokens=50)
        case["q"][1, 3, 2] = np.nan
        with self.assertRaisesRegex(RuntimeError, "layer 0, q_moment, head 1"):
            fit(case)


if __name__ == "__main__":
    print("seed", SEED)
    unittest.main()
