"""Classifiers and reward models on the Qwen3 of MindFormers' PyNative Trainer, registered when imported."""

from typing import Optional

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Parameter, Tensor, mint

from mindlora.core.mindformers_version import require_mindformers
from mindlora.models.architectures.classifiers import Task
from mindlora.network.cells.score import Score
from mindlora.network.pynative.linear import set_value
from mindlora.training.classifier.mcore import McoreClassifier

require_mindformers("2.0")
from mindformers.models.qwen3.modeling_qwen3_train_pynative import PyNativeQwen3ForCausalLM  # noqa: E402
from mindformers.pynative.base_models.gpt.parallelize import parallelize_gptmodel  # noqa: E402
from mindformers.pynative.distributed import register_parallelize  # noqa: E402


class _Score(Score):
    """A Score for a model that MindFormers builds without values, and that passes a weight if embeddings are tied."""

    def __init__(self, hidden_size: int, num_labels: int, task: Task):
        super().__init__(hidden_size, num_labels, task)
        for parameter in list(self.get_parameters()):
            # With only an initializer here, the optimizer's states would have no values either.
            name = parameter.name
            setattr(self, name, Parameter(mint.empty(parameter.shape, dtype=parameter.dtype), name=name))

    def construct(self, hidden: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        return super().construct(hidden)

    def reset_parameter(self) -> None:
        """Draws the initial values into the memory that MindFormers has allocated."""
        new = Score(self.weight.shape[1], self.num_labels, self.task)
        for parameter, value in zip(self.get_parameters(), new.get_parameters()):
            set_value(parameter, value)


class _InPynative(McoreClassifier):
    score_type = _Score


register = MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)


@register
@register_parallelize(parallelize_gptmodel)
class Qwen3ForSequenceClassification(_InPynative, PyNativeQwen3ForCausalLM):
    """Scores of a text, at its last token."""


@register
@register_parallelize(parallelize_gptmodel)
class Qwen3ForTokenClassification(_InPynative, PyNativeQwen3ForCausalLM):
    """Scores of each token."""
