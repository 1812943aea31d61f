"""Initializations that are computed from a network's base: applies them, saves and loads such adapters.

With W' = W - scale B0 A0 in place of W, W' x + scale B A x = W x + scale [B, -B0] [A; A0] x: a pair trained on W' is a
plain LoRA of twice the rank on W. save_lora writes that LoRA, and load_lora takes it apart again for a network that was
built with the same lora_init. MiCA leaves the base unchanged and trains a plain LoRA.
"""

import logging
from typing import Callable, Dict, Tuple, Type

import numpy as np
from mindspore import Tensor, nn

from mindlora.core.errors import BaseMismatchError, LoraError, RankMismatchError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import ROUNDING, to_float32
from mindlora.core.numerics.initializers import InitialPair
from mindlora.core.text import listed
from mindlora.files.adapters import initial_pairs
from mindlora.files.adapters.adapter import Adapter
from mindlora.network.base_fingerprint import base_fingerprint
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.linear_base import channels_of
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells
from mindlora.network.tree import weight_of as weight_of_cell

logger = logging.getLogger("mindlora")


def initialize_adapters(network: nn.Cell) -> Tuple[str, ...]:
    """Applies lora_init "pissa", "pissa_niter_N", "olora" and "mica": computes A and B from W.

    All except mica, whose A is zero, also set W to W - scale B A. Call it after the base's weights are loaded and
    before training. Cells that are already initialized, or loaded from an adapter, stay as they are, so a second call
    does nothing. A network with another lora_init needs no call. Under MindFormers, LoraCheckpoint and
    LoraInitialization call it.

    Args:
        network (nn.Cell): A network with LoRADense cells.

    Returns:
        tuple of str, the paths of the cells that were initialized.

    Raises:
        LoraError: The network holds no LoRADense cell; a weight has no values yet, is shared with another cell, is not
            a float or holds NaN; or the cell has a trained adapter, whose B is not zero (or, with mica, does not
            consist of orthonormal columns).
        ConfigError: lora_rank is larger than a side of a weight.

    Source: Meng et al., PiSSA, 2024; Buyukakyuz, OLoRA, 2024; Rüdiger and Raschka, MiCA, 2026.
    """
    cells = dict(lora_cells(network))
    if not cells:
        raise LoraError(
            "The network holds no LoRADense cell, so there is nothing to initialize. Call apply_lora first."
        )
    waiting = {path: cell for path, cell in cells.items() if cell.awaits_initialization}
    frozen = {path: cell for path, cell in cells.items() if initializers.freezes_b(cell.lora_init) and not cell.merged}
    _check_frozen({path: to_array(cell.parts()["B"]) for path, cell in frozen.items() if path not in waiting})
    if not waiting:
        return ()
    _check_weights(network, waiting)
    trained = [path for path, cell in waiting.items() if to_float32(to_array(cell.mindpet_delta_lora_b)).any()]
    if trained:
        raise LoraError(
            f"B is not zero at {listed(trained)}, which lora_init {cells[trained[0]].lora_init!r} would overwrite: "
            "the base's checkpoint holds a trained adapter. Load a base without LoRA; to go on with a run, use "
            "resume of LoraCheckpoint."
        )
    fingerprint = base_fingerprint(network)
    for path, cell in waiting.items():
        weight = to_float32(to_array(cell.weight))
        if not np.isfinite(weight).all():
            raise LoraError(
                f"The weight of {path or 'the cell'} holds NaN or infinity, so lora_init {cell.lora_init!r} "
                "cannot be computed from it. Load the base again."
            )
        for part, array in zip("AB", initializers.of_base(cell.lora_init, weight, cell.lora_rank, cell.scale)):
            cell.load_part(part, array)
        if initializers.changes_base(cell.lora_init):
            # A and B rounded to the dtypes of their parameters, so that W' + scale B A is W.
            _subtract(cell, InitialPair(*(to_array(cell.parts()[part]).copy() for part in "AB"), fingerprint))
        if cell.training:
            cell.prepare()
    logger.info("Adapters initialized from the base by lora_init: %d, at %s.", len(waiting), listed(waiting))
    return tuple(waiting)


