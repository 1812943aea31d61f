"""scripts/docs_languages.py: each page has its language, a navigation of pages in it, and a switch to its twin."""

import types

import pytest

from scripts.docs_languages import on_nav, on_page_context


@pytest.fixture
def nav():
    """The navigation as MkDocs makes it: two English pages, then a section with the Chinese index and a page."""
    pages = []
    for path, url in (
        ("keys.md", "keys/"),
        ("api.md", "api/"),
        ("zh-CN/index.md", "zh-CN/"),
        ("zh-CN/keys.md", "zh/k/"),
    ):
        file = types.SimpleNamespace(src_uri=path)
        pages.append(types.SimpleNamespace(file=file, url=url, parent=None, next_page=None, previous_page=None))
    for page, following in zip(pages, pages[1:]):
        page.next_page, following.previous_page = following, page
    section = types.SimpleNamespace(children=pages[2:])
    pages[2].parent = pages[3].parent = section
    return types.SimpleNamespace(pages=pages, items=[*pages[:2], section], homepage=pages[0])


def shown(page, nav):
    """Returns the language of a page, the links of its switch, and its navigation."""
    config = types.SimpleNamespace(theme={}, extra={})
    context = on_page_context({}, page, config, nav)
    return config.theme["language"], [link["link"] for link in config.extra["alternate"]], context["nav"]


def test_a_page_leads_to_its_twin(nav):
    keys, api, _, chinese_keys = nav.pages
    assert shown(keys, nav)[:2] == ("en", ["keys/", "zh/k/"])
    assert shown(chinese_keys, nav)[:2] == ("zh", ["keys/", "zh/k/"])
    # It has none in Chinese.
    assert shown(api, nav)[:2] == ("en", ["api/", "zh-CN/"])


def test_the_navigation_has_pages_in_one_language(nav):
    keys, api, index, chinese_keys = nav.pages
    english, chinese = shown(keys, nav)[2], shown(chinese_keys, nav)[2]
    assert (english.items, english.homepage) == ([keys, api], keys)
    assert (chinese.items, chinese.homepage) == ([index, chinese_keys], index)


def test_the_next_page_is_in_the_same_language(nav):
    keys, api, index, chinese_keys = nav.pages
    on_nav(nav)
    assert api.next_page is None and index.previous_page is None
    assert keys.next_page is api and chinese_keys.previous_page is index
