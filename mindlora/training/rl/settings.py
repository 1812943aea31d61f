"""RlSettings: how a run learns from rewards, from the section rl of its YAML, with TRL's names."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import (
    COUNT,
    FACTOR,
    INDEX,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    check_flag,
    check_keys,
    check_names,
    check_number,
    whole_numbers,
)
from mindlora.core.text import suggestion
from mindlora.training.rl.reward_functions import PythonFunction, Reward, reward_of
from mindlora.training.rl.teacher import BASE, ServedTeacher, teacher_of

# vLLM's keys; exactly one of them defines the constraint.
OUTPUT_KINDS = ("json", "json_object", "regex", "choice", "grammar")
# The key that names a column of the prompts' rows, each with such a node.
OUTPUT_COLUMN = "column"
OUTPUT_ADVICE = (
    "Write one of {json: schema.json}, {json_object: True}, {regex: '[a-z]+'}, {choice: [yes, no]} and {grammar: ...}"
)


def check_structured_outputs(node: Any) -> None:
    """Raises ConfigError unless rl.structured_outputs is a node with one key that constrains answers."""
    problem = output_problem(node, (*OUTPUT_KINDS, OUTPUT_COLUMN))
    if problem:
        raise ConfigError(f"rl.structured_outputs {problem}. {OUTPUT_ADVICE}, or {{column: NAME}}.")
    if OUTPUT_COLUMN in node and (not isinstance(node[OUTPUT_COLUMN], str) or not node[OUTPUT_COLUMN]):
        raise ConfigError(f"rl.structured_outputs: column is {node[OUTPUT_COLUMN]!r}. Write the name of a column.")


def output_problem(node: Any, kinds: Sequence[str]) -> str:
    """Returns the fault of a node that must have one of these keys, or ""."""
    if not isinstance(node, Mapping):
        return f"is {node!r}"
    unknown = next((key for key in node if key not in kinds), None)
    if unknown is not None:
        return f"has no key {unknown!r}.{suggestion(str(unknown), list(kinds)).rstrip('.')}"
    return "" if len(node) == 1 else f"has {len(node)} keys"


_SHARE = Range("a number from 0 to 1", lambda value: 0 <= value <= 1)
# The field of the prompts' file with an answer that the policy learns instead of its own.
COMPLETION = "completion"


@dataclass(frozen=True)
class GkdSettings:
    """Settings of generalized knowledge distillation, with the names, meanings and defaults of TRL's GKDConfig.

    Args:
        beta (float): The divergence to learn: 0 is KL(teacher || policy), 1 is KL(policy || teacher), values in between
            are the generalized Jensen-Shannon divergence (see HeadDivergences). Default: 0.5.
        lmbda (float): The share of rows that the policy answers itself. Default: 0.5.
        seq_kd (bool): Whether the teacher answers the other rows; otherwise, they have the data's completions.
            Default: False.

    Raises:
        ConfigError: A value is out of range.

    Source: Agarwal et al., On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes, 2024.
    """

    beta: float = 0.5
    lmbda: float = 0.5
    seq_kd: bool = False

    def __post_init__(self):
        for name in ("beta", "lmbda"):
            check_number(getattr(self, name), f"rl.gkd.{name}", _SHARE)
        check_flag(self.seq_kd, "rl.gkd.seq_kd")

    @property
    def reads_completions(self) -> bool:
        """Whether some rows have the data's completions."""
        return self.lmbda < 1 and not self.seq_kd


