"""ModelRunner: computes the steps that the scheduler plans, on MindFormers' network."""

from typing import Dict, Sequence

import numpy as np
from mindspore import Tensor, nn

from mindlora.nn.multi_lora_dense import MultiLoRADense
from mindlora.serving.network import ServedStep, set_stage, takes_few
from mindlora.serving.request import Part
from mindlora.serving.settings import EngineSettings
from mindlora.serving.slot_pools import SlotPools
from mindlora.serving.step_inputs import StepInputs, step_inputs


class ModelRunner:
    """Computes steps of a network with a paged cache and pools of adapters. It is used by one thread.

    Two graphs are compiled by warm_up, one for steps of few tokens, such as decoding, and one for many, such as chunks
    of prompts with decoding beside them; other numbers of requests or tokens compile nothing.

    Args:
        network (nn.Cell): A network of build_network after add_pools, its weights loaded.
        cells (dict): What add_pools returned.
        dtype (numpy.dtype): That of the pools.
        settings (EngineSettings): Sizes.

    Attributes:
        vocab_size (int): Tokens that the network knows.
    """

    def __init__(self, network: nn.Cell, cells: Dict[str, MultiLoRADense], dtype: np.dtype, settings: EngineSettings):
        self.network, self.settings = network, settings
        self.pools = SlotPools(cells, dtype)
        shared = next(iter(cells.values())).slots_of_tokens
        self._steps = {few: ServedStep(network, shared, few) for few in (False, True)}
        self.vocab_size: int = network.config.vocab_size

    def warm_up(self) -> None:
        """Compiles all graphs, and leaves cache and pools as they were."""
        self.pools.warm_up()
        one = np.ones(1, np.int32)
        table = np.zeros((1, self.settings.blocks_per_request), np.int32)
        # A token whose key and value go nowhere.
        inputs = StepInputs(0 * one, 0 * one, -one, one, one, table, -one, 0 * one)
        for few in self._steps:
            set_stage(self.network, few)
            self._run(inputs, few)

    def forward(self, parts: Sequence[Part]) -> np.ndarray:
        """Computes one step: writes the keys and values of its tokens to the cache.

        Args:
            parts (sequence of Part): What to compute for each request.

        Returns:
            array, float32 [rows, vocabulary]: the logits after the last token of each part that samples, in order.
        """
        inputs = step_inputs(parts, self.settings.block_size, self.settings.blocks_per_request)
        return self._run(inputs, takes_few(inputs.query_lengths, inputs.last))

    def _run(self, inputs: StepInputs, few: bool) -> np.ndarray:
        tokens = len(inputs.tokens)
        slots = np.full(self.settings.max_tokens_per_step, -1, np.int32)
        slots[:tokens] = inputs.slots
        # A graph cannot take no rows at all, which happens when a step computes the middle of prompts.
        last = inputs.last if len(inputs.last) else np.zeros(1, np.int32)
        step = self._steps[few]
        logits = step(
            Tensor(inputs.tokens.reshape((-1, 1) if step.decodes else (1, -1))),
            Tensor(inputs.positions),
            Tensor(slots),
            Tensor(inputs.context_lengths),
            Tensor(inputs.query_lengths),
            Tensor(inputs.block_tables),
            Tensor(inputs.slot_mapping),
            Tensor(last),
        )
        return logits.asnumpy()[: len(inputs.last)]
