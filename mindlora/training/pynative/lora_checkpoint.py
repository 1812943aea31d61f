"""LoraCheckpoint under the PyNative Trainer: saves the adapter while training, as PEFT reads it."""

import os
from typing import Any, Optional, Sequence

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import nn
from mindspore.mint.distributed import get_world_size

from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number
from mindlora.core.mindformers_version import require_mindformers
from mindlora.network.save_load import save_lora
from mindlora.training.log import logger
from mindlora.training.resume import training_state

require_mindformers("2.0")
from mindformers.pynative.callback import TrainerCallback  # noqa: E402


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class LoraCheckpoint(TrainerCallback):
    """Saves the adapter without the base while training: every save_steps steps and at the end.

    ``directory`` gets a folder step_N for each, as PEFT writes it. What an earlier run saved there after the step at
    which this run starts is moved into earlier_run_1, earlier_run_2 and so on. A run is resumed from MindFormers' own
    checkpoints (checkpoint.load_path), which hold the optimizer too.

    Args:
        save_steps (int): Steps between saves. Default: 100.
        directory (str): Folder to write to. Default: None, lora_checkpoint in the output folder of MindFormers.
        keep_last (int): How many step folders to keep. Default: 3.

    Raises:
        ConfigError: An argument is out of range or for graph mode alone, or the run has several processes.
    """

    def __init__(self, save_steps: int = 100, directory: Optional[str] = None, keep_last: int = 3, **others: Any):
        for name, value in (("save_steps", save_steps), ("keep_last", keep_last)):
            check_number(value, name, COUNT)
        if others:
            raise ConfigError(
                f"LoraCheckpoint: {', '.join(others)} cannot be set under the PyNative Trainer, where it takes "
                "save_steps, directory and keep_last. To resume, set checkpoint.load_path."
            )
        self.save_steps, self.keep_last = save_steps, keep_last
        self.directory = training_state.checkpoint_directory(directory)
        self.last_saved = None

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Sets earlier saves aside."""
        if get_world_size() > 1:
            raise ConfigError(
                f"LoraCheckpoint saves in one process, and this run has {get_world_size()}, each with slices of the "
                "adapter. Remove it from callbacks: MindFormers' own checkpoints hold the adapter."
            )
        training_state.set_aside(self.directory, state.global_step)

    def on_step_end(self, args: Any, state: Any, model: Sequence[nn.Cell] = (), **kwargs: Any) -> None:
        """Saves if it is due."""
        if state.global_step % self.save_steps == 0:
            self._save(args, state.global_step, model)

    def on_train_end(self, args: Any, state: Any, model: Sequence[nn.Cell] = (), **kwargs: Any) -> None:
        """Saves the last step, if it has not been saved."""
        if state.global_step != self.last_saved:
            self._save(args, state.global_step, model)

    def _save(self, args, step, model):
        folder = os.path.join(self.directory, f"{training_state.STEP_PREFIX}{step}")
        pet_config = getattr(args, "pet_config", None)
        save_lora(model[0], folder, base_model=getattr(pet_config, "base_model_name_or_path", None))
        self.last_saved = step
        logger.info("Adapter of step %d saved in %s.", step, folder)
        for old in training_state.step_folders(self.directory)[: -self.keep_last]:
            atomic.remove_folder(old)
