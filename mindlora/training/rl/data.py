"""The steps of a run that learns from rewards, as a dataset of their numbers for MindFormers' Trainer."""

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindspore.dataset import Dataset


@MindFormerRegister.register(MindFormerModuleType.DATASET, legacy=True)
class RlSteps:
    """A dataset of the numbers of a run's steps, from 0: int32 [1, 1] each.

    The train step samples its rows itself, because it can begin only when the previous step has ended, whereas datasets
    are read ahead.

    Args:
        dataset_config (MindFormerConfig): Passed by MindFormers; unused.
        steps (int): Number of steps of the run.
    """

    def __new__(cls, dataset_config: MindFormerConfig, steps: int) -> Dataset:
        numbers = np.arange(steps, dtype=np.int32).reshape(-1, 1, 1)
        return ms.dataset.GeneratorDataset(
            _Numbers(numbers), ["steps"], num_parallel_workers=1, shuffle=False, python_multiprocessing=False
        )


class _Numbers:
    def __init__(self, numbers: np.ndarray):
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._numbers[index]
