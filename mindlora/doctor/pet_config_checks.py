"""Checks of the pet_config node: its pet_type, its keys and their values."""

import re
import warnings
from typing import List, Optional, Tuple

from mindlora.checks.finding import Finding
from mindlora.checks.pet_config import KNOWN_PET_TYPES, MINDFORMERS_PET_TYPES, PetLoraConfig
from mindlora.common.text import suggestion
from mindlora.common.yaml_file import PET, value_at
from mindlora.config import PET_TYPES
from mindlora.errors import LoraError


def check_pet_config(config: dict) -> Tuple[Optional[PetLoraConfig], List[Finding]]:
    """Returns the configuration that pet_config describes, or None if it is not a valid one, and the findings."""
    pet_config = value_at(config, PET)
    if not pet_config:
        return None, [Finding("note", PET, "There is no pet_config: the whole network is trained, without LoRA.")]
    if not isinstance(pet_config, dict):
        found = f"pet_config is {pet_config!r}, which is not a node with keys."
        return None, [Finding("error", PET, found, "Write pet_type, lora_rank and the rest as keys below it.")]
    finding = _check_pet_type(pet_config.get("pet_type"))
    if finding is not None:
        return None, [finding]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lora = PetLoraConfig.from_pet_config(pet_config)
        except LoraError as error:
            return None, [Finding("error", _key_of(str(error), pet_config), str(error))]
    messages = [str(warning.message) for warning in caught]
    return lora, [Finding("warning", _key_of(message, pet_config), message) for message in messages]


def _check_pet_type(pet_type) -> Optional[Finding]:
    if pet_type in PET_TYPES:
        return None
    if pet_type in MINDFORMERS_PET_TYPES:
        return Finding("note", f"{PET}.pet_type", f"pet_type {pet_type} is MindFormers' own and was not checked.")
    known = suggestion(str(pet_type), list(KNOWN_PET_TYPES))
    found = f"pet_type is {pet_type!r}, which is not known: MindFormers would train the whole network.{known}"
    return Finding("error", f"{PET}.pet_type", found)


def _key_of(message, pet_config) -> str:
    """Returns the full path of the key that a message starts with or calls unknown."""
    unknown = re.search("unknown key '(.*?)'", message)
    key = unknown[1] if unknown else re.match(r"\w+", message)[0]
    return f"{PET}.{key}" if key in pet_config else PET
