"""Learning from rewards in graph mode: the train step, the numbers of its steps as data, and the run's YAML."""

import os
from typing import Any, Dict, List, Mapping, Tuple

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.dataset import Dataset

from mindlora.data.tokenizers import load_tokenizer
from mindlora.run.yaml_run import YamlRun
from mindlora.training.log import logger
from mindlora.training.model.network import base_of
from mindlora.training.rl.callback import RlReport
from mindlora.training.rl.gkd import policy_of
from mindlora.training.rl.policies import Policies
from mindlora.training.rl.policy_graphs import GivenGradients
from mindlora.training.rl.prompts import Prompt, prompts_of_run
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.rules import settings_of, steps_of
from mindlora.training.rl.settings import RlSettings, rl_settings
from mindlora.training.rl.tools import tools_of
from mindlora.training.step.train_step import LoraTrainOneStepCell, StepRecord


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


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class RlTrainOneStepCell(LoraTrainOneStepCell):
    """LoraTrainOneStepCell for a run with ``rl``; mindlora-run sets it in place of that cell.

    A call samples and rates the answers to a step's prompts, adds up the gradient of the policy's loss over batches of
    rows (Policies), and takes the optimizer's step as LoraTrainOneStepCell does, with its clipping, limits, learning
    rate and record.

    Args:
        rl (dict): The fields of RlSettings.
        sampler (dict): As for Policies, with ``seed``, the run's seed.
        **kwargs: As for LoraTrainOneStepCell.

    Inputs:
        - **step** (Tensor) - int32 [1, 1]: the number of the step, from 0.

    Attributes:
        policies (Policies): The single policy, number 0.

    Raises:
        ConfigError: An argument is out of range, or not supported in the parallel mode.
    """

    # The number of the policy that callbacks see.
    number = 0
    UNREAD_BY_GRAPHS = ("policies",)

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, rl: Mapping, sampler: Mapping, **kwargs: Any):
        self.policies = Policies([policy_of("", rl_settings(rl), sampler["seed"])], sampler)
        super().__init__(network, optimizer, **kwargs)
        self.counts_tokens = False

    def _gradients(self, network, micro_batches, counts):
        """Returns the cell that passes the train step the gradients, which other graphs have added up."""
        self.graphs = self.policies.train(network, self.weights, [base_of(network)])
        return GivenGradients(self.graphs.gradients)

    def __call__(self, step: Tensor) -> Tuple:
        return self.policies.step(int(step.asnumpy().reshape(-1)[0]), self._update)

    def _update(self, losses: np.ndarray, tokens: np.ndarray) -> Tuple:
        # The loss is a mean already, over all processes, and rank 0 alone contributes it; if no token counts, there is
        # none, and the step is skipped.
        contributes = self.policies[0].processes.rank == 0
        loss, count = losses[0] * contributes, float(tokens[0] > 0) * contributes
        return super().__call__(Tensor(loss, mstype.float32), Tensor(count, mstype.float32))

    def last_record(self) -> StepRecord:
        """Returns the measurements of the last step."""
        policy = self.policies[0]
        record = super().last_record()
        return record._replace(tokens=policy.tokens, measures=policy.measures, loss_falls=False)
