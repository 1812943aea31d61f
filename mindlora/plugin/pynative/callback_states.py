"""What callbacks know, beside each checkpoint of MindFormers' PyNative Trainer: its own hold nothing of them."""

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

STATES = "mindlora_callbacks.json"


class SavedWithStates(TrainerCallback):
    """MindFormers' callback that saves checkpoints, and then what other callbacks know.

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
        self._save_states(state.global_step)

    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Saves the last step."""
        self.saver.on_train_end(args, state, **kwargs)
        self._save_states(state.global_step)

    def _save_states(self, step):
        """Writes the states into the folder of a step, if it has been saved."""
        saved = self.saver.current_ckpt_step_list
        states = callback_states(self.callbacks)
        if states and saved and os.path.basename(saved[-1]) == step_folder.name_of(step):
            with atomic.replace_file(os.path.join(saved[-1], STATES)) as path:
                write_json(path, states)


def restore(load_path: str, callbacks: Sequence[Any]) -> List[str]:
    """Gives callbacks the states that were saved with a checkpoint, as checkpoint.load_path names it.

    Returns the names of the callbacks that have a state, but none there. Raises CheckpointError if the file is damaged.
    """
    path = os.path.join(step_folder.last_step(load_path), STATES) if load_path else ""
    states = {}
    if os.path.isfile(path):
        with open(path, "rb") as file:
            states = parse_object(file.read(), path, CheckpointError)
    return restore_callbacks(states, callbacks)
