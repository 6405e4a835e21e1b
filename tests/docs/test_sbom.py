"""The list of what a build consists of names the libraries and packages with their versions."""
import json
import subprocess
import sys
import unittest

from support.programs import SOURCE


class Sbom(unittest.TestCase):
    def test_components_have_versions_and_addresses(self):
        text = subprocess.run([sys.executable, SOURCE / "scripts" / "make_sbom.py"],
                              capture_output=True, text=True, check=True).stdout
        document = json.loads(text)
        self.assertEqual(document["bomFormat"], "CycloneDX")
        self.assertTrue(document["metadata"]["component"]["version"])
        components = {part["name"]: part for part in document["components"]}
        for name in ("torch", "numpy", "safetensors", "nvidia-cuda-runtime"):
            if name == "nvidia-cuda-runtime" and name not in components:
                continue  # a system's own toolkit
            self.assertIn(name, components)
            self.assertIn(components[name]["version"], components[name]["purl"])
        for part in components.values():
            self.assertTrue(part["version"], part)


if __name__ == "__main__":
    unittest.main()
