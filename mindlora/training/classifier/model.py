"""Classifiers and reward models on MindFormers' models, registered when imported: a YAML names the class."""

from typing import Optional, Tuple

from mindformers.models.deepseek3.modeling_deepseek_v3_train import TrainingDeepseekV3ForCausalLM
from mindformers.models.llama.llama import LlamaForCausalLM
from mindformers.models.llama.llama_config import LlamaConfig
from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
from mindformers.models.qwen3_moe.modeling_qwen3_moe_train import TrainingQwen3MoeForCausalLM
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn

from mindlora.core.fields import COUNT, check_number
from mindlora.models.architectures.classifiers import TASKS
from mindlora.network.cells.score import Score
from mindlora.training.classifier.mcore import McoreClassifier
from mindlora.training.model.mcore_model import refuse_further_tokens

register = MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=True)


class _Classifier(LlamaForCausalLM):
    """LlamaForCausalLM with label scores instead of token logits; its loss is the same.

    A label belongs to the position before it, like a predicted token.

    Args:
        config (LlamaConfig): With num_labels, the number of scores; 1 for rewards.

    Raises:
        ConfigError: num_labels is not a whole number of at least 1.
    """

    def __init__(self, config: LlamaConfig):
        check_number(getattr(config, "num_labels", None), "model_config.num_labels", COUNT)
        # Under the name at which MindFormers looks for disable_lazy_inline: data parallel does not compile without it.
        super().__init__(config=config)
        del self.lm_head
        self.score = Score(config.hidden_size, config.num_labels, TASKS[type(self).__name__])
        # The Llama's construct calls this. Assigning it as an attribute would rename the parameters.
        self._cells["lm_head"] = self.score


@register
class LlamaForSequenceClassification(_Classifier):
    """Scores of a text, at its last token."""


@register
class LlamaForTokenClassification(_Classifier):
    """Scores of each token."""


class _ScoreLayer(nn.Cell):
    """A head in place of a GPTModel's output layer; it ignores the weight that tied embeddings pass."""

    def __init__(self, score: Score):
        super().__init__(auto_prefix=False)
        self.score = score

    def construct(self, hidden: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, None]:
        return self.score(hidden), None


class _InGraphMode(McoreClassifier):
    def output_layer(self) -> nn.Cell:
        refuse_further_tokens(self.model)
        return _ScoreLayer(self.score)


register_mcore = MindFormerRegister.register(MindFormerModuleType.MODELS, legacy=False)


@register_mcore
class Qwen3ForSequenceClassification(_InGraphMode, TrainingQwen3ForCausalLM):
    """Scores of a text, at its last token."""


@register_mcore
class Qwen3ForTokenClassification(_InGraphMode, TrainingQwen3ForCausalLM):
    """Scores of each token."""


@register_mcore
class Qwen3MoeForSequenceClassification(_InGraphMode, TrainingQwen3MoeForCausalLM):
    """Scores of a whole text, at its last token."""


@register_mcore
class Qwen3MoeForTokenClassification(_InGraphMode, TrainingQwen3MoeForCausalLM):
    """Scores of each token."""


@register_mcore
class DeepseekV3ForSequenceClassification(_InGraphMode, TrainingDeepseekV3ForCausalLM):
    """Scores of a whole text, at its last token."""


@register_mcore
class DeepseekV3ForTokenClassification(_InGraphMode, TrainingDeepseekV3ForCausalLM):
    """Scores of each token."""
