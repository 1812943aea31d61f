"""The pages in Chinese say what the English ones say: the same code, keys, figures and links, of the page as it is."""

import glob
import os
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from scripts import chinese
from tests.conftest import ROOT
from tests.test_documents import FENCE, text_of

PAGES = chinese.pages()
PAIRS = [("README.md", "README.zh-CN.md"), *((chinese.english(page), page) for page in PAGES)]
DRAWINGS = [(chinese.english(path), path) for path in sorted(glob.glob("docs/zh-CN/images/*.svg", root_dir=ROOT))]
# A number with its unit, such as 3.12, 1.9.0, 0.995x or 4.3e-6.
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)*(?:e-\d+)?x?")
COMMENT = re.compile(r"(?:(?<=\s)|^)#\s.*$", re.M)
INLINE = re.compile(r"`([^`]+)`")
TARGET = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]+)?\)")


def prose_of(text):
    """Returns a page without its blocks of code."""
    return FENCE.sub("", text)


def code_of(text):
    """Returns the blocks of code. Their comments may be in the language of the page; its figures remain."""
    return [COMMENT.sub(lambda comment: " ".join(FIGURE.findall(comment[0])), block) for block in FENCE.findall(text)]


def keys_of(text):
    """Returns the pieces of inline code, each once: languages differ in how often they name a thing."""
    return sorted({" ".join(piece.split()) for piece in INLINE.findall(prose_of(text))})


def figures_of(text):
    """Returns the numbers outside of code and of what links lead to."""
    return FIGURE.findall(TARGET.sub("]", INLINE.sub("", chinese.MARK.sub("", prose_of(text)))))


def headings_of(text):
    """Returns the levels of the headings."""
    return re.findall(r"^#+(?= )", prose_of(text), re.M)


def rows_of(text):
    """Returns the numbers of cells in the rows of all tables."""
    return [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in re.findall(r"^\|.*$", prose_of(text), re.M)]


WHAT_IS_EQUAL = {
    "blocks of code": code_of,
    "inline code": keys_of,
    "figures": figures_of,
    "headings": headings_of,
    "rows of tables, by their cells": rows_of,
}


def differences(english_text, chinese_text):
    """Returns what one of two texts has and the other has not, a line for each kind of thing."""
    found = []
    for what, of in WHAT_IS_EQUAL.items():
        ours, theirs = Counter(of(english_text)), Counter(of(chinese_text))
        if ours != theirs:
            found.append(
                f"{what}: missing {list((ours - theirs).elements())}, added {list((theirs - ours).elements())}"
            )
    return found


def linked_from(page):
    """Returns the files to which a page's links lead, from the top of the checkout."""
    folder = os.path.dirname(page)
    links = (target for target, _ in TARGET.findall(prose_of(text_of(page))))
    return {os.path.normpath(os.path.join(folder, link)) if link else page for link in links}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_written_from_the_english_page_as_it_is(page):
    problem = chinese.outdated(page)
    assert not problem, problem


@pytest.mark.parametrize("source, page", PAIRS)
def test_a_page_has_the_code_the_keys_and_the_figures_of_the_english_page(source, page):
    found = differences(text_of(source), text_of(page))
    assert not found, f"{page} differs from {source}:\n" + "\n".join(found)


@pytest.mark.parametrize("source, page", PAIRS)
def test_a_page_links_to_what_the_english_page_links_to_in_chinese_where_it_is(source, page):
    in_chinese = dict(PAIRS + DRAWINGS)
    # Without the links between the two languages.
    expected = {in_chinese.get(target, target) for target in linked_from(source)} - {source, page}
    found = linked_from(page) - {source, page}
    assert found == expected, f"{page} lacks links to {expected - found}, and links to {found - expected}"


@pytest.mark.parametrize("source, drawing", DRAWINGS)
def test_a_drawing_differs_from_the_english_one_in_its_words_alone(source, drawing):
    words = re.compile(r">[^<\n]+<")
    assert words.sub("><", text_of(drawing)) == words.sub("><", text_of(source))


