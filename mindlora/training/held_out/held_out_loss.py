"""HeldOutLoss: the loss on held-out data, measured while training."""

import math
import os
from typing import Any, Dict, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import RunContext

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number, ignore_token_id
from mindlora.network.cells.score import score_of
from mindlora.training.callbacks.common import PeriodicCallback, register, reported_metrics
from mindlora.training.classifier.labels import label_measures
from mindlora.training.held_out.cells import HeldOutLabelsCell, HeldOutLossCell
from mindlora.training.held_out.rows import Arrays, filled_batches, labeled_batches, loaded_rows, parts_of_batch
from mindlora.training.log import logger
from mindlora.training.model.network import base_of, train_step_of
from mindlora.training.preference.loss import SUMS, PreferenceLoss, preference_measures
from mindlora.training.report.history import HELD_OUT_FIELDS
from mindlora.training.resume.collectives import mean_over_ranks
from mindlora.training.several.step_of_adapter import StepOfAdapter
from mindlora.training.step.packing import check_held_out


@register
class HeldOutLoss(PeriodicCallback):
    """Measures the loss on held-out data while training and reports it as the metric ``held_out_loss``.

    The loss is the mean cross entropy, or the preference loss if the run learns from preferences, which also reports
    ``held_out_reward_accuracy`` and the other MEASURES (see docs/preferences.md). A classifier also reports
    ``held_out_accuracy`` and ``held_out_f1`` (see label_measures).

    The metric is reported only at the steps at which it is measured. LoraCheckpoint can use it if the YAML lists
    LoraCheckpoint after this callback.

    Args:
        dataset_dir (str): MindRecord with int32 columns input_ids and labels, or with the columns of preferences.
        every_steps (int): Steps between measurements; the last step is measured too. Default: 100.
        batch_size (int): Rows of a batch. Default: 8.
        data_loader (dict): Instead of dataset_dir, a loader of MindFormers as in train_dataset.data_loader, such as an
            HFDataLoader of a held-out file. Only for the loss of a language model. Default: None.

    Raises:
        ConfigError: An argument is out of range, or the file does not exist.
    """

    def __init__(
        self,
        dataset_dir: Optional[str] = None,
        every_steps: int = 100,
        batch_size: int = 8,
        data_loader: Optional[Dict[str, Any]] = None,
    ):
        super().__init__("every_steps", every_steps)
        check_number(batch_size, "batch_size", COUNT)
        if (dataset_dir is None) == (data_loader is None):
            raise ConfigError(
                f"HeldOutLoss has {'neither' if dataset_dir is None else 'both'} of dataset_dir, a MindRecord, and "
                "data_loader, a node like train_dataset.data_loader: give it one of them."
            )
        if dataset_dir is not None and not os.path.exists(dataset_dir):
            raise ConfigError(f"dataset_dir is {dataset_dir}, which does not exist: name a MindRecord.")
        self.dataset_dir = dataset_dir
        self.data_loader = data_loader
        self.data: Union[None, str, Arrays] = dataset_dir
        self.batch_size = batch_size
        self.cell = None

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that the network keeps the examples of packed rows apart, and reads the rows of data_loader."""
        network = run_context.original_args().train_network
        if self.dataset_dir is not None:
            check_held_out(network, self.dataset_dir)
            return
        if isinstance(self.make_cell(network), (StepOfAdapter, PreferenceLoss, HeldOutLabelsCell)):
            raise ConfigError(
                "HeldOutLoss has a data_loader, which is for the loss of a language model that trains alone: give it a "
                "MindRecord, as dataset_dir."
            )
        # MindFormers' loaders need the context of the run, which exists by now.
        self.data = loaded_rows(self.data_loader)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Measures the loss if a measurement is due."""
        params = run_context.original_args()
        step = params.cur_step_num
        results = reported_metrics(params)
        for name in HELD_OUT_FIELDS:
            results.pop(name, None)
        if self.is_due(params):
            if self.cell is None:
                self.cell = self.make_cell(params.train_network)
            measured = self.measure()
            params.train_network.set_train(True)
            logger.info("step %d: %s", step, ", ".join(f"{name} {value:.6f}" for name, value in measured.items()))
            results.update(measured)
        params["eval_results"] = results
        self.step_before = step

    def measure(self) -> Dict[str, float]:
        """Returns the metrics, the same on every rank."""
        if isinstance(self.cell, StepOfAdapter):
            measures = self.cell.held_out(self.dataset_dir, self.batch_size)
        elif isinstance(self.cell, PreferenceLoss):
            measures = held_out_preferences(self.cell, self.dataset_dir, self.batch_size)
        elif isinstance(self.cell, HeldOutLabelsCell):
            measures = held_out_labels(self.cell, self.dataset_dir, self.batch_size)
        else:
            measures = {"loss": held_out_loss(self.cell, self.data, self.batch_size)}
        # The ranks decide by the metrics, so these must be the same on all ranks.
        return {f"held_out_{name}": mean_over_ranks(value) for name, value in measures.items()}

    def make_cell(self, train_network: nn.Cell) -> nn.Cell:
        """Returns a cell that computes the loss of a batch, such as a HeldOutLossCell or a PreferenceLoss.

        For one of several adapters, the cell is the train step, which measures all adapters at once.
        """
        step = train_step_of(train_network)
        if isinstance(step, StepOfAdapter):
            return step
        if getattr(step, "learns_preferences", False):
            return step.token_gradients.network
        network = base_of(train_network)
        score = score_of(network)
        if score is not None:
            return HeldOutLabelsCell(network, ignore_token_id(network.config), score.num_labels)
        return HeldOutLossCell(network, ignore_token_id(network.config))


