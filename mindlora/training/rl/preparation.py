"""Prepares the YAML of a run that learns from rewards, and the dataset of its steps."""

import os
from typing import Any, Dict, List, Tuple

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindspore.dataset import Dataset

from mindlora.data.tokenizers import load_tokenizer
from mindlora.run.yaml_run import YamlRun
from mindlora.training.log import logger
from mindlora.training.rl.callback import RlReport
from mindlora.training.rl.prompts import Prompt, prompts_of_run
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.rules import settings_of, steps_of
from mindlora.training.rl.settings import RlSettings
from mindlora.training.rl.step import RlTrainOneStepCell
from mindlora.training.rl.tools import tools_of


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


def prepare_rl(config: MindFormerConfig) -> None:
    """Turns a YAML with runner_wrapper.rl, which has passed the checks, into one that MindFormers trains, in place."""
    run = YamlRun(config)
    if run.rl is None:
        return
    # Adapters differ only in the length and the number of their answers among the settings read here.
    settings = next(iter(settings_of(run).values()))
    sampler, prompts = sampler_of(run)
    config.runner_wrapper.type = RlTrainOneStepCell.__name__
    config.runner_wrapper.sampler = MindFormerConfig(**sampler)
    steps = steps_of(prompts, config.runner_config.epochs, settings)
    config.train_dataset_task = MindFormerConfig(
        type=RlSteps.__name__, dataset_config=config.train_dataset or MindFormerConfig(), steps=steps
    )
    # The passes over the prompts become one pass over the steps.
    config.runner_config.epochs = 1
    config.callbacks = [MindFormerConfig(type=RlReport.__name__), *(config.callbacks or [])]
    for _, callback in YamlRun(config).callbacks_of("LoraCheckpoint"):
        if "best_metric" not in callback:
            callback.update(best_of(settings))


def best_of(settings: RlSettings) -> Dict[str, str]:
    """Returns by what LoraCheckpoint keeps the best adapter where its node says nothing: best_metric and best_mode."""
    mode, which = ("max", "largest") if settings.reward_funcs else ("min", "smallest")
    logger.info("LoraCheckpoint keeps the adapter with the %s %s.", which, settings.best_metric)
    return {"best_metric": settings.best_metric, "best_mode": mode}


def sampler_of(run: YamlRun) -> Tuple[Dict[str, Any], int]:
    """Returns the ``sampler`` of Policies, with the run's seed, and the number of prompts.

    Raises ConfigError if a prompt cannot be used, before anything is built.
    """
    of_adapters = list(settings_of(run).values())
    tokenizer = of_adapters[0].tokenizer or run.tokenizer
    length = run.model["seq_length"]
    for each in of_adapters:
        prompts = _prompts(each, tokenizer, length)
    longest = max(len(prompt.tokens) for prompt in prompts) - 1
    # Rows beyond those that the longest answers fill would be empty.
    filled = (-(-each.rows // max(1, length // (longest + each.max_completion_length))) for each in of_adapters)
    rows = min(run.rows, max(filled))
    seed = int(run.config.get("seed") or 0)
    return {"tokenizer": tokenizer, "seed": seed, "rows": rows, "folder": os.getcwd()}, len(prompts)


def _prompts(settings: RlSettings, tokenizer: str, length: int) -> List[Prompt]:
    """Returns the prompts of a run; a process that loads tools for them ends with this call."""
    loaded, folder = load_tokenizer(tokenizer), os.getcwd()
    if not settings.tools:
        return prompts_of_run(settings, loaded, length, folder)[0]
    with Rewards(settings, folder) as rewards:
        return prompts_of_run(settings, loaded, length, folder, tools_of(rewards, loaded, settings))[0]
