"""The policies of a run that learn from rewards side by side, usually one: sampled, rated and differentiated."""

import contextlib
import functools
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np
from mindspore import Parameter, nn

from mindlora.core.errors import ConfigError, DivergenceError, RewardError, TeacherError
from mindlora.data.tokenizers import encode, load_tokenizer
from mindlora.run.yaml_run import YamlRun
from mindlora.training.log import logger
from mindlora.training.rl.policy import Policy
from mindlora.training.rl.policy_graphs import PolicyGraphs
from mindlora.training.rl.prompts import prompts_of_run
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.rollouts import Answers, Rollouts
from mindlora.training.rl.teacher import ServedTeacher
from mindlora.training.rl.tools import tools_of
from mindlora.training.run_configuration import run_configuration


class Policies:
    """The part of a train step before its update: answers, rewards and gradients of K policies.

    The policies have the same numbers of prompts per step and iterations, and one temperature, teacher and tokenizer. A
    policy that has ended is neither sampled nor rated.

    Args:
        policies (sequence of Policy): The policies.
        sampler (mapping): ``tokenizer``, its path; ``rows``, the number of rows of seq_length tokens, each holding
            several answers, that a policy's gradient takes at a time; ``folder``, from which relative paths start;
            ``configuration``, the run's YAML in graph mode's form, by default that of the process.

    Attributes:
        graphs (PolicyGraphs): The graphs of all policies.
        rollouts (Rollouts): The policies' sampler, from the first step on.
        keep (callable): Called with each policy's number and the rewards of its answers to the held-out prompts,
            float64 [prompts].
    """

    def __init__(self, policies: Sequence[Policy], sampler: Mapping[str, Any]):
        self._policies = list(policies)
        self._processes = policies[0].processes
        self._sampler = dict(sampler)
        self._networks: List[nn.Cell] = []
        self._refresh: Callable[[int], None] = lambda number: None
        self._rewards: List[Tuple[tuple, Rewards]] = []
        self.rollouts: Optional[Rollouts] = None
        self.graphs: Optional[PolicyGraphs] = None
        self.keep: Callable[[int, np.ndarray], None] = lambda number, rewards: None

    def __getitem__(self, number: int) -> Policy:
        return self._policies[number]

    def __len__(self) -> int:
        return len(self._policies)

    @property
    def learning(self) -> Dict[int, Policy]:
        """Number -> policy, for policies that have not ended."""
        return {number: policy for number, policy in enumerate(self._policies) if policy.learns}

    def train(
        self,
        network: nn.Cell,
        weights: Tuple[Parameter, ...],
        networks: Sequence[nn.Cell],
        refresh: Callable[[int], None] = lambda number: None,
        graphs: Type[PolicyGraphs] = PolicyGraphs,
    ) -> PolicyGraphs:
        """Makes the graphs of a network.

        Args:
            network (Cell): The training network, with all adapters.
            weights (sequence of Parameter): The trainable parameters.
            networks (sequence of Cell): A network for each policy, with only its adapter, to sample from.
            refresh (callable): Takes a policy's number, and copies the current adapter to its network. Default: the
                networks themselves train.
            graphs (type): The class of the graphs. Default: PolicyGraphs.
        """
        self._networks, self._refresh = list(networks), refresh
        settings = [policy.settings for policy in self._policies]
        # All policies are of one kind.
        of_rows = functools.partial(self._policies[0].of_rows, settings=settings)
        has_reference = any(each.beta for each in settings)
        self.graphs = graphs(network, weights, len(self), self._sampler["rows"], of_rows, has_reference)
        return self.graphs

    def step(self, number: int, update: Callable[[np.ndarray, np.ndarray], Any]) -> Any:
        """Takes a step, counted from 0: adds up the gradients, and returns the result of ``update``.

        ``update`` gets each policy's loss and number of counted tokens, float64 [K] each.

        Raises, with the adapter's name, DivergenceError if the sampler does not agree with the trainer, RewardError if
        a reward fails, and TeacherError if a served teacher does.
        """
        self.open()
        learning = self.learning
        began = time.perf_counter()
        data, iteration = divmod(number, self._policies[0].settings.num_iterations)
        if iteration == 0 or any(policy.experience is None for policy in learning.values()):
            self._sample(data, learning)
        sampled = time.perf_counter()
        self._differentiate(learning)
        losses, tokens = np.zeros(len(self)), np.zeros(len(self))
        for place, policy in learning.items():
            losses[place], tokens[place] = policy.loss, policy.tokens
        with self.turn():
            outputs = update(losses, tokens)
        seconds = {"seconds_sampling": sampled - began, "seconds_training": time.perf_counter() - sampled}
        for policy in learning.values():
            policy.measures.update(seconds)
        return outputs

    def _sample(self, data: int, learning: Mapping[int, Policy]) -> None:
        """Sets each learning policy's experience for a step of the data."""
        questions = {number: policy.questions(data) for number, policy in learning.items()}
        for number in learning:
            self._publish(number)
        with self._processes.fail_together():
            answered = iter(self.rollouts.answers([each for asked in questions.values() for each in asked]))
        answers = {}
        for number, policy in learning.items():
            answers[number] = policy.answers(data, [next(answered) for _ in questions[number]], self.rollouts)
        compared = {number: answers[number] for number, policy in learning.items() if policy.settings.beta}
        references = self.graphs.forward(compared, self.turn, by_reference=True) if compared else {}
        for number, policy in learning.items():
            with _named(policy):
                policy.rate(answers[number], references.get(number), self.rollouts)

    def _differentiate(self, learning: Mapping[int, Policy]) -> None:
        answers = {number: policy.experience.answers for number, policy in learning.items()}
        compared = {number: answers[number] for number, policy in learning.items() if policy.compares}
        now = self.graphs.forward(compared, self.turn) if compared else {}
        coefficients = {number: policy.coefficients(now.get(number)) for number, policy in learning.items()}
        given = self.graphs.differentiate(answers, coefficients, self.turn)
        for number, policy in learning.items():
            with _named(policy):
                policy.differentiated(given[number])

    def held_out_measures(self, number: int) -> Dict[str, float]:
        """Returns the measures of a policy's answers to held-out prompts; see Policy.held_out_measures."""
        policy = self._policies[number]
        self._publish(number)
        with self._processes.fail_together():
            (answers,) = self.rollouts.answers([policy.held_out_question()])

        def differentiate(rows: Answers, coefficients: np.ndarray) -> np.ndarray:
            return self.graphs.differentiate({number: rows}, {number: coefficients}, self.turn)[number]

        with _named(policy):
            measures = policy.held_out_measures(answers, self.rollouts, differentiate)
        if policy.held_out_rewards is not None:
            self.keep(number, policy.held_out_rewards)
        return measures

    def turn(self) -> contextlib.AbstractContextManager:
        """Returns the context in which a graph runs."""
        return self.rollouts.engine.turns.turn()

    def _publish(self, number: int) -> None:
        """Publishes a policy's current weights to the sampler."""
        self._refresh(number)
        self.rollouts.publish(self._policies[number].adapter)

    def open(self) -> None:
        """Creates the sampler and the rewards, which need the loaded weights, at the first step."""
        if self.rollouts is not None:
            return
        prompts, count = self._policies[0].settings.prompts_per_step, self._processes.count
        if prompts % count:
            raise ConfigError(
                f"rl.prompts_per_step is {prompts}, and {count} processes learn together, each from as many prompts. "
                f"Set it to a multiple of {count}."
            )
        with self._processes.fail_together():
            self._open()

    def _open(self) -> None:
        run = YamlRun(self._sampler.get("configuration") or run_configuration())
        model = {"model_config": run.model} if run.is_mcore else run.config["model"]
        tokenizer = load_tokenizer(self._sampler["tokenizer"])
        seq_length = model["model_config"]["seq_length"]
        folder = self._sampler["folder"]
        tools = None
        for policy in self._policies:
            settings = policy.settings
            if settings.reward_funcs:
                with _named(policy):
                    policy.rewards = self._rewards_of(policy, folder)
                tools = tools or tools_of(policy.rewards, tokenizer, settings)
            policy.prompts, policy.held_out = prompts_of_run(settings, tokenizer, seq_length, folder, tools)
        first = self._policies[0].settings
        if isinstance(first.teacher, ServedTeacher) and not first.teacher.check_tokenizer(
            functools.partial(encode, tokenizer)
        ):
            logger.warning(
                "rl.teacher: %s has no /tokenize, so that nothing compares its tokenizer with the student's. Make sure "
                "that it is the same.",
                first.teacher.url,
            )
        for number in range(len(self)):
            self._refresh(number)
        self.rollouts = Rollouts(
            {policy.adapter: network for policy, network in zip(self._policies, self._networks)},
            model,
            tokenizer,
            [policy.settings for policy in self._policies],
            max(len(prompt.tokens) for policy in self._policies for prompt in [*policy.prompts, *policy.held_out]),
            run.lora.product_dtype,
            tools,
            self._processes.count,
        )
        for policy in self._policies:
            logger.info(
                "rl: %s%d prompts; each step has %d answers to %d of them.",
                f"{policy.name}: " if policy.name else "",
                len(policy.prompts),
                policy.settings.rows,
                policy.settings.prompts_per_step,
            )

    def _rewards_of(self, policy: Policy, folder: str) -> Rewards:
        """Returns the process that rates a policy's answers; policies with the same functions share one."""
        settings = policy.settings
        key = (settings.reward_funcs, settings.tools, settings.reward_timeout)
        shared = next((rewards for known, rewards in self._rewards if known == key), None)
        if shared is None:
            shared = Rewards(settings, folder)
            self._rewards.append((key, shared))
        return shared

    def end(self, number: int) -> None:
        """Stops a policy's learning; with the last one, ends the sampler and the reward process."""
        self._policies[number].learns = False
        if self.learning:
            return
        if self.rollouts is not None:
            self.rollouts.close()
        for _, rewards in self._rewards:
            rewards.close()


@contextlib.contextmanager
def _named(policy: Policy) -> Iterator[None]:
    """Adds the adapter's name to errors of one of several policies."""
    try:
        yield
    except (DivergenceError, RewardError, TeacherError) as error:
        if not policy.name:
            raise
        raise type(error)(f"adapter {policy.name}: {error}") from error
