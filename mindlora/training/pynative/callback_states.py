"""What the PyNative Trainer's checkpoints lack, in a file beside each: callbacks' states, and more of the adapter."""

import os
from typing import Any, Dict, Iterator, List, Sequence

from mindspore import nn

from mindlora.core import atomic
from mindlora.core.errors import CheckpointError
from mindlora.core.formats import step_folder
from mindlora.core.json_files import parse_object, write_json
from mindlora.core.mindformers_version import require_mindformers
from mindlora.network.cells.cell import LoRACell
from mindlora.network.tree import lora_cells
from mindlora.training.resume.training_state import callback_states, restore_callbacks

require_mindformers("2.0")
from mindformers.pynative.callback import CheckpointCallback, TrainerCallback  # noqa: E402

# The fingerprint of the base before lora_init has changed it.
_BASE = "base_fingerprint"


class SavedWithStates(TrainerCallback):
    """MindFormers' callback that saves checkpoints, and then step_folder.RUN in their folders.

    Args:
        saver (CheckpointCallback): MindFormers'.
        callbacks (sequence): Those whose states are saved.
    """

    def __init__(self, saver: CheckpointCallback, callbacks: Sequence[Any]):
        self.saver = saver
        self.callbacks = callbacks

    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Makes the folder to save in."""
        self.saver.on_train_begin(args, state, **kwargs)

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Saves if it is due."""
        self.saver.on_step_end(args, state, **kwargs)
        self._complete(args, state.global_step, kwargs["model"])

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Saves the last step; raises CheckpointError if MindFormers could not, which it only logs."""
        self.saver.on_train_end(args, state, **kwargs)
        if not self._complete(args, state.global_step, kwargs["model"]):
            raise CheckpointError(
                f"MindFormers could not save step {state.global_step}, the last one, in {self.saver.save_path}: its "
                "log says why. Correct that, and train again from the last step that is there."
            )

    def _complete(self, args, step, model):
        """Adds to the folder of a step; returns whether it has been saved."""
        saved = self.saver.current_ckpt_step_list
        if not saved or os.path.basename(saved[-1]) != step_folder.name_of(step):
            return False
        config = args.to_dict()
        content = {name: config.get(name) for name in ("lora_config", "pet_config")}
        content[_BASE] = next((cell.initial_pair.fingerprint for cell in _changed_cells(model)), None)
        with atomic.replace_file(os.path.join(saved[-1], step_folder.RUN)) as path:
            write_json(path, {**content, "callbacks": callback_states(self.callbacks)})
        return True


def restore(load_path: str, callbacks: Sequence[Any]) -> List[str]:
    """Gives callbacks the states that were saved with a checkpoint, as checkpoint.load_path names it.

    Returns the names of the callbacks that have a state, but none there. Raises CheckpointError if the file is damaged.
    """
    return restore_callbacks(_read(load_path).get("callbacks") or {}, callbacks)


def restore_fingerprint(load_path: str, model: Sequence[nn.Cell]) -> None:
    """Lets the cells of a resumed model know which base it was that lora_init has changed.

    Raises CheckpointError if the file beside the checkpoint, which checkpoint.load_path names, is damaged.
    """
    fingerprint = _read(load_path).get(_BASE)
    for cell in _changed_cells(model):
        cell.initial_pair = cell.initial_pair._replace(fingerprint=fingerprint)


def _read(load_path: str) -> Dict[str, Any]:
    """Returns what was saved beside a checkpoint; empty if nothing was."""
    path = os.path.join(step_folder.last_step(load_path), step_folder.RUN) if load_path else ""
    if not os.path.isfile(path):
        return {}
    with open(path, "rb") as file:
        return parse_object(file.read(), path, CheckpointError)


def _changed_cells(model: Sequence[nn.Cell]) -> Iterator[LoRACell]:
    """Yields the cells of a model's stages whose weight is not the base's any more."""
    for stage in model:
        for _, cell in lora_cells(stage):
            if cell.initial_pair:
                yield cell
