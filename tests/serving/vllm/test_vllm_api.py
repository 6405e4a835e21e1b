#!/usr/bin/env python3
"""What the vLLM plugin uses of vLLM is there, and scripts/check_vllm_api.py would find it missing."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

SOURCE = pathlib.Path(os.environ["OSCAR_SOURCE"])
SCRIPT = SOURCE / "scripts" / "check_vllm_api.py"
sys.path.insert(0, str(SCRIPT.parent))
import check_vllm_api as api
from vllm_sources import Module, Sources

VENV = pathlib.Path(os.environ.get("OSCAR_VLLM_VENV", SOURCE / ".venv-vllm"))
INSTALLED = next((path.parent for path in VENV.glob("lib/python*/site-packages/vllm")), None)
BACKEND, MANAGER = "v1/attention/backend.py", "v1/core/single_type_kv_cache_manager.py"
# (file, a text in it, what it becomes, what has to be said)
CHANGES = (
    (BACKEND, "seq_lens_cpu_upper_bound: torch.Tensor", "seq_lens_upper: torch.Tensor",
     "CommonAttentionMetadata.seq_lens_cpu_upper_bound is not there"),
    (BACKEND, "UNIFORM_SINGLE_TOKEN_DECODE =", "SINGLE_TOKEN_DECODE =",
     "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE is not there"),
    (BACKEND, "def process_weights_after_loading(", "def after_loading(",
     "that of OscarAttention is for nothing"),
    (BACKEND, "        kv_sharing_target_layer_name: str | None = None,\n",
     "        another: int = 0,\n        kv_sharing_target_layer_name: str | None = None,\n",
     r"OscarAttention.__init__, which does not take its parameter another"),
    (BACKEND, "    @staticmethod\n    @abstractmethod\n    def get_name(",
     "    @abstractmethod\n    def newcomer(self):\n        pass\n\n    @staticmethod\n    @abstractmethod\n"
     "    def get_name(", "newcomer is abstract and OscarBackend does not define it"),
    (BACKEND, "        output_block_scale: torch.Tensor | None = None,\n",
     "        output_block_scale: torch.Tensor | None = None,\n        window: int = 0,\n",
     "OscarAttention.forward, which does not take its parameter window"),
    (MANAGER, "def pop_blocks_for_free(", "def pop_blocks(", "pop_blocks_for_free is not there"),
    (MANAGER, "num_cached_block:", "cached_blocks:", "FullAttentionManager.num_cached_block is not"),
    ("v1/core/sched/output.py", "preempted_req_ids: set", "preempted: set",
     "SchedulerOutput.preempted_req_ids is not there"),
    ("v1/worker/gpu_model_runner.py", "def _update_states(", "def update_states(",
     "GPUModelRunner._update_states is not there"),
    ("config/cache.py", "kv_sharing_fast_prefill: bool", "fast_prefill: bool",
     "CacheConfig.kv_sharing_fast_prefill is not there"),
    ("engine/arg_utils.py", "    block_size: int", "    block_tokens: int",
     "EngineArgs.block_size is not there"),
    ("vllm_flash_attn/flash_attn_interface.py", "    fa_version: int", "    version: int",
     r"flash_attn_varlen_func.*has no parameter fa_version"),
    ("config/vllm.py", "def use_v2_model_runner(", "def use_second_runner(",
     "VllmConfig.use_v2_model_runner is not there"),
    ("v1/kv_cache_spec_registry.py", "class KVCacheSpecRegistry", "class SpecRegistry",
     "KVCacheSpecRegistry is not there"),
)


@unittest.skipUnless(INSTALLED, "there is no vLLM here: scripts/setup_vllm.sh installs one")
class VllmApi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sources = Sources(INSTALLED)
        cls.adapter = api.adapter_of(cls.sources)
        cls.uses, cls.problems = api.check(cls.sources, cls.adapter)

    def test_the_installed_vllm_has_what_the_plugin_uses(self):
        self.assertEqual(self.problems, [])
        self.assertGreaterEqual(len(self.uses), 150)
        for use in ("vllm.config.model.ModelConfig.use_mla",
                    "vllm.v1.worker.gpu_input_batch.InputBatch.req_ids",
                    "vllm.v1.worker.utils.AttentionGroup.metadata_builders",
                    "vllm.v1.core.kv_cache_utils.KVCacheBlock.block_hash",
                    "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry.register(_, _, _)"):
            self.assertIn(use, self.uses)

    def test_a_change_of_what_is_used_is_found(self):
        for file, before, after, said in CHANGES:
            with self.subTest(file=file, before=before):
                text = self.sources.read(f"vllm/{file}")
                self.assertIn(before, text)
                changed = Sources(INSTALLED)
                changed.modules = dict(self.sources.modules)
                name = "vllm." + file.removesuffix(".py").replace("/", ".")
                changed.modules[name] = Module(name, text.replace(before, after), f"vllm/{file}")
                self.assertRegex("\n".join(api.check(changed, self.adapter)[1]), said)

    def test_the_adapter_of_another_version_does_not_fit(self):
        other = {"adapter_0_26": "adapter_0_33", "adapter_0_33": "adapter_0_26"}[self.adapter]
        self.assertRegex("\n".join(api.check(self.sources, other)[1]), "CacheShape is for nothing")

    def test_a_wheel_is_read_as_its_files_are(self):
        with tempfile.TemporaryDirectory() as folder:
            wheel = pathlib.Path(folder, "vllm.whl")
            with zipfile.ZipFile(wheel, "w") as file:
                for name in self.sources.modules:
                    path = name.replace(".", "/")
                    for found in (f"{path}/__init__.py", f"{path}.py"):
                        if self.sources.has(found):
                            file.writestr(found, self.sources.read(found))
                for name in ("vllm/__init__.py", "vllm/_version.py"):
                    if name not in file.namelist():
                        file.writestr(name, self.sources.read(name))
            self.assertEqual(api.check(Sources(wheel), self.adapter), (self.uses, []))
            done = self.run_script(wheel)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(f"{len(self.uses)} uses, 0 of them", done.stdout)

    def test_a_version_without_an_adapter_is_refused_by_name(self):
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "vllm")
            package.mkdir()
            (package / "__init__.py").touch()
            (package / "_version.py").write_text("__version__ = version = '0.27.1'\n")
            done = self.run_script(folder)
            self.assertNotEqual(done.returncode, 0)
            self.assertRegex(done.stderr, r"0\.27\.1; there are adapters for 0\.26, 0\.32, 0\.33")

    def run_script(self, path):
        return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)


if __name__ == "__main__":
    unittest.main(verbosity=2)
