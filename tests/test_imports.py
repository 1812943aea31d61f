"""Which module may import which, and what works where MindSpore is not installed."""

import ast
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# Lowest first. A module imports only its own package and packages on lower floors, so packages on the same floor do not
# import each other. A name is a folder or a module of mindlora.
FLOORS = (
    ("errors",),
    ("common",),
    ("dry_run", "numerics"),
    ("formats",),
    ("models",),
    ("config",),
    ("adapters", "ops"),
    ("nn", "base"),
    ("checks",),
    ("plan",),
    ("quantize", "initialize", "eva", "merge", "load_base"),
    ("apply",),
    ("save_load",),
    ("data", "training"),
    ("drafts",),
    ("serving",),
    ("evaluation",),
    ("plugin",),
    ("doctor",),
    ("cli",),
)
FLOOR = {package: number for number, packages in enumerate(FLOORS) for package in packages}
# The rooms of plugin/, lowest first.
ROOMS = ("graph", "resume", "callbacks", "pynative", "launching")
# They work only on files.
WITHOUT_MINDSPORE = (
    "errors",
    "common",
    "numerics",
    "formats",
    "models",
    "config",
    "adapters",
    "base",
    "checks",
    "plan",
    "drafts",
)
# MindFormers takes seconds to import: only the plug-in imports it, and these modules in a function.
IN_A_FUNCTION = (
    "mindlora.data.tokenizers",
    "mindlora.doctor.examination",
    "mindlora.serving.cpu_cells",
    "mindlora.serving.network",
)
MAX_LINES = 600

FILES_ALONE = """
import importlib, pkgutil, sys
sys.modules["mindspore"] = sys.modules["mindformers"] = None
import mindlora
for package in {packages}:
    module = importlib.import_module("mindlora." + package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(found.name)

import numpy as np
from mindlora.adapters import files
from mindlora.adapters.adapter import Adapter

path = "model.layers.0.attention.wq"
pair = {{(path, "A"): np.ones((2, 6), np.float32), (path, "B"): np.full((4, 2), 0.5, np.float32)}}
files.write(Adapter(pair, {{path: 3.0}}), "first.ckpt", "ckpt")
mindlora.convert_adapter("first.ckpt", "peft", "peft")
mindlora.convert_adapter("peft", "second.ckpt", "ckpt")
found = files.read("second.ckpt")
assert found.tensors.keys() == pair.keys() and found.alphas == {{path: 3.0}}
assert all((found.tensors[key] == array).all() for key, array in pair.items())
assert sys.modules["mindspore"] is None and sys.modules["mindformers"] is None
"""


def test_what_works_on_files_needs_no_mindspore(tmp_path):
    environment = {**os.environ, "PYTHONPATH": ROOT}
    program = FILES_ALONE.format(packages=WITHOUT_MINDSPORE)
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert sorted(os.listdir(tmp_path)) == ["first.ckpt", "peft", "second.ckpt"]


@pytest.fixture(scope="module")
def modules():
    """Returns what each module of the package imports."""
    return imports(ROOT)


def test_imports_go_down(modules):
    assert len(modules) > 80  # The check did look at the right folder.
    assert not broken_rules(modules)


@pytest.mark.parametrize(
    "imported, broken",
    [("graph.network", []), ("resume.collectives", ["plugin.graph.a imports plugin.resume.collectives"])],
)
def test_rooms_of_the_plug_in_import_one_way(modules, imported, broken):
    modules = {**modules, "mindlora.plugin.graph.a": [(f"mindlora.plugin.{imported}", False)]}
    assert wrong_rooms(modules) == broken


def wrong_rooms(modules):
    """Returns a sentence for each import of one of the plug-in's rooms from a room that comes later in ROOMS."""
    wrong = []
    for module, imported in modules.items():
        for target, _ in imported:
            rooms = [ROOMS.index(name.split(".")[2]) for name in (module, target) if _room(name) in ROOMS]
            if len(rooms) == 2 and rooms[0] < rooms[1]:
                wrong.append(f"{module[len('mindlora.') :]} imports {target[len('mindlora.') :]}")
    return wrong


def _room(module):
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "plugin" else None


def test_no_file_is_too_long():
    found = {}
    for top in ("mindlora", "ops", "scripts", "tests"):
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            for path in (os.path.join(folder, name) for name in names if name.endswith((".py", ".h", ".cpp", ".sh"))):
                with open(path, encoding="utf-8") as file:
                    found[os.path.relpath(path, ROOT)] = sum(1 for _ in file)
    assert not {path: lines for path, lines in found.items() if lines > MAX_LINES}


