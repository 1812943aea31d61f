"""The tokenizer that a training saved beside its adapter: where it has more tokens, it is the merged model's."""

import os
from typing import Dict, List, NamedTuple, Tuple

from mindlora.core.errors import CheckpointError
from mindlora.core.json_files import parse_object
from mindlora.core.text import first_ten
from mindlora.files.base.reader import COMPANIONS, CONFIG

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_OF_MODEL = (CONFIG, "generation_config.json")


class TokenizerFiles(NamedTuple):
    """The tokenizer of a merged model.

    Attributes:
        folder (str): The folder that tokenizer.json is in.
        companions (list of str): Paths of all files that go with the model.
        notes (tuple of str): What of the adapter's tokenizer was taken or left.
    """

    folder: str
    companions: List[str]
    notes: Tuple[str, ...] = ()


def tokenizer_files(adapter: str, base_folder: str, companions: List[str], rows: int) -> TokenizerFiles:
    """Returns the tokenizer of the model that an adapter is merged into.

    That is the adapter's if it has the base's tokens and more, for each of which the model has a row.

    Args:
        adapter (str): Path of the adapter.
        base_folder (str): The folder of the base.
        companions (list of str): The base's own files.
        rows (int): Tokens that the merged model embeds.

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
    beside = f"{folder} has a tokenizer of {len(tokens)} tokens, and the base's has {len(of_base)}"
    if any(tokens.get(token) != number for token, number in of_base.items()):
        return own._replace(notes=(f"{beside}, other ones: the base's was kept.",))
    if max(tokens.values()) >= rows:
        note = f"{beside}: it was not taken, since the model has {rows} rows, none for {first_ten(added)}."
        return own._replace(notes=(note,))
    return TokenizerFiles(folder, _with_tokenizer_of(folder, companions), (f"{beside}: the adapter's was taken.",))


def _with_tokenizer_of(folder: str, companions: List[str]) -> List[str]:
    """Returns a base's files with the tokenizer of ``folder`` in the place of its own."""
    names = [name for name in COMPANIONS if name not in _OF_MODEL]
    taken = [os.path.join(folder, name) for name in names if os.path.isfile(os.path.join(folder, name))]
    kept = [path for path in companions if os.path.basename(path) in _OF_MODEL]
    settings = os.path.join(folder, SETTINGS)
    has_template = os.path.isfile(settings) and "chat_template" in read_object(settings)
    if not has_template and not any(os.path.basename(path) in _TEMPLATES for path in taken):
        kept += [path for path in companions if os.path.basename(path) in _TEMPLATES]
    return kept + taken


def vocabulary_of(path: str) -> Dict[str, int]:
    """Returns token -> number of a tokenizer.json; none if there is none."""
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
