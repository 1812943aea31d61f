"""Rows of training data under the PyNative Trainer, whose models take labels that are shifted already."""

from typing import Any, Dict, Mapping

from mindlora.core.errors import DataError

_COLUMNS = ("input_ids", "labels")


def shifted(inputs: Mapping[str, Any], seq_length: int) -> Dict[str, Any]:
    """Returns a batch as the model takes it: seq_length tokens in a row, and as label of each the next one.

    Rows of seq_length + 1 tokens are those of ``mindlora data`` and of graph mode: label i belongs to token i.

    Raises DataError if the rows have another length, or labels that are not shifted although nothing is left over.
    """
    tokens, labels = (inputs.get(name) for name in _COLUMNS)
    if labels is None or tokens.ndim != 2:
        return dict(inputs)
    length = tokens.shape[1]
    if length == seq_length + 1 and set(inputs) == set(_COLUMNS):
        return {"input_ids": tokens[:, :-1], "labels": labels[:, 1:]}
    if length != seq_length:
        raise DataError(
            f"The rows of the data have {length} tokens and the columns {', '.join(sorted(inputs))}, and the model's "
            f"seq_length is {seq_length}. Write rows of {seq_length} tokens with shifted labels, or rows of "
            f"{seq_length + 1} tokens with input_ids and labels alone, as mindlora data does."
        )
    return dict(inputs)
