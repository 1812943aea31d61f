"""What MkDocs calls (hooks in mkdocs.yml): links to files outside of docs/, which the site lacks, become paths."""

import posixpath
import re

LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown, page, **_):
    """Returns a page's Markdown, in which a link to a file of the repository is its words and the file's path."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def shown(match):
        words, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        return f"`{path}`" if words.strip("`") == path else f"{words} (`{path}`)"

    return LINK.sub(shown, markdown)
