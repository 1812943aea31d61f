"""StepOfAdapter: one adapter of a stack, with the interface of a train step for callbacks; its held-out loss."""

import math
from typing import Any, Dict, Iterator, Optional, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.network.graph_cache import CompiledOnce
from mindlora.training.held_out.cells import HeldOutLossCell
from mindlora.training.held_out.rows import labeled_batches
from mindlora.training.several.stack import AdapterStack, Slice, pull, push
from mindlora.training.several.train_step import RowsOfAdapters, UpdatesOfAdapters
from mindlora.training.step.train_step import StepRecord

# Prefixes of an optimizer's parameter names: both moments, and float32 copies of 16-bit weights.
_BESIDE_WEIGHTS = ("adam_m", "adam_v", "main_param")


class HeldOutRows(CompiledOnce):
    """The held-out loss of each row under each of K adapters.

    Args:
        cell (HeldOutLossCell): The loss of the network with the adapters, with ``by_row``.
        adapters (int): K.

    Inputs:
        - **input_ids**, **labels** (Tensor) - int32 [rows, N + 1], as for HeldOutLossCell.

    Outputs:
        Tuple of two tensors float32 [K, rows]: the sum of each row's losses, and the number of labels that count in it.
    """

    def __init__(self, cell: HeldOutLossCell, adapters: int):
        super().__init__(auto_prefix=False)
        self.ignore_token_id = cell.ignore_token_id
        self.network = RowsOfAdapters(cell, adapters)
        self.adapters = adapters

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        losses, counts = self.network(input_ids, labels)
        return losses.reshape((self.adapters, -1)), counts.reshape((self.adapters, -1))


class HeldOutOfAdapters:
    """The held-out losses of all adapters, measured when one of them is requested, once per step.

    Args:
        cell, adapters: As for HeldOutRows; None where a subclass measures otherwise.

    Attributes:
        rows (dict): Path of the data -> (losses [K, rows], counts [rows]) of its rows, measured in this step.
        best (dict): Path of the data -> adapter -> (losses [rows], counts [rows], step) at its smallest loss. For
            prompts, the losses are negated rewards.
    """

    def __init__(self, cell: Optional[HeldOutLossCell], adapters: int):
        self.cell = None if cell is None else HeldOutRows(cell, adapters)
        self.rows: Dict[str, Tuple[np.ndarray, np.ndarray]] = {}
        self.best: Dict[str, Dict[int, Tuple[np.ndarray, np.ndarray, int]]] = {}
        self.step = 0

    def begin(self, step: int) -> None:
        """Begins a step: later requests are measured again."""
        self.rows = {}
        self.step = step

    def loss(self, adapter: int, dataset_dir: str, batch_size: int) -> float:
        """Returns the mean loss, in nats per label, of an adapter on a MindRecord; NaN if no label counts."""
        if dataset_dir not in self.rows:
            self.rows[dataset_dir] = self._measure(dataset_dir, batch_size)
        losses, counts = self.rows[dataset_dir]
        if not counts.sum():
            return math.nan
        self.keep(adapter, dataset_dir, losses[adapter], counts)
        return float(losses[adapter].sum() / counts.sum())

    def measures(self, adapter: int, dataset_dir: str, batch_size: int) -> Dict[str, float]:
        """Returns the mean loss as "loss", and what else is measured with it."""
        return {"loss": self.loss(adapter, dataset_dir, batch_size)}

    def keep(self, adapter: int, path: str, losses: np.ndarray, counts: np.ndarray) -> None:
        """Keeps an adapter's measurements in this step, if its loss has not been smaller on the same data."""
        best = self.best.setdefault(path, {})
        if adapter not in best or losses.sum() < best[adapter][0].sum():
            best[adapter] = losses, counts, self.step

    def state_of(self, adapter: int) -> Dict[str, Any]:
        """Returns an adapter's state for a resumed run, as JSON values: path of the data -> its part of ``best``."""
        best = {path: each[adapter] for path, each in self.best.items() if adapter in each}
        return {path: [losses.tolist(), counts.tolist(), step] for path, (losses, counts, step) in best.items()}

    def restore(self, adapter: int, state: Dict[str, Any]) -> None:
        """Restores what ``state_of`` returned."""
        for path, (losses, counts, step) in state.items():
            self.best.setdefault(path, {})[adapter] = np.array(losses), np.array(counts), step

    def _measure(self, dataset_dir, batch_size):
        losses, counts = [], []
        self.cell.set_train(False)
        for rows, input_ids, labels in labeled_batches(dataset_dir, batch_size, self.cell.ignore_token_id):
            sums = self.cell(input_ids, labels)
            losses.append(sums[0].asnumpy()[:, :rows].astype(np.float64))
            counts.append(sums[1].asnumpy()[0, :rows].astype(np.float64))
        self.cell.set_train(True)
        return np.concatenate(losses, 1), np.concatenate(counts)


