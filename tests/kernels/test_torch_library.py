#!/usr/bin/env python3
"""The file that holds torch.ops.oscar_int2: what it needs of torch and of the system."""
import os
import pathlib
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(os.environ["OSCAR_BIN"]).parent / "python"))
from oscar_int2._library import LIBRARY

KERNELS = os.environ.get("OSCAR_KERNELS", "none")  # none, core or full: what the library holds


class Library(unittest.TestCase):
    def undefined_symbols(self, kinds="UwWvV"):
        text = subprocess.run(["nm", "-D", "--undefined-only", str(LIBRARY)],
                              check=True, capture_output=True, text=True).stdout
        lines = [line.split() for line in text.splitlines()]
        return [name for kind, name in lines if kind in kinds]

    def test_needs_the_stable_c_interface_of_torch_and_none_of_its_cpp(self):
        symbols = self.undefined_symbols()
        self.assertIn("torch_library_impl", symbols)
        cpp = [s for s in symbols if re.match("_Z.*(3c10|2at|5torch|5caffe2)", s)]
        self.assertEqual(cpp, [])

    def test_needs_nothing_that_came_after_torch_2_10(self):
        # Names without the prefix aoti_ came with 2.10 and later: these with 2.10 (torch/csrc/stable/c/shim.h).
        known = {f"torch_{name}" for name in (
            "call_dispatcher", "delete_list", "library_impl", "list_get_item", "list_push_back", "list_size",
            "new_list_reserve_size", "new_string_handle")}
        found = {symbol for symbol in self.undefined_symbols() if symbol.startswith("torch_")}
        self.assertEqual(found - known, set())

    def test_loads_in_a_torch_without_cuda(self):
        name = "aoti_torch_get_current_cuda_stream"  # weak, so that it may be missing
        self.assertEqual(name in self.undefined_symbols("w"), KERNELS != "none")
        self.assertNotIn(name, self.undefined_symbols("U"))

    def test_needs_no_path_to_a_torch(self):
        text = subprocess.run(["readelf", "-d", str(LIBRARY)], check=True,
                              capture_output=True, text=True).stdout
        self.assertIn("NEEDED", text)
        self.assertNotRegex(text, "RPATH|RUNPATH")


if __name__ == "__main__":
    unittest.main(verbosity=2)
