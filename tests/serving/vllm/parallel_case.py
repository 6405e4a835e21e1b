"""Engines of several processes: what they answer, and what their workers do for a test. Imported behind vllm_case;
vLLM imports it in each worker too (Extension)."""
import contextlib
import os
import sys
from unittest import mock

import torch

DEVICES = torch.cuda.device_count()
LENGTHS, TOKENS = (700, 350, 90), 24


def several_processes(ranks, **variables):
    """The environment of an engine of so many workers, as long as it is needed."""
    found = {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_WORKER_MULTIPROC_METHOD": "spawn", **variables}
    if not DEVICES and ranks > 1:  # a core each, as far as there are cores
        cores = sorted(os.sched_getaffinity(0))
        found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(ranks))
    return mock.patch.dict(os.environ, found)


def parameters():
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20, detokenize=False)


@contextlib.contextmanager
def blocks_left(llm, count):
    """A pool of so many free blocks, by which a request has to be preempted."""
    llm.reset_prefix_cache()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # in this process, whatever the workers' number
    pool, preempt, preempted = scheduler.kv_cache_manager.block_pool, scheduler._preempt_request, []

    def note(request, *args, **options):
        preempted.append(request.num_computed_tokens)
        return preempt(request, *args, **options)

    taken = pool.get_new_blocks(pool.get_num_free_blocks() - count)
    with mock.patch.object(scheduler, "_preempt_request", note):
        yield
    pool.free_blocks(taken)
    assert any(tokens > max(LENGTHS) for tokens in preempted), f"preempted behind {preempted} tokens"


def answers(model, texts, refusing=None, blocks=None, **options):
    """What an engine answers to the beginnings of three texts, first together, then to the first one again, and the
    sizes() of its ranks. `blocks`: the three are asked again, the first one last, in so many blocks, too few for them.
    `refusing`: a rank that then refuses a row of the first one. It is asked once more, beside the last one. Then it is
    asked with good rows, in a pool that is full of NaN."""
    import vllm

    with several_processes(options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)):
        llm = vllm.LLM(str(model), worker_extension_cls="parallel_case.Extension", **options)
        prompts = [{"prompt_token_ids": text[:length]} for text, length in zip(texts, LENGTHS)]

        def ask(prompts):
            return llm.generate(prompts, parameters(), use_tqdm=False)

        sizes = llm.collective_rpc("sizes")
        found = [*ask(prompts), *ask(prompts[:1])]
        if blocks:
            with blocks_left(llm, blocks):
                found += ask(prompts[::-1])
        if refusing is not None:
            llm.reset_prefix_cache()
            llm.collective_rpc("enlarge_a_row", args=(refusing,))
            found += ask([prompts[0], prompts[-1]])
            llm.collective_rpc("rows_are_as_they_were")
            llm.collective_rpc("spoil_pool")
            found += ask(prompts[:1])
        llm.llm_engine.engine_core.shutdown()
    return found, sizes


def from_host_memory(model, texts, pages, **options):
    """(what an engine answers to the beginning of the first text when it finds it in its pool, and then in host memory
    alone; tokens that came from there). Host memory has room for so many pages of all ranks."""
    import vllm
    from offloading_case import bench_agents, gib_of

    with several_processes(options.get("tensor_parallel_size", 1)):
        llm = vllm.LLM(str(model), worker_extension_cls="parallel_case.Extension", disable_log_stats=False,
                       kv_offloading_size=gib_of(pages), **options)
        came, prompt, found = bench_agents.note_host_tokens(llm.llm_engine), {"prompt_token_ids": texts[0][:LENGTHS[0]]}, []
        for _ in range(3):
            found += llm.generate([prompt], parameters(), use_tqdm=False)
            if len(found) == 2:
                while llm.llm_engine.has_unfinished_requests() or not llm.reset_prefix_cache():
                    llm.llm_engine.step()
        llm.llm_engine.engine_core.shutdown()
    return found[1], found[2], list(came.values())[-1]


