"""scripts/docs_links.py: a link that the site cannot follow is a path there, and every other one stays."""

import types

import pytest

from scripts.docs_links import on_page_markdown


@pytest.mark.parametrize(
    "page, text, shown",
    (
        ("ascend.md", "[bounds](../ops/x/README.md#right).", "bounds (`ops/x/README.md`)."),
        ("ascend/build.md", "[`ops/x`](../../ops/x) and [why](../../ops/y)", "`ops/x` and why (`ops/y`)"),
        ("ascend/build.md", "[a](../keys.md#one) [b](calls.md) [c](#d)", None),
        ("index.md", "![a](images/flow.svg) [b](https://example.com/a)", None),
    ),
)
def test_links_out_of_the_site_are_paths(page, text, shown):
    of_page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=page))
    assert on_page_markdown(text, of_page) == (shown or text)
