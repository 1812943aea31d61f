"""Lists the pages in Chinese (docs/zh-CN) that are based on an earlier version of their English page, and marks pages.

The last line of a page in Chinese is its mark: the English page and Git's hash of it, as `git hash-object` computes it.

python scripts/chinese.py                             names the pages whose English page has changed since
python scripts/chinese.py --renew docs/zh-CN/data.md  writes the mark of the current English page
"""

import argparse
import hashlib
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHINESE = pathlib.Path("docs", "zh-CN")
MARK = re.compile(r"\n<!-- From (\S+) at ([0-9a-f]{40})\. -->\n\Z")


def pages() -> list[str]:
    """Returns the paths of the pages in Chinese, relative to the checkout."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / CHINESE).glob("**/*.md"))


def english(page: str) -> str:
    """Returns the path of a page's English page, which has the same name in docs/."""
    return str(CHINESE.parent / pathlib.Path(page).relative_to(CHINESE))


def blob(path: str) -> str:
    """Returns Git's hash of a file's current content, committed or not."""
    content = (ROOT / path).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def outdated(page: str) -> str:
    """Returns the fault of a page's mark and the remedy, or an empty text."""
    source = english(page)
    mark = MARK.search((ROOT / page).read_text(encoding="utf-8"))
    if not (ROOT / source).is_file():
        return f"{page} has no English page: {source} is not there. Move or remove it."
    mending = f"  python scripts/chinese.py --renew {page}"
    if mark is None or mark[1] != source:
        return f"{page} does not end with the mark of {source}. Compare the two, then write it:\n{mending}"
    if mark[2] != blob(source):
        mending = f"  git diff {mark[2]} {source}\n{mending}"
        return f"{page} is from an earlier {source}. See what has changed, bring it in and renew the mark:\n{mending}"
    return ""


def renew(page: str) -> None:
    """Writes the mark of the current English page into a page in Chinese, atomically."""
    path = ROOT / page
    text = MARK.sub("", path.read_text(encoding="utf-8")).rstrip("\n")
    beside = path.with_suffix(".new")
    beside.write_text(f"{text}\n\n<!-- From {english(page)} at {blob(english(page))}. -->\n", encoding="utf-8")
    os.replace(beside, path)


def main() -> None:
    """Lists the outdated pages, or renews the marks of the given pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", nargs="+", metavar="PAGE", default=[], help="pages such as docs/zh-CN/data.md")
    for page in parser.parse_args().renew:
        if page not in pages():
            sys.exit(f"{page} is not a page in Chinese. Name one of these: {', '.join(pages())}")
        renew(page)
    problems = list(filter(None, map(outdated, pages())))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
