"""The layouts of A and B on each kind of cell: linear, embedding, convolution, stacked experts."""

import math
from typing import Dict, List, Optional, Tuple, Type

import numpy as np

from mindlora.core.errors import AdapterError, RankMismatchError, ShapeMismatchError
from mindlora.core.numerics.dtypes import to_float32

# A and B.
Pair = Tuple[np.ndarray, np.ndarray]
Shape = Tuple[int, ...]
# The error to raise, and a description of the fault.
Problem = Tuple[Type[AdapterError], str]


class PairLayout:
    """A and B of a linear cell, and the base class of the other layouts: A [r, in], B [out, r], W [out, in].

    Attributes:
        dims (int): Number of dimensions of A and of B.
        rank_axes (tuple of int): The axis of A and the axis of B whose size is the rank.
        peft (dict): "A" and "B" -> the ending of the key in PEFT's files.
        can_combine (bool): Whether combine_adapters takes such pairs.
        in_slora (bool): Whether MindFormers' slora can serve them.
        stacked (bool): Whether A and B are stacks, with a product B A for each expert.
    """

    cells = "linear cells"
    dims = 2
    rank_axes = (0, 1)
    stacked = False
    peft = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
    can_combine = True
    in_slora = True

    def pair_shapes(self, shape: Shape, rank: int, groups: int = 1) -> Dict[str, Shape]:
        """Returns the shapes of A and B, by "A" and "B", for a weight of this shape.

        The weight is [out, in]; [vocabulary, dim] for an embedding, [out, in / groups, kh, kw] for a convolution, and
        [experts, out, in] for stacked experts.
        """
        rows, columns = shape
        return {"A": (rank, columns), "B": (rows, rank)}

    def rank(self, a: Shape) -> int:
        """Returns the rank of a pair with A of shape ``a``."""
        return a[self.rank_axes[0]]

    def channels(self, a: Shape, b: Shape) -> Tuple[int, int]:
        """Returns (outputs, inputs) of the weight, or of each expert; a convolution's kernel counts as inputs."""
        return b[0], math.prod(a[1:])

    def with_rank(self, half: str, array: np.ndarray, rank: int) -> np.ndarray:
        """Returns A or B cut to its first ``rank`` ranks, or padded with zeros to that many."""
        axis = self.rank_axes["AB".index(half)]
        by_rank = np.moveaxis(array, axis, 0)[:rank]
        missing = np.zeros_like(by_rank, shape=(rank - len(by_rank), *by_rank.shape[1:]))
        return np.ascontiguousarray(np.moveaxis(np.concatenate([by_rank, missing]), 0, axis))

    def used_rank(self, a: np.ndarray, b: np.ndarray) -> int:
        """Returns the rank up to the last one that is not zero in A or in B; the whole rank if all are zero."""
        rank = self.rank(a.shape)
        by_rank = [np.moveaxis(to_float32(x), axis, 0).reshape(rank, -1) for x, axis in zip((a, b), self.rank_axes)]
        used = by_rank[0].any(axis=1) | by_rank[1].any(axis=1)
        return 1 + int(max(np.flatnonzero(used), default=rank - 1))

    def has_product(self, a: Shape, b: Shape) -> bool:
        """Returns whether B A is defined for A and B of these shapes."""
        return self.rank(a) == b[self.rank_axes[1]]

    def shape_problem(self, a: Shape, b: Shape, rank: int) -> Optional[Problem]:
        """Returns the fault of these shapes of A and B, each with ``dims`` sizes above 0, at this rank, or None."""
        if a[0] == rank and b[1] == rank:
            return None
        if a[1] == rank and b[0] == rank:
            return ShapeMismatchError, "A and B are swapped"
        if a[1] == rank and b[1] == rank:
            return ShapeMismatchError, "A is transposed: it must be [r, in]"
        if a[0] == rank and b[0] == rank:
            return ShapeMismatchError, "B is transposed: it must be [out, r]"
        if a[0] == b[1]:
            return _other_rank(rank, a[0])
        return ShapeMismatchError, "A [r, in] and B [out, r] have no rank r in common"

    def weight_shape(self, a: Shape, b: Shape) -> Shape:
        """Returns the shape of the weight that a pair with A of shape ``a`` and B of shape ``b`` is for."""
        return b[0], a[1]

    def factors(self, a: np.ndarray, b: np.ndarray) -> Pair:
        """Returns the matrices [rows of W, r] and [r, the rest of W] whose product is what B A adds to W.

        For experts, both are stacks with one matrix per expert, whose products are stacked by rows.
        """
        return b, a

    def products(self, a: np.ndarray, b: np.ndarray) -> List[Pair]:
        """Returns A [r, in] and B [out, r] of each product B A: a single one, or one for each expert.

        For a convolution without groups, in counts each element of the kernel. For an embedding, B A is the transpose
        of the table's update.
        """
        return [(a.reshape(len(a), -1), b.reshape(len(b), -1))]

    def stacked_again(self, pairs: List[Pair], a: Shape, b: Shape) -> Pair:
        """Returns the A and B that ``products`` splits into these pairs, all of one rank.

        ``a`` and ``b`` are the shapes of A and of B at any rank.
        """
        rank = len(pairs[0][0])
        whole_a, whole_b = (np.stack(halves) for halves in zip(*pairs))
        shape_a, shape_b = ((*s[:axis], rank, *s[axis + 1 :]) for s, axis in zip((a, b), self.rank_axes))
        return whole_a.reshape(shape_a), whole_b.reshape(shape_b)


