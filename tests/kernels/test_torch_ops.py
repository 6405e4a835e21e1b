#!/usr/bin/env python3
"""torch.ops.oscar_int2 against goldens and float64 attention in plain torch, on CPU and CUDA.

Usage: test_torch_ops.py [OnCpu ...]     CUDA cases are skipped, with the reason, without a device
"""
import os
import pathlib
import random
import sys
import unittest

import torch

sys.path[:0] = [str(pathlib.Path(os.environ["OSCAR_BIN"]).parent / "python"),
                str(pathlib.Path(__file__).resolve().parent)]
import oscar_int2  # registers the operators
from torch_ops_reference import (CORE, FORMATS, PROPERTIES, Format, Server, bits, dequantized, golden_matrices,
                                 goldens, recipe_of, relative_error, shaped_feedback, split, step_numbers)

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
GOLDEN, README = SOURCE / "tests" / "golden", SOURCE / "kernels" / "README.md"
# Of the relative error 1.7e-3 is the rounding of the output to bf16.
RELATIVE_BOUND, LSE_BOUND = 2e-3, 1e-3
KERNELS = os.environ.get("OSCAR_KERNELS", "none")  # none, core or full: what the library holds
ops = torch.ops.oscar_int2


class Device:
    """Cases that run on every device; subclasses name it."""

    device = "cpu"

    def server(self, *arguments, **options):
        return Server(ops, self.device, *arguments, **options)

    def on(self, *tensors):
        return [t.to(self.device) for t in tensors]

    def written_row(self, row, fmt, **writer):
        """Codes [d] and (scale, zero) [groups, 2] of one bf16 row as key and as value."""
        server = self.server(fmt, 1, heads=1, sink=0, recent=0, pages=2, **writer)
        server.append([row.reshape(1, 1, 1, -1).expand(1, 2, 1, -1)])
        codes, pairs = split(server.pool[server.pages[0]], fmt)
        self.assertTrue(torch.equal(codes[0, 0, 0, 0], codes[0, 0, 1, 0]))
        self.assertTrue(torch.equal(pairs[0, 0, 0, 0], pairs[0, 0, 1, 0]))
        return codes[0, 0, 0, 0], pairs[0, 0, 0, 0], server.status.max().item()

    def supported(self, fmt):
        """Whether this build decodes the format: every one on the CPU."""
        return True

    def step(self, windows, starts, seq_lens, slots, held, drafts, history, written, room=40):
        """ops.step_numbers, and what it leaves: ({name: list}, history, written, starts)."""
        ints = lambda values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=self.device)
        out, numbers = ints([-7] * (room + 1)), ints([[-7] * room] * 9)  # more rows than it has numbers
        history, written = ints(history), ints(written)
        ops.step_numbers(windows, ints(starts), ints(seq_lens), ints(slots, torch.int64), ints(held), ints(drafts), out,
                         numbers, history, written)
        n, names = len(seq_lens), ops.step_names().split()
        self.assertTrue((numbers[len(names):] == -7).all() and (numbers[:, n:] == -7).all() and (out[n + 1:] == -7).all())
        return (dict(zip(names, numbers[:, :n].tolist())), history.tolist(), written.tolist(), out[:n + 1].tolist())

    def test_numbers_of_steps_are_those_of_the_definition(self):
        """A few requests grow, with drafts of which some are taken; others leave, come, and pad a graph."""
        numbers = random.Random(3)
        for windows in ((64, 256, 16), (0, 128, 1), (128, 0, 64)):
            history, written, lengths = [0] * 40, [0] * 40, {}
            for _ in range(60):
                for slot in numbers.sample(range(40), 3):
                    if lengths.pop(slot, None) is None:
                        lengths[slot] = 0
                    history[slot] = written[slot] = 0
                held = numbers.sample(sorted(lengths), len(lengths))
                rows = [numbers.choice((1, 1, 4, 70, 500)) for _ in held]
                drafts = [numbers.randrange(3) if count == 4 else 0 for count in rows]
                padding = numbers.randrange(4) if len(held) < 36 else 0
                starts = [sum(rows[:b]) for b in range(len(rows) + 1)] + [sum(rows)] * padding
                seq_lens = [lengths[slot] + count for slot, count in zip(held, rows)] + [numbers.randrange(9)] * padding
                nowhere = numbers.random() < 0.1  # a dummy run
                slots = [-1 if nowhere else 5] * sum(rows) + [-1] * padding
                given = windows, starts, seq_lens, slots, held, drafts, history, written
                expected = step_numbers(*given)
                self.assertEqual(self.step(*given), expected)
                _, history, written, _ = expected
                if not nowhere:
                    lengths = {slot: lengths[slot] + count - numbers.randrange(drafted + 1)
                               for slot, count, drafted in zip(held, rows, drafts)}

    def test_a_step_of_nobody_has_no_numbers(self):
        self.assertEqual(self.step([64, 256, 16], [0], [], [], [], [], [3], [4]), ({
            name: [] for name in ops.step_names().split()}, [3], [4], [-7]))

    def test_rows_are_the_bytes_of_the_independent_goldens(self):
        cases = 0
        for case in goldens(GOLDEN):
            if case.shaped and self.device != "cpu":
                continue  # fp32 sums in another order may differ at ties; see OnCuda
            feedback, metric = [m[None].to(self.device) for m in golden_matrices(case.fmt.head_dim)]
            clips = torch.tensor([case.clip], device=self.device)
            writer = {"clip_ratio_k": clips, "clip_ratio_v": clips}
            if case.shaped:
                writer |= {"feedback_k": feedback, "feedback_v": feedback}
            if case.correction == "metric":
                writer |= {"metric_k": metric, "metric_v": metric}
            codes, pairs, status = self.written_row(case.row, case.fmt, **writer)
            if case.correction == "unbiased":  # which pages do not have: the scale differs
                pairs, case.pairs = pairs[:, 1:], case.pairs[:, 1:]
            with self.subTest(case.name):
                self.assertEqual(status, 0)
                self.assertTrue(torch.equal(codes, case.codes))
                self.assertTrue(torch.equal(bits(pairs), bits(case.pairs)))
            cases += 1
        self.assertGreaterEqual(cases, 150 if self.device == "cpu" else 117)

    def test_attention_matches_float64_over_the_dequantized_cache(self):
        for fmt in FORMATS:
            for lengths, q_len in (([1, 15, 48, 49, 112, 113, 200], 1), ([90, 300], 3)):
                with self.subTest(fmt=fmt, q_len=q_len):
                    server = self.server(fmt, len(lengths))
                    server.append([server.normal(n, 2, 2, fmt.head_dim) for n in lengths])
                    server.append([server.normal(q_len, 2, 2, fmt.head_dim) for _ in lengths])
                    q = server.queries(q_len)
                    arguments = server.attention_arguments(q)
                    if not self.supported(fmt):
                        with self.assertRaisesRegex(RuntimeError, "OSCAR_KERNELS=full"):
                            ops.decode_attention(**arguments)
                        continue
                    o, lse = ops.decode_attention(**arguments)
                    reference, reference_lse = server.reference(q)
                    self.assertFalse(server.status.any())
                    self.assertLess(relative_error(o, reference), RELATIVE_BOUND)
                    self.assertLess((lse.cpu() - reference_lse).abs().max().item(), LSE_BOUND)

    def test_outputs_of_the_caller_and_a_kept_workspace_give_the_same_bits(self):
        server = self.server(CORE, 3)
        server.append([server.normal(n, 2, 2, 128) for n in (40, 150, 260)])
        arguments = server.attention_arguments(server.queries())
        o, lse = ops.decode_attention(**arguments)
        size = ops.decode_attention_workspace_size(server.pool, 128)
        workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        for _ in range(2):
            again, lse_again = torch.full_like(o, torch.nan), torch.full_like(lse, torch.nan)
            ops.decode_attention_out(o=again, lse=lse_again, workspace=workspace, **arguments)
            self.assertTrue(torch.equal(o, again) and torch.equal(lse, lse_again))
        ops.decode_attention_out(o=again.zero_(), workspace=workspace, **arguments)
        self.assertTrue(torch.equal(o, again))

    def test_tokens_appended_one_by_one_become_the_rows_of_one_prefill(self):
        whole, steps = self.server(CORE, 2), self.server(CORE, 2)
        rows = [whole.normal(n, 2, 2, 128) for n in (130, 60)]
        whole.append(rows)
        steps.append([r[:20] for r in rows])
        for i in range(20, 130):
            steps.append([r[i:i + 1] for r in rows])
        self.assertEqual(whole.history, steps.history)
        for b in range(2):
            self.assertTrue(torch.equal(whole.history_rows(b), steps.history_rows(b)))
        q = whole.queries()
        results = [ops.decode_attention(**s.attention_arguments(q))[0] for s in (whole, steps)]
        self.assertTrue(torch.equal(*results))

    def test_rows_may_get_their_page_before_they_leave_the_window(self):
        plain, ahead = (self.server(CORE, 2, recent=80, ahead=ahead) for ahead in (False, True))
        rows = [plain.normal(n, 2, 2, 128) for n in (210, 80)]
        for begin, end in ((0, 40), (40, 150), *((i, i + 1) for i in range(150, 210))):
            for server in (plain, ahead):
                server.append([r[begin:end] for r in rows])
            for ours, theirs in ((ahead.window_k, plain.window_k), (ahead.window_v, plain.window_v)):
                self.assertTrue(torch.equal(ours.isnan(), theirs.isnan()), end)
                self.assertTrue(torch.equal(ours.nan_to_num(), theirs.nan_to_num()), end)
        self.assertEqual((plain.history, ahead.history, ahead.written), ([114, 0], [114, 0], [192, 64]))
        whole = self.server(CORE, 2, recent=0)
        whole.append(rows)
        for b in range(2):
            read = slice(plain.history[b])
            self.assertTrue(torch.equal(ahead.history_rows(b)[read], plain.history_rows(b)[read]))
            pages = ahead.written[b]
            self.assertTrue(torch.equal(ahead.history_rows(b)[:pages], whole.history_rows(b)[:pages]))
        q = plain.queries()
        results = [ops.decode_attention(**s.attention_arguments(q))[0] for s in (plain, ahead)]
        self.assertTrue(torch.equal(*results))

    def test_clip_ratios_feedback_and_metric_belong_to_heads_and_sides(self):
        metric = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(5))
        metric = torch.eye(128) + metric @ metric.transpose(1, 2) / 128
        feedback = torch.stack([shaped_feedback(m) for m in metric]).float()
        feedback, metric = self.on(feedback, metric)
        rows = torch.randn(300, 2, 2, 128, generator=torch.Generator().manual_seed(6))

        def written(**writer):
            server = self.server(CORE, 1, **writer)
            server.append([rows.to(torch.bfloat16)])
            return server.history_rows(0)  # [tokens, side, heads, d]

        plain = written()
        clip = torch.tensor([0.0, 0.9], device=self.device)
        changed = (written(clip_ratio_k=clip) != plain).any(-1).float().mean(0)  # [side, heads]
        self.assertEqual(changed[1].tolist() + [changed[0, 0].item()], [0, 0, 0])
        self.assertGreater(changed[0, 1].item(), 0.9)
        shaped = written(feedback_v=feedback, metric_v=metric)
        self.assertTrue(torch.equal(shaped[:, 0], plain[:, 0]))
        error = [(w[:, 1] - rows[16:268, 1].bfloat16().float()) for w in (plain, shaped)]
        loss = [torch.einsum("thi,hij,thj->h", e, metric.cpu(), e) for e in error]
        self.assertTrue((loss[1] < 0.95 * loss[0]).all(), loss)

    def centered(self, fmt, batch=2, size=4.0):
        """A server with key centers of two segments; pages lie before and behind position 1024."""
        random = torch.Generator().manual_seed(11)
        centers = size * torch.randn(2, 2, 2, fmt.head_dim, generator=random)
        positions = torch.arange(batch, dtype=torch.int32) * 100 + 800
        return self.server(fmt, batch, key_centers_k=centers.bfloat16().to(self.device),
                           first_position=positions.to(self.device))

    def test_keys_are_coded_around_centers_and_read_with_them(self):
        for fmt in FORMATS:
            with self.subTest(fmt=fmt):
                server = self.centered(fmt)
                rows = [server.normal(n, 2, 2, fmt.head_dim) for n in (400, 150)]
                for new, position in zip(rows, (800, 900)):
                    page = (torch.arange(len(new)) - server.sink).clamp(min=0) // 64
                    segment = (position + server.sink + 64 * page + 32 >= 1024).long()
                    which = torch.randint(2, (len(new), 2), generator=server.random)
                    table = server.key_centers.cpu()[segment]  # [tokens, heads, 2, d]
                    new[:, 0] += table[torch.arange(len(new))[:, None], torch.arange(2), which]
                server.append(rows)
                self.assertFalse(server.status.any())
                coded, centers = server.history_rows(0), server.row_centers(0)
                self.assertEqual(len(centers[:, 0].unique(dim=0)), 4)  # two of each segment
                exact = rows[0][server.sink:server.sink + server.history[0], 0].double()
                plain = self.server(fmt, 2)
                plain.append(rows)
                near = relative_error(coded[:, 0] + centers, exact)
                self.assertLess(near, 0.5 * relative_error(plain.history_rows(0)[:, 0], exact))
                if not self.supported(fmt):
                    continue
                q = server.queries()
                o, lse = ops.decode_attention(**server.attention_arguments(q))
                reference, reference_lse = server.reference(q)
                self.assertLess(relative_error(o, reference), RELATIVE_BOUND)
                self.assertLess((lse.cpu() - reference_lse).abs().max().item(), LSE_BOUND)

    def test_centers_of_zeros_change_no_byte(self):
        plain, zeros = self.server(CORE, 2), self.centered(CORE, size=0.0)
        rows = [plain.normal(n, 2, 2, 128) for n in (130, 60)]
        for server in (plain, zeros):
            server.append(rows)
        self.assertTrue(torch.equal(plain.pool, zeros.pool))

    def test_an_unused_place_of_the_batch_gives_zeros_and_nothing_of_it_is_read(self):
        server = self.server(CORE, 3)
        new = [server.normal(n, 2, 2, 128) for n in (100, 0, 260)]
        # What a captured graph has there: no lengths, and whatever stood in the other tables.
        server.window_slot[1] = -1
        rows = server.append(new)
        self.assertEqual(rows["query_start_loc"].tolist(), [0, 100, 100, 360])
        read = server.attention_arguments(server.queries())
        self.assertEqual(read["block_table"][1].tolist(), 4 * [1 << 30])
        read["history_len"][1] = 1 << 30
        o, lse = ops.decode_attention(**read)
        self.assertEqual(o[1].abs().max().item(), 0)
        self.assertTrue((lse[1] == -torch.inf).all())
        reference, reference_lse = server.reference(read["q"].cpu())
        self.assertLess(relative_error(o, reference), RELATIVE_BOUND)
        self.assertLess((lse.cpu() - reference_lse)[[0, 2]].abs().max().item(), LSE_BOUND)

    def test_a_refused_row_is_noted_by_window_slot_and_makes_attention_of_its_request_nan(self):
        pages, sink, recent = 30, 3, 67  # positions of 70
        for fmt, row, side, value, noted in (
                (CORE, pages, 0, torch.inf, 1), (CORE, pages, 1, torch.nan, 1),
                (CORE, pages, 0, 1e9, 2), (CORE, pages, 1, 1e9, 2), (CORE, sink, 0, torch.nan, 1),
                (CORE, recent, 1, torch.inf, 1), (CORE, recent, 1, 1e9, 0),
                *((other, pages, side, torch.nan, 1) for other in FORMATS[1:] for side in (0, 1)
                  if self.supported(other))):
            with self.subTest(fmt=fmt, row=row, side=side, value=value):
                server = self.server(fmt, 3)
                rows = [server.normal(70, 2, 2, fmt.head_dim) for _ in range(3)]
                rows[1][row, side, 1, 7] = value
                server.append(rows)
                expected = torch.zeros_like(server.status)
                expected[server.window_slot[1].long()] = noted
                self.assertEqual(server.status.tolist(), expected.tolist())
                for q_len in (1, 3) if fmt == CORE else (1,):  # few columns and many
                    read = server.attention_arguments(server.queries(q_len))
                    o, lse = ops.decode_attention(**read)
                    reference, reference_lse = server.reference(read["q"].cpu())
                    sound = torch.ones(o.shape[:3], dtype=bool)
                    sound[1, :, 4:] = noted == 0  # the query heads of the KV head
                    self.assertFalse(o[~sound].isfinite().all(-1).any())
                    self.assertLess(relative_error(o[sound], reference[sound]), RELATIVE_BOUND)
                    self.assertLess((lse.cpu() - reference_lse)[sound].abs().max(), LSE_BOUND)
                    if side == 0:
                        self.assertTrue(o[~sound].isnan().all() and lse[~sound].isnan().all())
                if row == pages:
                    self.assertTrue(o[~sound].isnan().all())
                    back = self.read_back(server, 64, dtype=torch.bfloat16)
                    nan = back[1, :server.history[1]].isnan()
                    self.assertEqual(nan.any(-1).nonzero().tolist(), [[row - server.sink, side, 1]])
                    self.assertEqual(nan.sum().item(), fmt.head_dim)

    def read_back(self, server, tokens, first_token=0, dtype=torch.float32, apart=False):
        """What dequantize_history writes of `tokens` rows a request; NaN where it does not."""
        shape = (server.batch, tokens, server.pool.shape[1], server.fmt.head_dim)
        if apart:  # as [batch, heads, tokens, d], with room for other rows before and behind
            whole = torch.full((shape[0], shape[2], tokens + 5, shape[3]), torch.nan, dtype=dtype,
                               device=self.device)
            k, v = whole[:, :, 2:-3].transpose(1, 2), whole.clone()[:, :, 2:-3].transpose(1, 2)
        else:
            k = torch.full(shape, torch.nan, dtype=dtype, device=self.device)
            v = k.clone()
        arguments = server.history_arguments() | {"k": k, "v": v, "first_token": first_token}
        ops.dequantize_history(**arguments)
        return torch.stack([k, v], dim=2).cpu()

    def test_history_comes_back_as_the_rows_that_attention_reads(self):
        for fmt in FORMATS:
            for server in (self.server(fmt, 3), self.centered(fmt, 3)):
                server.append([server.normal(n, 2, 2, fmt.head_dim) for n in (40, 333, 200)])
                most = max(server.history)
                expected = torch.full((3, most + 9, 2, 2, fmt.head_dim), torch.nan)
                for b, history in enumerate(server.history):
                    expected[b, :history] = server.history_rows(b)
                    if server.key_centers is not None:
                        expected[b, :history, 0] += server.row_centers(b).float()
                for first, tokens, apart in ((0, most + 9, False), (0, most, True),
                                             (70, 150, False), (128, 64, True),
                                             (most, 9, False), (7, 0, False)):
                    for dtype in (torch.float32, torch.bfloat16):
                        with self.subTest(fmt=fmt, first=first, tokens=tokens, dtype=dtype):
                            got = self.read_back(server, tokens, first, dtype, apart)
                            wanted = expected[:, first:first + tokens].to(dtype)
                            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)

    def test_history_that_does_not_fit_is_refused_by_name(self):
        server = self.server(CORE, 2)
        server.append([server.normal(n, 2, 2, 128) for n in (70, 150)])
        rows = torch.empty(2, 20, 2, 128, device=self.device)
        arguments = server.history_arguments() | {"k": rows, "v": rows.clone()}
        for change, words in (({"k": rows.half()}, ("k", "BFloat16 or Float", "Half")),
                              ({"v": rows.bfloat16()}, ("v", "Float", "BFloat16")),
                              ({"v": rows[:, 1:]}, ("v", "tokens")),
                              ({"k": rows[:, :, :1]}, ("pool", "num_kv_heads")),
                              ({"k": rows.mT.contiguous().mT}, ("k", "multiples of 4")),
                              ({"first_token": -1}, ("first_token", "-1")),
                              ({"first_position": server.ints([0, 0])}, ("key_centers",))):
            self.refused(ops.dequantize_history, arguments, change,
                         "oscar_int2::dequantize_history", *words)

    def transforms(self, rows, heads, share, d, seed=3):
        """Slices of a fused qkv tensor, and arguments of transform_qkv without them."""
        random = torch.Generator().manual_seed(seed)
        qkv = torch.randn(rows, heads * (share + 2), d, generator=random).bfloat16() * 4
        q, k, v = self.on(qkv)[0].split([heads * share, heads, heads], dim=1)
        rotations = [torch.randn(heads, d, d, generator=random) / d**0.5 for _ in range(3)]
        means = [4 * torch.randn(heads, d, generator=random) for _ in range(2)]
        return (q, k, v), self.on(*rotations) + self.on(*means)

    def basis(self, q_rotation, k_rotation, v_rotation, k_mean=None, v_mean=None, o_rotation=None):
        """The list of a layer with these matrices."""
        given = {"partner_k": q_rotation, "forward_k": k_rotation, "forward_v": v_rotation,
                 "mean_k": k_mean, "mean_v": v_mean, "partner_v": o_rotation}
        return recipe_of(q_rotation.device, **{n: x for n, x in given.items() if x is not None})

    def close_in_bf16(self, got, expected):
        error = (got.cpu().double() - expected).abs()
        self.assertEqual(got.dtype, torch.bfloat16)
        self.assertTrue(got.is_contiguous())
        self.assertTrue((error <= 2.0**-8 * expected.abs() + 1e-4).all(), error)

    def test_transforms_are_products_with_the_matrix_of_the_kv_head(self):
        for rows, heads, share, d in ((1, 2, 4, 128), (70, 2, 3, 64), (5, 1, 8, 256),
                                      (0, 2, 1, 128)):
            with self.subTest(rows=rows, heads=heads, share=share, d=d):
                qkv, (*rotations, k_mean, v_mean) = self.transforms(rows, heads, share, d)
                for means in ((k_mean, v_mean), (None, None)):
                    recipe = self.basis(*rotations, *means)
                    results = ops.transform_qkv(*qkv, recipe)
                    outs = [torch.full_like(r, torch.nan) for r in results]
                    ops.transform_qkv_out(*qkv, recipe, *outs)
                    for x, r, mean, got, out in zip(qkv, rotations, (None, *means), results, outs):
                        x, r = x.cpu().double(), r.cpu().double()
                        x = x if mean is None else x - mean.cpu().double()
                        r = r.repeat_interleave(x.shape[1] // heads, dim=0)
                        self.close_in_bf16(got, torch.einsum("nhd,hde->nhe", x, r))
                        self.assertTrue(torch.equal(got, out))
                q, rotation = qkv[0], rotations[0]
                for mean in (v_mean, None):
                    recipe = self.basis(*rotations, v_mean=mean, o_rotation=rotation)
                    got = ops.transform_output(q, recipe)
                    ops.transform_output_out(q, recipe, out := torch.full_like(got, 7))
                    turn = rotation.cpu().double().repeat_interleave(share, dim=0)
                    expected = torch.einsum("nhd,hde->nhe", q.cpu().double(), turn)
                    if mean is not None:
                        expected += mean.cpu().double().repeat_interleave(share, dim=0)
                    self.close_in_bf16(got, expected)
                    self.assertTrue(torch.equal(got, out))

    def test_transforms_of_tensors_that_do_not_fit_are_refused_by_name(self):
        qkv, matrices = self.transforms(5, 2, 4, 128)
        (q, k, v), rotation = qkv, matrices[0]
        arguments = {"q": q, "k": k, "v": v, "recipe": self.basis(*matrices)}

        def changed(**change):
            names = ("q_rotation", "k_rotation", "v_rotation", "k_mean", "v_mean")
            return {"recipe": self.basis(**(dict(zip(names, matrices)) | change))}

        for change, words in (
                ({"q": q.float()}, ("q", "BFloat16", "Float")),
                ({"q": q[:, :7]}, ("q", "multiple", "7")),
                ({"q": q.transpose(1, 2).contiguous().transpose(1, 2)}, ("q", ".contiguous()")),
                ({"q": q[..., 1:]}, ("head_dim", "127")),
                ({"k": k[1:]}, ("k", "rows")),
                ({"k": q}, ("k", "num_kv_heads 2", "8")),
                ({"recipe": []}, ("recipe", "forward partner")),
                ({"recipe": arguments["recipe"][:5]}, ("recipe", "9 of keys", "5")),
                (changed(k_rotation=rotation[:1]), ("key.partner", "[2, 128, 128]")),
                (changed(q_rotation=rotation[:0]), ("a matrix is missing", "q")),
                (changed(v_rotation=rotation.bfloat16()), ("value.forward", "Float", "BFloat16")),
                (changed(v_rotation=rotation.mT), ("value.forward", ".contiguous()")),
                (changed(v_mean=matrices[4][:, :64].contiguous()), ("value.mean", "[2, 64]"))):
            self.refused(ops.transform_qkv, arguments, change, "oscar_int2::transform_qkv", *words)
        o = q.contiguous()
        self.refused(ops.transform_output_out,
                     {"o": o, "recipe": self.basis(*matrices, o_rotation=rotation)}, {"out": o}, "out",
                     "memory of its own")

    def test_the_example_of_the_readme_runs(self):
        text = README.read_text().split("```python\n")[1].split("```")[0]
        self.assertIn('"cpu"', text)
        names = {}
        exec(text.replace('"cpu"', repr(self.device)), names)
        self.assertTrue(names["o"].isfinite().all() and names["lse"].isfinite().all())
        self.assertEqual((names["o"].shape, names["status"].item()), ((1, 1, 32, 128), 0))

    def refused(self, op, arguments, change, *words):
        with self.subTest(words=words), self.assertRaises(RuntimeError) as caught:
            op(**(arguments | change))
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_tensors_that_do_not_fit_are_refused_by_name(self):
        server = self.server(CORE, 2)
        rows = server.append([server.normal(n, 2, 2, 128) for n in (70, 150)])
        read = server.attention_arguments(server.queries())
        pool, q, op = server.pool, read["q"], ops.decode_attention
        odd = torch.empty(pool.numel() + 1, dtype=torch.uint8, device=self.device)[1:]
        for change, words in (
                ({"q": q.float()}, ("wrong dtype", "q", "BFloat16", "Float")),
                ({"q": q[0]}, ("wrong number of dimensions", "q")),
                ({"q": q[..., :64], "format": [64, 0, 16]}, ("pool", "2560", "4608")),
                ({"q": q.transpose(0, 2).contiguous().transpose(0, 2)}, ("q", ".contiguous()")),
                ({"q": q[:, :, :7].contiguous()}, ("num_qo_heads", "multiple", "7")),
                ({"pool": pool[:, :, :-1].contiguous()}, ("pool", "4608", "4607")),
                ({"pool": odd.view(pool.shape)}, ("pool", "16 bytes")),
                ({"block_table": read["block_table"][1:]}, ("block_table", "[2, any]", "[1, ")),
                ({"block_table": read["block_table"].long()}, ("block_table", "Int", "Long")),
                ({"block_table": read["block_table"][:1].expand(2, -1)}, ("block_table", "[0, 1]")),
                ({"block_table": read["block_table"].T.contiguous().T}, ("block_table", ", 1]")),
                ({"history_len": read["history_len"][:1]}, ("history_len", "[2]", "[1]")),
                ({"seq_lens": read["seq_lens"][:1]}, ("seq_lens", "[2]", "[1]")),
                ({"window_v": server.window_v[:1]}, ("window_v",)),
                ({"window_slot": None, "window_k": server.window_k[:1],
                  "window_v": server.window_v[:1]}, ("window_k", "window_slot")),
                ({"format": [128, 0, 999]}, ("sink_tokens", "999")),
                ({"format": [48, 0, 16]}, ("quant_group_size", "48")),
                ({"format": [128, 3, 16]}, ("metadata_dtype", "0 to 2", "3")),
                ({"format": [128, 0]}, ("format", "quant_group_size metadata_dtype sink_tokens", "2")),
                ({"first_position": read["seq_lens"]}, ("first_position", "key_centers")),
                ({"recipe": [q]}, ("recipe", "9 of keys", "1")),
                ({"recipe": recipe_of(self.device, key_centers_v=q)}, ("value.key_centers", "only keys")),
                ({"recipe": recipe_of(self.device, key_centers_k=q)}, ("key.key_centers", "num_kv_heads")),
                ({"recipe": recipe_of(self.device, key_centers_k=q.float())},
                 ("key.key_centers", "BFloat16"))):
            self.refused(op, read, change, "oscar_int2::decode_attention", *words)
        out = torch.empty_like(q)
        self.refused(ops.decode_attention_out, read, {"o": out[:1]}, "o", "[2, 1, 8, 128]")
        self.refused(ops.decode_attention_out, read, {"o": out, "lse": out}, "lse", "Float")
        write = server.cache() | rows
        heads = torch.ones(3, device=self.device)
        for change, words in (
                ({"v": rows["v"][1:]}, ("v", "new rows")),
                ({"k": rows["k"].transpose(1, 2).contiguous().transpose(1, 2)},
                 ("k", "multiples of 8", ".contiguous()")),
                ({"k": rows["k"].half(), "v": rows["v"].half()}, ("k", "BFloat16", "Half")),
                ({"old_history": rows["old_history"][:1]}, ("old_history",)),
                ({"recipe": recipe_of(self.device, clip_ratio_k=heads)}, ("key.clip_ratio", "[2]", "[3]")),
                ({"recipe": recipe_of(self.device, feedback_v=heads)}, ("value.feedback", "head_dim")),
                ({"recipe": recipe_of(self.device, scale_correction_k=heads[:2].byte())},
                 ("key.scale_correction", "key.metric")),
                ({"status": rows["status"].float()}, ("status", "Int")),
                ({"max_new_rows": -1}, ("max_new_rows", "-1"))):
            self.refused(ops.quantize_append, write, change, "oscar_int2::quantize_append", *words)

    def test_operators_pass_the_checks_of_torch(self):
        server = self.server(CORE, 2)
        rows = server.append([server.normal(n, 2, 2, 128) for n in (70, 150)])
        read = server.attention_arguments(server.queries())
        size = ops.decode_attention_workspace_size(server.pool, 128)
        read["workspace"] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        torch.library.opcheck(ops.quantize_append.default, (), server.cache() | rows)
        torch.library.opcheck(ops.decode_attention.default, (), read)
        o = torch.zeros_like(read["q"])
        torch.library.opcheck(ops.decode_attention_out.default, (),
                              read | {"o": o, "lse": o[..., 0].float()})
        centered = self.centered(CORE)
        rows = centered.append([centered.normal(n, 2, 2, 128) for n in (70, 150)])
        torch.library.opcheck(ops.quantize_append.default, (), centered.cache() | rows)
        torch.library.opcheck(ops.decode_attention.default, (),
                              centered.attention_arguments(centered.queries()))
        qkv, matrices = self.transforms(5, 2, 4, 128)
        recipe = self.basis(*matrices, o_rotation=matrices[0])
        torch.library.opcheck(ops.transform_qkv.default, (*qkv, recipe))
        outs = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in qkv]
        torch.library.opcheck(ops.transform_qkv_out.default, (*qkv, recipe, *outs))
        torch.library.opcheck(ops.transform_output.default, (qkv[0], recipe))
        torch.library.opcheck(ops.transform_output_out.default, (qkv[0], recipe, outs[0]))
        rows = torch.zeros(2, 150, 2, 128, dtype=torch.bfloat16, device=self.device)
        for written in (server, centered):
            torch.library.opcheck(ops.dequantize_history.default, (),
                                  written.history_arguments() | {"k": rows, "v": rows.clone()})

    def test_a_compiled_step_does_what_the_plain_one_does(self):
        def step(write, read):
            ops.quantize_append(**write)
            o, lse = ops.decode_attention(**read)
            return o.float() * 2, lse

        compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
        results = []
        for run in (step, compiled):
            server = self.server(CORE, 2, seed=9)
            server.append([server.normal(n, 2, 2, 128) for n in (70, 150)])
            for _ in range(2):
                writes = []
                new = [server.normal(1, 2, 2, 128) for _ in range(2)]
                server.append(new, call=lambda **write: writes.append(write))
                results.append(run(writes[0], server.attention_arguments(server.queries())))
            results.append((server.pool.float(), server.window_k.nan_to_num()))
        for plain, traced in zip(results[:3], results[3:]):
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, traced)))


