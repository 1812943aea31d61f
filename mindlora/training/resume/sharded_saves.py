"""How LoraCheckpoint saves in a sharded run: the slices of all ranks joined, or written as they are."""

import contextlib
import os
import shutil
from typing import Dict, Optional

import numpy as np
from mindformers.tools.utils import get_real_rank
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import BackendError
from mindlora.training.log import logger
from mindlora.training.model.network import base_of
from mindlora.training.resume import collectives, sharded_adapter, training_state


class ShardedSaves:
    """Joins the slices of a sharded run's adapter, or writes them; slices of the last ``keep_last`` steps are kept."""

    def __init__(self, directory: str, keep_last: int):
        self.folder = os.path.join(directory, training_state.SLICES)
        self.keep_last = keep_last

    def applies_to(self, params: InternalCallbackParam) -> bool:
        """Returns whether the run is sharded."""
        return sharded_adapter.is_sharded(base_of(params.train_network), params.train_network.parameter_layout_dict)

    def metric(self, value: Optional[float]) -> Optional[float]:
        """Returns what the last rank measured: in a pipeline, only the last stage knows the loss.

        All ranks must call this. Where they cannot talk to each other, nothing is known: None.
        """
        try:
            agreed = collectives.value_of(-1, float("nan") if value is None else value)
        except BackendError:
            return None
        return None if value is None else agreed

    def rank_0_says(self, answer: bool) -> bool:
        """Returns the answer of rank 0, on all ranks; False where they cannot talk to each other."""
        try:
            return bool(collectives.value_of(0, float(answer)))
        except BackendError:
            return False

    def gather(self, params: InternalCallbackParam) -> Optional[Dict[str, np.ndarray]]:
        """Returns the whole tensors of the adapter; or writes this rank's slices and returns None.

        All ranks must call this. Raises LoraError if the slices do not make up the tensors, or are of different steps.
        """
        network = base_of(params.train_network)
        layouts = params.train_network.parameter_layout_dict
        try:
            return sharded_adapter.gather(network, layouts, params.cur_step_num)
        except BackendError as error:
            folder = os.path.join(self.folder, f"{training_state.STEP_PREFIX}{params.cur_step_num}")
            sharded_adapter.write_slices(folder, network, layouts, f"{params.cur_epoch_num}_{params.cur_step_num}")
            if get_real_rank() == 0:
                joined = os.path.join(os.path.dirname(self.folder), os.path.basename(folder))
                where = "" if os.path.isdir(os.path.join(folder, "strategy")) else " --strategy OUTPUT/strategy"
                logger.warning(
                    "The slices of step %d were written as they are, because %s. Join them after the run: "
                    "mindlora adapter gather %s%s --output %s",
                    params.cur_step_num,
                    error,
                    folder,
                    where,
                    joined,
                )
            self._remove_old()
            return None

    def _remove_old(self):
        """Removes what this rank wrote at steps that are not kept."""
        for old in training_state.step_folders(self.folder)[: -self.keep_last]:
            shutil.rmtree(os.path.join(old, f"rank_{get_real_rank()}"), ignore_errors=True)
            # Where ranks share a disk, another one may have removed the rest.
            with contextlib.suppress(FileNotFoundError):
                if not any(name.startswith("rank_") for name in os.listdir(old)):
                    shutil.rmtree(old, ignore_errors=True)
