"""The forms of LoRA in MindFormers' own files: a table of key endings for each, and the same functions for all."""

import re
from typing import Dict, List, NamedTuple, Optional

from mindlora.core.errors import AdapterError, AdapterFormatError, UnexpectedTensorsError
from mindlora.core.formats import ckpt_file
from mindlora.core.text import listed
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects.dialect import Dialect, File, Keys, listed_keys, write_file
from mindlora.files.adapters.expert_pairs import single_paths
from mindlora.models import names
from mindlora.models.architectures import architecture
from mindlora.models.variants.registry import IN_CHECKPOINTS_ALONE, PARTS, SHARED_PARTS
from mindlora.models.variants.variant import PartKey


class KeyNames(NamedTuple):
    """One form of key names.

    Attributes:
        endings (dict): Ending of a key -> name of the part; the first ending of a part is written.
        mcore (bool): Whether its paths are those of mcore models, not legacy models'.
        only (str): Regular expression that at least one key of a file in this form matches; "" for any key.
    """

    name: str
    endings: Dict[str, str]
    mcore: bool = False
    only: str = ""


MINDPET = KeyNames(
    "MindFormers' LoRA (mindpet_delta_lora)",
    {
        **{f".{part.parameter}": part.name for part in (*PARTS.values(), *SHARED_PARTS.values())},
        # Outside a network, MindPet's LoRADense saves its keys with capital letters.
        ".mindpet_delta_lora_A": "A",
        ".mindpet_delta_lora_B": "B",
    },
)
TK_DELTA = KeyNames(
    "MindFormers' LoRA from before 2023 (tk_delta_lora)",
    {".tk_delta_lora_a": "A", ".tk_delta_lora_b": "B", ".tk_delta_lora_A": "A", ".tk_delta_lora_B": "B"},
)
MCORE = KeyNames(
    "MindFormers' mcore LoRA",
    {".lora_A.weight": "A", ".lora_B.weight": "B"},
    mcore=True,
    only=r"^decoder\.layers\.|^output_layer\.",
)
PYNATIVE = KeyNames(
    "MindFormers 2's LoRA",
    {
        **{f".{part.pynative}": part.name for part in PARTS.values()},
        **{f".{part.parameter}": part.name for part in SHARED_PARTS.values()},
    },
    mcore=True,
    only=r"^decoder\.layers\.|^output_layer\.",
)
SLORA = KeyNames("MindFormers' slora", {".lora_a": "A", ".lora_b": "B"})
KEY_NAMES = (MINDPET, TK_DELTA, MCORE, PYNATIVE, SLORA)

