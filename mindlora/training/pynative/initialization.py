"""Initial adapters under the PyNative Trainer, once the base is loaded: from a saved adapter, or from the base."""

from typing import Any, Optional, Sequence

import numpy as np
from mindspore import nn

from mindlora.core.mindformers_version import require_mindformers
from mindlora.network.initialize import initialize_adapters
from mindlora.network.save_load import load_lora
from mindlora.network.tree import lora_cells, mark_saved_module, saved_module_parameters
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.training.log import logger
from mindlora.training.preference.reference import reference_fingerprint
from mindlora.training.preference.settings import PreferenceSettings
from mindlora.training.pynative.checkpoints import restore_fingerprint, saved_reference

require_mindformers("2.0")
from mindformers.pynative.callback import TrainerCallback  # noqa: E402

_CONFIGURATION, _PREFERENCE, _REFERENCE = "mindlora_configuration", "mindlora_preference", "mindlora_reference"
_SAVED_MODULES = "mindlora_saved_modules"


def remember(model: nn.Cell, config: PetLoraConfig, preference: Optional[PreferenceSettings] = None) -> None:
    """Stores, with a model, its adapters' configuration and its preference settings, if any."""
    setattr(model, _CONFIGURATION, config)
    setattr(model, _PREFERENCE, preference)
    setattr(model, _SAVED_MODULES, {parameter.name for parameter in saved_module_parameters(model)})


def mark_saved_modules(model: nn.Cell) -> None:
    """Marks the parameters of modules_to_save again, which hyper_parallel has replaced in the meantime."""
    for parameter in model.get_parameters():
        if parameter.name in getattr(model, _SAVED_MODULES, ()):
            mark_saved_module(parameter)


def configuration_of(model: nn.Cell) -> Optional[PetLoraConfig]:
    """Returns the configuration of a model's adapters, or None if mindlora has put none on it."""
    return getattr(model, _CONFIGURATION, None)


def preference_of(model: nn.Cell) -> Optional[PreferenceSettings]:
    """Returns a model's preference settings, or None if it learns labels."""
    return getattr(model, _PREFERENCE, None)


def reference_of(model: nn.Cell) -> Optional[np.ndarray]:
    """Returns the reference's fingerprint of a model in training, int32 [8]; None if the data has none."""
    return getattr(model, _REFERENCE, None)


class Initialization(TrainerCallback):
    """Loads pet_config.adapter_path, or carries out a lora_init that needs the base, at the start of a new run.

    A resumed run has the values of its checkpoint: A and B, the changed base, and the initial pairs.
    """

    def on_train_begin(
        self, args: Any, state: Any, model: Sequence[nn.Cell] = (), optimizer: Optional[nn.Optimizer] = None, **_: Any
    ) -> None:
        """Sets the values of A and B in a run that is not resumed."""
        adapted = [stage for stage in model if configuration_of(stage)]
        if not adapted or optimizer is None:
            return
        if state.global_step:
            logger.info("The run goes on after step %d, with the adapter of its checkpoint.", state.global_step)
            restore_fingerprint(args.checkpoint.load_path, adapted)
            _remember_reference(adapted, lambda stage: saved_reference(args.checkpoint.load_path))
            return
        for stage in adapted:
            config = configuration_of(stage)
            if config.adapter_path:
                load_lora(stage, config.adapter_path, on_base_mismatch=config.on_base_mismatch)
                logger.info("Adapter loaded from %s.", config.adapter_path)
        _remember_reference(adapted, reference_fingerprint)
        for stage in adapted:
            initialize_adapters(stage)
            for _, cell in lora_cells(stage):
                cell.prepare()
        # The optimizer has float32 copies of the former values of parameters with fewer bits.
        optimizer.reload_main_params_from_model()


def _remember_reference(model, fingerprint_of):
    """Stores the reference's fingerprint with a model that learns from preferences, if the reference is in the data."""
    for stage in model:
        settings = preference_of(stage)
        if settings is not None and settings.precomputed_reference:
            setattr(stage, _REFERENCE, fingerprint_of(stage))