def gkd_settings(node: Any) -> GkdSettings:
    """Returns the settings of the node rl.gkd.

    Raises ConfigError if it is not a node, a key is unknown, or a value is out of range.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"rl.gkd is {node!r}, but it must be a node, such as {{beta: 0.5, lmbda: 1.0}}.")
    check_keys(node, GkdSettings, "rl.gkd")
    return GkdSettings(**node)


# The values of each key with a fixed set of values, the default first.
CHOICES: Dict[str, Tuple[str, ...]] = {
    "algorithm": ("grpo", "rloo"),
    "loss_type": ("dapo", "grpo", "dr_grpo", "bnpo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
}
# Key -> the only algorithm that has it.
_OWN = {
    **dict.fromkeys(("loss_type", "delta", "scale_rewards", "importance_sampling_level"), "grpo"),
    "normalize_advantages": "rloo",
}
# Keys that say how rewards count.
_OF_REWARDS = ("reward_weights", "scale_rewards", "reward_timeout")
# Metrics that a run reports at each step, by which callbacks can choose the best adapter.
METRICS = (
    *("reward", "held_out_reward", "teacher/kl", "held_out_teacher/kl"),
    *("teacher/divergence", "held_out_teacher/divergence"),
)
# Settings in which adapters that learn side by side cannot differ -> why.
SHARED = {
    **dict.fromkeys(("prompts", "prompts_per_step", "num_iterations"), "all take the same steps over one file"),
    **dict.fromkeys(("held_out_prompts", "held_out_steps"), "they are compared on the same prompts, at the same steps"),
    **dict.fromkeys(("teacher", "teacher_coef"), "they learn from one teacher"),
    **dict.fromkeys(("tools", "max_tool_calling_iterations"), "the prompts show the tools"),
    "tokenizer": "they have one base",
    "chat_template_kwargs": "the prompts are the same",
    "temperature": "the log-probabilities of all are computed at once",
}
# Settings that gkd does not read: its loss is a divergence from the teacher, from the trainer's log-probabilities.
_NOT_OF_GKD = (
    *("reward_funcs", *_OF_REWARDS, "teacher_coef", "algorithm", "num_iterations", "beta", "epsilon", "epsilon_high"),
    *("delta", "loss_type", "normalize_advantages", "importance_sampling_level", "max_disagreement"),
    *("structured_outputs", "tools", "max_tool_calling_iterations"),
)
# Other settings that contradict a teacher's log-probabilities: key -> the only allowed value.
_WITH_TEACHER = {"algorithm": "grpo", "importance_sampling_level": "token", "temperature": 1, "top_p": 1, "top_k": 0}
_WEIGHT = Range("a number", lambda value: abs(value) < float("inf"))


@dataclass(frozen=True)
class RlSettings:
    """Settings of learning from rewards, with the names and meanings of TRL's GRPOConfig and RLOOConfig.

    Args:
        reward_funcs (list or one): The functions that rate the answers, as for
            mindlora.training.rl.reward_functions.reward_of; here a tuple of Reward.
        reward_weights (list of float): The weight of each function in the sum. Default: None, 1 for all.
        algorithm (str): grpo (Shao et al., 2024) or rloo (Ahmadian et al., 2024). Default: "grpo".
        prompts_per_step (int): Prompts per optimizer step. Default: 8.
        num_generations (int): Answers to each prompt. Default: 8.
        num_iterations (int): Optimizer steps on the same answers. Default: 1.
        beta (float): Weight of the KL divergence from the reference: in GRPO's loss, or in RLOO's reward. Default: 0,
            no reference.
        epsilon (float): A ratio of probabilities counts down to 1 - epsilon. Default: 0.2.
        epsilon_high (float): A ratio counts up to 1 + epsilon_high. Default: None, epsilon.
        delta (float): GRPO: the upper limit of a ratio with a negative advantage (INTELLECT-2, 2025). Default:
            None, no limit.
        loss_type (str): GRPO: the divisor of the sum over tokens: dapo, grpo, dr_grpo or bnpo. Default: "dapo".
        scale_rewards (str): GRPO: whether advantages are divided by the standard deviation of a prompt's rewards
            ("group"), of all ("batch") or not at all ("none"). True and False are "group" and "none". Default: "group".
        normalize_advantages (bool): RLOO: whether advantages are normalized to mean 0 and standard deviation 1.
            Default: False.
        importance_sampling_level (str): GRPO: whether the ratio is per token or per answer ("sequence", GSPO).
            Default: "token".
        mask_truncated_completions (bool): Whether answers cut at max_completion_length are left out of the loss.
            Default: False.
        max_completion_length (int): Maximum number of tokens of an answer. Default: 512.
        temperature (float): Default: 1.
        top_p (float): Share of the probability to sample from. Default: 1, all.
        top_k (int): Number of tokens to sample from. Default: 0, all.
        stop (list of str): Texts that end an answer, as the end token does. Default: none.
        structured_outputs (mapping): The constraint on answers, for the run or from a column, as for
            mindlora.training.rl.prompts. Default: None, any text.
        tools (list of str, or one): Functions of Python files that answers to messages may call, path/to/file.py:NAME;
            here a tuple of PythonFunction. Default: none.
        max_tool_calling_iterations (int): Number of an answer's turns whose calls are executed. Default: None, all.
        max_disagreement (float): The run ends if trainer and sampler differ by more than this on a token's
            log-probability, in nats. Default: 1e-3.
        prompts (str): A file with a prompt in each row: see mindlora.training.rl.prompts. A run needs it.
        held_out_prompts (str): A file of prompts not learned from, on whose answers the reward and the divergence from
            the teacher are measured. Default: None.
        held_out_steps (int): Steps between these measurements. Default: 10.
        teacher (str or mapping): GRPO: the teacher whose log-probabilities of the answers' tokens the policy learns
            too, as for mindlora.training.rl.teacher.teacher_of: "base", the path of an adapter, or {url, model}.
            Default: None.
        gkd (mapping): Whether and how the policy learns the complete distribution of a teacher in the process, instead
            of the teacher's log-probabilities of its own tokens: the fields of GkdSettings. Default: None.
        teacher_coef (float): Factor of a token's difference log(teacher / policy). Default: 1.
        tokenizer (str): The tokenizer's folder or file. Default: None, beside the base.
        seed (int): Seed of the prompts' order and of sampling. Default: None, the run's seed.
        chat_template_kwargs (mapping): Further variables of the chat template, such as enable_thinking. Default: None.
        reward_timeout (float): Seconds that a reward function may take for the answers of a step. Default: 60.

    Raises:
        ConfigError: A value is out of range, or belongs to the other algorithm.
    """

    reward_funcs: Any = ()
    reward_weights: Any = None
    algorithm: str = CHOICES["algorithm"][0]
    prompts_per_step: int = 8
    num_generations: int = 8
    num_iterations: int = 1
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: Optional[float] = None
    delta: Optional[float] = None
    loss_type: str = CHOICES["loss_type"][0]
    scale_rewards: str = CHOICES["scale_rewards"][0]
    normalize_advantages: bool = False
    importance_sampling_level: str = CHOICES["importance_sampling_level"][0]
    mask_truncated_completions: bool = False
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: Any = ()
    structured_outputs: Any = None
    tools: Any = ()
    max_tool_calling_iterations: Optional[int] = None
    max_disagreement: float = 1e-3
    reward_timeout: float = 60.0
    prompts: str = ""
    held_out_prompts: Optional[str] = None
    held_out_steps: int = 10
    teacher: Any = None
    teacher_coef: float = 1.0
    gkd: Any = None
    tokenizer: Optional[str] = None
    seed: Optional[int] = None
    chat_template_kwargs: Any = None

    def __post_init__(self):
        if isinstance(self.scale_rewards, bool):
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        if self.epsilon_high is None:
            object.__setattr__(self, "epsilon_high", self.epsilon)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"rl.{name} is {value!r}, but it must be one of {', '.join(choices)}."
                    f"{suggestion(str(value), list(choices))}"
                )
        for name, allowed in _RANGES.items():
            check_number(getattr(self, name), f"rl.{name}", allowed)
        if self.delta is not None:
            check_number(self.delta, "rl.delta", POSITIVE)
        for name in ("normalize_advantages", "mask_truncated_completions"):
            check_flag(getattr(self, name), f"rl.{name}")
        if self.stop != ():
            check_names(self.stop, "rl.stop")
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        if self.structured_outputs is not None:
            check_structured_outputs(self.structured_outputs)
        object.__setattr__(self, "tools", _tools(self.tools))
        if self.seed is not None:
            check_number(self.seed, "rl.seed", INDEX)
        if self.chat_template_kwargs is not None and not isinstance(self.chat_template_kwargs, Mapping):
            raise ConfigError(
                f"rl.chat_template_kwargs is {self.chat_template_kwargs!r}, but it must be a node with variables of "
                "the chat template, such as {enable_thinking: False}."
            )
        if self.max_tool_calling_iterations is not None:
            check_number(self.max_tool_calling_iterations, "rl.max_tool_calling_iterations", COUNT)
        if self.teacher is not None:
            object.__setattr__(self, "teacher", teacher_of(self.teacher))
        if self.gkd is not None:
            object.__setattr__(self, "gkd", gkd_settings(self.gkd))
        elif self.teacher is not None:
            self._check_teacher()
        if self.reward_funcs != () or self.teacher is None:
            # An answer is compared with the others' rewards.
            check_number(self.num_generations, "rl.num_generations", whole_numbers(2))
            object.__setattr__(self, "reward_funcs", _functions(self.reward_funcs))
        object.__setattr__(self, "reward_weights", self._weights())

    def _check_teacher(self) -> None:
        """Raises ConfigError if a setting breaks the token-by-token comparison of teacher and policy."""
        for name, needed in _WITH_TEACHER.items():
            value = getattr(self, name)
            if value != needed:
                raise ConfigError(
                    f"rl.{name} is {value!r}, and rl.teacher rates each token of the policy's own draws by itself. Set "
                    f"{name} to {needed}, or remove teacher."
                )
        for name in ("structured_outputs", "tools"):
            if getattr(self, name):
                raise ConfigError(
                    f"rl has {name} and a teacher, but rl.teacher rates each token of the policy's own draws, behind "
                    "its own tokens alone. Remove one of them."
                )

    def _weights(self) -> Tuple[float, ...]:
        """Returns the weights, one per function."""
        count = len(self.reward_funcs)
        if self.reward_weights is None:
            return (1.0,) * count
        if not isinstance(self.reward_weights, (list, tuple)) or len(self.reward_weights) != count:
            raise ConfigError(
                f"rl.reward_weights is {self.reward_weights!r}, and rl.reward_funcs has {count} functions: write a "
                "list with a number for each."
            )
        for weight in self.reward_weights:
            check_number(weight, "rl.reward_weights", _WEIGHT)
        return tuple(map(float, self.reward_weights))

    @property
    def rows(self) -> int:
        """Number of answers of a step, to all of its prompts."""
        return self.prompts_per_step * self.num_generations

    @property
    def best_metric(self) -> str:
        """The metric that best shows the policy's quality: of rewards if there are any, held out if possible."""
        metric = "reward" if self.reward_funcs else ("teacher/kl" if self.gkd is None else "teacher/divergence")
        return f"held_out_{metric}" if self.held_out_prompts else metric

    @property
    def teacher_adapter(self) -> Optional[str]:
        """The path of the teacher, if it is an adapter."""
        return self.teacher if isinstance(self.teacher, str) and self.teacher != BASE else None

    @property
    def reward_names(self) -> Tuple[str, ...]:
        """Each function's name in metrics; functions with the same name are numbered from the second on."""
        found: Counter = Counter()
        names = []
        for function in self.reward_funcs:
            found[function.name] += 1
            number = found[function.name]
            names.append(function.name if number == 1 else f"{function.name}_{number}")
        return tuple(names)


