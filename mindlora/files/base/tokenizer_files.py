"""The tokenizer in a model's folder: the token that ends the assistant's turns, and the tokenizer of a merged model.

If training saved a tokenizer beside the adapter that has more tokens than the base's, the merged model gets that one.
"""

import importlib.util
import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from mindlora.core.errors import CheckpointError
from mindlora.core.json_files import parse_object
from mindlora.core.text import first_ten
from mindlora.files.base.reader import COMPANIONS, CONFIG

GENERATION = "generation_config.json"
_ANSWER = "An answer."
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_OF_MODEL = (CONFIG, "generation_config.json")


class TurnEnd(NamedTuple):
    """The text of a special token, and its number."""

    text: str
    token: int

    def __str__(self) -> str:
        return f"{self.text!r} ({self.token})"


def token_behind_answer(render: Callable[[List[Dict[str, str]]], str], special: Sequence[str]) -> Optional[str]:
    """Returns the special token that a chat template writes behind the assistant's text, or None.

    Args:
        render (callable): Returns the text of messages.
        special (sequence of str): The tokenizer's special tokens.
    """
    try:
        text = render([{"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER}])
    except Exception:  # a template is a program, which may refuse this conversation
        return None
    behind = text[text.rfind(_ANSWER) + len(_ANSWER) :].lstrip() if _ANSWER in text else ""
    return max(filter(behind.startswith, filter(None, special)), key=len, default=None)


def turn_end(files: Sequence[str]) -> Optional[TurnEnd]:
    """Returns the token that the chat template in a model's files ends the assistant's turns with.

    Args:
        files (sequence of str): The paths of configuration and tokenizer.

    Returns:
        TurnEnd, or None without a chat template or tokenizer.json, or if the template writes no special token there.

    Raises CheckpointError if a file cannot be read.
    """
    paths = {os.path.basename(path): path for path in files}
    settings = read_object(paths[SETTINGS]) if SETTINGS in paths else {}
    template = _template(paths, settings)
    if template is None or TOKENIZER not in paths:
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {role: _text(settings[role]) for role in _ROLES if settings.get(role)}
    added = read_object(paths[TOKENIZER]).get("added_tokens") or []
    special = [*(token["content"] for token in added if token.get("special")), *named.values()]

    def render(messages: List[Dict[str, str]]) -> str:
        return render_jinja_template(conversations=[messages], chat_template=template, **named)[0][0]

    text = token_behind_answer(render, special)
    if text is None:
        return None
    # Usually one of these; the rest of the file is large.
    token = next((token["id"] for token in added if token["content"] == text), None)
    token = vocabulary_of(paths[TOKENIZER]).get(text) if token is None else token
    return None if token is None else TurnEnd(text, token)


def stated_ends(files: Sequence[str]) -> Optional[Tuple[int, ...]]:
    """Returns the tokens at which a model stops, by generation_config.json or else config.json; None without both.

    Raises CheckpointError if a file cannot be read.
    """
    paths = {os.path.basename(path): path for path in files}
    for name in (GENERATION, CONFIG):
        stated = read_object(paths[name]).get("eos_token_id") if name in paths else None
        if stated is not None:
            return tuple(stated if isinstance(stated, list) else [stated])
    return None


def stopping_at_turn_end(files: Sequence[str], rows: int) -> Tuple[Optional[Dict[str, Any]], List[str]]:
    """Returns generation_config.json with the end of turns added, if it lacks it, and a note about it.

    Both are empty (None, "") if the model stops there already, its chat template has no end of turns, or the
    model's embedding has too few rows (``rows``) for that token.

    Raises CheckpointError if a file cannot be read.
    """
    if importlib.util.find_spec("transformers") is None:
        return None, ["The chat template was not looked at: transformers, which renders it, is not installed."]
    end = turn_end(files)
    ends = None if end is None else stated_ends(files)
    if end is None or ends is None or end.token in ends or end.token >= rows:
        return None, []
    paths = {os.path.basename(path): path for path in files}
    content: Mapping[str, Any]
    if GENERATION in paths:
        content = read_object(paths[GENERATION])
    else:
        config = read_object(paths[CONFIG])
        content = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    stops = [*ends, end.token]
    note = (
        f"{GENERATION}: eos_token_id is {stops}, since the chat template ends the assistant's turns with {end}, and "
        f"the base stops at {', '.join(map(str, ends))} alone."
    )
    return {**content, "eos_token_id": stops}, [note]


def _template(paths: Mapping[str, str], settings: Mapping[str, Any]) -> Optional[str]:
    if "chat_template.jinja" in paths:
        with open(paths["chat_template.jinja"], encoding="utf-8") as file:
            return file.read()
    if "chat_template.json" in paths:
        settings = read_object(paths["chat_template.json"])
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Where there are several templates, the one called default applies without tools.
        by_name = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


class TokenizerFiles(NamedTuple):
    """The tokenizer of a merged model.

    Attributes:
        folder (str): The folder of tokenizer.json.
        companions (list of str): Paths of all files that accompany the model.
        notes (tuple of str): What was taken from the adapter's tokenizer, or left.
    """

    folder: str
    companions: List[str]
    notes: Tuple[str, ...] = ()


def tokenizer_files(adapter: str, base_folder: str, companions: List[str], rows: int) -> TokenizerFiles:
    """Returns the tokenizer of the model that an adapter is merged into.

    It is the adapter's if that has the base's tokens and more, and the model has a row for each of them.

    Args:
        adapter (str): Path of the adapter.
        base_folder (str): The folder of the base.
        companions (list of str): The base's own files.
        rows (int): Rows of the merged model's embedding.

    Raises CheckpointError if a tokenizer.json cannot be read.
    """
    folder = adapter if os.path.isdir(adapter) else os.path.dirname(os.path.abspath(adapter))
    own = TokenizerFiles(base_folder, companions)
    if not os.path.isfile(os.path.join(folder, TOKENIZER)) or os.path.realpath(folder) == os.path.realpath(base_folder):
        return own
    tokens, of_base = (vocabulary_of(os.path.join(where, TOKENIZER)) for where in (folder, base_folder))
    if tokens == of_base:
        return own
    added = sorted(tokens.keys() - of_base.keys(), key=lambda token: tokens[token])
    beside = f"{folder} has a tokenizer of {len(tokens)} tokens, but the base's has {len(of_base)}"
    if any(tokens.get(token) != number for token, number in of_base.items()):
        return own._replace(notes=(f"{beside}, other ones: the base's was kept.",))
    if max(tokens.values()) >= rows:
        note = f"{beside}: it was not taken, since the model has {rows} rows, none for {first_ten(added)}."
        return own._replace(notes=(note,))
    return TokenizerFiles(folder, _with_tokenizer_of(folder, companions), (f"{beside}: the adapter's was taken.",))


def _with_tokenizer_of(folder: str, companions: List[str]) -> List[str]:
    """Returns a base's files with its tokenizer replaced by that of ``folder``."""
    names = [name for name in COMPANIONS if name not in _OF_MODEL]
    taken = [os.path.join(folder, name) for name in names if os.path.isfile(os.path.join(folder, name))]
    kept = [path for path in companions if os.path.basename(path) in _OF_MODEL]
    settings = os.path.join(folder, SETTINGS)
    has_template = os.path.isfile(settings) and "chat_template" in read_object(settings)
    if not has_template and not any(os.path.basename(path) in _TEMPLATES for path in taken):
        kept += [path for path in companions if os.path.basename(path) in _TEMPLATES]
    return kept + taken


def vocabulary_of(path: str) -> Dict[str, int]:
    """Returns token -> number of a tokenizer.json; empty if there is none."""
    if not os.path.isfile(path):
        return {}
    content = read_object(path)
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        # Type Unigram has [token, score], in the order of their numbers.
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or []}}


def read_object(path: str) -> dict:
    """Returns the object in a JSON file; raises CheckpointError if it cannot be read."""
    with open(path, "rb") as file:
        return parse_object(file.read(), path, CheckpointError)
