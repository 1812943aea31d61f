"""Several adapters that learn from preferences under the PyNative Trainer: a loss for each, of rows at once."""

from typing import Dict, List, Mapping, Tuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindlora.training.held_out.whole_batches import filled_batches
from mindlora.training.preference.loss import SUMS, PreferenceLoss, preference_measures
from mindlora.training.several.step_of_adapter import HeldOutOfAdapters
from mindlora.training.several.train_step import of_each


class _Given(nn.Cell):
    """In the place of a network of PreferenceLoss: log-probabilities that have been computed already."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.given: Tuple[Tensor, ...] = ()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.given[0]


class PreferencesOfAdapters:
    """The losses of K adapters on preferences: PreferenceLoss of each adapter's rows.

    Args:
        preference (PreferenceLoss): The model's loss; its rows are those of all adapters, the first adapter's first.
        adapters (int): K.

    Attributes:
        settings (PreferenceSettings): The loss.
    """

    def __init__(self, preference: PreferenceLoss, adapters: int):
        self.network, self.reference = preference.network, preference.reference
        self.settings = preference.settings
        self.adapters = adapters
        self.loss = PreferenceLoss(_Given(), _Given() if self.reference is not None else None, self.settings)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tuple[List[Tensor], np.ndarray]:
        """Returns the sum of the losses of each adapter's examples, float32 [] each, and their SUMS, [K, len(SUMS)].

        Args:
            inputs (mapping): The columns of preferences, [K batch, ...], those of the first adapter first.
        """
        columns = [inputs[name] for name in self.settings.columns]
        width = columns[0].shape[-1]
        rows = [column.reshape((-1, width)) for column in columns[:2]]
        self._give(self.loss.network, self.network(*rows))
        if self.reference is not None:
            self._give(self.loss.reference, self.reference(*rows))
        batch = columns[0].shape[0] // self.adapters
        policy, reference = self.loss.network.given, getattr(self.loss.reference, "given", ())
        totals, sums = [], []
        for number in range(self.adapters):
            self.loss.network.given = policy[number:]
            if self.reference is not None:
                self.loss.reference.given = reference[number:]
            total, of_adapter = self.loss(*(column[number * batch : (number + 1) * batch] for column in columns))
            totals.append(total)
            sums.append(of_adapter.asnumpy())
        return totals, np.stack(sums)

    def _give(self, cell, log_probabilities):
        """Gives a cell the log-probabilities of each adapter."""
        cell.given = tuple(log_probabilities.reshape((self.adapters, -1)))


class HeldOutPreferencesOfAdapters(HeldOutOfAdapters):
    """HeldOutOfAdapters of preferences, whose ``rows`` and ``best`` have batches in the place of rows.

    Args:
        preferences (PreferencesOfAdapters): What computes the losses.
    """

    def __init__(self, preferences: PreferencesOfAdapters):
        super().__init__(None, preferences.adapters)
        self.preferences = preferences
        # Path of the data -> SUMS of each adapter.
        self.sums: Dict[str, np.ndarray] = {}

    def measures(self, adapter: int, dataset_dir: str, batch_size: int) -> Dict[str, float]:
        """Returns the mean loss of an adapter's examples, and MEASURES."""
        loss = self.loss(adapter, dataset_dir, batch_size)
        return {"loss": loss, **preference_measures(self.sums[dataset_dir][adapter], self.preferences.settings)}

    def _measure(self, dataset_dir, batch_size):
        columns = list(self.preferences.settings.columns)
        dataset = ms.dataset.MindDataset(dataset_dir, columns_list=columns, shuffle=False)
        losses, counts, sums = [], [], np.zeros((self.preferences.adapters, len(SUMS)))
        model = self.preferences.network
        model.set_train(False)
        # As in held_out_preferences.
        for _, inputs in filled_batches(dataset, batch_size, (None, None, -1, 0)):
            batch = {name: of_each(column, self.preferences.adapters, False) for name, column in zip(columns, inputs)}
            totals, of_batch = self.preferences(batch)
            losses.append([float(total.asnumpy()) for total in totals])
            counts.append(of_batch[0][0])
            sums += of_batch
        model.set_train(True)
        self.sums[dataset_dir] = sums
        return np.array(losses).T, np.array(counts)
