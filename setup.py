"""Builds and installs mindlora."""
import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "mindlora" / "__init__.py").read_text()).group(1)

# Pairs of MindSpore and MindFormers that were run together: 2.9.0 + 1.9.0 (the default) and 2.7.2 + 1.8.0.
MINDFORMERS_BY_MINDSPORE = {"2.9.0": "1.9.0", "2.7.2": "1.8.0"}


def _pair(mindspore):
    return [f"mindspore=={mindspore}", f"mindformers=={MINDFORMERS_BY_MINDSPORE[mindspore]}"]


setup(
    name="mindlora",
    version=VERSION,
    description="LoRA for MindSpore, native to MindFormers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mindlora", "mindlora.*"]),
    package_data={"mindlora.plugin": ["register_path/*.py"]},
    python_requires=">=3.9,<3.13",
    install_requires=[
        "mindspore>=2.7.2,<2.10,!=2.8.*",
        "mindformers>=1.8,<2",
        "numpy",
        "pyyaml",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        # The newest pair that works; the older one for machines whose CANN needs it.
        "ms29": _pair("2.9.0"),
        "ms27": _pair("2.7.2"),
        "plot": ["matplotlib"],
        "data": ["tokenizers", "transformers"],
        "test": ["pytest", "matplotlib", "tokenizers", "transformers", "hypothesis"],
    },
    entry_points={
        "console_scripts": [
            "mindlora = mindlora.cli:main",
            "mindlora-run = mindlora.plugin.launcher:main",
        ],
    },
)