class OnCpu(Device, unittest.TestCase):
    def test_page_sizes(self):
        self.assertEqual(ops.page_bytes(128, [0, 0, 64]), 4608)
        for fmt in FORMATS:
            self.assertEqual(ops.page_bytes(fmt.head_dim, fmt.numbers()), fmt.page_bytes())

    def test_lists_have_the_order_that_the_library_states(self):
        self.assertEqual(tuple(ops.recipe_names().split()), PROPERTIES)
        self.assertEqual(ops.format_names(), "quant_group_size metadata_dtype sink_tokens")

    def test_rows_of_eight_are_the_bytes_worked_out_by_hand(self):
        row = torch.tensor([-1.5, .3, .8, 3, -.5, 1.1, 0, 2]).bfloat16()
        clips = torch.tensor([0.75])
        plain = {"clip_ratio_k": clips, "clip_ratio_v": clips}
        codes, pairs, _ = self.written_row(row, Format(8, 8, torch.float32), **plain)
        self.assertEqual(codes.tolist(), [0, 2, 2, 3, 1, 2, 1, 3])
        torch.testing.assert_close(pairs[0], torch.tensor([1.1666667, 1.2857143]))
        v = torch.arange(8, 0, -1).double()
        metric = torch.eye(8).double() + torch.outer(v, v)
        feedback = shaped_feedback(metric)[None].float()
        shaped = plain | {"feedback_k": feedback, "feedback_v": feedback}
        codes, pairs, _ = self.written_row(row, Format(8, 8), **shaped)
        self.assertEqual(codes.tolist(), [0, 2, 2, 3, 1, 2, 2, 3])
        self.assertEqual(pairs[0].view(torch.int16).tolist(), [0x3cab, 0x3d24])
        metric = metric[None].float()
        _, pairs, _ = self.written_row(row, Format(8, 8), **shaped, metric_k=metric,
                                       metric_v=metric)
        self.assertEqual(pairs[0].view(torch.int16).tolist(), [0x3c98, 0x3d24])

    def test_steps_that_point_outside_their_tables_are_refused(self):
        given = [64, 256, 16], [0, 1, 2], [9, 9], [5, 5]
        for what, words in (
                ([0, 40], "window_slot, request 1.*0 to 1"), ([-1, 0], "window_slot, request 0.*0 to 1")):
            with self.assertRaisesRegex(RuntimeError, f"(?s)step_numbers.*{words}"):
                self.step(*given, what, [0, 0], [0, 0], [0, 0])
        with self.assertRaisesRegex(RuntimeError, "(?s)step_numbers.*drafts, request 1.*0 to 1"):
            self.step(*given, [0, 1], [0, 2], [0, 0], [0, 0])
        with self.assertRaisesRegex(RuntimeError, "(?s)step_numbers.*seq_lens.size.0.*0 to 1.*2"):
            self.step(*given, [0, 1], [0, 0], [0, 0], [0, 0], room=1)
        with self.assertRaisesRegex(RuntimeError, "(?s)step_numbers.*windows.*sink_tokens, recent_tokens, demote_block.*2"):
            self.step([64, 256], *given[1:], [0, 1], [0, 0], [0, 0], [0, 0])

    def test_tables_that_point_outside_the_cache_are_refused(self):
        server = self.server(CORE, 2)
        rows = server.append([server.normal(n, 2, 2, 128) for n in (70, 150)])
        write, read = server.cache() | rows, server.attention_arguments(server.queries())

        def changed(table, index, value):
            copy = (write | read)[table].clone()
            copy[index] = value
            return {table: copy}

        for table, index, value in (("block_table", (0, 0), 40), ("block_table", (1, 1), -1),
                                    ("history_len", 0, -1), ("history_len", 1, 129),
                                    ("seq_lens", 1, 99), ("seq_lens", 0, 900), ("seq_lens", 1, -1),
                                    ("window_slot", 1, 4)):
            self.refused(ops.decode_attention, read, changed(table, index, value), table,
                         "request")
        for table, index, value in (("block_table", (1, 1), 40), ("query_start_loc", 2, 221),
                                    ("old_len", 0, -1), ("old_history", 1, 200),
                                    ("new_history", 0, 0), ("new_history", 1, 150),
                                    ("window_slot", 0, -1)):
            self.refused(ops.quantize_append, write, changed(table, index, value), table,
                         "request")
        k = torch.zeros(2, 64, 2, 128)
        back = server.history_arguments() | {"k": k, "v": k.clone()}
        ops.dequantize_history(**back | changed("block_table", (1, 1), -1))  # is not read
        for table, index, value in (("block_table", (0, 0), 40), ("history_len", 1, 129)):
            self.refused(ops.dequantize_history, back, changed(table, index, value), table,
                         "request")
        centers = torch.zeros(1, 2, 2, 128, dtype=torch.bfloat16)
        for op, arguments in ((ops.decode_attention, read), (ops.quantize_append, write)):
            self.refused(op, arguments, {
                "recipe": recipe_of("cpu", key_centers_k=centers),
                "first_position": torch.tensor([0, -1], dtype=torch.int32)}, "first_position", "request 1")
        for value in (-1, 103, 96):  # of 102 INT2 tokens; behind 96 there are more rows than the ring's 37
            read_history = torch.tensor([rows["new_history"][0], value], dtype=torch.int32)
            self.refused(ops.quantize_append, write, {"read_history": read_history}, "read_history", "request 1")
        self.refused(ops.quantize_append, write, {"max_new_rows": 100}, "max_new_rows", "150")
        self.refused(ops.quantize_append, write, {"max_new_history": 9}, "max_new_history", "22")


