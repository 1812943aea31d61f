"""The pet_config node of a MindFormers YAML: its pet types, its keys and their values."""

import dataclasses
import re
import warnings
from typing import Any, ClassVar, List, Mapping, Optional, Tuple, cast

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.fields import INDEX, POSITIVE, check_number, check_product_dtype, numbers
from mindlora.core.numerics.initializers import freezes_b
from mindlora.core.text import suggestion
from mindlora.core.yaml_file import PET
from mindlora.files.adapters.fingerprint import ON_BASE_MISMATCH
from mindlora.models.architectures.classifiers import task_of, with_score
from mindlora.models.lora_config import PET_TYPES, LoraConfig
from mindlora.run.checks.finding import Finding, error, note, refuse, warning

PET_TYPE = "lora"
# MindFormers builds these itself, and mindlora leaves them alone.
MINDFORMERS_PET_TYPES = ("prefixtuning", "ptuning2", "slora")


@dataclasses.dataclass
class PetLoraConfig(LoraConfig):
    """LoraConfig with the additional keys that a pet_config node may have.

    Args:
        adapter_path (str): An adapter to load when the network is built, in order to train it further, evaluate it or
            predict with it. It overrides lora_init. Default: None.
        loraplus_lr_ratio (float): The learning rate of B divided by that of A (Hayou et al., LoRA+, 2024); at least 1.
            mindlora-run turns it into grouped learning rates. Default: None, B learns at the rate of A.
        base_model_name_or_path (str): Name or path of the base on Hugging Face, written into the adapter_config.json of
            saved adapters, from which PEFT and others load the base. Default: None.
        on_base_mismatch (str): What to do if load_checkpoint is not the base that adapter_path was trained on: "error",
            "warn" or "ignore". (Without load_checkpoint there is at most a warning.) Default: "error".
        seed (int): Seed of the adapter's initial values. Default: None, by the seed of the run and
            earlier draws.
        adapters (list of dict): Several adapters that train in one run, as checks.adapters describes them. Default:
            None, one adapter.
        product_dtype (str): float32 or bfloat16, the dtype to which linear cells round their factors, on a CPU with a
            frozen base in bfloat16: see FrozenLinear. All sums, and the values between cells, are float32. Default:
            "float32".
        neftune_alpha (float): Strength of the noise added to the embedding's output in training (Jain et al.,
            NEFTune, 2023); above 0. Default: None, no noise.

    Raises:
        ConfigError: A field is out of range, or loraplus_lr_ratio is combined with a variant without B.
    """

    # MindFormers reads this when it generates text.
    pet_type: ClassVar[str] = PET_TYPE
    adapter_path: Optional[str] = None
    loraplus_lr_ratio: Optional[float] = None
    neftune_alpha: Optional[float] = None
    base_model_name_or_path: Optional[str] = None
    on_base_mismatch: str = "error"
    seed: Optional[int] = None
    adapters: Optional[List[Mapping[str, Any]]] = None
    product_dtype: str = "float32"

    def __post_init__(self):
        super().__post_init__()
        name = self.base_model_name_or_path
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError(f"base_model_name_or_path is {name!r}: it must be a name or a path of the base.")
        if self.on_base_mismatch not in ON_BASE_MISMATCH:
            raise ConfigError(
                f"on_base_mismatch is {self.on_base_mismatch!r}: it must be one of {', '.join(ON_BASE_MISMATCH)}."
            )
        check_product_dtype(self.product_dtype)
        if self.seed is not None:
            check_number(self.seed, "seed", INDEX)
        if self.neftune_alpha is not None:
            check_number(self.neftune_alpha, "neftune_alpha", POSITIVE)
        if self.loraplus_lr_ratio is None:
            return
        check_number(self.loraplus_lr_ratio, "loraplus_lr_ratio", numbers(1))
        if freezes_b(self.lora_init):
            raise ConfigError(
                f"loraplus_lr_ratio is {self.loraplus_lr_ratio!r} and lora_init is {self.lora_init!r}: LoRA+ speeds up "
                "B, which mica does not train. Remove one of them."
            )
        if not self.variant.own_pair:
            raise ConfigError(
                f"loraplus_lr_ratio is {self.loraplus_lr_ratio!r} and {self.variant.field} is True: LoRA+ speeds up "
                f"B, which {self.variant.name} does not train. Remove one of them."
            )

    def for_network(self) -> LoraConfig:
        """Returns the configuration for apply_lora: a saved adapter is for the loaded base, not for a changed one."""
        return self.as_saved() if self.adapter_path else self


def read_pet_config(
    pet_config: Optional[Mapping[str, Any]], model_class: Optional[str] = None
) -> Tuple[Optional[PetLoraConfig], List[Finding]]:
    """Returns the configuration of a pet_config node, or None if it is invalid, and the findings.

    ``model_class`` is the class of the model.
    """
    if not pet_config:
        return None, [note(PET, "There is no pet_config: the whole network is trained, without LoRA.")]
    pet_type = pet_config.get("pet_type")
    if pet_type in MINDFORMERS_PET_TYPES:
        return None, [note(f"{PET}.pet_type", f"pet_type {pet_type} is MindFormers' own and was not checked.")]
    if pet_type not in PET_TYPES:
        hint = suggestion(str(pet_type), [*PET_TYPES, *MINDFORMERS_PET_TYPES])
        unknown = f"pet_type is {pet_type!r}, which is not known: MindFormers would train the whole network.{hint}"
        return None, [error(f"{PET}.pet_type", unknown)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lora = cast(PetLoraConfig, PetLoraConfig.from_pet_config(pet_config))
        except LoraError as refusal:
            return None, [error(_key_of(str(refusal), pet_config), str(refusal))]
    if task_of(model_class) is not None:
        lora.modules_to_save = with_score(lora.modules_to_save)
    messages = [str(each.message) for each in caught]
    return lora, [warning(_key_of(message, pet_config), message) for message in messages]


def _key_of(message: str, pet_config: Mapping[str, Any]) -> str:
    """Returns the full path of the key with which a message starts or which it calls unknown."""
    named = re.search("unknown key '(.*?)'", message) or re.match(r"(\w+)", message)
    keys = {*pet_config, *(field.name for field in dataclasses.fields(PetLoraConfig))}
    return f"{PET}.{named[1]}" if named and named[1] in keys else PET


def refuse_pet_config(pet_config: Mapping[str, Any]) -> None:
    """Raises ConfigError unless MindFormers, under its own launcher, can build ``pet_config``."""
    if pet_config.get("pet_type") == "qlora":
        refuse_qlora()
    refuse(read_pet_config(pet_config)[1])


def refuse_qlora(**_: object) -> None:
    """Raises ConfigError: MindFormers passes pet_type on to MindPet's freeze_delta, which does not know ``qlora``."""
    raise ConfigError(
        "pet_type is 'qlora', which only mindlora-run understands. For MindFormers' own launcher, write "
        "pet_type: lora and quantize_base: nf4."
    )