@pytest.mark.parametrize("page", [page for _, page in PAIRS])
def test_bold_text_ends_where_github_sees_its_end(page):
    # CommonMark takes ** between a punctuation mark and a letter, which Chinese characters are, for a beginning.
    lost = re.findall(r"\*\*[^*\n]*[^\w\s*]\*\*(?=\w)", prose_of(text_of(page)))
    assert not lost, f"{page}: move the last mark of {lost} behind the **"


@pytest.mark.parametrize(
    "english_text, chinese_text, kind",
    [
        ("```\nmindlora doctor\n```", "", "blocks of code"),
        ("", "```\nmindlora doctor\n```", "blocks of code"),
        ("```\nmindlora doctor a.yaml\n```", "```\nmindlora doctor b.yaml\n```", "blocks of code"),
        ("```\nmindlora doctor  # 2 minutes\n```", "```\nmindlora doctor  # 3 分钟\n```", "blocks of code"),
        ("The key `lora_rank`.", "配置项。", "inline code"),
        ("The key.", "配置项 `lora_rank`。", "inline code"),
        ("It takes 0.3 GB.", "占用 0.4 GB。", "figures"),
        ("| 2.1 GB |", "| 2.10 GB |", "figures"),
        ("## Data", "", "headings"),
        ("## Data", "### 数据", "headings"),
        ("| a | b |", "| 甲 |", "rows of tables"),
    ],
)
def test_what_counts_as_different(english_text, chinese_text, kind):
    (found,) = differences(english_text, chinese_text)
    assert found.startswith(kind)


@pytest.mark.parametrize(
    "english_text, chinese_text",
    [
        ("```\nmindlora doctor  # versions\n```", "```\nmindlora doctor  # 版本\n```"),
        ("`a` and `b`", "`b` 和 `a`；`b` 见下文"),
        ("from 2 to 16 GB", "16 GB，而不是 2 GB"),
        ("[On 2 NPUs](a.md#on-16-npus)", "[2 个 NPU](a.md#多设备)"),
        ("## Data\n\n| a | `b\\|c` |", "## 数据\n\n| 甲 | `b\\|c` |\n\n<!-- From docs/a.md at " + "1" * 40 + ". -->\n"),
    ],
)
def test_what_does_not_count_as_different(english_text, chinese_text):
    assert not differences(english_text, chinese_text)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the script, one English page and its page in Chinese, which has no mark yet."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(chinese.__file__, tmp_path / "scripts")
    (tmp_path / "docs" / "zh-CN").mkdir(parents=True)
    (tmp_path / "docs" / "data.md").write_text("# Data\n", encoding="utf-8")
    (tmp_path / "docs" / "zh-CN" / "data.md").write_text("# 数据\n", encoding="utf-8")
    return tmp_path


def run(checkout, *arguments):
    command = [sys.executable, "scripts/chinese.py", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_a_changed_english_page_is_named_until_the_mark_is_renewed(checkout):
    page = os.path.join("docs", "zh-CN", "data.md")
    assert "does not end with the mark" in run(checkout).stderr
    assert run(checkout, "--renew", page).returncode == 0
    assert run(checkout).returncode == 0
    (checkout / "docs" / "data.md").write_text("# Data\n\nMore.\n", encoding="utf-8")
    failed = run(checkout)
    assert failed.returncode == 1
    # The hash that Git gives "# Data\n".
    assert "git diff 599c41b4d2f89db3a2bc6517f25a78e33b677e45 docs/data.md" in failed.stderr
    assert f"python scripts/chinese.py --renew {page}" in failed.stderr
    assert run(checkout, "--renew", page).returncode == 0
    assert (checkout / page).read_text(encoding="utf-8").count("<!--") == 1


def test_a_page_without_an_english_page_is_named(checkout):
    os.remove(checkout / "docs" / "data.md")
    assert "docs/data.md is not there" in run(checkout).stderr
    assert "Name one of these: docs/zh-CN/data.md" in run(checkout, "--renew", "docs/data.md").stderr
