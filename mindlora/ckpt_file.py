"""MindSpore's .ckpt files as NumPy arrays, and arrays as MindSpore's tensors: the one reader that imports MindSpore."""
import os
from typing import Callable, Dict, Tuple

import mindspore as ms
import numpy as np

from mindlora import atomic
from mindlora.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.tensor_file import BFLOAT16, to_float32

# A .ckpt that was cut between two records loads without a word: of ours, the first record says that the last one,
# a text, must be there.
_FIRST = "mindlora_begin"
_FACTS = "mindlora"


def read(path: str, wanted: Callable[[str], bool]) -> Tuple[Dict[str, np.ndarray], str]:
    """Returns the tensors whose names are ``wanted``, and the text that write put beside them, or "".

    Raises:
        TruncatedAdapterError: The file ends before its content does, or is no MindSpore checkpoint.
        AdapterFormatError: No tensor in it is wanted.
    """
    if os.path.getsize(path) == 0:
        raise TruncatedAdapterError(f"{path} is truncated: it is empty. Copy or save it again.")
    try:
        content = ms.load_checkpoint(path, choice_func=lambda key: key in (_FIRST, _FACTS) or wanted(key))
    except ValueError as error:
        if "empty after filter" in str(error):
            raise AdapterFormatError(f"{path} holds no LoRA tensor: no name in it is one of an adapter's.") from error
        raise TruncatedAdapterError(f"{path} is truncated or no MindSpore checkpoint: {error}") from error
    begun, facts = content.pop(_FIRST, None), content.pop(_FACTS, None)
    if begun is not None and facts is None:
        raise TruncatedAdapterError(f"{path} is truncated: its last record is missing. Copy or save it again.")
    return {key: to_array(parameter) for key, parameter in content.items()}, str(facts or "")


def write(path: str, tensors: Dict[str, np.ndarray], facts: str) -> None:
    """Writes arrays and a text as one .ckpt, in one step."""
    content = [{"name": _FIRST, "data": ms.Tensor(1, ms.int32)}]
    content += [{"name": key, "data": to_tensor(array)} for key, array in tensors.items()]
    with atomic.replace_file(path) as written:
        ms.save_checkpoint(content, written, append_dict={_FACTS: facts})


def to_tensor(array: np.ndarray) -> ms.Tensor:
    """Returns ``array`` as a MindSpore tensor of the same dtype."""
    if array.dtype == BFLOAT16:
        return ms.Tensor(to_float32(array), ms.bfloat16)
    return ms.Tensor(np.ascontiguousarray(array))


def to_array(tensor: ms.Tensor) -> np.ndarray:
    """Returns a MindSpore tensor as an array of the same dtype, bfloat16 as tensor_file.BFLOAT16."""
    array = tensor.asnumpy()
    return array.view(np.uint16).view(BFLOAT16) if tensor.dtype == ms.bfloat16 else array
