"""What of a base and an adapter decides whether they can be merged: transposed weights, the size of the vocabulary."""

from typing import Dict, Mapping, Tuple

from mindlora.adapters import tied_embeddings
from mindlora.adapters.adapter import Adapter
from mindlora.errors import MergeError, ShapeMismatchError
from mindlora.numerics.pair_layouts import EMBEDDING, Shape


def grown_tables(adapter: Adapter, shapes: Mapping[str, Shape], source: str) -> Dict[str, Shape]:
    """Returns the saved embedding and head that replace the base's at another number of tokens, name -> new shape.

    Args:
        adapter (Adapter): The adapter.
        shapes (mapping): The base's parameters -> shape, under MindFormers' names.
        source (str): The adapter, for messages.

    Raises:
        ShapeMismatchError: Only one of the two is in the file, or they differ in size.
    """
    saved = {name: array.shape for name, array in adapter.saved_modules.items()}
    grown = {
        name: shape
        for name, shape in saved.items()
        if tied_embeddings.is_of_vocabulary(name) and shape[:1] != shapes[name][:1] and shape[1:] == shapes[name][1:]
    }
    tables = [name for name in shapes if tied_embeddings.is_of_vocabulary(name) and len(shapes[name]) == 2]
    if grown and {saved.get(name, shapes[name])[0] for name in tables} != {next(iter(grown.values()))[0]}:
        name = next(iter(grown))
        tied_embeddings.check_vocabulary(name, saved[name], shapes[name], source)
    return grown


def check_pair(adapter: Adapter, path: str, name: str, source: str) -> None:
    """Raises MergeError for the pair of an embedding with DoRA's magnitude, which is of its columns."""
    if adapter.layout(path) is EMBEDDING and adapter.row_norms(path) is not None:
        raise MergeError(
            f"{source} is a DoRA adapter of {path}, an embedding, whose magnitude is of the columns of {name}, and "
            "only that of rows can be merged. Merge it with PEFT (merge_and_unload)."
        )


def check_not_transposed(path: str, name: str, shapes: Mapping[str, Shape]) -> None:
    """Raises MergeError if the base stores its linear weights [in, out], as GPT-2's Conv1D does.

    A bias has one element for each output, which tells wherever a weight is not square.

    Args:
        path (str): Path of the cell.
        name (str): The base's name of its weight.
        shapes (mapping): The base's parameters -> shape, under MindFormers' names.
    """
    if f"{path}.bias" in shapes and any(_is_transposed(other, shapes) for other in shapes):
        raise MergeError(
            f"{name} is stored transposed, [in, out], as GPT-2's Conv1D has it (fan_in_fan_out), and only weights "
            "[out, in] can be merged into. Merge with PEFT (merge_and_unload)."
        )


def check_shape(name: str, found: Shape, needed: Tuple[int, ...], source: str) -> None:
    """Raises ShapeMismatchError if a weight of the base does not have the shape that a pair is for."""
    if tuple(found) != tuple(needed):
        raise ShapeMismatchError(
            f"{name} is {list(found)} in the base, and the adapter {source} is for {list(needed)}. It belongs to "
            "another model: give the base that it was trained on."
        )


def _is_transposed(name: str, shapes: Mapping[str, Shape]) -> bool:
    path, _, leaf = name.rpartition(".")
    shape, bias = shapes[name], shapes.get(f"{path}.bias")
    return leaf == "weight" and len(shape) == 2 and shape[0] != shape[1] and bias == (shape[1],)
