"""Which module may import which, and what works where MindSpore is not installed."""

import ast
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# The rooms of mindlora, lowest first: a module imports only its own room and lower ones.
ROOMS = ("core", "models", "files", "ops", "network", "data", "run", "serving", "training", "cli")
# What a feature of training says of a YAML stands in its folder, and on the floor of those who ask it.
# What rates answers and computes losses of them needs NumPy alone: settings name the functions, which run elsewhere.
FLOOR_OF_FEATURES = {
    **{"settings": "models", "rules": "run", "policy_loss": "models"},
    **dict.fromkeys(("asking", "reward_functions", "reward_process", "rewards", "teacher"), "models"),
}
# They work only on files, with the settings and rules of training's features.
WITHOUT_MINDSPORE = ("core", "models", "files", "run")
# It runs in a process of its own, on MindSpore's Ascend backend.
WITH_MINDSPORE = ("mindlora.run.dry_run.child",)
# MindFormers takes seconds to import: only training does, and these modules in a function.
IN_A_FUNCTION = (
    "mindlora.cli.doctor.examination",
    "mindlora.data.tokenizers",
    "mindlora.serving.cpu_cells",
    "mindlora.serving.network",
)
MAX_LINES = 600

FILES_ALONE = """
import importlib, pkgutil, sys
sys.modules["mindspore"] = sys.modules["mindformers"] = None
import mindlora
for module in {modules}:
    importlib.import_module(module)

import numpy as np
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter

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


@pytest.fixture(scope="module")
def modules():
    """Returns what each module of the package imports."""
    return imports(ROOT)


def test_what_works_on_files_needs_no_mindspore(tmp_path, modules):
    environment = {**os.environ, "PYTHONPATH": ROOT}
    needing_none = [module for module in modules if _needs_no_mindspore(module)]
    assert len(needing_none) > 150 and "mindlora.training.preference.rules" in needing_none
    program = FILES_ALONE.format(modules=needing_none)
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert sorted(os.listdir(tmp_path)) == ["first.ckpt", "peft", "second.ckpt"]


def test_imports_go_down(modules):
    assert len(modules) > 80  # The check did look at the right folder.
    assert not broken_rules(modules)


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
        ("core/a.py", "from mindlora.models import names", "mindlora.core.a imports mindlora.models.names"),
        ("models/a.py", "def f():\n    import mindlora.files.b", "mindlora.models.a imports mindlora.files.b"),
        ("ops/a.py", "from mindlora.network import save_load", "mindlora.ops.a imports mindlora.network.save_load"),
        ("network/a.py", "from mindlora import apply_lora", "mindlora.network.a imports mindlora"),
        ("network/a.py", "from . import dense", "mindlora.network.a has a relative import"),
        ("wine/a.py", "import os", "mindlora.wine.a is in no room"),
        ("run/a.py", "from mindlora.training.wine import step", "mindlora.run.a imports mindlora.training.wine.step"),
        ("files/a.py", "def f():\n    import mindspore", "mindlora.files.a imports mindspore"),
        ("training/wine/rules.py", "import mindspore", "mindlora.training.wine.rules imports mindspore"),
        ("training/wine/settings.py", "import mindlora.files.b", "mindlora.training.wine.settings imports"),
        ("models/a.py", "from mindspore.common import dtype", "mindlora.models.a imports mindspore"),
        ("data/sources.py", "def f():\n    import mindformers", "mindlora.data.sources imports mindformers"),
        ("data/tokenizers.py", "import mindformers.models", "mindlora.data.tokenizers imports mindformers"),
        ("network/x.py", "from mindlora.network import y", "mindlora.network.x -> mindlora.network.y -> mindlora"),
    ],
)
def test_each_rule_can_be_broken(tmp_path, module, source, broken):
    others = {
        "files/b.py": "",
        "models/names.py": "",
        "network/save_load.py": "import numpy",
        "network/y.py": "from mindlora.network.x import f\nfrom mindlora import __version__",
        "run/b.py": "from mindlora.training.wine.rules import f",
        "training/a.py": "import mindformers",
        "training/wine/rules.py": "from mindlora.files import b",
        "training/wine/step.py": "import mindspore",
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
        room = _floor(module)
        if module != "mindlora" and room not in ROOMS:
            broken.append(f"{module} is in no room: add it to ROOMS")
            continue
        for target, in_function in imported:
            top = target.split(".")[0]
            if target.startswith("."):
                broken.append(f"{module} has a relative import: name the module from mindlora on")
            elif top == "mindlora" and not _may_import(module, target):
                broken.append(f"{module} imports {target}: imports go to lower rooms")
            elif top == "mindspore" and _needs_no_mindspore(module):
                broken.append(f"{module} imports mindspore, but it works on files alone")
            elif top == "mindformers" and room != "training" and not (in_function and module in IN_A_FUNCTION):
                broken.append(f"{module} imports mindformers, which belongs under training/")
    return broken or _circles(modules)


def _floor(module):
    """Returns the room on whose floor a module stands: its own, but for what a feature says of a YAML."""
    room, *path = (module.split(".") + [""])[1:]
    if room == "training" and len(path) > 1:
        return FLOOR_OF_FEATURES.get(path[1], room)
    return room


def _needs_no_mindspore(module):
    return _floor(module) in WITHOUT_MINDSPORE and module not in WITH_MINDSPORE


def _may_import(module, target):
    if target == "mindlora.__version__":
        return True
    found, floor = _floor(target), _floor(module)
    return found == floor or (found in ROOMS and floor in ROOMS and ROOMS.index(found) < ROOMS.index(floor))


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