class StepOfAdapter(nn.Cell):
    """The train step's interface for callbacks, for one of several adapters.

    Its parameters have the names and shapes of a run with only this adapter, so it is saved as in such a run. They hold
    the adapter's state between collect_state and distribute_state.

    Args:
        stack (AdapterStack): The adapters of the run.
        step (UpdatesOfAdapters): Takes the steps of all adapters.
        number (int): The adapter's number.
        held_out (HeldOutOfAdapters): Measures the adapters' held-out losses.

    Attributes:
        network (Cell): The adapter's own network.
        rate_factors (dict): The factors of the learning rate: source -> value.
    """

    is_mindformers_step = False
    loss_scaling_manager = exchange = None
    learns_preferences = False

    def __init__(self, stack: AdapterStack, step: UpdatesOfAdapters, number: int, held_out: HeldOutOfAdapters):
        super().__init__(auto_prefix=False)
        self.network = stack.networks[number]
        self.number = number
        self.rate_factors: Dict[str, float] = {}
        self.scale_sense = None
        if step.scale_sense is not None:
            self.scale_sense = Parameter(Tensor(step.scale_sense, mstype.float32), "scale_sense", requires_grad=False)
        optimizer = step.optimizer
        self.global_step = Parameter(Tensor([0], mstype.int32), "global_step", requires_grad=False)
        weights = stack.slices(number)
        kept = {p.name: p for p in (*optimizer.exp_avg, *optimizer.exp_avg_sq, *optimizer.weights)}
        beside = []
        for prefix in _BESIDE_WEIGHTS:
            beside += [_beside(kept, prefix, weight) for weight in weights if _name(prefix, weight.stacked) in kept]
        self.moments = tuple(each.own for each in beside)
        self.slices = [*weights, *beside, Slice(optimizer.global_step, number, self.global_step)]
        # Not child cells: this cell's parameters are only the adapter's.
        self._all = (step, held_out)

    def collect_state(self) -> None:
        """Copies the adapter's current parameters from the stack."""
        pull(self.slices)

    def distribute_state(self) -> None:
        """Copies the adapter's parameters back to the stack."""
        push(self.slices)

    def get_parameters(self, expand: bool = True) -> Iterator[Parameter]:
        """As for a cell, with the optimizer's state of the weights."""
        yield from super().get_parameters(expand)
        yield from self.moments

    def last_record(self) -> StepRecord:
        """Returns the adapter's measurements in the last step."""
        return self._all[0].record_of(self.number)

    def set_limits(self, loss: float, gradient_norm: float) -> None:
        """Sets the loss and the gradient norm before clipping above which a step is skipped; infinity for no limit."""
        self._all[0].set_limits(self.number, loss, gradient_norm)

    def set_rate_factor(self, source: str, value: float) -> None:
        """Sets the learning-rate factor of ``source``; the product of all sources' factors applies."""
        self.rate_factors[source] = float(value)
        self._all[0].set_rate_factor(self.number, math.prod(self.rate_factors.values()))

    @property
    def policies(self) -> Any:
        """The policies of a run that learns from rewards; this adapter's policy has the adapter's number."""
        return self._all[0].policies

    def stop(self) -> None:
        """Stops the adapter's learning."""
        self._all[0].stop(self.number)

    def held_out(self, dataset_dir: str, batch_size: int) -> Dict[str, float]:
        """Returns the adapter's mean loss on a MindRecord, "loss", and what is measured with it, for all at once."""
        return self._all[1].measures(self.number, dataset_dir, batch_size)


def _beside(kept, prefix, weight):
    """Returns the slice of a weight's optimizer state, corresponding to the weight's slice."""
    zeros = Tensor(np.zeros(weight.own.shape, np.float32))
    own = Parameter(zeros, _name(prefix, weight.own), requires_grad=False)
    return Slice(kept[_name(prefix, weight.stacked)], weight.number, own)


def _name(prefix, parameter):
    return f"{prefix}.{parameter.name}"
