#!/usr/bin/env python3
"""What the vLLM plugin uses of vLLM is there, and scripts/check_vllm.py would find it missing."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
SCRIPT = SOURCE / "scripts" / "check_vllm.py"
sys.path.insert(0, str(SCRIPT.parent))
import check_vllm

VENV = pathlib.Path(os.environ.get("OSCAR_VLLM_VENV", SOURCE / ".venv-vllm"))
INSTALLED = next((path.parent for path in VENV.glob("lib/python*/site-packages/vllm")), None)
BACKEND, MANAGER = "v1/attention/backend.py", "v1/core/single_type_kv_cache_manager.py"
# (file, a text in it, what it becomes, what has to be said)
CHANGES = (
    (BACKEND, "seq_lens_cpu_upper_bound: torch.Tensor", "seq_lens_upper: torch.Tensor",
     r'attribute "seq_lens_cpu_upper_bound" for class "CommonAttentionMetadata"'),
    (BACKEND, "UNIFORM_BATCH =", "BATCH =", r'attribute "UNIFORM_BATCH" for class "type\[AttentionCGSupport\]"'),
    (BACKEND, "def process_weights_after_loading(", "def after_loading(",
     r'"process_weights_after_loading" is marked as override, but no base method'),
    (BACKEND, "supports_quant_query_input", "quant_query_input",
     r'attribute "supports_quant_query_input" for class "type\[AttentionImpl'),
    (BACKEND, "    @staticmethod\n    @abstractmethod\n    def get_name(",
     "    @abstractmethod\n    def newcomer(self):\n        pass\n\n    @staticmethod\n    @abstractmethod\n"
     "    def get_name(",
     r'Cannot instantiate abstract class "Backend"\s+"AttentionBackend.newcomer"'),
    (BACKEND, "        output_block_scale: torch.Tensor | None = None,\n",
     "        output_block_scale: torch.Tensor | None = None,\n        window: int = 0,\n",
     r'Method "forward" overrides class "AttentionImpl" in an incompatible manner\s+.*has 11, but override has 10'),
    (MANAGER, "def pop_blocks_for_free(", "def pop_blocks(", r'"pop_blocks_for_free" is marked as override'),
    (MANAGER, "num_cached_block", "cached_blocks", r'attribute "num_cached_block"'),
    ("v1/core/sched/output.py", "preempted_req_ids: set", "preempted: set",
     r'attribute "preempted_req_ids" for class "SchedulerOutput"'),
    ("v1/worker/gpu_model_runner.py", "def _update_states(", "def update_states(",
     r'attribute "_update_states" for class "type\[GPUModelRunner\]"'),
    ("v1/metrics/loggers.py", "scheduler_stats: SchedulerStats | None,\n        iteration_stats",
     "stats: SchedulerStats | None,\n        iteration_stats", r'Parameter name mismatch: "stats" versus "scheduler_stats"'),
    ("config/cache.py", "kv_sharing_fast_prefill: bool", "fast_prefill: bool",
     r'attribute "kv_sharing_fast_prefill" for class "CacheConfig"'),
    ("engine/arg_utils.py", "    block_size: int", "    block_tokens: int",
     r'attribute "block_size" for class "EngineArgs'),
    ("vllm_flash_attn/flash_attn_interface.py", "    fa_version: int", "    version: int",
     r'No parameter named "fa_version"'),
    ("v1/worker/gpu/model_runner.py", "def finish_requests(", "def end_requests(",
     r'attribute "finish_requests" for class "type\[GPUModelRunner\]"'),
    ("v1/worker/gpu/input_batch.py", "idx_mapping_np: np", "index_np: np",
     r'attribute "idx_mapping_np" for class "InputBatch"'),
    ("sampling_params.py", "    prompt_logprobs: int | None", "    logprobs_of_prompt: int | None",
     r'No parameter named "prompt_logprobs"'),
    ("v1/kv_cache_spec_registry.py", "class KVCacheSpecRegistry", "class SpecRegistry",
     r'"KVCacheSpecRegistry" is unknown import symbol'),
    ("tokenizers/registry.py", None, None, r'Import "vllm.tokenizers.registry" could not be resolved'),
)


def changed(package, folder):
    """A folder vllm/ of links to those of `package`, in which the files of CHANGES are others."""
    texts, gone = {}, set()
    for file, before, after, _ in CHANGES:
        if before is None:
            gone.add(file)
            continue
        text = texts.get(file) or (package / file).read_text()
        if before not in text:
            raise AssertionError(f"{file} has no {before!r}")
        texts[file] = text.replace(before, after)
    inner = {parent for file in {*texts, *gone} for parent in pathlib.PurePath(file).parents}
    for part in sorted(inner, key=lambda path: len(path.parts)):
        (folder / "vllm" / part).mkdir(parents=True)
        for entry in (package / part).iterdir():
            name = entry.relative_to(package)
            if str(name) in texts:
                (folder / "vllm" / name).write_text(texts[str(name)])
            elif name not in inner and str(name) not in gone:
                (folder / "vllm" / name).symlink_to(entry)
    return folder


@unittest.skipUnless(INSTALLED, "there is no vLLM here: scripts/setup_vllm.sh installs one")
class VllmApi(unittest.TestCase):
    def test_the_installed_vllm_has_what_the_plugin_uses(self):
        self.assertEqual(check_vllm.check(INSTALLED)[2], [])

    def test_a_change_of_what_is_used_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            _, _, problems = check_vllm.check(changed(INSTALLED / "vllm", pathlib.Path(folder)))
        for file, before, _, said in CHANGES:
            with self.subTest(file=file, before=before):
                self.assertRegex("\n".join(problems), said)

    def test_of_a_wheel_the_sources_are_unpacked(self):
        with tempfile.TemporaryDirectory() as folder:
            wheel = pathlib.Path(folder, "vllm.whl")
            with zipfile.ZipFile(wheel, "w") as file:
                for name in ("vllm/__init__.py", "vllm/v1/request.py", "vllm/_C.abi3.so", "other/__init__.py"):
                    file.writestr(name, "")
                file.writestr("vllm/_version.py", "__version__ = version = '0.33.0'\n")
            package = check_vllm.unpacked(wheel, pathlib.Path(folder, "unpacked"))
            self.assertEqual(sorted(path.name for path in package.parent.rglob("*.*")),
                             ["__init__.py", "_version.py", "request.py"])
            self.assertEqual(check_vllm.version_of(package), "0.33.0")

    def test_what_cannot_be_checked_is_refused_by_name(self):
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "vllm")
            self.assertRegex(self.refused(folder), "holds no vllm/__init__.py")
            package.mkdir()
            (package / "__init__.py").touch()
            self.assertRegex(self.refused(folder), "does not say its version")

    def refused(self, path):
        done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        return done.stderr


if __name__ == "__main__":
    unittest.main(verbosity=2)