def held_out_loss(cell: HeldOutLossCell, data: Union[str, Arrays], batch_size: int) -> float:
    """Returns the mean cross entropy, in nats per label, over data for labeled_batches; NaN if no label counts.

    The rows must be in the form that HeldOutLossCell takes.
    """
    was_training = cell.network.training
    cell.set_train(False)
    total = count = 0.0
    parts = parts_of_batch(cell.network)
    for _, input_ids, labels in labeled_batches(data, batch_size, cell.ignore_token_id, parts):
        batch_total, batch_count = cell(input_ids, labels)
        total, count = total + float(batch_total.asnumpy()), count + float(batch_count.asnumpy())
    cell.set_train(was_training)
    return _mean(total, count)


def held_out_labels(cell: HeldOutLabelsCell, dataset_dir: str, batch_size: int) -> Dict[str, float]:
    """Returns the mean cross entropy of the labels of a MindRecord, as ``loss``, and label_measures."""
    was_training = cell.network.training
    cell.set_train(False)
    total, confusion = 0.0, np.zeros((cell.num_labels, cell.num_labels))
    parts = parts_of_batch(cell.network)
    for _, input_ids, labels in labeled_batches(dataset_dir, batch_size, cell.ignore_token_id, parts):
        batch_total, _, counts = cell(input_ids, labels)
        total, confusion = total + float(batch_total.asnumpy()), confusion + counts.asnumpy()
    cell.set_train(was_training)
    return {"loss": _mean(total, confusion.sum()), **label_measures(confusion)}


def held_out_preferences(cell: PreferenceLoss, dataset_dir: str, batch_size: int) -> Dict[str, float]:
    """Returns the mean loss of the examples of a MindRecord, as ``loss``, and MEASURES.

    KTO's distance from the reference is estimated for each batch.
    """
    columns = list(cell.settings.columns)
    dataset = ms.dataset.MindDataset(dataset_dir, columns_list=columns, shuffle=False)
    total, sums = 0.0, np.zeros(len(SUMS))
    was_training = cell.network.training
    cell.set_train(False)
    # Answers and marks of a filler row without an example; its tokens, labels and reference values are copied from any
    # row.
    absent = (None, None, -1, 0, None)
    for _, inputs in filled_batches(dataset, batch_size, absent[: len(columns)]):
        batch_total, batch_sums = cell(*inputs)
        total, sums = total + float(batch_total.asnumpy()), sums + batch_sums.asnumpy()
    cell.set_train(was_training)
    return {"loss": _mean(total, sums[0]), **preference_measures(sums, cell.settings)}


def _mean(total: float, count: float) -> float:
    # A loss over no examples must not be the best of a run.
    return total / count if count else math.nan
