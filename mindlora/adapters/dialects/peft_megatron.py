"""PEFT's LoRA on Megatron's cells, as MindSpeed-LLM trains it: base_model.model.decoder.layers.0.mlp.linear_fc1....

Megatron's linear_fc1 has all rows of gate before those of up, and MindFormers', whose form adapters are kept in, has
them in turn. The rows of linear_qkv are the same in both.
"""

from typing import Iterable

from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects import peft
from mindlora.errors import ShapeMismatchError
from mindlora.models import names
from mindlora.models.joined_rows import PartAfterPart, RowsInTurn, join_rows, split_rows


def reorder(adapter: Adapter, keys: Iterable[str]) -> None:
    """Gives pairs of Megatron's linear_fc1 the order of rows that MindFormers has.

    Args:
        adapter (Adapter): Read from PEFT's form; changed in place.
        keys (list of str): The keys of its file.

    Raises:
        ShapeMismatchError: The rows are not those of two parts.
    """
    for path in dict.fromkeys(found[0] for key in keys if peft.is_megatron_key(key) and (found := peft.parse_key(key))):
        if not names.joined_parts(path) or not isinstance(names.joined_cell(path).layout, RowsInTurn):
            continue
        for part in ("B", *adapter.variant.row_parts):
            rows = adapter.tensors.get((path, part))
            sizes = None if rows is None else PartAfterPart().sizes(len(rows))
            if rows is not None and not sizes:
                raise ShapeMismatchError(f"{part} of {path} has {len(rows)} rows, which are not those of gate and up.")
            if rows is not None and sizes:
                adapter.tensors[path, part] = join_rows(split_rows(rows, sizes), len(rows) // 2)
