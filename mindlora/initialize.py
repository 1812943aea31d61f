"""Starts that change the base, in a network: made of its weights, taken from them, made up for in a saved adapter.

With W' = W - scale B0 A0 in the place of W, W' x + scale B A x = W x + scale [B, -B0] [A; A0] x: what is trained on W'
is a plain LoRA of twice the rank on W. That is what save_lora writes, and load_lora takes apart again for a network
that was built with the same start.
"""

import logging
import math
from typing import Dict, Iterable, Tuple

import numpy as np
from mindspore import Tensor, nn

from mindlora.adapters.adapter import Adapter
from mindlora.common.text import listed
from mindlora.errors import BaseMismatchError, LoraError, RankMismatchError
from mindlora.nn.cell import LoRACell
from mindlora.nn.fingerprint import base_fingerprint
from mindlora.nn.tensors import to_array
from mindlora.nn.tree import lora_cells
from mindlora.numerics import initializers
from mindlora.numerics.dtypes import ROUNDING, from_float32, to_float32
from mindlora.numerics.initializers import InitialPair

logger = logging.getLogger("mindlora")


def initialize_adapters(network: nn.Cell) -> Tuple[str, ...]:
    """Carries out lora_init "pissa", "pissa_niter_N" and "olora": A and B from W, and W - scale B A in W's place.

    Call it once the base's weights are loaded, and before training. What has been started, or loaded from an adapter,
    stays as it is, so that a second call does nothing. A network with another lora_init needs no call. Under
    MindFormers, LoraCheckpoint and LoraInitialization call it.

    Args:
        network (nn.Cell): A network with LoRADense cells.

    Returns:
        tuple of str, the paths of the cells that were started.

    Raises:
        LoraError: The network holds no LoRADense cell; or a weight has no values yet, is another cell's too, is of a
            dtype that is no float or holds NaN; or B is not zero, so that an adapter is there already.
        ConfigError: lora_rank is larger than a side of a weight.

    Source: Meng et al., PiSSA, 2024; Buyukakyuz, OLoRA, 2024.
    """
    cells = dict(lora_cells(network))
    if not cells:
        raise LoraError("The network holds no LoRADense cell, so there is nothing to start. Call apply_lora first.")
    waiting = {path: cell for path, cell in cells.items() if cell.awaits_initialization}
    if not waiting:
        return ()
    _check_weights(network, waiting)
    trained = [path for path, cell in waiting.items() if to_float32(to_array(cell.mindpet_delta_lora_b)).any()]
    if trained:
        raise LoraError(
            f"B is not zero at {listed(trained)}, where lora_init {cells[trained[0]].lora_init!r} is "
            "to start: the checkpoint of the base holds a trained adapter. Load a base without LoRA; to "
            "go on with a run, use resume of LoraCheckpoint."
        )
    mark = base_fingerprint(network)
    for path, cell in waiting.items():
        weight = to_float32(to_array(cell.weight))
        if not np.isfinite(weight).all():
            raise LoraError(
                f"The weight of {path or 'the cell'} holds NaN or infinity, so that lora_init "
                f"{cell.lora_init!r} cannot be made from it. Load the base again."
            )
        for part, array in zip("AB", initializers.of_base(cell.lora_init, weight, cell.lora_rank, cell.scale)):
            cell.load_part(part, array)
        # As they were rounded to the dtypes of the parameters, so that W' + scale B A is W.
        _correct(cell, InitialPair(*(to_array(cell.parts()[part]).copy() for part in "AB"), mark))
        if cell.training:
            cell.prepare()
    logger.info("Adapters started by lora_init: %d, at %s.", len(waiting), listed(waiting))
    return tuple(waiting)


def make_plain(adapter: Adapter, cells: Dict[str, LoRACell]) -> None:
    """Turns the adapter of a corrected base, as it is in the network, into a plain LoRA on the base as it was.

    Args:
        adapter (Adapter): Changed in place: A becomes [A; A0] and B [B, -B0], at the same scale.
        cells (dict): Path -> cell, of the pairs of ``adapter``.

    Raises:
        LoraError: A start has not been carried out.
    """
    waiting = [path for path, cell in cells.items() if cell.awaits_initialization]
    if waiting:
        raise LoraError(
            f"lora_init {cells[waiting[0]].lora_init!r} has not been carried out at "
            f"{listed(waiting)}. Call initialize_adapters once the base is loaded, before training."
        )
    for path, cell in cells.items():
        if cell.initial_pair:
            a, b = (adapter.tensors[path, half] for half in "AB")
            adapter.tensors[path, "A"] = np.concatenate([a, cell.initial_pair.a])
            adapter.tensors[path, "B"] = np.concatenate([b, _negative(cell.initial_pair.b)], axis=1)
            adapter.alphas[path] *= _growth(cell.use_rslora)
    if all(cell.initial_pair for cell in cells.values()):
        adapter.initialization = next(iter(cells.values())).lora_init


