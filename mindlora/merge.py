"""merge_lora, unmerge_lora, merge_and_unload: adapters folded into the base, verified, and out of it again."""

import dataclasses
import logging
from typing import Iterator, List, Optional, Tuple

import numpy as np
from mindspore import Tensor, nn

from mindlora.adapters.adapter import factors, row_gains
from mindlora.common.text import listed
from mindlora.errors import LoraError, MergeError
from mindlora.nn.cell import LoRACell
from mindlora.nn.tree import lora_cells, replace_children
from mindlora.numerics.dtypes import ROUNDING
from mindlora.numerics.nf4 import dequantize, quantize

logger = logging.getLogger("mindlora")

# Weights are worked on in pieces of whole rows, so that only a piece of what is float32 or float64 is in memory.
_BLOCK_ELEMENTS = 1 << 20
# What is looked at to say how merged weights would be quantized again.
_SAMPLED_CELLS, _SAMPLED_ROWS = 8, 256


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What merge_lora did; str() says it to people.

    Attributes:
        merged (tuple of str): Paths of the cells whose adapters are in the base now.
        cell (str): Path of the cell whose result on a random probe changed most.
        difference (float): By how much, in the largest element.
        bound (float): By how much rounding can change that element.
        before_merge_bytes (int): Size of what is kept on the host for unmerge_lora.
        output_difference (float): Largest change of the network's output on the given probe, or None without one.
        output_bound (float): What was allowed, or None.
    """

    merged: Tuple[str, ...]
    cell: str
    difference: float
    bound: float
    before_merge_bytes: int
    output_difference: Optional[float] = None
    output_bound: Optional[float] = None

    def __str__(self):
        lines = [
            f"Adapters merged into the base: {len(self.merged)}, at {listed(self.merged)}.",
            f"Largest difference of a cell's result on a random probe: {self.difference:.3g}, at {self.cell}; "
            f"rounding explains up to {self.bound:.3g}.",
        ]
        if self.output_difference is not None:
            lines.append(
                f"Largest difference of the network's output on the given probe: "
                f"{self.output_difference:.3g}; allowed are {self.output_bound:.3g}."
            )
        if self.before_merge_bytes:
            lines.append(f"Kept on the host for unmerge_lora: {self.before_merge_bytes / 2**20:,.1f} MiB.")
        return "\n".join(lines)


def merge_lora(network: nn.Cell, *probe) -> MergeReport:
    """Folds the adapter into the base: W' = round(W + scale B A), for each LoRADense, in place and verified.

    The sum is formed in float32, whatever the dtypes of W, A and B, and rounded once, to the dtype of W. W and B are
    kept on the host for unmerge_lora, and B is zero while merged, so that graphs that were compiled before stay right.

    With DoRA, W' = round(g (W + scale B A)) with g = m / ||W + scale B A|| for each row; below, g W stands for W then,
    g B for B, and the magnitude m is kept too.

    For each cell, x W^T + scale (x A^T) B^T and x W'^T are compared in float64, with a few random rows x and a few that
    the adapter answers to most. Rounding, by at most a share u of a number (2^-24 in float32, 2^-11 in float16, 2^-8 in
    bfloat16), explains in each element

        |difference| <= (u + 2 u32) |x| |W|^T + (u + (r + 5) u32) scale |x| |A|^T |B|^T

    and next to nothing more. On any error, every weight is byte for byte what it was.

    Args:
        network (nn.Cell): A network with LoRADense cells, not in training mode. W is [out, in], A [r, in] and
            B [out, r], each float32, float16 or bfloat16.
        *probe: Inputs of the network, to compare its own output (the first, where it has several) as well.

    Returns:
        MergeReport.

    Raises:
        LoraError: The network holds no LoRADense cell.
        MergeError: An adapter is merged already or in training mode; its weight is another cell's too, has no values
            yet or another dtype; or a result differs by more than rounding explains.

    Note:
        Merged cells must not train: set_train(True) raises. A gradient function made by hand (mindspore.value_and_grad)
        sets no mode, so that it goes unnoticed until unmerge_lora warns of a B that was changed.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.
    """
    cells = _cells(network)
    _check_can_merge(network, cells)
    before = _output(network, probe) if probe else None
    try:
        difference, bound, worst = max((*_merge_cell(path, cell), path) for path, cell in cells)
        checked = _compare_outputs(before, _output(network, probe), cells) if probe else (None, None)
    except BaseException:  # an interrupt as well must not leave half of it
        _restore(cells)
        raise
    before_merge_bytes = sum(array.nbytes for _, cell in cells for array in cell.before_merge)
    report = MergeReport(tuple(path for path, _ in cells), worst, difference, bound, before_merge_bytes, *checked)
    logger.info("%s", report)
    return report


def unmerge_lora(network: nn.Cell) -> None:
    """Takes the adapter out of the base again: W and B are byte for byte what they were before merge_lora.

    Args:
        network (nn.Cell): A network on which merge_lora was called.

    Raises:
        LoraError: The network holds no LoRADense cell.
        MergeError: No adapter is merged.
    """
    cells = [(path, cell) for path, cell in _cells(network) if cell.merged]
    if not cells:
        raise MergeError("No adapter of the network is merged, so there is nothing to take out of the base.")
    changed = [path for path, cell in cells if cell.parts()[cell.zero_part].asnumpy().astype(np.float32).any()]
    if changed:
        logger.warning(
            "The adapter was changed while it was merged, at %s, by training or by loading: that is "
            "lost, for unmerge_lora restores what was before the merge.",
            listed(changed),
        )
    _restore(cells)
    logger.info("Adapters taken out of the base again: %d, at %s.", len(cells), listed(path for path, _ in cells))


def merge_and_unload(network: nn.Cell, *probe) -> MergeReport:
    """Merges as merge_lora does, then puts the plain cells back: the network is as before apply_lora, with W' for W.

    Where the base is quantized, the adapted cells are made float cells again first, of the dtype they had; quantized
    cells without an adapter stay as they are.

    Args:
        network (nn.Cell): A network with LoRADense cells inside.
        *probe: As for merge_lora.

    Returns:
        MergeReport.

    Raises:
        LoraError, MergeError: As merge_lora, or the network is itself a LoRADense.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.
    """
    if isinstance(network, LoRACell):
        raise MergeError(
            f"The network is itself a {type(network).__name__}, so no cell is around it to put the plain "
            "one into. Use merge_lora, or put it into a network."
        )
    quantized = [cell for _, cell in _cells(network) if cell.quantization]
    in_float = {id(cell): cell.in_float() for cell in quantized}
    replace_children(network, in_float)
    try:
        report = merge_lora(network, *probe)
    except BaseException:
        replace_children(network, {id(in_float[id(cell)]): cell for cell in quantized})
        for cell in quantized:
            cell.drop_float()
        raise
    cells = [cell for _, cell in _cells(network)]
    for cell in cells:
        cell.before_merge = None
    replace_children(network, {id(cell): cell.plain_cell() for cell in cells})
    return dataclasses.replace(report, before_merge_bytes=0)


def _cells(network) -> List[Tuple[str, LoRACell]]:
    cells = [(path or type(cell).__name__, cell) for path, cell in lora_cells(network)]
    if not cells:
        raise LoraError(
            "The network holds no LoRADense cell, so there is no adapter to merge or unmerge. Call "
            "apply_lora, and load_lora, first."
        )
    return cells


def _check_can_merge(network, cells):
    merged = [path for path, cell in cells if cell.merged]
    if merged:
        raise MergeError(f"Adapters are merged already, at {listed(merged)}: call unmerge_lora first.")
    training = [path for path, cell in cells if cell.training]
    if training:
        raise MergeError(
            f"The network is in training mode, at {listed(training)}: call network.set_train(False) before merging."
        )
    quantized = [(path, cell) for path, cell in cells if cell.quantization]
    if quantized:
        error, change = requantization_error(*(cell for _, cell in quantized))
        raise MergeError(
            f"The weights of {listed(path for path, _ in quantized)} are quantized, and merged ones "
            f"would have to be quantized again: that would err by {error:.2g} (root mean square of a "
            f"sample), where the adapter changes them by {change:.2g}. Use merge_and_unload, which makes "
            "float cells of them, or merge the adapter into the base in float (mindlora merge)."
        )
    for path, cell in cells:
        if cell.weight.has_init:
            raise MergeError(f"The weight of {path} has no values yet: load the base checkpoint before merging.")
        if str(cell.weight.dtype).lower() not in ROUNDING:
            raise MergeError(
                f"The weight of {path} is {cell.weight.dtype}: an adapter can be merged into float32, "
                "float16 or bfloat16."
            )
    owners = {id(cell.weight): (path, cell) for path, cell in cells}
    for other_path, other in network.cells_and_names():
        for name, parameter in other.parameters_and_names(expand=False):
            path, owner = owners.get(id(parameter), ("", other))
            if owner is not other:
                raise MergeError(
                    f"{path} shares its weight with {other_path} ({name}), which merging would change "
                    "too. Keep the adapter unmerged, or untie the two before apply_lora."
                )


def requantization_error(*cells: LoRACell) -> Tuple[float, float]:
    """Returns what quantizing merged weights again would change them by, and what the adapter does, root mean squares.

    Of the first rows of up to 8 of the cells, evenly spread.
    """
    errors, changes = [], []
    for index in sorted({round(i) for i in np.linspace(0, len(cells) - 1, min(_SAMPLED_CELLS, len(cells)))}):
        before, change = cells[index].sample(_SAMPLED_ROWS)
        errors.append(np.square(dequantize(quantize(before + change)) - (before + change)))
        changes.append(np.square(change))
    return tuple(
        float(np.sqrt(np.mean(np.concatenate([array.reshape(-1) for array in squares]))))
        for squares in (errors, changes)
    )


# What overflows is found by comparing results, with a better message than numpy's.
@np.errstate(over="ignore", invalid="ignore")
def _merge_cell(path, cell) -> Tuple[float, float]:
    """Merges one cell; returns its largest difference on the probe and the bound of that element."""
    cell.prepare()
    # Copies, because asnumpy may look into the parameter's own memory.
    cell.before_merge = tuple(parameter.asnumpy().copy() for parameter in cell.merge_parameters())
    whole, _, *magnitude = cell.before_merge
    weight = whole.reshape(len(whole), -1)
    b, a = factors(*cell.pair(), cell.embeds)
    gains = _gains(weight, a, b, cell.scale, *magnitude)
    # from_numpy takes the array over, where Tensor would hold a second copy of the weight for a moment.
    cell.weight.set_data(Tensor.from_numpy(_folded(weight, a, b, cell.scale, gains).reshape(whole.shape)))
    cell.silence()
    difference, bound = _measure(weight, cell.weight.asnumpy().reshape(weight.shape), a, b, cell.scale, gains)
    if not np.isfinite(bound).all():
        raise MergeError(
            f"{path}: W, A or B holds NaN or infinity, so that nothing was merged. Load the base or the adapter again."
        )
    wrong = ~(difference <= bound)  # NaN is wrong too
    place = np.unravel_index(np.argmax(np.where(wrong, np.inf, difference)), difference.shape)
    if wrong.any():
        raise MergeError(
            f"{path}: on a random probe the merged cell's result differs by {difference[place]:.3g}, and "
            f"rounding to {weight.dtype} explains no more than {bound[place]:.3g}. The merge is undone: "
            "keep the adapter unmerged, or load the base in a dtype of more range."
        )
    return float(difference[place]), float(bound[place])


def _gains(weight, a, b, scale, magnitude=None) -> np.ndarray:
    """Returns what each row of weight + scale b a is multiplied by, float32 [rows, 1]: 1 without DoRA."""
    gains = np.ones((len(weight), 1), np.float32)
    if magnitude is not None:
        a, b = a.astype(np.float32), np.float32(scale) * b.astype(np.float32)
        for rows in _blocks(weight):
            gains[rows] = row_gains(weight[rows].astype(np.float32) + b[rows] @ a, magnitude[rows].astype(np.float32))
    return gains


def _folded(weight, a, b, scale, gains) -> np.ndarray:
    """Returns round(gains (weight + scale b a)) in the dtype of ``weight``."""
    merged = np.empty_like(weight)
    a, b = a.astype(np.float32), np.float32(scale) * b.astype(np.float32)
    for rows in _blocks(weight):
        merged[rows] = (weight[rows].astype(np.float32) + b[rows] @ a) * gains[rows]
    return merged


def _measure(weight, merged, a, b, scale, gains) -> Tuple[np.ndarray, np.ndarray]:
    """Returns |difference| and its bound (see merge_lora), each [rows of x, out]."""
    a, b = a.astype(np.float64), b.astype(np.float64) * gains
    # An update far smaller than W is lost in the rounding of x W^T for most x. Mixtures of the rows of A answer to it
    # most, and tell whether it is there.
    rng = np.random.default_rng(0)
    anywhere, within = rng.normal(size=(2, a.shape[1])), rng.normal(size=(2, len(a))) @ a
    x = np.concatenate([anywhere, within / max(np.sqrt(np.mean(np.square(within))), 1e-30)])
    x_size, low_rank, low_rank_size = np.abs(x), scale * (x @ a.T), scale * (np.abs(x) @ np.abs(a).T)
    (unit, smallest), (unit32, _) = ROUNDING[weight.dtype.name], ROUNDING["float32"]
    difference, bound = np.empty((2, len(x), len(weight)))
    for rows in _blocks(weight):
        block = weight[rows].astype(np.float64) * gains[rows]
        expected = x @ block.T + low_rank @ b[rows].T
        difference[:, rows] = np.abs(x @ merged[rows].astype(np.float64).T - expected)
        # The second unit32 is for the product with gains.
        bound[:, rows] = (unit + 2 * unit32) * (x_size @ np.abs(block).T) + (unit + (len(a) + 5) * unit32) * (
            low_rank_size @ np.abs(b[rows]).T
        )
    # One hundredth for the products of these roundings, and for float64's own.
    return difference, 1.01 * (bound + smallest * x_size.sum(axis=1, keepdims=True))


def _blocks(weight) -> Iterator[slice]:
    count = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    return (slice(begin, begin + count) for begin in range(0, len(weight), count))


def _restore(cells):
    for _, cell in cells:
        if cell.merged:
            for parameter, array in zip(cell.merge_parameters(), cell.before_merge):
                parameter.set_data(Tensor.from_numpy(array))
            cell.before_merge = None


def _output(network, probe) -> np.ndarray:
    output = network(*probe)
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor):
        raise MergeError(
            f"The network's first output on the probe is of type {type(first).__name__}: only a Tensor "
            "can be compared before and after merging."
        )
    return first.asnumpy().astype(np.float64)  # a copy too


def _compare_outputs(before, after, cells) -> Tuple[float, float]:
    """Returns the largest difference of the network's outputs and what is allowed of it."""
    with np.errstate(invalid="ignore"):
        # An infinity that masks something differs from itself by nothing.
        difference = float(np.max(np.where(before == after, 0, np.abs(after - before)), initial=0))
    # The cells round independently of each other, so their errors add up like the root of their number; 8 is for what
    # the layers between them amplify. Below a thousandth of the output the order of sums in a product shows as well. A
    # path that is left out or counted twice shows by far more, unless the adapter does nothing.
    unit = max(ROUNDING[str(dtype).lower()][0] for _, cell in cells for dtype in (cell.weight.dtype, cell.dtype))
    share = max(1e-3, 8 * np.sqrt(len(cells)) * unit)
    bound = float(share * np.max(np.abs(before[np.isfinite(before)]), initial=0))
    if not difference <= bound:
        raise MergeError(
            f"Merged, the network's output on the given probe differs by {difference:.3g}, and rounding "
            f"explains about {bound:.3g}. The merge is undone: keep the adapter unmerged, or leave the "
            "probe out if the output is random by itself."
        )
    return difference, bound
