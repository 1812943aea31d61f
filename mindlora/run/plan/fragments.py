"""Fragments in MindSpore's memory pool: the holes beside the tensors of a step into which no tensor fits."""

import bisect
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.run.plan.units import GIB

# The tensors of the logits' shape that MindFormers' loss allocates and frees, in the order of its operators.
#
# They are read from MindSpore's memory tracker (MS_ALLOC_CONF=memory_tracker:True) on its own Ascend backend, which
# names the operator that computes each tensor, and when it is freed.


class Made(NamedTuple):
    """A tensor that an operator computes, and the tensors whose last use this is.

    Attributes:
        name (str): Its content.
        last_for (tuple of str): Names of the tensors that are freed then, possibly itself.
        in_16_bits (bool): Whether it is in the compute dtype rather than in float32.
    """

    name: str
    last_for: Tuple[str, ...] = ()
    in_16_bits: bool = False


class LossTensors(NamedTuple):
    """The tensors that a loss computes before the layers, from the labels alone, and after them."""

    before: Tuple[Made, ...]
    after: Tuple[Made, ...]

    def widest(self, whole: int, in_16_bits: int) -> int:
        """Returns the peak bytes of tensors of ``whole`` bytes, or ``in_16_bits``."""
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


# If LabelLosses replaces MindFormers' loss, these are the tensors of a piece.
_IN_PIECES = LossTensors(
    (),
    (
        Made("one-hot labels"),
        *_product(),
        Made("log-probabilities", ("logits",)),
        Made("exponentials", ("log-probabilities",)),
        Made("gradient", ("exponentials", "one-hot labels")),
        Made("gradient in 16 bits", ("gradient", "gradient in 16 bits"), in_16_bits=True),
    ),
)


def loss_tensors(is_legacy: bool, fuses: bool, in_pieces: bool = False) -> LossTensors:
    """Returns the tensors of the loss of a legacy or an mcore model, or of a piece; ``fuses``: the jit_level is O1."""
    if in_pieces:
        return _IN_PIECES
    if is_legacy:
        return _LEGACY_FUSED if fuses else _LEGACY
    return _MCORE_FUSED if fuses else _MCORE


# MindSpore's pool of device memory: the block of each tensor, and how much of the blocks has ever been used.
#
# The rules are those of MindSpore's dynamic memory pool: a tensor gets the smallest hole that it fits into, and if
# it fits into none, a block of 2 GiB (mindspore.runtime.set_memory: increase_size), or 4, 8 and so on for larger ones.
# Adjacent holes in a block become one, and blocks are not released. A block of 1 GiB is for parameters
# alone; parameters that do not fit into it lie among the other tensors.

_BLOCK = 2 * GIB
_OF_PARAMETERS = GIB
_ALIGNMENT = 512


class Piece(NamedTuple):
    """A piece of a block: its beginning and its bytes."""

    block: int
    begin: int
    size: int


