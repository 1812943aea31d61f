"""Saved embeddings and output heads for a base with one table for both (tied embeddings).

PEFT gives each module of modules_to_save its own weight, which unties the two: an embedding that was saved alone
leaves the head as in the base, and one table cannot be both. With ensure_weight_tying, PEFT keeps the two equal.
"""

from typing import Callable, Iterable, Optional, Tuple, Type

import numpy as np

from mindlora.core.errors import LoraError, ShapeMismatchError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.pair_shapes import Shape
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.models import names

WAY_OUT = (
    "Merge it into the base, which then has two (mindlora base merge), or take a base with tie_word_embeddings: false."
)
# Largest difference of two copies of a weight, relative to its largest element, if one was rounded to bfloat16.
_ROUNDED = 2.0**-7


def settle(
    adapter: Adapter, source: str, base: str, error: Type[LoraError], table: Optional[Callable[[], np.ndarray]] = None
) -> None:
    """Removes the saved head from an adapter for a base with one table if it equals the saved embedding.

    Raises ``error`` if the adapter has an embedding that the head must not share, or is for a head with its own
    weight. Messages name the base ``base``; ``table`` returns its table, and is called only if needed.
    """
    embedding = _saved(adapter, names.embeddings())
    head = _saved(adapter, names.output_heads())
    if embedding is None:
        if head is None or head not in adapter.base_tables or table is None:
            return
        head_weight, of_base = adapter.saved_modules[head], table()
        # Matching checks the shapes.
        if head_weight.shape == of_base.shape and not is_copy(head_weight, of_base):
            raise error(
                f"{source} holds {head}, the weight that the adapter of the output head is for, but {base} has another "
                f"one, the embedding's table: its embeddings are tied. {WAY_OUT}"
            )
        return
    if head is not None:
        tables = [adapter.saved_modules[name] for name in (embedding, head)]
        if tables[0].shape != tables[1].shape or (to_float32(tables[0]) != to_float32(tables[1])).any():
            raise error(
                f"{source} holds different weights for {embedding} and {head}, but {base} has one table for both: its "
                f"embeddings are tied. {WAY_OUT}"
            )
        del adapter.saved_modules[head]
    elif _is_untied(adapter, embedding):
        raise error(
            f"{source} holds {embedding} alone (modules_to_save), beside which the output head stays as it was, but "
            f"{base} has one table for both: its embeddings are tied. {WAY_OUT}"
        )


def complete_pairs(adapter: Adapter) -> None:
    """Gives embedding and head the same change if PEFT keeps them equal (ensure_weight_tying) and the file has one.

    The A and B of one are the B and A of the other, transposed. Pairs of other variants are unchanged.
    """
    embedding, head = _adapted(adapter)
    if not adapter.peft_fields.get("ensure_weight_tying") or not adapter.variant.is_plain:
        return
    if embedding and not head:
        _add_transposed(adapter, embedding, names.output_heads()[0])
    elif head and not embedding:
        _add_transposed(adapter, head, names.embeddings()[0])
        adapter.embeddings.add(names.embeddings()[0])


def drop_equal_head(adapter: Adapter) -> None:
    """Removes the head's pair and weight from an adapter whose embedding has the same: one table serves both."""
    embedding, head = _adapted(adapter)
    saved = _saved(adapter, names.output_heads())
    if embedding and head:
        adapter.remove(head)
    if _saved(adapter, names.embeddings()) and saved:
        del adapter.saved_modules[saved]


def unties(adapter: Adapter) -> bool:
    """Returns whether PEFT gives embedding and head different weights, on a base that has one table for both."""
    embedding, head = _adapted(adapter)
    saved_embedding, saved_head = (_saved(adapter, paths) for paths in (names.embeddings(), names.output_heads()))
    if saved_embedding and saved_head:
        embedded, chosen = (to_float32(adapter.saved_modules[name]) for name in (saved_embedding, saved_head))
        if not np.array_equal(embedded, chosen):
            return True
    elif saved_head and not head or saved_embedding and not embedding and _is_untied(adapter, saved_embedding):
        return True
    if embedding is None or head is None:
        return embedding is not head
    return not _change_alike(adapter, embedding, head)


def has_lone_embedding(adapter: Adapter) -> bool:
    """Returns whether an adapter has its own embedding while the tied output head stays the base's."""
    embedding = _saved(adapter, names.embeddings())
    return embedding is not None and not _saved(adapter, names.output_heads()) and _is_untied(adapter, embedding)


