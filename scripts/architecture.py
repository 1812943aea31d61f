"""Writes three parts of docs/architecture.md: the package's tree, the order of imports, and the cost of each feature.

The tree has the first docstring line of each folder and root module; the order comes from tests/test_imports.py; the
costs are files, packages and lines.

python scripts/architecture.py            rewrites all of them
python scripts/architecture.py --check    exits with 1 if the document shows something else
"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mindlora"
DOCUMENT = ROOT / "docs" / "architecture.md"
# The test that defines the order of imports, as tables.
IMPORTS = ROOT / "tests" / "test_imports.py"
# This script writes the text between these lines of the document.
BEGIN = "<!-- The {} is written by scripts/architecture.py. -->\n"
END = "\n<!-- End of the {}. -->"
# Feature -> the modules that serve only this feature, as patterns below mindlora/.
FEATURES = {
    "AdaLoRA": ("training/adalora/*.py", "**/adalora.py", "core/numerics/rank_schedule.py"),
    "aLoRA": ("**/invocation.py",),
    "classifiers and rewards": ("training/classifier/*.py", "**/*classif*.py", "**/score.py", "**/score_head.py"),
    "EVA": ("**/eva.py",),
    "exchange in fewer bits": ("training/exchange/*.py",),
    "forgetting": ("**/forgetting.py",),
    "guard and health": ("training/health/*.py",),
    "NF4, QLoRA, LoftQ": ("network/quantized/*.py", "**/*nf4*.py", "**/*quantize*.py"),
    "preference training": ("training/preference/*.py",),
    "PyNative Trainer": ("training/pynative/*.py", "network/pynative/*.py", "**/*pynative*.py"),
    "rewards": ("training/rl/*.py", "cli/rl.py", "serving/in_training.py", "network/cells/divergences.py"),
    "routed experts": ("**/*experts*.py",),
    "several adapters in one run": ("training/several/*.py", "cli/sweep.py"),
    "sharded adapters": ("files/adapters/sharding/*.py", "**/sharded_*.py", "**/collectives.py"),
}


def tree() -> str:
    """Returns the tree: the root's modules and the packages, with the first lines of their docstrings."""
    modules = [path for path in sorted(PACKAGE.glob("*.py")) if path.name not in ("__init__.py", "__main__.py")]
    lines = [f"  {module.name}  {first_line(module)}" for module in modules]
    return "\n".join(["mindlora/", *lines, *_packages(PACKAGE, 1)])


def _packages(folder, depth):
    """Yields a line for each package in a folder, recursively."""
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield f"{'  ' * depth}{package.name}/  {first_line(package / '__init__.py')}"
        yield from _packages(package, depth + 1)


def first_line(module: pathlib.Path) -> str:
    """Returns the first line of a module's docstring, without the leading name and the final full stop.

    Raises:
        SystemExit: The module has no docstring.
    """
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"{module.relative_to(ROOT)} has no docstring. Say in its first line what it holds.")
    line = docstring.splitlines()[0].rstrip(".")
    return line.removeprefix(f"{module.stem}: ")


def order() -> str:
    """Returns the order of imports from the test's tables, and the rooms that work without MindSpore."""
    tables = {}
    for statement in ast.parse(IMPORTS.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).isupper():
            tables[ast.unparse(statement.targets[0])] = statement.value
    rooms, without, inside = (
        ast.literal_eval(tables[name]) for name in ("ROOMS", "WITHOUT_MINDSPORE", "IN_A_FUNCTION")
    )
    lines = ["```", " <- ".join(rooms), "```", "", f"- Without MindSpore: {', '.join(without)}."]
    modules = ", ".join(f"{name.removeprefix('mindlora.').replace('.', '/')}.py" for name in inside)
    return "\n".join([*lines, f"- MindFormers is imported under training/, and inside a function in {modules}."])


def costs() -> str:
    """Returns the table of features: files, packages at the root of mindlora/, and lines, rounded to hundreds."""
    rows = ["| feature | files | packages | lines |", "| --- | --- | --- | --- |"]
    for feature, patterns in FEATURES.items():
        files = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
        packages = {path.relative_to(PACKAGE).parts[0] for path in files}
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        rows.append(f"| {feature} | {len(files)} | {len(packages)} | {round(lines, -2):,} |")
    return "\n".join(rows)


def replaced(text: str, part: str, content: str) -> str:
    """Returns the document with new content between a part's marks; raises SystemExit if the marks are missing."""
    begin, end = BEGIN.format(part), END.format(part)
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{DOCUMENT.relative_to(ROOT)} lacks the marks around the {part}: {begin!r} and {end!r}.")
    return before + begin + content + end + after


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    updated = text
    for part, content in (("tree", f"```\n{tree()}\n```"), ("order", f"\n{order()}\n"), ("table", f"\n{costs()}\n")):
        updated = replaced(updated, part, content)
    if "--check" in sys.argv[1:]:
        if updated != text:
            raise SystemExit("docs/architecture.md shows another package. Run: python scripts/architecture.py")
    elif updated != text:
        DOCUMENT.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