class MemoryPool:
    """A pool in which tensors are allocated and freed.

    Attributes:
        used (int): Bytes of the allocated tensors.
        used_peak (int): The peak of ``used``: MindSpore's "used peak memory usage (without fragments)".
    """

    def __init__(self) -> None:
        self.used = self.used_peak = 0
        self._parameters = 0
        self._reached: List[int] = []
        # The holes by size, by beginning and by end.
        self._by_size: List[Tuple[int, int, int]] = []
        self._beginning: Dict[Tuple[int, int], Piece] = {}
        self._ending: Dict[Tuple[int, int], Piece] = {}

    @property
    def actual_peak(self) -> int:
        """The extent of its blocks that tensors have used: MindSpore's "actual peak memory usage (with fragments)"."""
        return self._parameters + sum(self._reached)

    def keep(self, size: int) -> None:
        """Allocates a parameter of ``size`` bytes, which is never freed."""
        size = _aligned(size)
        if self._parameters + size > _OF_PARAMETERS:
            self.take(size)
        else:
            self._parameters += size
            self._hold(size)

    def take(self, size: int) -> Piece:
        """Returns a piece for a tensor of ``size`` bytes."""
        size = _aligned(size)
        position = bisect.bisect_left(self._by_size, (size,))
        if position < len(self._by_size):
            hole_size, newest, begin = self._by_size[position]
            hole = Piece(-newest, begin, hole_size)
            self._remove(hole)
        else:
            hole = self._new_block(size)
        if hole.size > size:
            self._add(Piece(hole.block, hole.begin + size, hole.size - size))
        self._reached[hole.block] = max(self._reached[hole.block], hole.begin + size)
        self._hold(size)
        return Piece(hole.block, hole.begin, size)

    def give_back(self, piece: Piece) -> None:
        """Frees a piece, and joins it with the holes beside it."""
        block, begin, size = piece
        self.used -= size
        before = self._ending.get((block, begin))
        after = self._beginning.get((block, begin + size))
        for hole in (before, after):
            if hole is not None:
                self._remove(hole)
                size += hole.size
        self._add(Piece(block, begin if before is None else before.begin, size))

    def _hold(self, size: int) -> None:
        self.used += size
        self.used_peak = max(self.used_peak, self.used)

    def _new_block(self, size: int) -> Piece:
        block = _BLOCK
        while block < size:
            block *= 2
        self._reached.append(0)
        return Piece(len(self._reached) - 1, 0, block)

    def _add(self, hole: Piece) -> None:
        # Among equal holes, the one at the lowest address is taken: the newest block's, which lies lowest.
        bisect.insort(self._by_size, (hole.size, -hole.block, hole.begin))
        self._beginning[hole.block, hole.begin] = hole
        self._ending[hole.block, hole.begin + hole.size] = hole

    def _remove(self, hole: Piece) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (hole.size, -hole.block, hole.begin))]
        del self._beginning[hole.block, hole.begin]
        del self._ending[hole.block, hole.begin + hole.size]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# The first step leaves holes that the second one fills differently; the third equals the second.
_STEPS = 2


class LayerTensors(NamedTuple):
    """Bytes of the tensors that a layer computes for its backward, and of those that it keeps until then.

    A recomputed layer keeps only its input, and computes the others again.
    """

    made: Tuple[int, ...]
    kept: Tuple[int, ...]


class StepTensors(NamedTuple):
    """The tensors of a step in the order of their allocation, in bytes.

    Attributes:
        shared (tuple of int): Before the layers, until the step ends.
        layers (list of LayerTensors): The stage's layers in order.
        in_flight (int): Number of micro-batches whose layers' tensors are kept.
        head (int): Between the last layer and the loss.
        loss (LossTensors): The loss's tensors, or None on a device without the output head.
        logits (tuple of int): Bytes of the logits in float32 and in 16 bits; of a piece, if there are several.
        gradients (tuple of int): At their peak in the backward of a layer.
        pieces (int): How often the loss computes its tensors.
        of_hidden (int): Gradient of the head's input, which a loss in pieces assembles from its pieces.
    """

    shared: Tuple[int, ...]
    layers: List[LayerTensors]
    in_flight: int
    head: int
    loss: Optional[LossTensors]
    logits: Tuple[int, int]
    gradients: Tuple[int, ...] = ()
    pieces: int = 1
    of_hidden: int = 0


def fragments_of(parameters: Sequence[int], step: StepTensors) -> int:
    """Returns the bytes of the holes in the pool after parameters of these sizes, in this order, and some steps."""
    pool = MemoryPool()
    for size in parameters:
        pool.keep(size)
    for _ in range(_STEPS):
        _take_step(pool, step)
    return pool.actual_peak - pool.used_peak


def _take_step(pool: MemoryPool, step: StepTensors) -> None:
    """Allocates the tensors of a step in the pool, and frees all of them."""
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
        made = [pool.take(size) for size in layer.made] if layer.made != layer.kept else []
        _give_back(pool, [*[pool.take(size) for size in step.gradients], *made])
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
        self.pieces = step.pieces
        self.of_hidden = step.of_hidden
        self.held: Dict[str, Piece] = {}

    def make_before(self) -> None:
        """Allocates the tensors that depend on the labels alone."""
        self._make(self.tensors.before)

    def make_after(self) -> None:
        """Allocates the logits and the tensors computed from them, and frees all of them."""
        of_pieces = []
        for _ in range(self.pieces):
            self._make(self.tensors.after)
            of_pieces.append(self.pool.take(self.of_hidden // self.pieces))
        joined = self.pool.take(self.of_hidden)
        _give_back(self.pool, [*of_pieces, joined])

    def _make(self, tensors):
        for made in tensors:
            self.held[made.name] = self.pool.take(self.sizes[made.in_16_bits])
            for name in made.last_for:
                self.pool.give_back(self.held.pop(name))
