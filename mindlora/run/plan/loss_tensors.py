"""The tensors of the logits' shape that MindFormers' loss makes and gives back, in the order of its operators.

They are read from MindSpore's memory tracker (MS_ALLOC_CONF=memory_tracker:True) on its own Ascend backend, which names
the operator that makes each tensor, and when it is given back.
"""

from typing import Iterator, NamedTuple, Tuple


class Made(NamedTuple):
    """A tensor that an operator makes, and the tensors that nothing takes after it.

    Attributes:
        name (str): What it holds.
        last_for (tuple of str): Names of the tensors that are given back then, itself perhaps.
        in_16_bits (bool): Whether it is in the compute dtype, and not in float32.
    """

    name: str
    last_for: Tuple[str, ...] = ()
    in_16_bits: bool = False


class LossTensors(NamedTuple):
    """What a loss makes before the layers, because it needs the labels alone, and after them."""

    before: Tuple[Made, ...]
    after: Tuple[Made, ...]

    def widest(self, whole: int, in_16_bits: int) -> int:
        """Returns the most bytes that are held at a time, of tensors of ``whole`` bytes, or ``in_16_bits``."""
        held = {}
        widest = 0
        for made in (*self.before, *self.after):
            held[made.name] = in_16_bits if made.in_16_bits else whole
            widest = max(widest, sum(held.values()))
            for name in made.last_for:
                del held[name]
        return widest


def _product() -> Iterator[Made]:
    yield Made("product of lm_head", in_16_bits=True)
    yield Made("logits", ("product of lm_head",))


# Operator by operator, as at jit_level O0 and on a CPU: four at a time, at Neg.
_LEGACY = LossTensors(
    (Made("one-hot labels"),),
    (
        *_product(),
        Made("logits - maximum", ("logits",)),
        Made("exponentials", ("exponentials",)),
        Made("log-probabilities", ("logits - maximum",)),
        Made("product with the labels"),
        Made("negative", ("product with the labels", "negative")),
        Made("probabilities", ("log-probabilities",)),
        Made("gradient", ("probabilities", "one-hot labels")),
        Made("scaled gradient", ("gradient",)),
        Made("gradient in 16 bits", ("scaled gradient", "gradient in 16 bits"), in_16_bits=True),
    ),
)
# With operators fused at jit_level O1: three at a time, at Sub, Exp and ReduceSum in one.
_LEGACY_FUSED = LossTensors(
    (Made("one-hot labels"),),
    (
        *_product(),
        Made("exponentials", ("logits",)),
        Made("log-probabilities", ("exponentials",)),
        Made("gradient in 16 bits", ("log-probabilities", "one-hot labels", "gradient in 16 bits"), in_16_bits=True),
    ),
)
# MindFormers' mcore models transpose the logits, and hold the labels twice at O0: as OneHot gives them, and in float32.
_MCORE = LossTensors(
    (Made("one-hot labels"), Made("one-hot labels in float32")),
    (
        Made("product of output_layer", in_16_bits=True),
        Made("product, transposed", ("product of output_layer",), in_16_bits=True),
        Made("logits", ("product, transposed",)),
        Made("logits - maximum", ("logits",)),
        Made("exponentials", ("exponentials",)),
        Made("log-probabilities", ("logits - maximum",)),
        Made("product with the labels", ("one-hot labels",)),
        Made("negative", ("product with the labels", "negative")),
        Made("probabilities", ("log-probabilities",)),
        Made("gradient", ("probabilities", "one-hot labels in float32")),
        Made("scaled gradient", ("gradient",)),
        Made("gradient in 16 bits", ("scaled gradient",), in_16_bits=True),
        Made("gradient, transposed", ("gradient in 16 bits", "gradient, transposed"), in_16_bits=True),
    ),
)
_MCORE_FUSED = LossTensors(
    (Made("one-hot labels"),),
    (
        Made("product of output_layer", in_16_bits=True),
        Made("product, transposed", ("product of output_layer",), in_16_bits=True),
        Made("logits", ("product, transposed",)),
        Made("exponentials", ("logits",)),
        Made("log-probabilities", ("exponentials",)),
        Made("gradient in 16 bits", ("log-probabilities", "one-hot labels"), in_16_bits=True),
        Made("gradient, transposed", ("gradient in 16 bits", "gradient, transposed"), in_16_bits=True),
    ),
)


def loss_tensors(is_legacy: bool, fuses: bool) -> LossTensors:
    """Returns the tensors of the loss of a legacy or an mcore model; ``fuses``: the jit_level is O1."""
    if is_legacy:
        return _LEGACY_FUSED if fuses else _LEGACY
    return _MCORE_FUSED if fuses else _MCORE
