"""merge_lora, unmerge_lora, merge_and_unload: fold adapters into the base, verified, and take them out again."""

import dataclasses
import logging
import warnings
from typing import List, Optional, Tuple

import numpy as np
from mindspore import Tensor, nn

from mindlora.core.errors import LoraError, MergeError
from mindlora.core.numerics.dtypes import ROUNDING, to_float32
from mindlora.core.numerics.folding import fold_weight, probe_weight, row_gains, worst_of
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.core.numerics.pair_shapes import EMBEDDING, factors
from mindlora.core.text import listed
from mindlora.network.cells.cell import LoRACell, carry_settings
from mindlora.network.cells.routed_experts import plain_holders
from mindlora.network.initialize import check_weights
from mindlora.network.quantized.nf4 import first_rows
from mindlora.network.registry import kind_of
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells, replace_children

# A cell with an adapter on a 4-bit weight of any kind: its weight in float, and a sample of it.


def in_float(cell: LoRACell) -> LoRACell:
    """Returns a cell with the same adapter on the plain cell with the dequantized weight (see NF4Dense.plain_cell)."""
    config = dataclasses.replace(
        cell.config, quantize_base=None, quantize_exclude=None, lora_init=None, compute_dtype=str(cell.dtype)
    )
    plain = cell.base_cell.plain_cell()
    lora = kind_of(plain, config).from_cell(plain, config, tuple(cell.shared_parts().values()))
    for part, parameter in cell.parts().items():
        setattr(lora, lora.parameter_names[part], parameter)
    carry_settings(cell, lora)
    return lora


