"""The page of ``mindlora serve`` for browsers: chats with one model, or with two side by side.

It is one file, with headers that forbid a browser to load or run anything else on it.
"""

import base64
import functools
import hashlib
import os
from typing import Dict, Tuple

# In the order of their dependencies.
_SCRIPTS = ("texts.js", "server.js", "answers.js", "page.js")


@functools.lru_cache(maxsize=None)
def page() -> Tuple[bytes, Dict[str, str]]:
    """Returns the page and its headers. The policy names style and script by their hashes and allows no other."""
    style = _read("page.css")
    script = "".join(map(_read, _SCRIPTS))
    text = _read("page.html").replace("<style></style>", f"<style>{style}</style>")
    text = text.replace('<script type="module"></script>', f'<script type="module">{script}</script>')
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return text.encode(), {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _read(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
