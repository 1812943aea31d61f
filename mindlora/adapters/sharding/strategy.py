"""Strategy: which rank of a run holds which part of which parameter."""

import math
from typing import Dict, List

from mindlora.adapters.sharding.slices import Shape, Slice, slice_of
from mindlora.common.text import listed
from mindlora.errors import AdapterFormatError, UnexpectedTensorsError
from mindlora.formats import strategy_file
from mindlora.formats.strategy_file import Layout, Stages


class Strategy:
    """The strategies of all pipeline stages of one run.

    Args:
        stages (dict): Pipeline stage -> parameter -> Layout.
        source (str): Where they come from, for messages.

    Attributes:
        stages, source: As above.
        devices (int): Ranks of one stage.
        ranks (int): Ranks of the run.

    Raises:
        AdapterFormatError: A stage is missing, or two parameters are spread over different numbers of devices.
    """

    def __init__(self, stages: Stages, source: str):
        self.stages, self.source = stages, source
        if sorted(stages) != list(range(len(stages))):
            raise AdapterFormatError(
                f"{source} has the strategies of pipeline stages {', '.join(map(str, sorted(stages)))}: the others are "
                "missing. Give the folder with the strategy files of all ranks."
            )
        found = {math.prod(layout.dev_matrix): name for own in stages.values() for name, layout in own.items()}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise AdapterFormatError(
                f"{source} is damaged: it spreads {first} over {one} devices and {second} over {other}. "
                "Copy or save the strategy files again."
            )
        (self.devices,) = found
        self.ranks = self.devices * len(stages)

    def layouts(self, rank: int) -> Dict[str, Layout]:
        """Returns parameter -> Layout for the pipeline stage of ``rank``."""
        return self.stages[rank // self.devices]

    def names(self) -> List[str]:
        """Returns the parameters of all stages."""
        return list(dict.fromkeys(name for own in self.stages.values() for name in own))

    def cells(self) -> List[str]:
        """Returns the paths of the cells that these parameters belong to, as far as it was recorded."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.names()))

    def slice_of(self, name: str, rank: int, shape: Shape) -> Slice:
        """Returns which part of a parameter a rank holds, of which it has a slice of this shape."""
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
    """Returns the strategy in a file or a folder.

    Args:
        path (str): As in strategy_file.read_all.

    Raises:
        AdapterFormatError, TruncatedAdapterError: It cannot be read, or lacks a pipeline stage.
    """
    return Strategy(strategy_file.read_all(path), path)
