"""MkDocs hooks (see mkdocs.yml): turn links to files outside docs/, which the site lacks, into paths."""

import posixpath
import re

LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown, page, **_):
    """Returns a page's Markdown, with each link to a repository file replaced by its text and the file's path."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def shown(match):
        words, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        return f"`{path}`" if words.strip("`") == path else f"{words} (`{path}`)"

    return LINK.sub(shown, markdown)
