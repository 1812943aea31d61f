"""The parts that make a classifier of MindFormers' mcore models, in graph mode and under the PyNative Trainer."""

from typing import Any, Type

from mindspore import nn

from mindlora.core.fields import COUNT, check_number
from mindlora.models.architectures.classifiers import SCORE, TASKS
from mindlora.network.cells.score import Score


class McoreClassifier:
    """Label scores instead of token logits: a mixin that precedes the class of MindFormers' model.

    Args:
        config (PretrainedConfig): With num_labels, the number of scores; 1 for rewards.

    Attributes:
        score_type (type): Its head.

    Raises:
        ConfigError: num_labels is not a whole number of at least 1.
    """

    score_type: Type[Score] = Score
    model: nn.Cell

    def __init__(self, config: Any):
        check_number(getattr(config, "num_labels", None), "num_labels", COUNT)
        # MindFormers refuses keys that it does not know.
        labels = config.num_labels
        del config.num_labels
        super().__init__(config)  # type: ignore[call-arg]
        config.num_labels = labels
        self.score = self.score_type(config.hidden_size, labels, TASKS[type(self).__name__])
        # The network has no prefix: the names of its parameters begin inside it.
        self.score.update_parameters_name(f"{SCORE.mcore}.")
        self.model._cells["output_layer"] = self.output_layer()

    def output_layer(self) -> nn.Cell:
        """The head that a GPTModel calls with its output, and with the weight that tied embeddings would pass."""
        return self.score
