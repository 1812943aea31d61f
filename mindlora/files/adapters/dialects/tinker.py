"""Tinker's adapters, as in its checkpoints and its cookbook: PEFT's folder with Tinker's own names.

The output head is called unembed_tokens. The experts of a layer have one tensor for each of w1 (gate_proj), w2
(down_proj) and w3 (up_proj): A [experts, r, in] and B [experts, out, r], where all experts may share one A or B.
Every pair is scaled by lora_alpha / r of the configuration. An adapter without both features is in PEFT's form.

Source: tinker_cookbook/weights (tinker-cookbook 0.6.1), which turns such a folder into PEFT's.
"""

import re
from typing import Dict, Iterator

from mindlora.core.errors import MissingTensorsError, ShapeMismatchError
from mindlora.core.numerics.pair_shapes import Pair
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft
from mindlora.files.adapters.dialects.dialect import Dialect, File, Keys, unknown_tensors
from mindlora.models import names
from mindlora.models.architectures import architecture
from mindlora.models.variants.variant import PartKey

_HEAD = "model.unembed_tokens"
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OWN_KEY = re.compile(r"\.(unembed_tokens|experts\.w[123])\.lora_[AB]\.weight$")
_STACK = re.compile(r"^(.*\.experts)\.(w[123])$")


class Tinker(Dialect):
    """The folder of one adapter, which is only read."""

    name = "Tinker"
    world = architecture.HF

    def matches(self, file: File) -> bool:
        return any(map(_OWN_KEY.search, file.keys))

    def sort(self, file: File) -> Keys:
        part_keys: Dict[str, PartKey] = {}
        for key in file.keys:
            part_key = peft.parse_key(key.replace(f"{peft.PREFIX}{_HEAD}.", f"{peft.PREFIX}lm_head."))
            if part_key:
                part_keys[key] = part_key
        if len(part_keys) < len(file.keys):
            raise unknown_tensors(set(file.keys) - set(part_keys), file)
        return Keys(part_keys)

    def complete(self, adapter: Adapter, file: File) -> None:
        """Gives each expert a pair from the tensors of all experts of a layer."""
        for path in adapter.paths:
            stack = _STACK.match(path)
            if stack:
                holder, weight = stack.groups()
                for expert, pair in enumerate(_pairs(adapter, path, file.source)):
                    single = names.to_mindformers(f"{holder}.{expert}.{_EXPERTS[weight]}")
                    adapter.tensors[single, "A"], adapter.tensors[single, "B"] = pair
                adapter.remove(path)


def _pairs(adapter: Adapter, path: str, source: str) -> Iterator[Pair]:
    """Yields A [r, in] and B [out, r] of each expert in the stack at ``path``."""
    a, b = (adapter.tensors.get((path, half)) for half in "AB")
    if a is None or b is None:
        raise MissingTensorsError(f"{source} holds one of A and B of {path} alone. Save the adapter again.")
    counts = sorted({len(a), len(b)} - {1}) if len(a.shape) == len(b.shape) == 3 else []
    if len(counts) != 1:
        raise ShapeMismatchError(
            f"{source}: A of {path} is {list(a.shape)} and B {list(b.shape)}; they must be [experts, r, in] and "
            "[experts, out, r], of as many experts, or one of them of one. Save the adapter again."
        )
    for expert in range(counts[0]):
        yield a[expert if len(a) > 1 else 0], b[expert if len(b) > 1 else 0]