def append_initial_pairs(adapter: Adapter, cells: Dict[str, LoRACell]) -> None:
    """Turns a network's adapter for the changed base into a plain LoRA for the original base, in place.

    For the pairs of the cells, by path, A becomes [A; A0] and B [B, -B0], at the same scale. Raises LoraError if an
    initialization has not been applied.
    """
    waiting = [path for path, cell in cells.items() if cell.awaits_initialization]
    if waiting:
        raise LoraError(
            f"lora_init {cells[waiting[0]].lora_init!r} has not been carried out at "
            f"{listed(waiting)}. Call initialize_adapters once the base is loaded, before training."
        )
    for path, cell in cells.items():
        if cell.initial_pair:
            initial_pairs.append(adapter, path, cell.initial_pair.a, cell.initial_pair.b)
    if all(cell.initial_pair for cell in cells.values()):
        adapter.initialization = next(iter(cells.values())).lora_init


def base_weights(adapter: Adapter, cells: Dict[str, nn.Cell], source: str) -> Callable[[str], np.ndarray]:
    """Returns a function that returns the base's weight [out, in] of a cell, float32, from its path.

    The adapter is one that PEFT saved as PiSSA, OLoRA or KaSA trained it; it is not called for any other. It
    raises LoraError if the weight is not the one that the initial pairs were computed from.
    """

    def weight_of(path: str) -> np.ndarray:
        problem, advice = _unusable(cells[path])
        if problem:
            raise LoraError(
                f"{source} was trained with PEFT's {adapter.initializer!r}, whose initial pairs follow from "
                f"the base, and the weight of {path or 'the cell'} {problem}. {advice}"
            )
        return to_float32(to_array(weight_of_cell(cells[path])))

    return weight_of


def _unusable(cell) -> Tuple[str, str]:
    """Returns why initial pairs cannot be computed from a cell's weight, and what to do; "" if they can."""
    weight = weight_of_cell(cell)
    if getattr(cell, "initial_pair", None):
        return "has been changed by initialize_adapters", "Load the adapter before."
    if weight is None or weight.has_init:
        return (
            "has no values yet",
            "Load the base first, or merge the adapter into it (mindlora base merge): in a YAML, load_checkpoint comes "
            "after adapter_path.",
        )
    if str(weight.dtype).lower() not in ROUNDING:
        advice = "Merge the adapter into the base in float (mindlora base merge), and quantize the result."
        return "is quantized", advice
    if tuple(weight.shape) != channels_of(cell)[::-1]:
        return "is a part of a sharded one", "Merge the adapter into the whole base (mindlora base merge)."
    return "", ""


def split_initial_pairs(adapter: Adapter, network: nn.Cell, source: str) -> Dict[str, InitialPair]:
    """Undoes append_initial_pairs for the cells of ``network`` whose lora_init changes the base.

    The pairs of ``adapter``, which is matched to the network, become those that were trained. Returns path -> initial
    pair, for each cell from whose weight it has yet to be subtracted; the network is not changed.

    Raises:
        RankMismatchError: The adapter holds initial pairs, and the network was built with its lora_rank but without
            its lora_init.
        BaseMismatchError: The initial pair that was subtracted from the base is not the adapter's.
        LoraError: An initial pair cannot be subtracted from a weight.
    """
    cells, pairs = dict(lora_cells(network)), {}
    for path in adapter.paths:
        cell, rank = cells[path], adapter.rank(path)
        if adapter.initialization and rank == 2 * cell.lora_rank:
            if not initializers.changes_base(cell.lora_init):
                raise RankMismatchError(
                    f"{source} was trained with lora_init {adapter.initialization!r} and lora_rank {cell.lora_rank}, "
                    f"but is saved as a plain LoRA of rank {rank}. Set lora_init to {adapter.initialization!r}, or "
                    f"lora_rank to {rank} and lora_alpha to {adapter.alphas[path]:g}."
                )
            pairs[path] = _split_initial_pair(adapter, path)
        built = cell.initial_pair and _content(cell.initial_pair)
        if built and built != (path in pairs and _content(pairs[path])):
            raise BaseMismatchError(
                f"{source} holds a different initial pair for {path or 'the cell'} than initialize_adapters has "
                "subtracted from the base. Load it into a network on which initialize_adapters was not called."
            )
        if built:
            del pairs[path]
    _check_weights(network, {path: cells[path] for path in pairs})
    return pairs


def subtract_initial_pairs(network: nn.Cell, adapter: Adapter, pairs: Dict[str, InitialPair]) -> None:
    """Subtracts split_initial_pairs' result from the base; in cells without a pair, lora_init no longer applies."""
    fingerprint = base_fingerprint(network) if pairs else None
    plain, paths = [], set(adapter.paths)
    for path, cell in lora_cells(network):
        if path in pairs:
            _subtract(cell, pairs[path]._replace(fingerprint=fingerprint))
        elif path in paths and cell.will_change_base:
            cell.lora_init = None
            plain.append(path)
    if plain:
        logger.warning(
            "lora_init is not carried out at %s, where a plain adapter was loaded. Leave it out for such an adapter.",
            listed(plain),
        )


