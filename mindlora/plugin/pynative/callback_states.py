"""What the PyNative Trainer's checkpoints lack, in a file beside each: callbacks' states, the adapter's settings."""

import os
from typing import Any, List, Sequence

from mindlora.common import atomic
from mindlora.common.json_files import parse_object, write_json
from mindlora.common.mindformers_version import require_mindformers
from mindlora.errors import CheckpointError
from mindlora.formats import step_folder
from mindlora.plugin.resume.training_state import callback_states, restore_callbacks

require_mindformers("2.0")
from mindformers.pynative.callback import CheckpointCallback, TrainerCallback  # noqa: E402


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
        self._complete(args, state.global_step)

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Saves the last step; raises CheckpointError if MindFormers could not, which it only logs."""
        self.saver.on_train_end(args, state, **kwargs)
        if not self._complete(args, state.global_step):
            raise CheckpointError(
                f"MindFormers could not save step {state.global_step}, the last one, in {self.saver.save_path}: its "
                "log says why. Correct that, and train again from the last step that is there."
            )

    def _complete(self, args, step):
        """Adds to the folder of a step; returns whether it has been saved."""
        saved = self.saver.current_ckpt_step_list
        if not saved or os.path.basename(saved[-1]) != step_folder.name_of(step):
            return False
        config = args.to_dict()
        content = {name: config.get(name) for name in ("lora_config", "pet_config")}
        with atomic.replace_file(os.path.join(saved[-1], step_folder.RUN)) as path:
            write_json(path, {**content, "callbacks": callback_states(self.callbacks)})
        return True


def restore(load_path: str, callbacks: Sequence[Any]) -> List[str]:
    """Gives callbacks the states that were saved with a checkpoint, as checkpoint.load_path names it.

    Returns the names of the callbacks that have a state, but none there. Raises CheckpointError if the file is damaged.
    """
    path = os.path.join(step_folder.last_step(load_path), step_folder.RUN) if load_path else ""
    states = {}
    if os.path.isfile(path):
        with open(path, "rb") as file:
            states = parse_object(file.read(), path, CheckpointError).get("callbacks") or {}
    return restore_callbacks(states, callbacks)
