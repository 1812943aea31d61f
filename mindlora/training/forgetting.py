"""Forgetting: how far training has moved the model away from its base's own answers, and a limit for it."""

import contextlib
import math
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
from mindspore import Callback, Tensor, nn
from mindspore.train import RunContext

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, FACTOR, Range, check_number, ignore_token_id, pad_token_id, whole_numbers
from mindlora.network.tree import lora_cells
from mindlora.training.callbacks.common import (
    PeriodicCallback,
    controlled_step,
    copy_state,
    put_back,
    register,
    report_event,
    reported_metrics,
)
from mindlora.training.callbacks.sample_answers import Continuations
from mindlora.training.held_out.held_out_loss import HeldOutLossCell
from mindlora.training.held_out.rows import missing_rows, parts_of_batch
from mindlora.training.log import logger
from mindlora.training.model.network import evaluated_model
from mindlora.training.resume.collectives import mean_over_ranks

_NAME = "ForgettingBudget"


@register
class Forgetting(PeriodicCallback):
    r"""Measures the divergence from the base on the base's own texts, and reports it as the metric ``forgetting``.

        KL(base || tuned) = E_{x ~ base} [log p_base(x) - log p_tuned(x)], in nats per token

    Before the first step, the base generates ``samples`` texts at temperature 1: no data is needed. The expectation is
    the mean over their tokens, which are the same each time. So the metric is 0 if nothing has changed, and the curve
    is smooth. ``mindlora eval --forgetting`` computes the same metric for a saved adapter.

    Drawing the texts takes ``max_tokens`` passes over the complete window for each batch, since a network in training
    has no KV cache; a measurement takes one. An adapter of adapter_path counts as change, unless its initialization has
    changed the base (pissa, olora): then the initial model counts as the base.

    Args:
        every_steps (int): Steps between measurements; the last step is measured too. Default: 100.
        samples (int): Number of texts. Default: 16.
        max_tokens (int): Maximum number of tokens in a text. Default: 64.
        batch_size (int): Texts in a batch. Default: 8.
        seed (int): Seed of the draws. Default: 0.

    Raises:
        ConfigError: An argument is out of range.

    Source: Kullback and Leibler, On Information and Sufficiency, 1951.
    """

    def __init__(
        self, every_steps: int = 100, samples: int = 16, max_tokens: int = 64, batch_size: int = 8, seed: int = 0
    ):
        super().__init__("every_steps", every_steps)
        check_number(samples, "samples", COUNT)
        check_number(max_tokens, "max_tokens", COUNT)
        check_number(batch_size, "batch_size", COUNT)
        check_number(seed, "seed", whole_numbers(0))
        self.count = samples
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self.seed = seed
        self.samples: Optional[List[List[int]]] = None
        self.base_loss = 0.0
        self.cell: Optional[HeldOutLossCell] = None

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Draws the texts, unless a resumed run has restored them."""
        super().on_train_epoch_begin(run_context)
        if self.samples is not None:
            return
        params = run_context.original_args()
        network = evaluated_model(params.train_network)
        with _without_adapters(network):
            self.samples = self._draw(network)
            self.base_loss = self._loss(network)
        params.train_network.set_train(True)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Measures the divergence if a measurement is due."""
        params = run_context.original_args()
        results = reported_metrics(params)
        results.pop("forgetting", None)
        if self.is_due(params):
            moved = self._loss(evaluated_model(params.train_network)) - self.base_loss
            params.train_network.set_train(True)
            # The ranks decide by the metric, so it must be the same on all of them.
            results["forgetting"] = mean_over_ranks(moved)
            logger.info("step %d: forgetting %.6f", params.cur_step_num, results["forgetting"])
        params["eval_results"] = results
        self.step_before = params.cur_step_num

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        return {"samples": self.samples, "base_loss": self.base_loss}

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.samples = state["samples"]
        self.base_loss = state["base_loss"]

    def _draw(self, network: nn.Cell) -> List[List[int]]:
        """Returns texts that begin with bos, and end with eos or after max_tokens."""
        config = network.config
        if not isinstance(config.bos_token_id, int):
            raise ConfigError(
                f"Forgetting needs a token with which a text begins, but bos_token_id of the model is "
                f"{config.bos_token_id!r}. Set it."
            )
        pad, eos = pad_token_id(config), config.eos_token_id
        continued = Continuations(network, config.seq_length, pad, eos, self.max_tokens)
        rng = np.random.default_rng(self.seed)
        samples: List[List[int]] = []
        for begin in range(0, self.count, self.batch_size):
            rows = [[config.bos_token_id]] * min(self.batch_size, self.count - begin)
            samples += continued(rows, lambda logits: _drawn(logits, rng), size=self.batch_size)
        return samples

    def _loss(self, network: nn.Cell) -> float:
        """Returns the mean cross entropy of the texts' tokens, in nats."""
        config = network.config
        if self.cell is None:
            self.cell = HeldOutLossCell(network, ignore_token_id(config))
        self.cell.set_train(False)
        length = config.seq_length + (not self.cell.is_sliced)
        total = count = 0.0
        rows = self.batch_size + missing_rows(self.batch_size, parts_of_batch(network))
        for begin in range(0, self.count, self.batch_size):
            tokens, labels = _rows(self.samples[begin : begin + self.batch_size], length, rows, config)
            if self.cell.is_sliced:
                labels = np.roll(labels, -1, axis=1)
            batch_total, batch_count = self.cell(Tensor(tokens), Tensor(labels))
            total, count = total + float(batch_total.asnumpy()), count + float(batch_count.asnumpy())
        # A dry run computes nothing, so nothing counts.
        return total / max(count, 1.0)


