"""What each rank has not sent yet, saved beside the step folders that rank 0 writes, and read by a resumed run."""

import json
import os
import re
from typing import Dict, Optional

from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank
from safetensors import safe_open
from safetensors.numpy import save_file

from mindlora.core import atomic
from mindlora.training.exchange.exchange import Exchange
from mindlora.training.log import logger
from mindlora.training.model.network import train_step_of
from mindlora.training.resume.collectives import wait_for_all_ranks

_FOLDER = "unsent_gradients"
_TENSOR = "unsent"


def save_unsent(directory: str, step: int, train_network: nn.Cell, keep_last: int) -> None:
    """Writes what this rank has not sent, and returns when all ranks have: rank 0 writes its step folder afterwards.

    So each step folder has these files, wherever a run is killed. Without such an exchange, nothing is done. The file
    is unsent_gradients/step_N.rank_R.safetensors in ``directory``; one more of them is kept than of step folders.
    """
    exchange = _compressing(train_network)
    if exchange is None:
        return
    folder = os.path.join(directory, _FOLDER)
    with atomic.replace_file(_path(folder, step)) as path:
        # A copy is contiguous.
        save_file({_TENSOR: exchange.unsent().asnumpy().copy()}, path, {"exchange": json.dumps(_identity(exchange))})
    saved = _files_of_this_rank(folder)
    # The files of later steps belong to an earlier run, whose folders have been moved.
    for old in [s for s in saved if s > step] + [s for s in saved if s <= step][: -keep_last - 1]:
        os.unlink(saved[old])
    wait_for_all_ranks()


def restore_unsent(step_folder: str, step: int, train_network: nn.Cell) -> None:
    """Restores what this rank had not sent; it starts at 0, with a warning, if there is no such file of this run's."""
    exchange = _compressing(train_network)
    if exchange is None:
        return
    path = _path(os.path.join(os.path.dirname(os.path.abspath(step_folder)), _FOLDER), step)
    problem = f"{path} does not exist"
    if os.path.isfile(path):
        with safe_open(path, framework="np") as file:
            saved = json.loads(file.metadata()["exchange"])
            expected = _identity(exchange)
            if saved == expected:
                exchange.unsent().set_data(Tensor(file.get_tensor(_TENSOR)))
                return
        problem = f"{path} was written by {_text(saved)}, and this run has {_text(expected)}"
    logger.warning(
        "Gradients that were not sent start at zero on rank %d: %s. Resume with the files and the settings of the run "
        "to go on exactly.",
        get_rank(),
        problem,
    )


def _compressing(train_network: nn.Cell) -> Optional[Exchange]:
    """Returns the exchange of a train step, if it keeps back what it does not send."""
    exchange = getattr(train_step_of(train_network), "exchange", None)
    return exchange if exchange is not None and exchange.unsent() is not None else None


def _identity(exchange):
    """Returns what must be the same in the run that wrote a file."""
    return {"ranks": get_group_size(), "elements": int(exchange.unsent().size)}


def _text(identity):
    return f"{identity['ranks']} ranks with {identity['elements']:,} elements to choose from"


def _path(folder, step):
    return os.path.join(folder, f"step_{step}.rank_{get_rank()}.safetensors")


def _files_of_this_rank(folder: str) -> Dict[int, str]:
    """Returns {step: path}, oldest first."""
    pattern = rf"step_(\d+)\.rank_{get_rank()}\.safetensors"
    matches = ((re.fullmatch(pattern, entry.name), entry.path) for entry in os.scandir(folder))
    return dict(sorted((int(match.group(1)), path) for match, path in matches if match))
