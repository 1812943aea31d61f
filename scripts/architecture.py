"""Writes the tree of the package in docs/architecture.md: the first docstring line of each folder and root module.

python scripts/architecture.py            rewrites the tree
python scripts/architecture.py --check    exits with 1 if the document shows another one
"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mindlora"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- The tree is written by scripts/architecture.py. -->\n```\n"
END = "\n```\n<!-- End of the tree. -->"


def tree() -> str:
    """Returns the tree: the modules of the root, and the packages, with the first line of their docstrings."""
    modules = [path for path in sorted(PACKAGE.glob("*.py")) if path.name not in ("__init__.py", "__main__.py")]
    lines = [f"  {module.name}  {first_line(module)}" for module in modules]
    return "\n".join(["mindlora/", *lines, *_packages(PACKAGE, 1)])


def _packages(folder, depth):
    """Yields a line for each package in a folder, and for those in it."""
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield f"{'  ' * depth}{package.name}/  {first_line(package / '__init__.py')}"
        yield from _packages(package, depth + 1)


def first_line(module: pathlib.Path) -> str:
    """Returns the first line of a module's docstring, without the module's name before it and the full stop after it.

    Raises:
        SystemExit: The module has no docstring.
    """
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"{module.relative_to(ROOT)} has no docstring. Say in its first line what it holds.")
    line = docstring.splitlines()[0].rstrip(".")
    return line.removeprefix(f"{module.stem}: ")


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{DOCUMENT.relative_to(ROOT)} lacks the marks around the tree: {BEGIN!r} and {END!r}.")
    updated = before + begin + tree() + end + after
    if "--check" in sys.argv[1:]:
        if updated != text:
            raise SystemExit("docs/architecture.md shows another tree. Run: python scripts/architecture.py")
    elif updated != text:
        DOCUMENT.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