def take_initial_pairs(adapter: Adapter, network: nn.Cell, source: str) -> Dict[str, InitialPair]:
    """Takes apart what make_plain put together, for the cells of ``network`` that have a start which changes the base.

    Args:
        adapter (Adapter): Fitted to the network; its pairs become what was trained.
        network (nn.Cell): A network with LoRADense cells; not changed.
        source (str): What to name in messages.

    Returns:
        dict, path -> what the cell began with, for each cell whose base is still to be corrected.

    Raises:
        RankMismatchError: The adapter is of a start, and the network was built for the rank before it was saved.
        BaseMismatchError: The base has been corrected for another start than the adapter's.
        LoraError: A weight that is to be corrected cannot be.
    """
    cells, initial_pairs = dict(lora_cells(network)), {}
    for path in adapter.paths:
        cell, rank = cells[path], adapter.rank(path)
        if adapter.initialization and rank == 2 * cell.lora_rank:
            if not initializers.changes_base(cell.lora_init):
                raise RankMismatchError(
                    f"{source} was trained with lora_init {adapter.initialization!r} and lora_rank {cell.lora_rank}, and is "
                    f"saved as a plain LoRA of rank {rank}. Set lora_init to {adapter.initialization!r}, or lora_rank to {rank} "
                    f"and lora_alpha to {adapter.alphas[path]:g}."
                )
            initial_pairs[path] = _take_half(adapter, path)
        started = cell.initial_pair and (cell.initial_pair.a.tobytes(), cell.initial_pair.b.tobytes())
        found = path in initial_pairs and (initial_pairs[path].a.tobytes(), initial_pairs[path].b.tobytes())
        if started and started != found:
            raise BaseMismatchError(
                f"{source} holds for {path or 'the cell'} another start than the one that initialize_adapters has taken "
                "from the base. Load it into a network whose adapters have not been started."
            )
        if started:
            del initial_pairs[path]
    _check_weights(network, {path: cells[path] for path in initial_pairs})
    return initial_pairs


def settle_initialization(network: nn.Cell, paths: Iterable[str], initial_pairs: Dict[str, InitialPair]) -> None:
    """Corrects the base for the starts of a loaded adapter; cells that got a plain one have no start any more."""
    mark = base_fingerprint(network) if initial_pairs else None
    plain = []
    for path, cell in lora_cells(network):
        if path in initial_pairs:
            _correct(cell, initial_pairs[path]._replace(fingerprint=mark))
        elif path in paths and cell.awaits_initialization:
            cell.lora_init = None
            plain.append(path)
    if plain:
        logger.warning("lora_init is not carried out at %s, where a plain adapter was loaded.", listed(plain))


def _take_half(adapter, path) -> InitialPair:
    a, b = (adapter.tensors[path, half] for half in "AB")
    rank = len(a) // 2
    adapter.tensors[path, "A"], adapter.tensors[path, "B"] = a[:rank], b[:, :rank]
    adapter.alphas[path] /= _growth(adapter.use_rslora)
    return InitialPair(np.ascontiguousarray(a[rank:]), _negative(b[:, rank:]), None)


def _correct(cell, origin):
    a, b = to_float32(origin.a), to_float32(origin.b)
    weight = initializers.residual(to_float32(to_array(cell.weight)), a, b, cell.scale)
    cell.weight.set_data(Tensor(weight, cell.weight.dtype))
    cell.initial_pair = origin


def _check_weights(network, cells):
    """Raises LoraError where the weight of one of ``cells`` cannot be corrected."""
    empty = [path for path, cell in cells.items() if cell.weight.has_init]
    if empty:
        raise LoraError(
            f"lora_init {cells[empty[0]].lora_init!r} is made from the base's weights, which have no "
            f"values yet at {listed(empty)}. Load the base first."
        )
    for path, cell in cells.items():
        if tuple(cell.weight.shape) != (cell.out_channels, cell.in_channels):
            raise LoraError(
                f"The weight of {path or 'the cell'} is a part of a sharded one, "
                f"{list(cell.weight.shape)}, and lora_init {cell.lora_init!r} needs whole "
                "weights. Set lora_init: kaiming."
            )
        if str(cell.weight.dtype).lower() not in ROUNDING:
            raise LoraError(
                f"The weight of {path or 'the cell'} is {cell.weight.dtype}: lora_init {cell.lora_init!r} "
                "is made from float32, float16 or bfloat16."
            )
    owners = {id(cell.weight): (path, cell) for path, cell in cells.items()}
    for other_path, other in network.cells_and_names() if cells else ():
        for name, parameter in other.parameters_and_names(expand=False):
            path, owner = owners.get(id(parameter), ("", other))
            if owner is not other:
                raise LoraError(
                    f"{path} shares its weight with {other_path} ({name}), which lora_init "
                    f"{owner.lora_init!r} would change too. Add it to exclude_modules."
                )


def _negative(array) -> np.ndarray:
    return from_float32(-to_float32(array), array.dtype)


def _growth(use_rslora) -> float:
    """By how much lora_alpha grows with twice the rank, so that the scale stays."""
    return math.sqrt(2) if use_rslora else 2
