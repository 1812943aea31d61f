"""Strategy: which rank of a run holds which part of which parameter; cuts tensors accordingly and joins the parts."""

import math
from typing import Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError, MissingTensorsError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.formats import strategy_file
from mindlora.core.formats.strategy_file import Layout, Stages
from mindlora.core.text import listed

Shape = Tuple[int, ...]

_ONE_RUN = "Give the checkpoints of one step of one run, and the strategy of that run."


class Slice(NamedTuple):
    """A part of a tensor of shape ``whole``: the index of its first element, and its own shape."""

    whole: Shape
    begin: Shape
    shape: Shape

    @property
    def where(self) -> Tuple[slice, ...]:
        """The index that selects the part in the whole array."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begin, self.shape))


class Piece(NamedTuple):
    """One rank's part of a tensor, and its place."""

    source: str
    part: Slice
    array: np.ndarray


class Strategy:
    """The strategies of all pipeline stages of one run: stage -> parameter -> Layout.

    Attributes:
        devices (int): Ranks of one stage.
        ranks (int): Ranks of the run.

    Raises AdapterFormatError if a stage is missing, or two parameters are spread over different numbers of devices.
    """

    def __init__(self, stages: Stages, source: str):
        self.stages = stages
        self.source = source
        if sorted(stages) != list(range(len(stages))):
            raise AdapterFormatError(
                f"{source} has the strategies of pipeline stages {', '.join(map(str, sorted(stages)))}: the others are "
                "missing. Give the folder with the strategy files of all ranks."
            )
        names_by_devices = {
            math.prod(layout.dev_matrix): name for layouts in stages.values() for name, layout in layouts.items()
        }
        if len(names_by_devices) > 1:
            (one, first), (other, second) = list(names_by_devices.items())[:2]
            raise AdapterFormatError(
                f"{source} is damaged: it spreads {first} over {one} devices and {second} over {other}. "
                "Copy or save the strategy files again."
            )
        (self.devices,) = names_by_devices
        self.ranks = self.devices * len(stages)

    def layouts(self, rank: int) -> Dict[str, Layout]:
        """Returns parameter -> Layout for the pipeline stage of ``rank``."""
        return self.stages[rank // self.devices]

    def names(self) -> List[str]:
        """Returns the parameters of all stages."""
        return list(dict.fromkeys(name for layouts in self.stages.values() for name in layouts))

    def cells(self) -> List[str]:
        """Returns the paths of the cells to which these parameters belong, as far as they were recorded."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.names()))

    def slice_of(self, name: str, rank: int, shape: Shape) -> Slice:
        """Returns which part of a parameter a rank holds, given the shape of its slice."""
        return slice_of(self.layouts(rank)[name], rank % self.devices, shape, name)

    def check_knows(self, names: List[str], source: str) -> None:
        """Raises UnexpectedTensorsError if one of the parameters of ``source`` is in no stage."""
        known = set(self.names())
        unknown = sorted(set(names) - known)
        if unknown:
            raise UnexpectedTensorsError(
                f"{source} holds {listed(unknown)}, of which the strategy in {self.source} knows nothing: it is the "
                "strategy of another run. Give the one that this run saved."
            )


def read_strategy(path: str) -> Strategy:
    """Returns the strategy in a file or a folder, which strategy_file.read_all reads."""
    return Strategy(strategy_file.read_all(path), path)


def parts_of(layout: Layout, rank: int, name: str) -> Tuple[Shape, Shape]:
    """Returns, for each axis, the number of parts of a tensor and the part that a rank (of its stage) holds.

    Along an axis that several axes of the device matrix cut, the first of them cuts most coarsely. Optimizer
    parallelism cuts the first axis of the remaining slice among the ranks that share it.

    Raises AdapterFormatError if the layout contradicts itself or has uneven slices.
    """
    matrix = layout.dev_matrix
    if layout.uneven:
        raise AdapterFormatError(
            f"The strategy cuts {name} into uneven slices (field slices), which mindlora cannot join. Shard it evenly."
        )
    used = [axis for axes in layout.tensor_map for axis in axes]
    if len(set(used)) < len(used) or any(not 0 <= axis < len(matrix) for axis in used) or min(matrix, default=1) < 1:
        raise AdapterFormatError(
            f"The strategy of {name} is damaged: its tensor map {list(layout.tensor_map)} does not belong to a device "
            f"matrix {list(matrix)}. Copy or save the strategy file again."
        )
    place = np.unravel_index(rank, matrix) if matrix else ()
    counts = []
    indices = []
    for axes in layout.tensor_map:
        sizes = [(matrix[-1 - axis], int(place[-1 - axis])) for axis in axes]
        count = math.prod(size for size, _ in sizes)
        index = 0
        for size, own in sizes:
            index = index * size + own
        counts.append(count)
        indices.append(index)
    size = layout.opt_shard_size
    if size > 1 and counts:
        own = _opt_index(layout, used, [int(at) for at in place], name)
        counts[0], indices[0] = counts[0] * size, indices[0] * size + own
    return tuple(counts), tuple(indices)


def slice_of(layout: Layout, rank: int, shape: Shape, name: str) -> Slice:
    """Returns which part of a tensor a rank of its stage holds, where ``shape`` is the shape of that part.

    A layout without a tensor map is not cut. Raises AdapterFormatError as ``parts_of`` does, and ShapeMismatchError if
    the tensor has another number of axes than the layout.
    """
    if not layout.tensor_map:
        return Slice(shape, (0,) * len(shape), shape)
    counts, indices = parts_of(layout, rank, name)
    if len(counts) != len(shape):
        raise ShapeMismatchError(
            f"{name} is {list(shape)}, and the strategy cuts a tensor of {len(counts)} axes: it is the strategy of "
            "another run. Give the one that this run saved."
        )
    return Slice(
        tuple(size * count for size, count in zip(shape, counts)),
        tuple(size * index for size, index in zip(shape, indices)),
        tuple(shape),
    )


def cut(array: np.ndarray, layout: Layout, rank: int, name: str) -> np.ndarray:
    """Returns a copy of the part of a whole tensor that a rank of its stage holds.

    Raises AdapterFormatError as ``parts_of`` does, and ShapeMismatchError if the parts would not be equal.
    """
    axes = len(array.shape)
    counts, indices = parts_of(layout, rank, name) if layout.tensor_map else ((1,) * axes, (0,) * axes)
    if len(counts) != axes or any(size % count for size, count in zip(array.shape, counts)):
        raise ShapeMismatchError(
            f"{name} is {list(array.shape)}, which the strategy's {list(counts)} parts do not divide: it is the "
            "strategy of another network. Give the one of the run that is to start from this adapter."
        )
    sizes = [size // count for size, count in zip(array.shape, counts)]
    part = Slice(array.shape, tuple(size * index for size, index in zip(sizes, indices)), tuple(sizes))
    return np.array(array[part.where])


def join(name: str, pieces: Sequence[Piece]) -> np.ndarray:
    """Joins pieces into the whole tensor: each element comes from one slice, and its copies are equal.

    Raises ShapeMismatchError if the pieces belong to different tensors or overlap, AdapterFormatError if copies of a
    part differ, and MissingTensorsError if a part is missing.
    """
    first = pieces[0]
    for piece in pieces:
        if (piece.part.whole, piece.array.dtype) != (first.part.whole, first.array.dtype):
            raise ShapeMismatchError(
                f"{name} is a slice {list(first.array.shape)} of {list(first.part.whole)} {first.array.dtype} in "
                f"{first.source}, and {list(piece.array.shape)} of {list(piece.part.whole)} {piece.array.dtype} in "
                f"{piece.source}. {_ONE_RUN}"
            )
    whole = np.empty(first.part.whole, first.array.dtype)
    distinct: List[Piece] = []
    covered = np.zeros(first.part.whole, bool)
    for piece in pieces:
        twin = next((other for other in distinct if other.part == piece.part), None)
        if twin is not None:
            if twin.array.tobytes() != piece.array.tobytes():
                raise AdapterFormatError(
                    f"{name} differs between {twin.source} and {piece.source}, which hold copies of the same slice. "
                    f"{_ONE_RUN}"
                )
            continue
        if covered[piece.part.where].any():
            raise ShapeMismatchError(
                f"{name} has overlapping slices: {piece.source} holds elements that another rank holds as part of a "
                f"different slice. {_ONE_RUN}"
            )
        distinct.append(piece)
        covered[piece.part.where] = True
        whole[piece.part.where] = piece.array
    if not covered.all():
        raise MissingTensorsError(
            f"{name} is incomplete: {np.count_nonzero(~covered):,} of its {covered.size:,} elements are in no rank's "
            "file. Copy the files of all ranks."
        )
    return whole


def _opt_index(layout: Layout, used: Sequence[int], place: List[int], name: str) -> int:
    """Returns which part of a slice, cut by optimizer parallelism, a rank's place in the device matrix holds."""
    matrix = layout.dev_matrix
    left = layout.opt_shard_size
    index, weight = 0, 1
    # The ranks that share a slice differ along the axes that cut nothing; the last of these runs fastest.
    for axis in reversed(range(len(matrix))):
        if len(matrix) - 1 - axis in used or matrix[axis] == 1 or left == 1:
            continue
        size = math.gcd(matrix[axis], left)
        if size != min(matrix[axis], left):
            break
        index += weight * (place[axis] % size)
        weight *= size
        left //= size
    if left > 1:
        raise AdapterFormatError(
            f"The strategy of {name} is damaged: optimizer parallelism cannot cut a slice into "
            f"{layout.opt_shard_size} parts on a device matrix {list(matrix)}. Copy or save the strategy file again."
        )
    return index
