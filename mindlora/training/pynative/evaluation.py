"""A PyNative model in evaluation, with the interface of MindFormers' legacy models, for callbacks that evaluate it."""

import types
from typing import Optional, Tuple

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.graph.api import _no_grad

from mindlora.core.mindformers_version import require_mindformers

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402


class EvaluatedModel(nn.Cell):
    """A model in evaluation, without gradients.

    A router counts its experts' tokens in evaluation too, for the bias that the next step sets, so its counts are
    restored.

    Args:
        network (nn.Cell): An undivided PyNative model, which returns only logits when it does not train.
        gpt (GPTModel): The part of the model that computes the loss.

    Attributes:
        config: seq_length and the token ids that callbacks read, with the names of a legacy model's configuration.

    Inputs:
        - **input_ids** (Tensor) - int32 [batch, N].
        - **labels** (Tensor) - int32 [batch, N]; label i belongs to token i + 1. Default: None, all tokens count.

    Outputs:
        Tuple (logits float32 [batch, N, vocabulary], input_ids, mask float32 [batch, N]).
    """

    def __init__(self, network: nn.Cell, gpt: GPTModel):
        super().__init__(auto_prefix=False)
        self.network = network
        self.gpt = gpt
        self.config = types.SimpleNamespace(
            seq_length=gpt.seq_length,
            pad_token_id=gpt.pad_token_id,
            ignore_token_id=gpt.ignore_token_id,
            bos_token_id=getattr(network.config, "bos_token_id", None),
            eos_token_id=getattr(network.config, "eos_token_id", None),
            input_sliced_sig=True,
        )
        self.counts = [p for p in network.get_parameters() if p.name.endswith("tokens_per_expert")]

    def construct(self, input_ids: Tensor, labels: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor]:
        mask = input_ids != self.config.pad_token_id
        if labels is not None:
            mask = ops.logical_and(mask, labels != self.config.ignore_token_id)
        before = [parameter.asnumpy().copy() for parameter in self.counts]
        with _no_grad():
            logits = self.network(input_ids=input_ids, labels=input_ids if labels is None else labels)
        for parameter, value in zip(self.counts, before):
            parameter.set_data(Tensor(value))
        rows, length = input_ids.shape
        return logits.reshape((rows, length, -1)), input_ids, mask.astype(mstype.float32)