_RANGES = {
    **dict.fromkeys(("prompts_per_step", "num_iterations", "max_completion_length", "held_out_steps"), COUNT),
    "num_generations": COUNT,
    **dict.fromkeys(("beta", "epsilon", "epsilon_high"), NOT_NEGATIVE),
    **dict.fromkeys(("teacher_coef", "temperature", "max_disagreement", "reward_timeout"), POSITIVE),
    "top_p": FACTOR,
    "top_k": INDEX,
}


# The cache has room for so many answers at a time; further ones wait.
_MOST_RUNNING = 64


def answers_at_once(settings: Iterable[RlSettings], processes: int = 1) -> int:
    """Returns the number of answers that a process samples at a time.

    Args:
        settings (iterable of RlSettings): The settings of all policies.
        processes (int): The number of processes that share the answers of a step. Default: 1.
    """
    return min(sum(each.rows for each in settings) // processes, _MOST_RUNNING)


def _functions(value: Any) -> Tuple[Reward, ...]:
    """Returns the reward functions that rl.reward_funcs names."""
    if isinstance(value, (str, Mapping)):
        return (reward_of(value, "rl.reward_funcs"),)
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(
            f"rl.reward_funcs is {value!r}, but it must name a reward function or several, such as rewards.py:helpful "
            "or [exact_answer, rewards.py:short]."
        )
    return tuple(reward_of(entry, f"rl.reward_funcs[{index}]") for index, entry in enumerate(value))


def _tools(value: Any) -> Tuple[PythonFunction, ...]:
    """Returns the functions that rl.tools names."""
    entries = [value] if isinstance(value, str) else list(value or ())
    tools = []
    for index, entry in enumerate(entries):
        tool = reward_of(entry, f"rl.tools[{index}]")
        if not isinstance(tool, PythonFunction):
            raise ConfigError(
                f"rl.tools[{index}] is {entry!r}. Write a function of a Python file, such as tools.py:add."
            )
        tools.append(tool)
    return tuple(tools)


def rl_settings(node: Mapping[str, Any]) -> RlSettings:
    """Returns the settings of a YAML's section ``rl``, a node with the fields of RlSettings.

    Raises ConfigError if it is not a node, a key is missing, unknown, of the other algorithm or about absent rewards,
    or a value is out of range.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"rl is {node!r}, but it must be a node, such as {{reward_funcs: rewards.py:helpful}}.")
    check_keys(node, RlSettings, "rl")
    if node.get("gkd") is not None:
        return _with_gkd(node)
    if "reward_funcs" not in node and node.get("teacher") is None:
        raise ConfigError(
            "rl has no reward_funcs. Name what rates the answers, such as rewards.py:helpful, or a teacher to learn "
            "from."
        )
    for key in node:
        if key in _OF_REWARDS and "reward_funcs" not in node:
            raise ConfigError(f"rl.{key} is about rewards, and rl has a teacher and no reward_funcs. Remove it.")
    if "teacher_coef" in node and node.get("teacher") is None:
        raise ConfigError("rl has teacher_coef and no teacher. Name a teacher, or remove teacher_coef.")
    settings = RlSettings(**node)
    if "max_tool_calling_iterations" in node and not settings.tools:
        raise ConfigError(
            "rl has max_tool_calling_iterations and no tools. Name functions, or remove max_tool_calling_iterations."
        )
    for key in node:
        if _OWN.get(key, settings.algorithm) != settings.algorithm:
            raise ConfigError(f"rl.{key} belongs to {_OWN[key]}, but rl.algorithm is {settings.algorithm}. Remove it.")
    return settings


def _with_gkd(node: Mapping[str, Any]) -> RlSettings:
    """Returns the settings of a section ``rl`` with gkd, in which a prompt has one row by default."""
    for key in node:
        if key in _NOT_OF_GKD:
            hint = "Write gkd: {beta: ...}." if key == "beta" else "Remove one of both."
            raise ConfigError(
                f"rl.{key} and rl.gkd do not go together: gkd learns a divergence from the teacher. {hint}"
            )
    if node.get("teacher") is None:
        raise ConfigError("rl has gkd and no teacher. Name a teacher: base, or the path of an adapter.")
    settings = RlSettings(**{"num_generations": 1, **node})
    if isinstance(settings.teacher, ServedTeacher):
        raise ConfigError(
            "rl.gkd compares the whole vocabulary, which needs a teacher in the process, and a server gives "
            "log-probabilities of some tokens. Write teacher: base, or the path of an adapter; or remove gkd."
        )
    return settings
