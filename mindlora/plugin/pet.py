"""Makes MindFormers build mindlora's LoRA where a YAML says ``pet_type: lora``."""

import dataclasses
from typing import ClassVar, Optional

from mindformers.pet import pet_model
from mindformers.pet.models.lora import LoraModel
from mindspore import nn

from mindlora.apply import apply_lora, freeze_base, trainable_summary
from mindlora.config import LoraConfig, check_ratio
from mindlora.errors import ConfigError
from mindlora.nn.tree import saved_module_parameters
from mindlora.plugin.log import logger
from mindlora.save_load import load_lora

PET_TYPE = "lora"


class MindloraModel(LoraModel):
    """MindFormers' wrapper around a base model with LoRA, whose adapters are mindlora's.

    Args:
        config (PetLoraConfig): The pet_config node.
        base_model (PreTrainedModel): Any MindFormers model of Linear or nn.Dense cells.
    """

    def _check_config(self):
        """Nothing is left to check: PetLoraConfig has been validated."""

    def add_adapter(self, base_model: nn.Cell) -> nn.Cell:
        config = self.config.pet_config
        if config.loraplus_lr_ratio is not None:
            raise ConfigError(
                "loraplus_lr_ratio is a key that mindlora-run turns into learning rates. Under another "
                "launcher, write grouped_lr_schedule (docs/finetune.md)."
            )
        # A saved adapter fits the base as it is loaded, whatever start it was trained from.
        apply_lora(base_model, config.as_saved() if config.adapter_path else config)
        freeze_base(base_model, config)
        # MindFormers freezes once more, by MindPet's names and by this list, which is of paths in its own wrapper.
        # What has mindpet_delta_lora in its name stays as it is, an A of LoRA-FA's frozen.
        whole = [f"*.{parameter.name}" for parameter in saved_module_parameters(base_model)]
        config.freeze_exclude = [*(config.freeze_exclude or ()), *whole] or None
        if config.adapter_path:
            load_lora(base_model, config.adapter_path)
            logger.info("Adapter loaded from %s.", config.adapter_path)
        logger.info("LoRA by mindlora:\n%s", trainable_summary(base_model))
        return base_model

    def save_pet_config(self, save_path: str):
        """Writes nothing: an adapter_config.json without its weights is no adapter. LoraCheckpoint writes both."""


@dataclasses.dataclass
class PetLoraConfig(LoraConfig):
    """LoraConfig as a pet_config node gives it, with the adapter to start from.

    Args:
        adapter_path (str): An adapter that is loaded when the network is built: to train on, to evaluate or to
            predict with it. It takes the place of lora_init. Default: None.
        loraplus_lr_ratio (float): How many times as fast as A B learns (Hayou et al., LoRA+, 2024); at least 1.
            mindlora-run turns it into grouped learning rates. Default: None, B learns as A does.
    """

    # MindFormers asks for it when it generates.
    pet_type: ClassVar[str] = PET_TYPE
    adapter_path: Optional[str] = None
    loraplus_lr_ratio: Optional[float] = None

    def __post_init__(self):
        super().__post_init__()
        if self.loraplus_lr_ratio is not None:
            check_ratio(self.loraplus_lr_ratio, "loraplus_lr_ratio")
            if self.use_vera:
                raise ConfigError(
                    f"use_vera is True and loraplus_lr_ratio {self.loraplus_lr_ratio!r}, which is for "
                    "the B that VeRA does not train. Leave one of them out."
                )


def register():
    """Takes over ``pet_type: lora`` in MindFormers' two maps of PET types, and refuses a ``qlora`` left in it."""
    pet_model.PET_TYPE_TO_MODEL_MAPPING[PET_TYPE] = MindloraModel
    pet_model.PET_TYPE_TO_CONFIG_MAPPING[PET_TYPE] = lambda **keys: PetLoraConfig.from_pet_config(keys)
    # What is in neither map MindFormers would train whole.
    pet_model.PET_TYPE_TO_MODEL_MAPPING["qlora"] = MindloraModel
    pet_model.PET_TYPE_TO_CONFIG_MAPPING["qlora"] = refuse_qlora


def refuse_qlora(**_):
    """Raises ConfigError: MindFormers hands pet_type on to MindPet's freeze_delta, which knows no ``qlora``."""
    raise ConfigError(
        "pet_type is 'qlora', which mindlora-run alone takes; MindFormers' own launcher does not. Write "
        "pet_type: lora and quantize_base: nf4."
    )
