"""KaSA in PEFT's folders: W' x + scale B diag(s) A x, where W' lacks the r smallest singular values of W.

s [r] is <module>.lora_diag. It is multiplied into B, so what remains is a pair for a changed base, as PiSSA's is.

Source: Wang et al., KaSA: Knowledge-Aware Singular-Value Adaptation of Large Language Models, 2024.
"""

import dataclasses
from typing import Dict

import numpy as np

from mindlora.core.errors import ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import to_float32
from mindlora.files.adapters.dialects.dialect import File

_DIAGONAL, _B = ".lora_diag", ".lora_B.weight"


def without_diagonals(file: File) -> File:
    """Returns a file of KaSA with each module's lora_diag multiplied into its B, in float32; any other as it is.

    Raises:
        UnexpectedTensorsError: A module has one of lora_diag and B alone.
        ShapeMismatchError: lora_diag does not have a number for each column of B.
    """
    if file.config is None or file.config.initializer != initializers.KASA:
        return file
    modules = [key[: -len(_DIAGONAL)] for key in file.keys if key.endswith(_DIAGONAL)]
    adapted = [key[: -len(_B)] for key in file.keys if key.endswith(_B)]
    odd = sorted(set(modules).symmetric_difference(adapted))
    if odd:
        raise UnexpectedTensorsError(
            f"{file.path} holds one of lora_diag and lora_B of {odd[0]} alone. Save the adapter with PEFT again."
        )
    diagonals: Dict[str, str] = {module + _B: module + _DIAGONAL for module in modules}

    def fetch(key: str) -> np.ndarray:
        array = file.fetch(key)
        if key not in diagonals:
            return array
        diagonal = file.fetch(diagonals[key])
        if len(array.shape) != 2 or diagonal.shape != array.shape[1:]:
            raise ShapeMismatchError(
                f"{file.path}: {diagonals[key]} is {list(diagonal.shape)}, and {key} {list(array.shape)}; it must have "
                "a number for each column. Save the adapter with PEFT again."
            )
        return to_float32(array) * to_float32(diagonal)

    keys = [key for key in file.keys if not key.endswith(_DIAGONAL)]
    return dataclasses.replace(file, keys=keys, fetch=fetch)