@pytest.mark.parametrize(
    "module, source, broken",
    [
        ("formats/a.py", "from mindlora.models import names", "mindlora.formats.a imports mindlora.models.names"),
        ("common/a.py", "def f():\n    import mindlora.formats.b", "mindlora.common.a imports mindlora.formats.b"),
        ("ops/a.py", "from mindlora.adapters import files", "mindlora.ops.a imports mindlora.adapters.files"),
        ("apply.py", "from mindlora.save_load import load_lora", "mindlora.apply imports mindlora.save_load"),
        ("nn/a.py", "from mindlora import apply_lora", "mindlora.nn.a imports mindlora"),
        ("nn/a.py", "from . import dense", "mindlora.nn.a has a relative import"),
        ("wine/a.py", "import os", "mindlora.wine.a is on no floor"),
        ("base/a.py", "def f():\n    import mindspore", "mindlora.base.a imports mindspore"),
        ("config.py", "from mindspore.common import dtype", "mindlora.config imports mindspore"),
        ("data/sources.py", "def f():\n    import mindformers", "mindlora.data.sources imports mindformers"),
        ("data/tokenizers.py", "import mindformers.models", "mindlora.data.tokenizers imports mindformers"),
        ("nn/x.py", "from mindlora.nn import y", "mindlora.nn.x -> mindlora.nn.y -> mindlora.nn.x"),
    ],
)
def test_each_rule_can_be_broken(tmp_path, module, source, broken):
    others = {
        "formats/b.py": "",
        "models/names.py": "",
        "adapters/files.py": "",
        "save_load.py": "import numpy",
        "nn/y.py": "from mindlora.nn.x import f\nfrom mindlora import __version__",
        "plugin/a.py": "import mindformers",
    }
    for path, text in {**others, module: source}.items():
        os.makedirs(os.path.dirname(tmp_path / "mindlora" / path), exist_ok=True)
        (tmp_path / "mindlora" / path).write_text(text)
    found = broken_rules(imports(str(tmp_path)))
    assert len(found) == 1 and found[0].startswith(broken)


def imports(root):
    """Returns module -> [(what it imports, whether in a function)] of the package mindlora in the folder ``root``."""
    files = {}
    for folder, _, names in os.walk(os.path.join(root, "mindlora")):
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            module = os.path.relpath(path, root)[: -len(".py")].replace(os.sep, ".")
            files[module.removesuffix(".__init__")] = path
    return {module: list(_imports_of(path, files)) for module, path in sorted(files.items())}


def _imports_of(path, files):
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    in_functions = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in in_functions) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                known = "." * node.level or (
                    whole if whole in files or whole == "mindlora.__version__" else node.module
                )
                yield known, id(node) in in_functions


def broken_rules(modules):
    """Returns a sentence for each import that breaks a rule or, if there is no such import, for each cycle."""
    broken = []
    for module, imported in modules.items():
        package = _package(module)
        if module != "mindlora" and package not in FLOOR:
            broken.append(f"{module} is on no floor: add it to FLOORS")
            continue
        for target, in_function in imported:
            top = target.split(".")[0]
            if target.startswith("."):
                broken.append(f"{module} has a relative import: name the module from mindlora on")
            elif top == "mindlora" and not _may_import(package, target):
                broken.append(f"{module} imports {target}: imports go to lower floors")
            elif top == "mindspore" and package in WITHOUT_MINDSPORE:
                broken.append(f"{module} imports mindspore, but {package} works on files alone")
            elif top == "mindformers" and package != "plugin" and not (in_function and module in IN_A_FUNCTION):
                broken.append(f"{module} imports mindformers, which belongs under plugin/")
    return broken or _circles(modules)


def _package(module):
    return (module.split(".") + [""])[1]


def _may_import(package, target):
    found = _package(target)
    if target == "mindlora.__version__" or found == package:
        return True
    return found in FLOOR and FLOOR[found] < FLOOR.get(package, len(FLOORS))


def _circles(modules):
    """Returns a sentence for the first cycle among the modules, counting imports in functions."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :] + [module]
        if module in done or module not in modules:
            return None
        path.append(module)
        circle = next(filter(None, (visit(target) for target, _ in modules[module] if target != module)), None)
        path.pop()
        done.add(module)
        return circle

    circle = next(filter(None, map(visit, modules)), None)
    return [" -> ".join(circle)] if circle else []