@unittest.skipIf(KERNELS == "none", "this build has no CUDA kernels")
@unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
class OnCuda(Device, unittest.TestCase):
    device = "cuda"

    def supported(self, fmt):
        return fmt == CORE or KERNELS == "full"

    def test_pages_and_windows_are_those_of_the_cpu(self):
        servers = [Server(ops, device, CORE, 3, seed=4) for device in ("cpu", "cuda")]
        for server in servers:
            server.append([server.normal(n, 2, 2, 128) for n in (40, 333, 500)])
            for _ in range(5):
                server.append([server.normal(1, 2, 2, 128) for _ in range(3)])
        host, device = servers
        self.assertTrue(torch.equal(host.pool, device.pool.cpu()))
        for a, b in ((host.window_k, device.window_k), (host.window_v, device.window_v)):
            torch.testing.assert_close(a, b.cpu(), rtol=0, atol=0, equal_nan=True)

    def test_shaped_rows_are_those_of_the_cpu_but_for_the_order_of_sums(self):
        feedback, metric = [m.expand(2, 128, 128).contiguous() for m in golden_matrices(128)]
        rows = []
        for device in ("cpu", "cuda"):
            u, m = feedback.to(device), metric.to(device)
            server = Server(ops, device, CORE, 1, seed=4, feedback_k=u, feedback_v=u, metric_k=m,
                            metric_v=m)
            server.append([server.normal(1500, 2, 2, 128)])
            rows.append(server.history_rows(0))
        different = (rows[0] != rows[1]).any(-1).sum().item()
        self.assertLessEqual(different, 6)  # of 5808: 1e-3, by a unit in the last place of scales
        far = (rows[0] - rows[1]).abs() > 1.01 * 2**-10 * rows[0].abs()
        self.assertLessEqual(far.any(-1).sum().item(), 1)  # 1e-4, by a code

    def test_tensors_of_another_device_are_refused(self):
        server = self.server(CORE, 1)
        server.append([server.normal(100, 2, 2, 128)])
        read = server.attention_arguments(server.queries())
        self.refused(ops.decode_attention, read, {"seq_lens": read["seq_lens"].cpu()}, "seq_lens",
                     "cuda:0", "cpu")

    def test_steps_run_on_the_current_stream_and_replay_in_a_graph(self):
        server = self.server(CORE, 2, seed=7)
        server.append([server.normal(n, 2, 2, 128) for n in (70, 150)])
        writes, queries = [], server.queries().cuda()
        new = [server.normal(1, 2, 2, 128) for _ in range(2)]
        server.append(new, call=lambda **write: writes.append(write))
        write, read = writes[0], server.attention_arguments(queries)
        size = ops.decode_attention_workspace_size(server.pool, 128)
        read["workspace"] = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # on a stream of its own
            ops.quantize_append(**write, max_new_rows=1, max_new_history=1)
            o, lse = ops.decode_attention(**read)
        graph.replay()
        torch.cuda.synchronize()
        reference, reference_lse = server.reference(queries.cpu())
        self.assertLess(relative_error(o, reference), RELATIVE_BOUND)
        self.assertLess((lse.cpu() - reference_lse).abs().max().item(), LSE_BOUND)
        queries.copy_(server.queries())
        graph.replay()
        torch.cuda.synchronize()
        self.assertLess(relative_error(o, server.reference(queries.cpu())[0]), RELATIVE_BOUND)


    def test_one_graph_of_a_layer_serves_steps_whose_lengths_and_tables_change(self):
        """Rotations, append, attention and reading back; the third place of the batch is unused."""
        server = self.server(CORE, 3, seed=8)
        server.window_slot[2] = -1
        server.append([server.normal(n, 2, 2, 128) for n in (70, 150, 0)])
        (_, _, _), (*turns, k_mean, v_mean) = self.transforms(1, 2, 4, 128)
        o_turn = turns[0].mT.contiguous()
        recipe = self.basis(*turns, k_mean, v_mean, o_turn)
        on_cpu = [x.cpu() for x in recipe]
        table = torch.full((3, 12), -5, dtype=torch.int32, device="cuda")
        qkv = torch.empty(2, 12, 128, dtype=torch.bfloat16, device="cuda")
        ints = {name: server.ints([0] * size) for name, size in (
            ("query_start_loc", 4), ("old_len", 3), ("old_history", 3), ("new_history", 3),
            ("seq_lens", 3))}
        rows_q = torch.zeros(3, 1, 8, 128, dtype=torch.bfloat16, device="cuda")
        back = [torch.zeros(3, 200, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        size = ops.decode_attention_workspace_size(server.pool, 128)
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        seq_lens = ints.pop("seq_lens")
        cache = server.cache() | {"block_table": table[:, 1:]}
        history = {n: x for n, x in server.history_arguments().items() if n != "history_len"}

        def layer():
            q, k, v = qkv.split([8, 2, 2], dim=1)
            q, k, v = ops.transform_qkv(q, k, v, recipe)
            rows_q[:2, 0] = q
            ops.quantize_append(**cache, k=k, v=v, status=server.status, max_new_rows=1,
                                max_new_history=1, **ints)
            o, lse = ops.decode_attention(
                rows_q, **cache, history_len=ints["new_history"], seq_lens=seq_lens,
                sm_scale=128**-0.5, workspace=workspace)
            ops.dequantize_history(**(history | {"block_table": table[:, 1:]}), k=back[0],
                                   v=back[1], history_len=ints["new_history"])
            return o, lse, k, v, ops.transform_output(o.flatten(0, 1), recipe)

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, lse, k, v, model_o = layer()
        for step in range(60):
            new = server.normal(2, 12, 128)
            qkv.copy_(new)
            q, *rows = ops.transform_qkv(*qkv.cpu().split([8, 2, 2], dim=1), on_cpu)
            rows = torch.stack(rows, dim=1)  # [request, side, heads, d]; within a unit of bf16
            arguments = server.append([rows[:1], rows[1:], rows[:0]], call=lambda **_: None)
            for name, tensor in ints.items():
                tensor.copy_(arguments[name])
            seq_lens.copy_(server.ints(server.lengths()))
            table[:, 1:1 + server.block_table.shape[1]] = server.block_table
            graph.replay()
            torch.cuda.synchronize()
            self.assertFalse(server.status.any())
            for b in range(2):  # exact rows are those of the GPU
                server.rows[b][-1] = torch.stack([k[b], v[b]]).cpu()
            self.assertLess(relative_error(k, rows[:, 0].double()), 2**-8)
            if step % 20 > 0:
                continue
            reference, reference_lse = server.reference(rows_q.cpu())
            self.assertLess(relative_error(o, reference), RELATIVE_BOUND)
            self.assertLess((lse.cpu() - reference_lse)[:2].abs().max().item(), LSE_BOUND)
            self.assertTrue((lse[2] == -torch.inf).all() and not o[2].any())
            for b in range(2):
                for side in range(2):
                    self.assertTrue(torch.equal(
                        back[side][b, :server.history[b]].cpu(),
                        server.history_rows(b)[:, side].bfloat16()))
            turned = o.flatten(0, 1).cpu().double().unflatten(1, (2, 4))
            expected = torch.einsum("nhgd,hde->nhge", turned, o_turn.cpu().double())
            expected += v_mean.cpu().double()[:, None]
            self.close_in_bf16(model_o, expected.flatten(1, 2))


if __name__ == "__main__":
    unittest.main(verbosity=2)
