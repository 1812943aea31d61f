"""Makes MindFormers build mindlora's LoRA where a YAML says ``pet_type: lora``."""

from mindformers.pet import pet_model
from mindformers.pet.models.lora import LoraModel
from mindspore import nn

from mindlora.apply import apply_lora, freeze_base, trainable_summary
from mindlora.errors import ConfigError
from mindlora.nn.noisy_embedding import add_embedding_noise
from mindlora.nn.tree import saved_module_parameters
from mindlora.plugin.log import logger
from mindlora.plugin.pet_config import PET_TYPE, PetLoraConfig, refuse_qlora
from mindlora.save_load import load_lora


class MindloraModel(LoraModel):
    """MindFormers' wrapper around a base model, with mindlora's adapters instead of MindFormers' own.

    Args:
        config (PetLoraConfig): The pet_config node.
        base_model (PreTrainedModel): Any MindFormers model of Linear or nn.Dense cells.
    """

    def _check_config(self):
        """Does nothing: PetLoraConfig has been validated already."""

    def add_adapter(self, base_model: nn.Cell) -> nn.Cell:
        """Puts LoRA on ``base_model``, freezes the rest, and loads adapter_path if there is one.

        Args:
            base_model (nn.Cell): The model, changed in place.

        Returns:
            nn.Cell, base_model.

        Raises:
            ConfigError: loraplus_lr_ratio is set, which only mindlora-run can carry out.
            LoraError: As in apply_lora, freeze_base and load_lora.
        """
        config = self.config.pet_config
        if config.loraplus_lr_ratio is not None:
            raise ConfigError(
                "loraplus_lr_ratio is a key that only mindlora-run turns into learning rates. Under another "
                "launcher, write grouped_lr_schedule (docs/finetune.md)."
            )
        # A saved adapter belongs to the base as it is loaded, whatever initialization it was trained from.
        apply_lora(base_model, config.as_saved() if config.adapter_path else config)
        freeze_base(base_model, config)
        # MindFormers freezes again, by MindPet's names and by freeze_exclude, whose paths start at its own wrapper.
        # It leaves parameters with mindpet_delta_lora in their names alone, so LoRA-FA's A stays frozen.
        saved = [f"*.{parameter.name}" for parameter in saved_module_parameters(base_model)]
        config.freeze_exclude = [*(config.freeze_exclude or ()), *saved] or None
        if config.adapter_path:
            load_lora(base_model, config.adapter_path)
            logger.info("Adapter loaded from %s.", config.adapter_path)
        if config.neftune_alpha is not None:
            add_embedding_noise(base_model, config.neftune_alpha)
        logger.info("LoRA by mindlora:\n%s", trainable_summary(base_model))
        return base_model

    def save_pet_config(self, save_path: str) -> None:
        """Writes nothing: LoraCheckpoint writes adapter_config.json together with the weights it describes."""


def register() -> None:
    """Enters mindlora's classes for ``pet_type: lora`` into MindFormers' two maps, and makes ``qlora`` an error."""
    pet_model.PET_TYPE_TO_MODEL_MAPPING[PET_TYPE] = MindloraModel
    pet_model.PET_TYPE_TO_CONFIG_MAPPING[PET_TYPE] = lambda **keys: PetLoraConfig.from_pet_config(keys)
    # For a pet_type in neither map, MindFormers would train the whole network.
    pet_model.PET_TYPE_TO_MODEL_MAPPING["qlora"] = MindloraModel
    pet_model.PET_TYPE_TO_CONFIG_MAPPING["qlora"] = refuse_qlora
