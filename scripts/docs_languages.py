"""MkDocs hooks (see mkdocs.yml) for a site in two languages: docs/ in English, docs/zh-CN/ in Chinese.

The theme supports one language per site. These hooks give each page its own: the theme's words, the navigation, the
previous and next pages, and a switch to the same page in the other language, or to that language's index.
"""

import copy
import logging

FOLDER = "zh-CN/"


def in_chinese(page):
    """Returns whether a page is in Chinese."""
    return page.file.src_uri.startswith(FOLDER)


def on_startup(**_):
    """Silences jieba, which splits Chinese texts into words for the search and logs that like a warning."""
    logging.getLogger("jieba").setLevel(logging.WARNING)


def on_nav(nav, **_):
    """Separates the last English page from the first Chinese page."""
    for page in nav.pages:
        following = page.next_page
        if following and in_chinese(page) != in_chinese(following):
            page.next_page = following.previous_page = None


def on_page_context(context, page, config, nav):
    """Sets the language of a page, its switch and its navigation."""
    chinese = in_chinese(page)
    pages = {other.file.src_uri: other for other in nav.pages}
    source = page.file.src_uri.removeprefix(FOLDER)
    index = pages[f"{FOLDER}index.md"]
    config.theme["language"] = "zh" if chinese else "en"
    config.extra["alternate"] = [
        {"name": "English", "link": pages[source].url, "lang": "en"},
        {"name": "简体中文", "link": pages.get(FOLDER + source, index).url, "lang": "zh-CN"},
    ]
    section = index.parent
    context["nav"] = copy.copy(nav)
    if chinese:
        context["nav"].items, context["nav"].homepage = section.children, index
    else:
        context["nav"].items = [item for item in nav.items if item is not section]
    return context
