"""Builds and installs mindlora, with the library of its CPU operators where there is a C++ compiler."""

import pathlib
import re
import runpy

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "mindlora" / "__init__.py").read_text()).group(1)

# The pairs of MindSpore and MindFormers that were run together and that pip can resolve, the default first. It cannot
# resolve MindFormers 2, whose requirements no registry has: docs/installation.md installs it without them.
MINDFORMERS_BY_MINDSPORE = {"2.9.0": "1.9.0", "2.7.2": "1.8.0"}


def _pair(mindspore):
    return [f"mindspore=={mindspore}", f"mindformers=={MINDFORMERS_BY_MINDSPORE[mindspore]}"]


# On Python 3.9 there is none.
LM_EVAL = "lm-eval>=0.4.13,<0.5; python_version >= '3.10'"


class BuildPy(build_py):
    """Builds the library into the package before its files are gathered, for a wheel and for an editable install."""

    def run(self):
        library = runpy.run_path(str(ROOT / "mindlora" / "ops" / "build.py"))
        try:
            if not library["is_current"]():
                library["build"]()
        except RuntimeError as error:
            print(f"mindlora is installed without its CPU operators, and uses MindSpore's in their place: {error}")
        super().run()
        # So that `mindlora configs` finds them without a checkout.
        for path in sorted((ROOT / "configs").glob("*/*.yaml")):
            copy = pathlib.Path(self.build_lib) / "mindlora" / path.relative_to(ROOT)
            self.mkpath(str(copy.parent))
            self.copy_file(str(path), str(copy))


class PlatformDistribution(Distribution):
    """A wheel that may hold a library is for one platform."""

    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    """MindSpore loads the library, which knows nothing of Python: one wheel is for every Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    name="mindlora",
    version=VERSION,
    description="LoRA for MindSpore, native to MindFormers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mindlora", "mindlora.*"]),
    package_data={
        "mindlora": ["py.typed"],
        "mindlora.run.dry_run": ["cann/*.cc", "cann/*.h", "host/*.cc"],
        "mindlora.training.launch": ["register_path/*.py"],
        "mindlora.ops": ["lib/*.so"],
        "mindlora.serving.server.page": ["page.*", "*.js"],
        "mindlora.training.report": ["page.*", "live.js"],
    },
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
    distclass=PlatformDistribution,
    python_requires=">=3.9,<3.13",
    install_requires=[
        # What pip chooses from. Wider bounds have it download MindSpore 2.10 and ask for hyper-parallel, in vain.
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
        # MindFormers needs it too; named for a machine that only looks at runs.
        "report": ["jinja2"],
        # What the callback Trackers reports to, each by itself: nobody needs all, and each brings much of its own. The
        # first is MindFormers' too. MLflow's client, with what it takes to write into a file; its server is in mlflow.
        "tensorboard": ["tensorboardX>=2.6"],
        "swanlab": ["swanlab>=0.10"],
        "wandb": ["wandb>=0.20"],
        "mlflow": ["mlflow-skinny>=3", "alembic", "sqlalchemy>=2"],
        # llama.cpp's files, which convert and merge write.
        "gguf": ["gguf>=0.10"],
        "serve": ["fastapi>=0.110", "llguidance>=1.3", "prometheus_client>=0.20", "pydantic>=2.5", "uvicorn>=0.29"],
        "eval": [LM_EVAL],
        # The reward json_schema, and structured_outputs.
        "rl": ["jsonschema", "llguidance>=1.3"],
        "data": ["datasets", "jinja2", "pyarrow", "tokenizers", "transformers"],
        "test": [
            *("pytest", "pytest-xdist", "hypothesis", "matplotlib"),
            *("datasets", "gguf>=0.10", "jinja2", "pyarrow", "tokenizers", "transformers"),
            LM_EVAL,
            *("fastapi>=0.110", "httpx", "jsonschema", "llguidance>=1.3", "openai"),
            *("prometheus_client>=0.20", "pydantic>=2.5", "selenium>=4.20", "uvicorn>=0.29"),
        ],
    },
    entry_points={
        "console_scripts": [
            "mindlora = mindlora.cli:main",
            "mindlora-run = mindlora.training.launch.launcher:main",
            "mindlora-lm-eval = mindlora.cli.eval:harness",
        ]
    },
)
