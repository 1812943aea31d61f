"""What MindSpore's memory pool holds beside the tensors of a step: the holes that no tensor fits into."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.run.plan.loss_tensors import LossTensors
from mindlora.run.plan.pool import MemoryPool, Piece

# The first step leaves holes that the second one fills otherwise; the third is as the second.
_STEPS = 2


class LayerTensors(NamedTuple):
    """Bytes of the tensors that a layer makes for its backward, and of those that it keeps until then.

    If the layer is recomputed, it keeps its input alone, and makes the others again.
    """

    made: Tuple[int, ...]
    kept: Tuple[int, ...]


class StepTensors(NamedTuple):
    """The tensors of a step in the order in which they are made, in bytes.

    Attributes:
        shared (tuple of int): Before the layers, until the step ends.
        layers (list of LayerTensors): Of the stage, one after the other.
        in_flight (int): Micro-batches that keep what the layers keep.
        head (int): Between the last layer and the loss.
        loss (LossTensors): What the loss makes, or None on a device without the output head.
        logits (tuple of int): Bytes of the logits in float32 and in 16 bits.
    """

    shared: Tuple[int, ...]
    layers: List[LayerTensors]
    in_flight: int
    head: int
    loss: Optional[LossTensors]
    logits: Tuple[int, int]


def fragments_of(parameters: Sequence[int], step: StepTensors) -> int:
    """Returns the bytes of the holes in the pool after parameters of these sizes, in this order, and some steps."""
    pool = MemoryPool()
    for size in parameters:
        pool.keep(size)
    for _ in range(_STEPS):
        _take_step(pool, step)
    return pool.actual_peak - pool.used_peak


def _take_step(pool: MemoryPool, step: StepTensors) -> None:
    """Takes the tensors of a step from the pool, and gives all of them back."""
    loss = _Loss(pool, step)
    loss.make_before()
    shared = [pool.take(size) for size in step.shared]
    kept: List[List[Piece]] = []
    for layer in step.layers * step.in_flight:
        made = [pool.take(size) for size in layer.made]
        if layer.made == layer.kept:
            kept.append(made)
            continue
        _give_back(pool, made)
        kept.append([pool.take(size) for size in layer.kept])
    head = pool.take(step.head)
    loss.make_after()
    pool.give_back(head)
    for layer, pieces in zip(reversed(step.layers * step.in_flight), reversed(kept)):
        if layer.made != layer.kept:
            _give_back(pool, [pool.take(size) for size in layer.made])
        _give_back(pool, pieces)
    _give_back(pool, shared)


def _give_back(pool: MemoryPool, pieces: List[Piece]) -> None:
    for piece in pieces:
        pool.give_back(piece)


class _Loss:
    """The tensors of a step's loss in a pool."""

    def __init__(self, pool: MemoryPool, step: StepTensors):
        self.pool = pool
        self.tensors = step.loss or LossTensors((), ())
        self.sizes = step.logits
        self.held: Dict[str, Piece] = {}

    def make_before(self) -> None:
        """Makes what the labels alone determine."""
        self._make(self.tensors.before)

    def make_after(self) -> None:
        """Makes the logits and what follows from them; nothing is left of it."""
        self._make(self.tensors.after)

    def _make(self, tensors):
        for made in tensors:
            self.held[made.name] = self.pool.take(self.sizes[made.in_16_bits])
            for name in made.last_for:
                self.pool.give_back(self.held.pop(name))
