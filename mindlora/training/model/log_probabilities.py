"""Log-probabilities of labels from a MindFormers model, in place of its loss."""

from mindformers.core.loss.loss import CrossEntropyLoss
from mindspore import Tensor, nn

from mindlora.core.errors import ConfigError
from mindlora.training.model.loss_in_pieces import EvaluatedInPieces
from mindlora.training.model.mcore_model import is_gpt_model, replace_loss
from mindlora.training.model.network import base_of, with_loss


class LabelLogProbabilities(nn.Cell):
    """The log-probability of each label, from the parts of MindFormers' CrossEntropyLoss, which know the sharding.

    Args:
        loss (CrossEntropyLoss): The model's loss.
        temperature (float): T: probabilities are those of the logits divided by T. Default: 1.

    Inputs:
        - **logits** (Tensor) - float32 [n, vocabulary], or the head's input if put_loss_in_pieces was called.
        - **labels** (Tensor) - int32 [n]; one that is not a token, such as ignore_token_id, does not count.
        - **mask** (Tensor) - As for CrossEntropyLoss; not used.

    Outputs:
        float32 [n]; 0 for labels that do not count.
    """

    def __init__(self, loss: CrossEntropyLoss, temperature: float = 1.0):
        super().__init__()
        self.log_softmax = loss._log_softmax
        self.negative_log_likelihood = loss._nllloss
        self.temperature = temperature

    def construct(self, logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        if self.temperature != 1:
            # The head is linear, so dividing its input divides the logits too.
            logits = logits / self.temperature
        log_probabilities, one_hot = self.log_softmax(logits, labels)
        return -self.negative_log_likelihood(log_probabilities, one_hot)


class HeadInputs(nn.Cell):
    """The input of an output head under put_loss_in_pieces, in place of the log-probabilities of LabelLogProbabilities.

    Args:
        temperature (float): Divisor of the input, and so of the logits. Default: 1.
    """

    def __init__(self, temperature: float = 1.0):
        super().__init__()
        self.temperature = temperature

    def construct(self, handed: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return handed if self.temperature == 1 else handed / self.temperature


class Rewards(nn.Cell):
    """A reward model's single score of each position, in place of LabelLogProbabilities; labels are ignored."""

    def construct(self, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return scores.reshape((-1,))


class RowLogProbabilities(EvaluatedInPieces):
    """The log-probability of each label in rows, except the first, computed by a MindFormers model.

    In training, the model's own loss is LabelLogProbabilities. An mcore model also returns other losses, which are
    ignored: a frozen router's balance has nothing to do with the answers. In evaluation, the model returns logits.

    Inputs:
        - **input_ids**, **labels** (Tensor) - int32 [rows, N + 1].

    Outputs:
        float32 [rows * N]; 0 for labels that do not count.
    """

    def __init__(self, network: nn.Cell, of_labels: nn.Cell):
        super().__init__(network)
        self.of_labels = of_labels
        self.returns_others = is_gpt_model(with_loss(network))

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            outputs = self.network(input_ids, labels)
            return outputs[0] if self.returns_others else outputs
        labels = labels[:, 1:]
        logits, _, mask = self.network(input_ids[:, :-1], labels)
        if self.losses_of_head is not None:
            losses, _ = self.losses_of_head(logits.reshape((-1, logits.shape[-1])), labels.reshape((-1,)))
            return -losses
        return self.of_labels(logits.reshape((-1, logits.shape[-1])), labels.reshape((-1,)), mask)


def row_log_probabilities(
    network: nn.Cell, key: str, scores: bool = False, temperature: float = 1.0
) -> RowLogProbabilities:
    """Returns a cell that computes log-probabilities of labels; the MindFormers model's loss is replaced in place.

    Args:
        network (nn.Cell): The model, or a cell around it.
        key (str): The YAML's key that needs them, for the error.
        scores (bool): Whether the model is a reward model, whose scores replace the log-probabilities. Default: False.
        temperature (float): As for LabelLogProbabilities. Default: 1.

    Raises ConfigError if the model's loss does not get the logits of all tokens.
    """
    model = with_loss(network)
    if model is None:
        raise ConfigError(
            f"{key} needs the logits of every token, and {type(base_of(network)).__name__} does not give them to "
            "a CrossEntropyLoss of MindFormers'. Use a model such as LlamaForCausalLM or Qwen3ForCausalLM."
        )
    return _with_loss(network, Rewards() if scores else LabelLogProbabilities(model.loss, temperature))


def row_head_inputs(network: nn.Cell, temperature: float = 1.0) -> RowLogProbabilities:
    """Returns a cell that computes the head's inputs where it predicts the labels, in training.

    The model must have gone through put_loss_in_pieces. Its loss is replaced in place.

    Args:
        network (nn.Cell): The model, or a cell around it.
        temperature (float): As for HeadInputs. Default: 1.

    Outputs of the cell:
        [rows * N, channels], or [rows * N, channels + r] with an adapter on the head: see HandingHead.
    """
    return _with_loss(network, HeadInputs(temperature))


def _with_loss(network, loss):
    model = with_loss(network)
    if is_gpt_model(model):
        replace_loss(model, loss)
    else:
        model.loss = loss
    return RowLogProbabilities(network, loss)