class Extension:
    """Methods of each worker (worker_extension_cls), called by name in all of them."""

    def enlarge_a_row(self, rank):
        """On one rank: a row of long prompts becomes finite and too large for 2 bits."""
        if self.rank != rank:
            return
        codec = builders_of(self)[0].layers[0].codec
        transform = codec.transform_qkv

        def transformed(q, k, v):
            q, k, v = transform(q, k, v)
            if len(k) > 500:
                k[100] *= 1e9
            return q, k, v

        codec.transform_qkv = transformed

    def rows_are_as_they_were(self):
        for builder in builders_of(self):
            for layer in builder.layers:
                vars(layer.codec).pop("transform_qkv", None)

    def spoil_pool(self):
        """Fills vLLM's pool with bytes that read as NaN."""
        for layer in self.model_runner.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", ())
            for part in [cache] if torch.is_tensor(cache) else cache:
                part.untyped_storage().fill_(255)

    def attend_in_dummy_steps(self):
        """A dummy step comes before each step, and two in the place of one: so ranks keep pace. They build metadata
        and attend, as CUDA graphs do. They are counted."""
        execute, self.dummy_steps = self.execute_model, 0

        def dummy_step():
            self.dummy_steps += 1
            self.model_runner._dummy_run(1, uniform_decode=True, force_attention=True)

        def execute_model(output):
            if output.total_num_scheduled_tokens:
                dummy_step()
            return execute(output)

        def execute_dummy_batch():
            dummy_step()
            dummy_step()

        self.execute_model, self.execute_dummy_batch = execute_model, execute_dummy_batch

    def count_dummy_steps(self):
        return self.dummy_steps

    def sizes(self):
        """(bytes of a block, {layer: tokens of a block}, KV heads of a page) of this rank."""
        specs = {name: group.kv_cache_spec for group in self.model_runner.kv_cache_config.kv_cache_groups
                 for name in group.layer_names}
        return ({spec.page_size_bytes for spec in specs.values()},
                {name: spec.block_size for name, spec in specs.items()},
                {layer.num_kv_heads for builder in builders_of(self) for layer in builder.layers})


def builders_of(worker):
    return [builder for groups in worker.model_runner.attn_groups for group in groups
            for builder in group.metadata_builders if hasattr(builder, "sink_blocks")]


def complete_cpu_engine():
    """What experts of several ranks need, and vLLM 0.26's CPU engine lacks: rows of data parallel ranks are not
    gathered there, and its experts take no map from a model's experts to a rank's."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    def all_gatherv(self, input_, dim=0, sizes=None):
        if isinstance(input_, list):
            return [all_gatherv(self, part, dim, sizes) for part in input_]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[:len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        total = input_.float()
        torch.distributed.all_reduce(total, group=self.device_group)
        first = sum(sizes[:self.rank_in_group])
        return total[first:first + sizes[self.rank_in_group]].to(input_.dtype)

    make = CPUFusedMOE.__init__

    def __init__(self, layer):
        make(self, layer)
        forward = self.forward_method

        def of_this_rank(layer, x, weights, ids, activation, experts, *rest):
            if layer.expert_map is not None:
                ids = layer.expert_map[ids].to(ids.dtype)
                weights, ids = torch.where(ids < 0, 0, weights), ids.clamp(min=0)
                experts = layer.local_num_experts
            return forward(layer, x, weights, ids, activation, experts, *rest)

        self.forward_method = of_this_rank

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    CPUFusedMOE.__init__ = __init__


def offload_on_a_cpu():
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    def get_worker(spec, kv_caches):
        import offloading_case  # which sets up the environment: only where it is asked for

        return offloading_case.get_worker(spec, kv_caches)

    CPUOffloadingSpec.get_worker = get_worker


if not DEVICES:
    complete_cpu_engine()
    offload_on_a_cpu()
