"""KV offloading where vLLM's worker for it has no device: the CPU copies pages. Scheduler, connector and hooks are
vLLM's and ours."""
import contextlib
import sys
from unittest import mock

import torch
import vllm_case as case

sys.path.insert(0, str(case.SOURCE / "benchmarks"))
import bench_agents

GIB = 1 << 30


def make_worker(caches, host_blocks):
    """vLLM's OffloadingWorker over CanonicalKVCaches, for one page a chunk. A transfer copies when it is submitted, and
    is reported when it is asked for next: as one whose stream takes no time."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

    class Worker(OffloadingWorker):
        def __init__(self):
            self.host = [torch.zeros(host_blocks, entry.page_size_bytes, dtype=torch.int8) for entry in caches.tensors]
            self.done = []

        def _copy(self, job_id, gpu, cpu, store):
            [refs] = caches.group_data_refs
            assert all(caches.tensors[ref.tensor_idx].page_size_bytes == ref.page_size_bytes for ref in refs), "padded"
            ours, theirs = (torch.from_numpy(spec.block_ids.astype("int64")) for spec in (gpu, cpu))
            assert len(ours) == len(theirs)
            for host, entry in zip(self.host, caches.tensors):
                if store:
                    host[theirs] = entry.tensor[ours]
                else:
                    entry.tensor[ours] = host[theirs]
            size = len(ours) * sum(entry.page_size_bytes for entry in caches.tensors)
            self.done.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=1e-6))
            return True

        def submit_store(self, job_id, src_spec, dst_spec):
            return self._copy(job_id, src_spec, dst_spec, True)

        def submit_load(self, job_id, src_spec, dst_spec):
            return self._copy(job_id, dst_spec, src_spec, False)

        def get_finished(self):
            done, self.done = self.done, []
            return done

        def wait(self, job_ids):
            pass

    return Worker()


def get_worker(spec, kv_caches):
    """In place of CPUOffloadingSpec.get_worker."""
    if spec._worker is None:
        spec._worker = make_worker(kv_caches, spec.num_blocks)
    return spec._worker


@contextlib.contextmanager
def on_any_device():
    """Engines that are made here offload to host memory also on a CPU."""
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(CPUOffloadingSpec, "get_worker", get_worker))
        yield


@contextlib.contextmanager
def no_connector():
    """For another engine in the same process, which offloads nothing."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", None):
        yield


def gib_of(pages):
    """Host memory (kv_offloading_size) for so many pages of all layers and heads."""
    return (pages + 0.5) * 73728 / GIB


class Engine(case.Engine):
    """With host memory for `pages` blocks of 64 tokens."""

    def __init__(self, pages, **options):
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group

        ensure_kv_transfer_shutdown()  # a process has one connector: that of an engine before
        with on_any_device():
            super().__init__(kv_offloading_size=gib_of(pages), disable_log_stats=False, **options)
        self.offloading = self.scheduler.oscar_offloading
        self.prefixes = self.scheduler.oscar_prefixes
        self.from_host = bench_agents.note_host_tokens(self.core)
        self.core.engine_core.get_output = self._published(self.core.engine_core.get_output)
        self.connector_worker = get_kv_transfer_group().connector_worker
        self.counts, take = [], self.prefixes.take_counts
        self.prefixes.take_counts = lambda: self.counts.append(take()) or self.counts[-1]

    def _published(self, get_output):
        """Stats of steps without an answer too, in which pages come: a server publishes them, LLMEngine drops them."""
        def get():
            found = get_output()
            if found.scheduler_stats is not None and not found.outputs:
                self.core.logger_manager.record(found.scheduler_stats, None)
            return found

        return get

    def take_counts(self):
        """(sinks that were found, that were not) since this was called last; the engine's stats have taken some."""
        self.prefixes.take_counts()
        counts, self.counts[:] = list(self.counts), []
        return tuple(map(sum, zip(*counts)))

    def host_pages(self):
        """Blocks in host memory."""
        manager = self.scheduler.connector.connector_scheduler.manager
        return manager._num_blocks - manager._get_num_free_blocks()

    def settle(self):
        while self.scheduler.has_requests():
            self.core.step()  # by which stats are published, too

    def forget_pool(self):
        """The pool's blocks are nobody's; host memory keeps its own."""
        self.settle()
        super().forget()

    def forget(self):
        self.settle()
        for _ in range(4):
            if self.core.reset_prefix_cache(reset_connector=True):
                return
            self.core.step()
        raise AssertionError("blocks stay held")
