"""How many tokens an output head and its loss take at a time, and which runs take all at once."""

import dataclasses
from typing import NamedTuple, Union

from mindlora.core.fields import Range, check_number
from mindlora.models.variants.registry import LORA
from mindlora.models.variants.variant import Variant

KEY = "loss_in_pieces"
# The setting's place in a YAML of graph mode, and in one of MindFormers' PyNative Trainer.
IN_GRAPH_MODE, IN_PYNATIVE = f"runner_wrapper.{KEY}", f"pet_config.{KEY}"
_LOGITS = 2**22
_PIECES = 32
_MULTIPLE = 128


def tokens_at_once(tokens: int, channels: int, vocabulary: int) -> int:
    """Returns the size of the pieces in which a head goes through ``tokens`` tokens.

    Their logits, [piece, vocabulary], are at most 2^22, 16 MiB in float32, or as many as twice the hidden states
    [tokens, channels], of which each layer keeps several. There are at most 32 pieces, as each of them is compiled.

    Args:
        tokens (int): Tokens of a micro-batch.
        channels (int): Width of the head's input.
        vocabulary (int): Rows of the head's weight.
    """
    piece = max(_LOGITS, 2 * tokens * channels) // vocabulary // _MULTIPLE * _MULTIPLE
    return max(piece, _MULTIPLE, -(-tokens // _PIECES))


@dataclasses.dataclass(frozen=True)
class _OrFlag(Range):
    """A range of numbers, or True or False."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, bool) or super().__contains__(value)


PIECES = _OrFlag("True, False or a whole number of at least 1", lambda tokens: tokens >= 1, (int,))


def check_loss_in_pieces(setting: Union[bool, int]) -> None:
    """Raises ConfigError unless loss_in_pieces is one of PIECES."""
    check_number(setting, KEY, PIECES)


@dataclasses.dataclass(frozen=True)
class HeadDivision:
    """How an output head and its losses are divided among the devices of a semi-automatic parallel run.

    Attributes:
        rows (int): Devices, or groups of them, with tokens of their own: data_parallel * context_parallel.
        model (int): Devices that share the head (model_parallel).
        by_vocabulary (bool): Whether each of these holds a part of the head's rows, and all tokens. If not, each
            has the whole head (vocab_emb_dp, or a vocabulary that model_parallel does not divide).
        by_tokens (bool): Whether devices with a whole head each take a part of the tokens; if not, all of them take
            all, as model_parallel does not divide them.
    """

    rows: int = 1
    model: int = 1
    by_vocabulary: bool = False
    by_tokens: bool = False

    @classmethod
    def of_sizes(
        cls, data: int, context: int, model: int, whole_head: bool, vocabulary: int, seq_length: int
    ) -> "HeadDivision":
        """Returns the division in a run with data_parallel, context_parallel, model_parallel and vocab_emb_dp."""
        by_vocabulary = not whole_head and model > 1 and vocabulary % model == 0
        by_tokens = not by_vocabulary and model > 1 and seq_length // context % model == 0
        return cls(data * context, model, by_vocabulary, by_tokens)


# The text of Head.cell for a head with several adapters.
SEVERAL_ADAPTERS = "has several adapters"


def adapter_obstacle(variant: Variant, weight_trains: bool) -> str:
    """Returns the property of an adapter on a head that keeps its logits whole, for Head.cell; "" if there is none.

    Args:
        variant (Variant): The variant of LoRA.
        weight_trains (bool): Whether the head's own weight trains too.
    """
    if variant is not LORA:
        return f"has an adapter of {variant.name}"
    return "has an adapter beside a weight that trains" if weight_trains else ""


# What Head.run says of a train step of MindFormers' own, which makes the gradients, but of that of the semi-automatic
# parallel mode, and what Head.cell says of heads that are divided there: their devices would drop other elements.
OTHER_STEP = "the train step is MindFormers' own"
DIVIDED_DROPOUT = "has an adapter with lora_dropout and is divided among devices"


class Head(NamedTuple):
    """The properties of a run that decide whether its head and loss go through the tokens in pieces.

    Attributes:
        setting (bool or int): loss_in_pieces.
        run (str): What in the run keeps the logits whole, such as "the train step is MindFormers' own"; "" if
            nothing does.
        model (str): The model's name.
        is_known (bool): Whether it is LlamaForCausalLM or a GPTModel, whose use of their head is known.
        cell (str): The property of the head that keeps the logits whole, such as "has a bias"; "" if there is none.
        predicts_several (bool): Whether it is a PyNative model that predicts several tokens (num_nextn_predict_layers).
        key (str): IN_GRAPH_MODE or IN_PYNATIVE, which has the setting.
    """

    setting: Union[bool, int]
    run: str
    model: str
    is_known: bool
    cell: str
    predicts_several: bool = False
    key: str = IN_GRAPH_MODE

    @property
    def why_whole(self) -> str:
        """Why the logits of all tokens are computed at once; "" if they are not."""
        if self.setting is False:
            return f"{self.key} is False"
        if self.run:
            return self.run
        if not self.is_known:
            return f"the model is a {self.model}"
        if self.predicts_several:
            return "the model predicts several tokens"
        return f"the output head {self.cell}" if self.cell else ""

    def __str__(self) -> str:
        """Returns the sentence about the head for log, doctor and plan."""
        if self.why_whole:
            return f"Head and loss: the logits of all tokens are made at once, as {self.why_whole}."
        size = "some" if self.setting is True else f"{self.setting:,}"
        return f"Head and loss: {size} tokens at a time, so that no logits of all tokens are made."
