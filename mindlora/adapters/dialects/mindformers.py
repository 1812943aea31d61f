"""The forms of LoRA in MindFormers' own files: a table of key endings for each, and the same functions for all."""

import re
from typing import Dict, Iterable, List, NamedTuple, Optional

import numpy as np

from mindlora.config.variants.registry import PARTS, SHARED_PARTS
from mindlora.config.variants.variant import PartKey
from mindlora.errors import ShapeMismatchError
from mindlora.models import names
from mindlora.numerics.pair_layouts import unstack_experts


class Dialect(NamedTuple):
    """One form of key names.

    Attributes:
        name (str): For messages.
        endings (dict): Ending of a key -> name of the part; the first ending of a part is the one that is written.
        mcore (bool): Whether its paths are those of mcore models. Default: False, legacy models'.
        only (str): Regular expression that at least one key of a file in this form matches. Default: "", any key.
    """

    name: str
    endings: Dict[str, str]
    mcore: bool = False
    only: str = ""


MINDPET = Dialect(
    "MindFormers' LoRA (mindpet_delta_lora)",
    {
        **{f".{part.parameter}": part.name for part in (*PARTS.values(), *SHARED_PARTS.values())},
        # Outside a network, MindPet's LoRADense saves its keys with capital letters.
        ".mindpet_delta_lora_A": "A",
        ".mindpet_delta_lora_B": "B",
    },
)
TK_DELTA = Dialect(
    "MindFormers' LoRA from before 2023 (tk_delta_lora)",
    {".tk_delta_lora_a": "A", ".tk_delta_lora_b": "B", ".tk_delta_lora_A": "A", ".tk_delta_lora_B": "B"},
)
MCORE = Dialect(
    "MindFormers' mcore LoRA",
    {".lora_A.weight": "A", ".lora_B.weight": "B"},
    mcore=True,
    only=r"^decoder\.layers\.|^output_layer\.",
)
PYNATIVE = Dialect(
    "MindFormers 2's LoRA", {".lora_a": "A", ".lora_b": "B"}, mcore=True, only=r"^decoder\.layers\.|^output_layer\."
)
SLORA = Dialect("MindFormers' slora", {".lora_a": "A", ".lora_b": "B"})
DIALECTS = (MINDPET, TK_DELTA, MCORE, PYNATIVE, SLORA)

_OPTIMIZER_PREFIXES = ("adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "accu_grads.")
_EXPERTS = re.compile(r"^(.*\.experts)\.weight([12])_lora_([ab])$")


def tensor_key(path: str, part: str, dialect: Dialect = MINDPET) -> str:
    """Returns the key of a part of the cell at ``path``."""
    ending = next(ending for ending, name in dialect.endings.items() if name == part)
    return f"{path}{ending}" if path else ending[1:]


def parse_key(key: str, dialect: Dialect = MINDPET) -> Optional[PartKey]:
    """Returns (path, part) for a LoRA tensor, or None for a tensor of the base or of the optimizer."""
    found = _parse(key, dialect)
    return (names.mcore_to_mindformers(found[0]), found[1]) if found and dialect.mcore else found


def sort(keys: Iterable[str], dialect: Dialect) -> Dict[str, PartKey]:
    """Returns key -> (path, part) of the LoRA tensors among ``keys``; together, they tell which mcore model it is."""
    single = {key: own for key in keys if (own := parse_expert_key(key))}
    found = {key: own for key in keys if key not in single and (own := _parse(key, dialect))}
    if dialect.mcore:
        own_paths = names.canonical(path for path, _ in found.values())
        found = {key: (names.mcore_to_mindformers(own_paths[path]), part) for key, (path, part) in found.items()}
    return {**single, **found}


def _parse(key: str, dialect: Dialect) -> Optional[PartKey]:
    """Returns (path, part) as the dialect calls the path, or None."""
    if key.startswith(_OPTIMIZER_PREFIXES):
        return None
    for ending, part in dialect.endings.items():
        if ("." + key).endswith(ending):
            # MindSpore may name a shared parameter after the first of the cells that share it.
            return key[: -len(ending)] if key.endswith(ending) and part not in SHARED_PARTS else "", part
    return None


def detect(keys: List[str]) -> Optional[Dialect]:
    """Returns the dialect of a file with these keys, or None if none of them is a LoRA tensor's."""
    for dialect in DIALECTS:
        if any(parse_key(key, dialect) and re.search(dialect.only, key) for key in keys):
            return dialect
    return PYNATIVE if any(map(parse_expert_key, keys)) else None


def is_adapter_key(key: str) -> bool:
    """Tells whether ``key`` is a LoRA tensor's in any of the dialects."""
    return bool(parse_expert_key(key)) or is_adalora_key(key) or any(parse_key(key, dialect) for dialect in DIALECTS)


def is_adalora_key(key: str) -> bool:
    """Tells whether ``key`` is the Lambda of a cell that AdaLoRA trains, which MindSpore's own checkpoints hold."""
    return key.endswith("mindpet_delta_lora_lambda") and not key.startswith(_OPTIMIZER_PREFIXES)


def is_optimizer_key(key: str) -> bool:
    """Tells whether ``key`` is the optimizer's state of a parameter."""
    return key.startswith(_OPTIMIZER_PREFIXES)


def parse_expert_key(key: str) -> Optional[PartKey]:
    """Returns (path, part) of the stacked LoRA tensor of all experts in a layer, or None for any other key."""
    match = None if key.startswith(_OPTIMIZER_PREFIXES) else _EXPERTS.match(key)
    return (f"{match[1]}.weight{match[2]}", match[3].upper()) if match else None


def split_experts(key: str, array: np.ndarray) -> Dict[PartKey, np.ndarray]:
    """Returns the single experts' matrices of a stacked tensor of MindFormers 2, or {} for any other key.

    Args:
        key (str): For instance decoder.layers.0.mlp.experts.weight1_lora_a.
        array (array): A is [experts, in, r] and B [experts, r, out]: the transposes of a dense pair's.

    Returns:
        dict of (path, part) -> matrix: weight2 is down_proj; weight1 has the rows of gate_proj before those of up_proj,
        and the two share A.

    Raises:
        ShapeMismatchError: The tensor is not a stack of matrices, or B of weight1 has an odd number of outputs.
    """
    match = _EXPERTS.match(key)
    if not match:
        return {}
    holder, half = re.sub(r"^decoder\.", "model.", match[1]), match[3].upper()
    matrices = unstack_experts(array)
    if matrices is None or match[2] + half == "1B" and len(matrices[0]) % 2:
        raise ShapeMismatchError(
            f"{key} is {list(array.shape)}: A of all experts must be [experts, in, r] and B [experts, r, "
            "out], where out of weight1 is twice that of gate_proj."
        )
    pairs = {}
    for expert, matrix in enumerate(matrices):
        if match[2] == "2":
            parts = {"down_proj": matrix}
        elif half == "A":
            parts = {"gate_proj": matrix, "up_proj": matrix}
        else:
            parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2)))
        pairs.update({(f"{holder}.{expert}.{part}", half): np.ascontiguousarray(rows) for part, rows in parts.items()})
    return pairs
