"""Adapters of a bare model (layers.0..., as AutoModel has them) under the names of the model with a head, and back."""

from typing import Callable, Collection

from mindlora.files.adapters.adapter import Adapter
from mindlora.models import bare, names


def complete(adapter: Adapter) -> None:
    """Gives an adapter of a bare model the names of the model with a head; any other keeps its names."""
    prefix = bare.missing_prefix([*adapter.paths, *adapter.token_rows])
    if prefix:
        adapter.bare_prefix = prefix
        _rename(adapter, lambda name: bare.with_prefix(name, prefix))


def for_network(adapter: Adapter, paths: Collection[str]) -> None:
    """Gives an adapter the names of a bare model where the network, whose cells are at ``paths``, is one."""
    prefix = bare.missing_prefix(paths)
    if prefix:
        _rename(adapter, lambda name: name.removeprefix(prefix))


def _rename(adapter: Adapter, renamed: Callable[[str], str]) -> None:
    adapter.tensors = {(renamed(path), part): array for (path, part), array in adapter.tensors.items()}
    adapter.alphas = {renamed(path): alpha for path, alpha in adapter.alphas.items()}
    adapter.embeddings = set(map(renamed, adapter.embeddings))
    saved_modules = {renamed(name): array for name, array in adapter.saved_modules.items()}
    adapter.saved_modules = {names.parameter_in_adapters(name): array for name, array in saved_modules.items()}
    adapter.token_rows = {renamed(path): rows for path, rows in adapter.token_rows.items()}
    if adapter.allocation:
        adapter.allocation = {**adapter.allocation, "left_out": list(map(renamed, adapter.allocation["left_out"]))}
