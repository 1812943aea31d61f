"""Score: the head of a classifier or a reward model, which replaces a language model's."""

from typing import Optional

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Normal, initializer

from mindlora.models.architectures.classifiers import Task

# As transformers initializes it.
_DEVIATION = 0.02


class Score(nn.Cell):
    r"""scores = hidden W^T + b, in float32. A new classifier's head has no pretrained weights, so all of it trains.

    Args:
        hidden_size (int): Width of the model.
        num_labels (int): Number of scores per position; 1 for a reward.
        task (Task): The model's task, which decides whether there is a bias.

    Weights:
        weight [num_labels, hidden_size], bias [num_labels], float32.

    Inputs:
        - **hidden** (Tensor) - [..., hidden_size].

    Outputs:
        float32 [..., num_labels].
    """

    def __init__(self, hidden_size: int, num_labels: int, task: Task):
        super().__init__()
        self.num_labels = num_labels
        self.task = task
        weight = initializer(Normal(_DEVIATION), [num_labels, hidden_size], mstype.float32)
        self.weight = Parameter(weight, name="weight")
        self.has_bias = task.has_bias
        if task.has_bias:
            self.bias = Parameter(initializer("zeros", [num_labels], mstype.float32), name="bias")
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, hidden: Tensor) -> Tensor:
        rows = hidden.astype(mstype.float32).reshape((-1, hidden.shape[-1]))
        scores = self.matmul(rows, self.weight)
        if self.has_bias:
            scores = scores + self.bias
        return scores.reshape(hidden.shape[:-1] + (self.num_labels,))


def score_of(network: nn.Cell) -> Optional[Score]:
    """Returns the head of a classifier, or None for other models."""
    return next((cell for _, cell in network.cells_and_names() if isinstance(cell, Score)), None)
