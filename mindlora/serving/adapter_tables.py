"""AdapterTables: an adapter's own input embedding and output head, which stay in host memory.

A step looks up a few rows of the first and multiplies a few tokens by the second, so neither needs a slot.
"""

from typing import List, NamedTuple, NoReturn, Optional, Tuple

import numpy as np

from mindlora.core.errors import ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.text import listed
from mindlora.files.adapters import tied_embeddings
from mindlora.files.adapters.adapter import Adapter
from mindlora.models import names


class BaseTables(NamedTuple):
    """The base's tables.

    Attributes:
        embedding (array): [vocabulary, hidden], of any dtype; on a CPU MindSpore's own memory.
        tied (bool): Whether it is also the output head.
        head (array or None): [vocabulary, hidden] of the output head; None if it is unknown.
    """

    embedding: np.ndarray
    tied: bool
    head: Optional[np.ndarray] = None

    def weight_of(self, name: str) -> Optional[np.ndarray]:
        """Returns the table of the parameter ``name`` (MindFormers' name), or None for other parameters."""
        path = name.rpartition(".")[0]
        if path in names.embeddings() or self.tied and path in names.output_heads():
            return self.embedding
        return self.head if path in names.output_heads() else None


class AdapterTables(NamedTuple):
    """An adapter's replacements of the base's tables, in float32.

    Attributes:
        embedding (array or None): Its own [vocabulary, hidden].
        pair (tuple or None): A^T [vocabulary, r] and scale B^T [r, hidden], whose product is added to the embedding.
        head (array or None): Its own [vocabulary, hidden].
    """

    embedding: Optional[np.ndarray] = None
    pair: Optional[Tuple[np.ndarray, np.ndarray]] = None
    head: Optional[np.ndarray] = None

    @property
    def has_embedding(self) -> bool:
        """Whether it changes the base's embedding of tokens."""
        return self.embedding is not None or self.pair is not None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays; one that is both embedding and head counts once."""
        head = None if self.head is self.embedding else self.head
        return sum(array.nbytes for array in (self.embedding, *(self.pair or ()), head) if array is not None)

    def embed(self, tokens: np.ndarray, base: BaseTables) -> np.ndarray:
        """Returns float32 [tokens, hidden]."""
        rows = to_float32((base.embedding if self.embedding is None else self.embedding)[tokens])
        return rows if self.pair is None else rows + self.pair[0][tokens] @ self.pair[1]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Returns the logits, float32 [vocabulary], after a token, given the head's input for it, float32 [hidden]."""
        return self.head @ hidden


def take_tables(adapter: Adapter, base: Optional[BaseTables], source: str) -> AdapterTables:
    """Removes the embedding and output head from an adapter, which keeps the pairs of linear cells, and returns them.

    ``base`` is None if its tables cannot be replaced.

    Raises UnexpectedTensorsError for other saved modules, and without a base; ShapeMismatchError for tables of
    another vocabulary.
    """
    others = [name for name in adapter.saved_modules if not tied_embeddings.is_of_vocabulary(name)]
    if others or base is None and adapter.saved_modules:
        saved = listed(others or adapter.saved_modules)
        refuse_served(source, f"saved modules (modules_to_save), which replace the base's: {saved}")
    if base is not None and base.tied:
        tied_embeddings.complete_pairs(adapter)
    embeddings = [path for path in adapter.paths if path in adapter.embeddings or names.is_embedding(path)]
    if base is None:
        if embeddings:
            refuse_served(source, f"pairs of embeddings: {listed(embeddings)}")
        return AdapterTables()
    tied_embeddings.drop_copies(adapter, base.weight_of)
    for name, array in adapter.saved_modules.items():
        if array.shape != base.embedding.shape:
            tied_embeddings.check_vocabulary(name, array.shape, base.embedding.shape, source)
            raise ShapeMismatchError(
                f"{source}: {name}, a saved module (modules_to_save), is {list(array.shape)}, the network's is "
                f"{list(base.embedding.shape)}. Load it into the model it was trained on."
            )
    untied = base.tied and tied_embeddings.has_lone_embedding(adapter)
    embedding = _take_saved(adapter, names.embeddings())
    head = _take_saved(adapter, names.output_heads())
    if head is None and embedding is not None and base.tied and not untied:
        head = embedding
    return AdapterTables(embedding, _take_pair(adapter, embeddings), _with_pair(adapter, head, source))


def _take_saved(adapter: Adapter, paths: List[str]) -> Optional[np.ndarray]:
    name = next((name for name in adapter.saved_modules if name.rpartition(".")[0] in paths), None)
    return None if name is None else to_float32(adapter.saved_modules.pop(name))


def _take_pair(adapter: Adapter, paths: List[str]) -> Optional[Tuple[np.ndarray, np.ndarray]]:
    for path in paths:
        a, b = adapter.pair(path)
        scale = np.float32(adapter.scale(path))
        adapter.remove(path)
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T) * scale
    return None


def _with_pair(adapter: Adapter, head: Optional[np.ndarray], source: str) -> Optional[np.ndarray]:
    """Returns a saved head with the pair on it added, which it replaces."""
    path = next((path for path in adapter.paths if names.is_output_head(path)), None)
    if head is None or path is None:
        return head
    if adapter.variant.row_norms:
        refuse_served(source, f"{adapter.variant.tensors} ({adapter.variant.field}) of a saved module: {path}")
    head = head + adapter.delta(path)
    adapter.remove(path)
    return head


def refuse_served(source: str, content: str) -> NoReturn:
    """Raises UnexpectedTensorsError, with the way out, for parts of an adapter that no server takes."""
    raise UnexpectedTensorsError(
        f"{source} cannot be served beside other adapters: it holds {content}. Merge it into its base with "
        "`mindlora base merge`, and serve that."
    )