def check_frozen(adapter: Adapter, cells: Dict[str, LoRACell], source: str) -> None:
    """Raises LoraError if cells whose B does not train would get a B that no initialization computed.

    ``adapter`` is matched to the network, and ``cells`` is path -> cell.
    """
    frozen = [path for path in adapter.paths if initializers.freezes_b(cells[path].lora_init)]
    _check_frozen({path: adapter.tensors[path, "B"] for path in frozen}, f"{source}: ")


def _check_frozen(matrices, prefix=""):
    """Raises LoraError if a B, by path, is neither zero nor one of MiCA's."""
    matrices = {path: to_float32(b) for path, b in matrices.items()}
    others = [path for path, b in matrices.items() if b.any() and not initializers.has_orthonormal_columns(b)]
    if others:
        raise LoraError(
            f"{prefix}B at {listed(others)} is trained, and not made of singular vectors as lora_init 'mica' makes and "
            "keeps it. Remove lora_init to train that adapter, or load a base without LoRA."
        )


def _split_initial_pair(adapter, path) -> InitialPair:
    a, b = (adapter.tensors[path, half] for half in "AB")
    rank = len(a) // 2
    adapter.tensors[path, "A"], adapter.tensors[path, "B"] = a[:rank], b[:, :rank]
    adapter.alphas[path] /= adapter.alpha_growth(2)
    return InitialPair(np.ascontiguousarray(a[rank:]), initial_pairs.negative(b[:, rank:]), None)


def _subtract(cell, initial_pair):
    a, b = to_float32(initial_pair.a), to_float32(initial_pair.b)
    weight = initializers.residual(to_float32(to_array(cell.weight)), a, b, cell.scale)
    cell.weight.set_data(Tensor(weight, cell.weight.dtype))
    cell.initial_pair = initial_pair


def _content(initial_pair) -> Tuple[bytes, bytes]:
    return initial_pair.a.tobytes(), initial_pair.b.tobytes()


def _check_weights(network, cells):
    """Raises LoraError if the weight of one of ``cells`` cannot be read, or cannot be changed as lora_init needs."""
    for path, cell in cells.items():
        if tuple(cell.weight.shape) != (cell.out_channels, cell.in_channels):
            raise LoraError(
                f"The weight of {path or 'the cell'} is a part of a sharded one, "
                f"{list(cell.weight.shape)}, and lora_init {cell.lora_init!r} needs whole weights. "
                "Set lora_init: kaiming."
            )
    for name in dict.fromkeys(cell.lora_init for cell in cells.values()):
        cells_of_initializer = {path: cell for path, cell in cells.items() if cell.lora_init == name}
        step = f"initialization by lora_init {name!r}"
        if initializers.changes_base(name):
            check_weights(network, cells_of_initializer, LoraError, step, "Add it to exclude_modules.")
        else:
            check_values(cells_of_initializer, LoraError, step)


def check_weights(network: nn.Cell, cells: Dict[str, LoRACell], error: Type[LoraError], step: str, advice: str) -> None:
    """Raises ``error`` if a step would change a weight without values, of an unsupported dtype, or shared by cells.

    ``cells`` is path -> cell whose weight changes; ``advice`` says what to do about a weight that another cell shares.
    """
    check_values(cells, error, step)
    owners = {id(cell.weight): (path, cell) for path, cell in cells.items()}
    for other_path, other in network.cells_and_names() if cells else ():
        for name, parameter in other.parameters_and_names(expand=False):
            path, owner = owners.get(id(parameter), ("", other))
            # The weight of an adapter's cell may belong to the cell around it.
            if owner is not other and owner not in other.cells():
                raise error(
                    f"{path} shares its weight with {other_path} ({name}), which {step} would change too. {advice}"
                )


def check_values(cells: Dict[str, LoRACell], error: Type[LoraError], step: str) -> None:
    """Raises ``error`` if a step finds a weight of ``cells``, by path, without values or in an unsupported dtype."""
    empty = [path or "the cell" for path, cell in cells.items() if cell.weight.has_init]
    if empty:
        raise error(f"The weights of {listed(empty)} have no values yet: load the base checkpoint before {step}.")
    for path, cell in cells.items():
        if str(cell.weight.dtype).lower() not in ROUNDING:
            raise error(
                f"The weight of {path or 'the cell'} is {cell.weight.dtype}: {step} needs float32, float16 or "
                "bfloat16. Load the base in one of these, or leave the cell out of target_modules."
            )