_OPTIMIZER_PREFIXES = ("adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "accu_grads.")
_SHARED_NAMES = tuple(part.parameter for part in SHARED_PARTS.values())
_EXPERTS = re.compile(r"^(.*\.experts)\.weight([12])_lora_([ab])$")


class MindFormers(Dialect):
    """A file with the keys of one table."""

    def __init__(self, key_names: KeyNames):
        self.key_names = key_names
        self.name = key_names.name

    def matches(self, file: File) -> bool:
        return detect(file.keys) is self.key_names

    def sort(self, file: File) -> Keys:
        part_keys = sort(file.keys, self.key_names)
        if any(map(is_adalora_key, file.keys)):
            raise AdapterFormatError(
                f"{file.path} is a checkpoint of a run of AdaLoRA, which keeps Lambda apart from A. Take the "
                "folder that LoraCheckpoint wrote at this step, or call save_lora on the network with this checkpoint "
                "loaded."
            )
        unknown = sorted(key for key in set(file.keys) - set(part_keys) if is_adapter_key(key))
        if unknown:
            raise UnexpectedTensorsError(
                f"{file.path} holds LoRA tensors of {self.name}, and others in another form: {listed_keys(unknown)}. "
                "Keep one form in a file."
            )
        saved_modules = {name: name for name in file.metadata.get("whole", ()) if name in file.keys}
        return Keys(part_keys, saved_modules)

    def refuse_single_experts(self, adapter: Adapter) -> None:
        """Raises AdapterError if an adapter has pairs of single experts, for which MindFormers' forms have no names."""
        experts = single_paths(adapter)
        if experts:
            raise AdapterError(
                f"Format {self.form!r} cannot hold adapters of single experts: {listed(experts)}. Write format 'peft', "
                "or stack them (mindlora adapter convert --experts stacked)."
            )


class MindPet(MindFormers):
    """MindFormers' own LoRA, under the names of a network; ``form`` is "mindformers" or "ckpt"."""

    world = architecture.LEGACY
    holds_modules = True
    stacks_experts = True

    def __init__(self, form: str, ending: str):
        super().__init__(MINDPET)
        self.form = form
        self.ending = ending

    def write(self, adapter: Adapter, path: str) -> None:
        self.refuse_single_experts(adapter)
        tensors = {tensor_key(*key): array for key, array in adapter.stored_tensors().items()}
        tensors |= adapter.saved_modules
        if self.ending == ".ckpt":
            ckpt_file.write(path, tensors, adapter_metadata.text_of(adapter))
        else:
            write_file(path, tensors, adapter_metadata.header(adapter))


def tensor_key(path: str, part: str, key_names: KeyNames = MINDPET) -> str:
    """Returns the key of a part of the cell at ``path``."""
    ending = next(ending for ending, name in key_names.endings.items() if name == part)
    return f"{path}{ending}" if path else ending[1:]


def parse_key(key: str, key_names: KeyNames = MINDPET) -> Optional[PartKey]:
    """Returns (path, part) for a LoRA tensor, or None for a tensor of the base or of the optimizer."""
    part_key = _parse(key, key_names)
    if part_key is None or not key_names.mcore:
        return part_key
    path, part = part_key
    return names.mcore_to_mindformers(path), part


def sort(keys: List[str], key_names: KeyNames) -> Dict[str, PartKey]:
    """Returns key -> (path, part) of the LoRA tensors among ``keys``, which together identify the mcore model."""
    parts: Dict[str, PartKey] = {}
    for key in keys:
        part_key = parse_expert_key(key) or _parse(key, key_names)
        if part_key:
            parts[key] = part_key
    if not key_names.mcore:
        return parts
    # A checkpoint that includes the base has more cells to identify the model.
    others = [key.removesuffix(".weight") for key in keys if key.endswith(".weight")]
    canonical = names.canonical((path for path, _ in parts.values() if path), others)
    # Shared parts belong to no cell.
    canonical[""] = ""
    return {key: (names.mcore_to_mindformers(canonical[path]), part) for key, (path, part) in parts.items()}


def _parse(key: str, key_names: KeyNames) -> Optional[PartKey]:
    """Returns (path, part) with the file's own path, or None."""
    if is_optimizer_key(key):
        return None
    for ending, part in key_names.endings.items():
        if ("." + key).endswith(ending):
            # MindSpore may name a shared parameter after the first of the cells that share it.
            return key[: -len(ending)] if key.endswith(ending) and part not in SHARED_PARTS else "", part
    return None


def detect(keys: List[str]) -> Optional[KeyNames]:
    """Returns the key names of a file with these keys, or None if none of them is a LoRA tensor's."""
    # Shared parts have the same names in several forms.
    own = [key for key in keys if not key.endswith(_SHARED_NAMES)]
    for key_names in KEY_NAMES:
        if any(parse_key(key, key_names) and re.search(key_names.only, key) for key in own):
            return key_names
    if any(map(parse_expert_key, keys)):
        return PYNATIVE
    return MINDPET if len(own) < len(keys) else None


def is_adapter_key(key: str) -> bool:
    """Returns whether ``key`` is a LoRA tensor's in any of the forms."""
    return bool(parse_expert_key(key)) or is_adalora_key(key) or any(parse_key(key, table) for table in KEY_NAMES)


def is_adalora_key(key: str) -> bool:
    """Returns whether ``key`` is the Lambda of a cell that AdaLoRA trains, as MindSpore or MindFormers saves it."""
    return key.endswith(IN_CHECKPOINTS_ALONE) and not is_optimizer_key(key)


def is_optimizer_key(key: str) -> bool:
    """Returns whether ``key`` is the optimizer's state of a parameter."""
    return key.startswith(_OPTIMIZER_PREFIXES)


def parse_expert_key(key: str) -> Optional[PartKey]:
    """Returns (path, part) of the stacked LoRA tensor of all experts in a layer, or None for any other key."""
    match = _EXPERTS.match(key)
    if match is None or is_optimizer_key(key):
        return None
    return f"{match[1]}.weight{match[2]}", match[3].upper()