def sample(cell: LoRACell, rows: int) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the first ``rows`` rows of a quantized W and of its update, float32 [rows, ...]."""
    weight = first_rows(cell, rows)
    # One pair of matrices, or one for each expert.
    left, right = (half.reshape(-1, *half.shape[-2:]) for half in cell.layout.factors(*cell.pair()))
    count = -(-len(weight) // left.shape[1])
    change = np.float32(cell.scale) * left[:count, : len(weight)].astype(np.float32) @ right[:count].astype(np.float32)
    change = change.reshape(-1, change.shape[-1])[: len(weight)]
    if cell.variant.row_norms:
        magnitude = to_float32(to_array(cell.parts()[cell.variant.row_norms]))[: len(weight)]
        change = row_gains(weight + change, magnitude) * (weight + change) - weight
    return weight, change


logger = logging.getLogger("mindlora")

# The sample that shows how much quantizing merged weights again would change them.
_SAMPLED_CELLS, _SAMPLED_ROWS = 8, 256


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """The result of merge_lora; str() gives it as text.

    Attributes:
        merged (tuple of str): Paths of the cells whose adapters are in the base now.
        cell (str): Path of the cell whose result on a random probe changed most.
        difference (float): The largest element of that change.
        bound (float): How much rounding can change that element.
        before_merge_bytes (int): Size of the weights before the merge, which unmerge_lora needs, on the host.
        output_difference (float): Largest change of the network's output on the given probe, or None without one.
        output_bound (float): The largest change that was allowed, or None.
    """

    merged: Tuple[str, ...]
    cell: str
    difference: float
    bound: float
    before_merge_bytes: int
    output_difference: Optional[float] = None
    output_bound: Optional[float] = None

    @property
    def kept_bytes(self) -> int:
        """The older name of before_merge_bytes, which will be removed in version 0.3."""
        old, new = "kept_bytes", "before_merge_bytes"
        warnings.warn(f"{old} is now {new}. Use the new name.", DeprecationWarning, stacklevel=2)
        return self.before_merge_bytes

    def __str__(self):
        lines = [
            f"Adapters merged into the base: {len(self.merged)}, at {listed(self.merged)}.",
            f"Largest difference of a cell's result on a random probe: {self.difference:.3g}, at {self.cell}; "
            f"rounding explains up to {self.bound:.3g}.",
        ]
        if self.output_difference is not None:
            lines.append(
                f"Largest difference of the network's output on the given probe: "
                f"{self.output_difference:.3g}; up to {self.output_bound:.3g} is allowed."
            )
        if self.before_merge_bytes:
            size = f"{self.before_merge_bytes / 2**20:,.1f} MiB"
            lines.append(f"Weights before the merge, on the host for unmerge_lora: {size}.")
        return "\n".join(lines)


def merge_lora(network: nn.Cell, *probe: Tensor) -> MergeReport:
    """Folds the adapter into the base: W' = round(W + scale B A), for each LoRADense, in place and verified.

    The sum is formed in float32, for any dtypes of W, A and B, and rounded once, to the dtype of W. Copies of W
    and B stay on the host for unmerge_lora. B is zero while merged, so that graphs compiled before stay correct.

    With DoRA, W' = round(g (W + scale B A)) with g = m / ||W + scale B A|| for each row; the magnitude m is copied too.

    For each cell, x W'^T is compared with the cell's output before the merge, for a few random rows x; the difference
    must be no larger than rounding explains (see mindlora.core.numerics.folding.probe_weight). After any error, every
    weight is restored byte for byte.

    Args:
        network (nn.Cell): A network with LoRADense cells, not in training mode. W is [out, in], A [r, in] and
            B [out, r], each float32, float16 or bfloat16.
        *probe (Tensor): Inputs of the network, with which its (first) output is compared as well.

    Returns:
        MergeReport.

    Raises:
        LoraError: The network holds no LoRADense cell.
        MergeError: An adapter is already merged or in training mode; its weight is shared with another cell, has no
            values yet or has another dtype; or a result differs by more than rounding explains.

    Note:
        Merged cells must not train: set_train(True) raises. A custom gradient function (mindspore.value_and_grad)
        sets no mode, so such training goes unnoticed until unmerge_lora warns that B has changed.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.
    """
    cells = _cells(network)
    _check_can_merge(network, cells)
    before = _output(network, probe) if probe else None
    try:
        difference, bound, worst = max((*_merge_cell(path, cell), path) for path, cell in cells)
        checked = _compare_outputs(before, _output(network, probe), cells) if probe else (None, None)
    except BaseException:  # Even an interrupt must not leave the network half merged.
        _restore(cells)
        raise
    before_merge_bytes = sum(array.nbytes for _, cell in cells for array in cell.before_merge)
    report = MergeReport(tuple(path for path, _ in cells), worst, difference, bound, before_merge_bytes, *checked)
    logger.info("%s", report)
    return report


def unmerge_lora(network: nn.Cell) -> None:
    """Takes the adapter out of the base again: restores W and B byte for byte.

    Args:
        network (nn.Cell): A network on which merge_lora was called.

    Raises:
        LoraError: The network holds no LoRADense cell.
        MergeError: No adapter is merged.
    """
    cells = [(path, cell) for path, cell in _cells(network) if cell.merged]
    if not cells:
        raise MergeError("No adapter of the network is merged: call unmerge_lora only after merge_lora.")
    changed = [path for path, cell in cells if cell.parts()[cell.variant.zero_part].asnumpy().astype(np.float32).any()]
    if changed:
        logger.warning(
            "The adapter was changed while it was merged, at %s, by training or by loading. The change is lost, as "
            "unmerge_lora restores the weights before the merge: call it before training or loading.",
            listed(changed),
        )
    _restore(cells)
    logger.info("Adapters taken out of the base again: %d, at %s.", len(cells), listed(path for path, _ in cells))


def merge_and_unload(network: nn.Cell, *probe: Tensor) -> MergeReport:
    """Merges like merge_lora, then restores the plain cells: the network is as before apply_lora, with W' for W.

    Adapted cells of a quantized base first become float cells again, in their earlier dtype; quantized cells
    without an adapter are unchanged.

    Args:
        network (nn.Cell): A network with LoRADense cells inside.
        *probe (Tensor): As for merge_lora.

    Returns:
        MergeReport.

    Raises:
        LoraError, MergeError: As in merge_lora, or the network is itself a LoRADense.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.
    """
    if isinstance(network, LoRACell):
        raise MergeError(
            f"The network is itself a {type(network).__name__}, so there is no cell around it to put the plain "
            "one into. Use merge_lora, or put it into a network."
        )
    quantized = [cell for _, cell in _cells(network) if cell.quantization]
    replacements = {id(cell): in_float(cell) for cell in quantized}
    replace_children(network, replacements)
    try:
        report = merge_lora(network, *probe)
    except BaseException:
        replace_children(network, {id(replacements[id(cell)]): cell for cell in quantized})
        for cell in quantized:
            cell.base_cell.drop_float()
        raise
    for _, cell in _cells(network):
        cell.before_merge = None
    without_adapters(network)
    return dataclasses.replace(report, before_merge_bytes=0)


def without_adapters(network: nn.Cell) -> None:
    """Puts in the place of each cell with an adapter the one that it replaced, with its current weight; in place."""
    cells = [cell for _, cell in lora_cells(network)]
    replace_children(network, {**{id(cell): cell.plain_cell() for cell in cells}, **plain_holders(network)})


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
    activated = [path for path, cell in cells if cell.invocation_tokens]
    if activated:
        raise MergeError(
            f"The adapter acts from its invocation tokens on (alora_invocation_tokens), at {listed(activated)}, and "
            "merged weights act on all tokens. Keep it unmerged, and serve it (mindlora serve, generate, chat)."
        )
    quantized = [(path, cell) for path, cell in cells if cell.quantization]
    if quantized:
        error, change = requantization_error(*(cell for _, cell in quantized))
        raise MergeError(
            f"The weights of {listed(path for path, _ in quantized)} are quantized, and merged ones "
            f"would have to be quantized again, with an error of {error:.2g} (root mean square of a sample), "
            f"while the adapter changes them by {change:.2g}. Use merge_and_unload, which turns them into "
            "float cells, or merge the adapter into the base in float (mindlora base merge)."
        )
    check_weights(
        network, dict(cells), MergeError, "merging", "Keep the adapter unmerged, or untie the two before apply_lora."
    )


def requantization_error(*cells: LoRACell) -> Tuple[float, float]:
    """Returns the root mean squares of two changes: from quantizing merged weights again, and from the adapter.

    Both cover the first rows of up to 8 cells, evenly spread among the given ones.
    """
    errors, changes = [], []
    for index in np.unique(np.linspace(0, len(cells) - 1, min(_SAMPLED_CELLS, len(cells))).round().astype(int)):
        before, change = sample(cells[index], _SAMPLED_ROWS)
        merged = before + change
        errors.append((dequantize(quantize(merged)) - merged).reshape(-1))
        changes.append(change.reshape(-1))
    return _root_mean_square(errors), _root_mean_square(changes)


def _root_mean_square(arrays: List[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.square(np.concatenate(arrays)))))


def _merge_cell(path, cell) -> Tuple[float, float]:
    """Merges one cell; returns its largest difference on the probe and the bound of that element."""
    cell.prepare()
    # Copies, because asnumpy may return a view of the parameter's own memory.
    cell.before_merge = tuple(parameter.asnumpy().copy() for parameter in cell.merge_parameters())
    original, _, *magnitude = cell.before_merge
    # One pair of matrices, or one for each expert.
    b, a = (half.reshape(-1, *half.shape[-2:]) for half in factors(*cell.pair(), cell.layout is EMBEDDING))
    weight = original.reshape(len(b), b.shape[1], a.shape[2])
    folded = [fold_weight(*matrices, cell.scale, *magnitude) for matrices in zip(weight, b, a)]
    merged = folded[0][0] if len(folded) == 1 else np.concatenate([block for block, _ in folded])
    # from_numpy takes over the array, whereas Tensor would briefly hold a second copy of the weight.
    cell.weight.set_data(Tensor.from_numpy(merged.reshape(original.shape)))
    cell.silence()
    stored = cell.weight.asnumpy().reshape(weight.shape)
    probes = [probe_weight(*matrices, cell.scale, gains) for *matrices, (_, gains) in zip(weight, stored, b, a, folded)]
    difference, bound = (np.concatenate(blocks, axis=1) for blocks in zip(*probes))
    if not np.isfinite(bound).all():
        raise MergeError(
            f"{path}: W, A or B holds NaN or infinity, so nothing was merged. Load the base or the adapter again."
        )
    worst, explained = worst_of(difference, bound)
    if not explained:
        raise MergeError(
            f"{path}: on a random probe the merged cell's result differs by {difference[worst]:.3g}, and "
            f"rounding to {weight.dtype} explains no more than {bound[worst]:.3g}. The merge is undone: "
            "keep the adapter unmerged, or load the base in a dtype with more range."
        )
    return float(difference[worst]), float(bound[worst])


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
            f"The network's first output on the probe is of type {type(first).__name__}: it must be a Tensor, which "
            "can be compared before and after merging."
        )
    return first.asnumpy().astype(np.float64)  # astype also copies.


def _compare_outputs(before, after, cells) -> Tuple[float, float]:
    """Returns the largest difference of the network's outputs, and the largest allowed one."""
    with np.errstate(invalid="ignore"):
        # Equal infinities, as in masks, compare equal although their difference is NaN.
        difference = float(np.max(np.where(before == after, 0, np.abs(after - before)), initial=0))
    # The cells round independently of each other, so their errors grow with the square root of their number; the layers
    # between them amplify that, and the factor of 8 allows for it. The order of sums in a product can change an output
    # by up to a thousandth. An update left out or added twice changes it by far more, unless the adapter does nothing.
    unit = max(ROUNDING[str(dtype).lower()][0] for _, cell in cells for dtype in (cell.weight.dtype, cell.dtype))
    share = max(1e-3, 8 * np.sqrt(len(cells)) * unit)
    bound = float(share * np.max(np.abs(before[np.isfinite(before)]), initial=0))
    if not difference <= bound:
        raise MergeError(
            f"Merged, the network's output on the given probe differs by {difference:.3g}, and rounding "
            f"explains about {bound:.3g}. The merge is undone: keep the adapter unmerged, or leave the "
            "probe out if the output is itself random."
        )
    return difference, bound