def drop_copies(adapter: Adapter, weight_of: Callable[[str], Optional[np.ndarray]]) -> None:
    """Removes the base's own tables, which PEFT saves beside pairs of embeddings and output heads, from an adapter.

    A table that differs from the base's stays, since the pair is for it. ``weight_of`` takes a parameter's name,
    and returns None if the base lacks it or its values.
    """
    for name in adapter.base_tables:
        weight = weight_of(name)
        saved = adapter.saved_modules[name]
        if weight is not None and is_copy(saved, weight):
            del adapter.saved_modules[name]


def is_copy(weight: np.ndarray, table: np.ndarray) -> bool:
    """Returns whether a weight equals the table up to rounding."""
    weight = to_float32(weight)
    table = to_float32(table)
    return weight.shape == table.shape and bool(np.abs(weight - table).max() <= _ROUNDED * np.abs(table).max())


def check_vocabulary(name: str, saved: Shape, base: Shape, source: str) -> None:
    """Raises ShapeMismatchError if a saved embedding or head has a larger or smaller vocabulary than the base."""
    if is_of_vocabulary(name) and saved[1:] == base[1:]:
        raise ShapeMismatchError(
            f"{source}: {name} has {saved[0]} rows and the base {base[0]}: tokens were added to or taken from the "
            f"vocabulary before the training. Build the model with vocab_size {saved[0]}, on the base that mindlora "
            "base merge makes with this adapter, if the file holds embedding and head, or one resized as for the "
            "training."
        )


def is_of_vocabulary(name: str) -> bool:
    """Returns whether a parameter (MindFormers' name) has a row for each token."""
    return name.rpartition(".")[0] in {*names.embeddings(), *names.output_heads()}


def add_head(adapter: Adapter, embedding: str, head: str) -> None:
    """Adds the head to an adapter of a network with tied embeddings, so that PEFT does not untie them.

    It does so if ``embedding`` is among the saved modules, except beside an adapter of the embedding, where it is the
    base's.
    """
    if embedding in adapter.saved_modules and embedding.rpartition(".")[0] not in adapter.paths:
        adapter.saved_modules[head] = adapter.saved_modules[embedding].copy()
        adapter.peft_fields["ensure_weight_tying"] = True


def _saved(adapter: Adapter, paths: Iterable[str]) -> Optional[str]:
    adapted = set(paths)
    return next((name for name in adapter.saved_modules if name.rpartition(".")[0] in adapted), None)


def _is_untied(adapter: Adapter, embedding: str) -> bool:
    """Returns whether PEFT would give the embedding its own weight.

    It does not if the file holds the base's weight without naming it, as after a change of the vocabulary. An
    adapter with a fingerprint was trained here, where tied embeddings stay tied.
    """
    modules = adapter.peft_fields.get("modules_to_save") or ()
    named = any(peft.is_of_module(embedding, module) for module in modules)
    return named and not adapter.peft_fields.get("ensure_weight_tying") and adapter.fingerprint is None


def _adapted(adapter: Adapter) -> Tuple[Optional[str], Optional[str]]:
    """Returns the paths of the embedding and of the head that have a pair."""
    paths = [(path, names.to_mindformers(path)) for path in adapter.paths]
    embedding = next((path for path, legacy in paths if legacy in names.embeddings()), None)
    return embedding, next((path for path, legacy in paths if legacy in names.output_heads()), None)


def _add_transposed(adapter: Adapter, path: str, other: str) -> None:
    for half, transposed in ("AB", "BA"):
        adapter.tensors[other, half] = np.ascontiguousarray(adapter.tensors[path, transposed].T)
    if path in adapter.alphas:
        adapter.alphas[other] = adapter.alphas[path]


def _change_alike(adapter: Adapter, embedding: str, head: str) -> bool:
    """Returns whether the pairs of embedding and head are the same change, as with ensure_weight_tying."""
    if adapter.alphas.get(embedding) != adapter.alphas.get(head) or not adapter.variant.is_plain:
        return False
    pairs = [(adapter.tensors[embedding, half], adapter.tensors[head, other].T) for half, other in ("AB", "BA")]
    return all(np.array_equal(to_float32(one), to_float32(other)) for one, other in pairs)