class _Embedding(PairLayout):
    """A [r, vocabulary] and B [dim, r]; the transpose of B A is added to the table W [vocabulary, dim]."""

    cells = "embeddings"
    peft = {"A": ".lora_embedding_A", "B": ".lora_embedding_B"}
    in_slora = False

    def pair_shapes(self, shape: Shape, rank: int, groups: int = 1) -> Dict[str, Shape]:
        vocabulary, dim = shape
        return {"A": (rank, vocabulary), "B": (dim, rank)}

    def weight_shape(self, a: Shape, b: Shape) -> Shape:
        return a[1], b[0]

    def factors(self, a: np.ndarray, b: np.ndarray) -> Pair:
        return a.T, b.T


class _Convolution(PairLayout):
    """A [r, in, kh, kw], B [out, r / groups, 1, 1] and W [out, in / groups, kh, kw]."""

    cells = "convolutions"
    dims = 4
    can_combine = False
    in_slora = False

    def pair_shapes(self, shape: Shape, rank: int, groups: int = 1) -> Dict[str, Shape]:
        rows, columns, *kernel = shape
        return {"A": (rank, columns * groups, *kernel), "B": (rows, rank // groups, 1, 1)}

    def shape_problem(self, a: Shape, b: Shape, rank: int) -> Optional[Problem]:
        groups = a[0] // b[1]
        if a[0] % b[1] or b[0] % groups or a[1] % groups or b[2:] != (1, 1):
            return ShapeMismatchError, "B of a convolution must be [out, r / groups, 1, 1]"
        return None if a[0] == rank else _other_rank(rank, a[0])

    def weight_shape(self, a: Shape, b: Shape) -> Shape:
        return b[0], a[1] * b[1] // a[0], *a[2:]

    def factors(self, a: np.ndarray, b: np.ndarray) -> Pair:
        return b.reshape(len(b), -1), a.reshape(len(a), -1)


class _Experts(PairLayout):
    """A [experts, r, in], B [experts, out, r]; A_e^T B_e^T is added to each W_e [in, out] of W [experts in, out]."""

    cells = "stacked experts"
    dims = 3
    stacked = True
    rank_axes = (1, 2)
    in_slora = False

    def pair_shapes(self, shape: Shape, rank: int, groups: int = 1) -> Dict[str, Shape]:
        experts, rows, columns = shape
        return {"A": (experts, rank, columns), "B": (experts, rows, rank)}

    def channels(self, a: Shape, b: Shape) -> Tuple[int, int]:
        return b[1], a[2]

    def shape_problem(self, a: Shape, b: Shape, rank: int) -> Optional[Problem]:
        if a[0] != b[0]:
            return ShapeMismatchError, f"A is of {a[0]} experts and B of {b[0]}"
        return super().shape_problem(a[1:], b[1:], rank)

    def weight_shape(self, a: Shape, b: Shape) -> Shape:
        return a[0] * a[2], b[1]

    def factors(self, a: np.ndarray, b: np.ndarray) -> Pair:
        return a.swapaxes(1, 2), b.swapaxes(1, 2)

    def products(self, a: np.ndarray, b: np.ndarray) -> List[Pair]:
        return list(zip(a, b))


LINEAR, EMBEDDING, CONVOLUTION, EXPERTS = LAYOUTS = (PairLayout(), _Embedding(), _Convolution(), _Experts())
_BY_DIMS = {layout.dims: layout for layout in (LINEAR, CONVOLUTION, EXPERTS)}


def layout_of(a: Shape, embeds: bool = False) -> PairLayout:
    """Returns the layout of a pair by the shape of its A, which cannot show whether the pair is for an embedding."""
    return EMBEDDING if embeds else _BY_DIMS.get(len(a), LINEAR)


def shape_problem(a: Shape, b: Shape, declared: Optional[int] = None) -> Optional[Problem]:
    """Returns the fault of these shapes of A and B, as (error class, description), or None.

    The rank is the declared one, or A's if none is declared.
    """
    layout = layout_of(a)
    if not layout.dims == len(a) == len(b):
        return ShapeMismatchError, "A and B must be matrices"
    if 0 in a + b:
        return ShapeMismatchError, "A or B is empty"
    return layout.shape_problem(a, b, layout.rank(a) if declared is None else declared)


def has_product(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether B A is defined; it is not for a convolution with groups."""
    return layout_of(a.shape).has_product(a.shape, b.shape)


def factors(a: np.ndarray, b: np.ndarray, embeds: bool = False) -> Pair:
    """Returns the matrices [rows of W, r] and [r, the rest of W] whose product is what B A adds to W.

    A is [r, in], [r, in, kh, kw] for a convolution, [experts, r, in] for experts, and B to match; with ``embeds``, W
    is a table [in, out]. Raises ShapeMismatchError for a convolution with groups.
    """
    if not has_product(a, b):
        raise ShapeMismatchError(
            f"The convolution has {a.shape[0] // b.shape[1]} groups, so no change of its weight can do what A "
            "and B do. Keep the adapter unmerged."
        )
    return layout_of(a.shape, embeds).factors(a, b)


def is_expert_stack(array: np.ndarray) -> bool:
    """Returns whether an array is a stack of one matrix per expert."""
    return array.ndim == EXPERTS.dims


def transposed_experts(stack: np.ndarray) -> np.ndarray:
    """Returns a stack of matrices with each one transposed."""
    return np.ascontiguousarray(stack.swapaxes(1, 2))


def flatten_experts(half: str, stack: np.ndarray) -> np.ndarray:
    """Returns A [experts, r, in] as PEFT's [experts * r, in], or B [experts, out, r] as [out, r * experts]."""
    if half == "A":
        return stack.reshape(-1, stack.shape[2])
    return np.ascontiguousarray(stack.transpose(1, 2, 0)).reshape(stack.shape[1], -1)


def unflatten_experts(half: str, flat: np.ndarray, rank: int) -> Optional[np.ndarray]:
    """Returns the stack that flatten_experts flattened to ``flat``, or None if its shape does not have this rank."""
    size = flat.shape[0 if half == "A" else -1]
    if flat.ndim != 2 or not size or size % rank:
        return None
    if half == "A":
        return flat.reshape(-1, rank, flat.shape[1])
    return np.ascontiguousarray(flat.reshape(len(flat), rank, -1).transpose(2, 0, 1))


def through_middle(a: np.ndarray, mid: np.ndarray, b: np.ndarray) -> Optional[Pair]:
    """Returns the pair equal to three convolutions, with A = mid a; None if their shapes do not agree.

    The three are a [r, in, 1, 1], mid [r, r, kh, kw] and b [out, r, 1, 1]. The product is summed in float64 and rounded
    once to float32; B is returned in float32 too.
    """
    alike = a.ndim == mid.ndim == b.ndim == CONVOLUTION.dims and a.shape[2:] == b.shape[2:] == (1, 1)
    if not alike or not mid.shape[0] == mid.shape[1] == a.shape[0] == b.shape[1]:
        return None
    product = np.einsum("pqhw,qi->pihw", to_float32(mid).astype(np.float64), to_float32(a)[:, :, 0, 0])
    return product.astype(np.float32), to_float32(b)


def turned(array: np.ndarray) -> Optional[np.ndarray]:
    """Returns a matrix transposed and a vector unchanged, or None for an array of more axes."""
    return None if array.ndim > 2 else np.ascontiguousarray(array.T)


def _other_rank(declared: int, found: int) -> Problem:
    return RankMismatchError, f"the configuration declares rank {declared} and the tensors have {found}"