def _rows(samples: List[List[int]], length: int, count: int, config: Any) -> Tuple[np.ndarray, np.ndarray]:
    """Returns tokens and labels, int32 [count, length]; all tokens but the first of each row have a label."""
    tokens = np.full((count, length), pad_token_id(config), np.int32)
    labels = np.full((count, length), ignore_token_id(config), np.int32)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample
        labels[row, 1 : len(sample)] = sample[1:]
    return tokens, labels


def _drawn(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a token for each row of logits [rows, vocabulary], drawn at temperature 1 by the Gumbel-max trick."""
    return (logits + rng.gumbel(size=logits.shape)).argmax(-1)


@contextlib.contextmanager
def _without_adapters(network: nn.Cell) -> Iterator[None]:
    """Temporarily switches off adapters with an effect, unless their initialization has changed the base."""
    kept = []
    for _, cell in lora_cells(network):
        if cell.initial_pair is None and cell.parts()[cell.variant.zero_part].asnumpy().any():
            kept += [(part, part.asnumpy().copy()) for part in cell.parts().values()]
            cell.silence()
            cell.prepare()
    try:
        yield
    finally:
        for part, values in kept:
            part.set_data(Tensor(values, part.dtype))


@register
class ForgettingBudget(Callback):
    """Keeps forgetting within a budget, by going back to the last state within it.

    When a measurement exceeds ``budget``, the adapter and the optimizer are restored to their state at the last
    measurement within it (a copy on the host). Then the run ends, or, up to ``max_returns`` times, continues with
    ``rate_cut`` times the learning rate. As the last step is measured too, the adapter at the end is within the budget.
    All ranks see the same measurement, and decide alike.

    Args:
        budget (float): Nats per token; above 0.
        max_returns (int): Maximum number of times that the run continues, at a lower rate. Default: 0, it ends at once.
        rate_cut (float): Factor of the learning rate at each return; above 0 and at most 1. Default: 0.3.

    Raises:
        ConfigError: An argument is out of range, nothing measures forgetting, or the train step is not mindlora's.
    """

    def __init__(self, budget: float, max_returns: int = 0, rate_cut: float = 0.3):
        super().__init__()
        check_number(budget, "budget", Range("a number above 0", lambda v: 0 < v < math.inf))
        check_number(max_returns, "max_returns", whole_numbers(0))
        check_number(rate_cut, "rate_cut", FACTOR)
        self.budget = budget
        self.max_returns = max_returns
        self.rate_cut = rate_cut
        self.returns = 0
        self.factor = 1.0
        self.within: Dict[str, Any] = {}
        self.step_within = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        """Checks that forgetting is measured."""
        params = run_context.original_args()
        if "Forgetting" not in {type(callback).__name__ for callback in params.list_callback}:
            raise ConfigError(f"{_NAME} needs forgetting, which nothing measures: add Forgetting to callbacks.")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Copies the initial state, and sets the rate that a resumed run had."""
        # Not when training begins: a resumed run may not have its state by then.
        params = run_context.original_args()
        step = controlled_step(params, _NAME)
        if not self.within:
            self._keep(params.cur_step_num, step)
            step.set_rate_factor(_NAME, self.factor)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Goes back if the budget is exceeded."""
        params = run_context.original_args()
        moved = reported_metrics(params).get("forgetting")
        if moved is None:
            return
        step = controlled_step(params, _NAME)
        # NaN exceeds the budget too.
        if moved <= self.budget:
            self._keep(params.cur_step_num, step)
            return
        put_back(step, self.within)
        # The metric belongs to the discarded state.
        params["eval_results"] = {k: v for k, v in reported_metrics(params).items() if k != "held_out_loss"}
        self.returns += 1
        told = (
            f"{_NAME}: the model is {moved:.4g} nats per token away from its base, but the budget is "
            f"{self.budget:.4g}. Adapter and optimizer are those of step {self.step_within} again"
        )
        if self.returns > self.max_returns:
            report_event(params, "budget", f"{told}, and the run ends.")
            run_context.request_stop()
        else:
            self.factor *= self.rate_cut
            rate = f"from now on the learning rate is {self.factor:.4g} times that of the schedule"
            report_event(params, "budget", f"{told}; {rate}.")
        # Restoring an optimizer without a schedule has restored its rate.
        step.set_rate_factor(_NAME, self.factor)

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        return {"returns": self.returns, "factor": self.factor}

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.returns = state["returns"]
        self.factor = state["factor"]

    def _keep(self, number: int, step: Any) -> None:
        self.within = copy_state(step)
        self.step_within = number
