"""ReferenceCheck: compares the reference in the data with the initial network, before the first step."""

from typing import Sequence

import numpy as np
from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core.errors import DataError
from mindlora.data.mindrecord import first_rows
from mindlora.training.callbacks.common import register
from mindlora.training.model.network import base_of, train_step_of
from mindlora.training.preference.reference import reference_fingerprint
from mindlora.training.preference.settings import REFERENCE_FINGERPRINT


@register
class ReferenceCheck(Callback):
    """Refuses data whose log-probabilities come from a reference other than the run's initial network.

    mindlora-run adds it to a run with ``preference: {precomputed_reference: True}``.

    Args:
        files (sequence of str): The MindRecords of the run.
    """

    def __init__(self, files: Sequence[str]):
        super().__init__()
        self.files = list(files)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Compares the two references, before an adapter is initialized or a run is resumed.

        Raises DataError if they differ.
        """
        network = run_context.original_args().train_network
        # Under the PyNative Trainer, the network's fingerprint was taken earlier.
        found = getattr(train_step_of(network), "reference", None)
        if found is None:
            found = reference_fingerprint(base_of(network))
        for path in self.files:
            (row,) = first_rows(path, 1)
            if not np.array_equal(row[REFERENCE_FINGERPRINT], found):
                raise DataError(
                    f"{path} has log-probabilities of another reference: the base (load_checkpoint), adapter_path, "
                    "lora_init or what trains has changed since they were computed. Run mindlora reference again."
                )
