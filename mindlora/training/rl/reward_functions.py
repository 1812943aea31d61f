"""Reward functions that rl.reward_funcs may name: functions of Python files, built-in ones, and served reward models.

Each is a Reward. Its ``load`` returns the function that rates answers, with TRL's signature: function(prompts,
completions, **columns) -> a number, or None, for each completion. Only the reward process calls ``load``
(mindlora.training.rl.reward_process).
"""

import importlib.util
import json
import os
import re
import sys
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Sequence, Type

from mindlora.core.errors import ConfigError, InstallationError, RewardError
from mindlora.core.fields import INDEX, check_number, check_patterns
from mindlora.core.text import shown, suggestion
from mindlora.models.thoughts import behind_thought
from mindlora.training.rl.asking import ask, path_of

RewardFunction = Callable[..., Sequence[Optional[float]]]
# A number in a text, with or without commas between thousands.
_NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")
# Number of texts in a request; servers accept at least twice as many by default.
_TEXTS = 32


class Reward:
    """A reward function named by a YAML.

    Attributes:
        name (str): The function's name in metrics and messages.
    """

    name: ClassVar[str]

    def load(self, folder: str) -> RewardFunction:
        """Returns the function; relative paths start from ``folder``.

        Raises LoraError if there is no such function, or a requirement is missing.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class PythonFunction(Reward):
    """The function ``function`` of the Python file ``path``, which ``key`` of a YAML names."""

    path: str
    function: str
    key: str = "rl.reward_funcs"

    @property
    def name(self) -> str:  # type: ignore[override]
        """The function's own name."""
        return self.function

    def load(self, folder: str) -> RewardFunction:
        """Runs the file, with its folder on sys.path from then on, as for a program."""
        path = os.path.abspath(os.path.join(folder, self.path))
        if not os.path.isfile(path):
            raise ConfigError(f"{self.key} names {self.path}, but there is no file {path}. Correct the path.")
        module = sys.modules.get(_module_name(path))
        if module is None:
            spec = importlib.util.spec_from_file_location(_module_name(path), path)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            sys.modules[spec.name] = module  # type: ignore[union-attr]
            sys.path.insert(0, os.path.dirname(path))
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        found = getattr(module, self.function, None)
        if not callable(found):
            functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise ConfigError(f"{path} has no function {self.function}.{suggestion(self.function, functions)}")
        return found


def _module_name(path: str) -> str:
    # Files of the same name in different folders are different modules.
    return f"rewards of {path}"


@dataclass(frozen=True)
class OfColumn(Reward):
    """1 if a completion has the right answer, by ``agrees`` and a column of the data; else 0.

    Args:
        column (str): The column. Default: "answer".
    """

    column: str = "answer"

    def __post_init__(self):
        if not isinstance(self.column, str) or not self.column:
            raise ConfigError(f"{self.name}: column is {self.column!r}: it must be the name of a column.")

    def load(self, folder: str) -> RewardFunction:
        """Returns the function."""
        return self._rate

    def agrees(self, completion: str, answer: Any) -> bool:
        """Returns whether a completion has the right answer."""
        raise NotImplementedError

    def _rate(self, prompts, completions, **columns):
        if self.column not in columns:
            raise RewardError(
                f"{self.name} needs the column {self.column}, which the data does not have. Add it, or set column."
                f"{suggestion(self.column, list(columns))}"
            )
        return [float(self.agrees(text, answer)) for text, answer in zip(completions, columns[self.column])]


class ExactAnswer(OfColumn):
    """1 if a completion, after its thought, equals the text of a column, ignoring surrounding space; else 0."""

    name: ClassVar[str] = "exact_answer"

    def agrees(self, completion: str, answer: Any) -> bool:
        """Returns whether both texts are the same."""
        return behind_thought(completion).strip() == str(answer).strip()


class NumericAnswer(OfColumn):
    """1 if the last number of a completion equals the last number of a column's text; else 0.

    So GSM8K's answers, which end with #### and the number, need no change. 1,000.0 and 1000 are equal.
    """

    name: ClassVar[str] = "numeric_answer"

    def agrees(self, completion: str, answer: Any) -> bool:
        """Returns whether their last numbers are equal; raises RewardError if the column's text has none."""
        right = _last_number(str(answer))
        if right is None:
            raise RewardError(
                f"numeric_answer: the column {self.column} holds {shown(answer)}, in which there is no number. Correct "
                "the row, or use exact_answer."
            )
        return _last_number(completion) == right


def _last_number(text: str) -> Optional[Decimal]:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


@dataclass(frozen=True)
class Regex(Reward):
    """1 if a regular expression in Python's syntax, such as (?s), ^ and \\Z, is found in a completion; else 0.

    Args:
        pattern (str): The expression.
    """

    name: ClassVar[str] = "regex"
    pattern: str

    def __post_init__(self):
        if not isinstance(self.pattern, str):
            raise ConfigError(f"regex: pattern is {self.pattern!r}: it must be a regular expression.")
        check_patterns(self.pattern, "regex: pattern")

    def load(self, folder: str) -> RewardFunction:
        """Returns the function."""
        search = re.compile(self.pattern).search
        return lambda prompts, completions, **columns: [float(search(text) is not None) for text in completions]


@dataclass(frozen=True)
class JsonSchema(Reward):
    """1 if a completion, after its thought, is JSON that matches a schema; else 0.

    Args:
        schema (mapping or str): The schema, or the path of a JSON file with it.
    """

    name: ClassVar[str] = "json_schema"
    schema: Any

    def __post_init__(self):
        if not isinstance(self.schema, (Mapping, str)):
            raise ConfigError(
                f"json_schema: schema is {self.schema!r}: it must be a schema, such as {{type: object}}, or the path "
                "of a file with one."
            )

    def load(self, folder: str) -> RewardFunction:
        """Returns the function, after checking the schema itself."""
        try:
            import jsonschema
        except ImportError as missing:
            raise InstallationError(
                "The reward json_schema needs the package jsonschema. Install it: pip install mindlora[rl]"
            ) from missing
        schema = self.schema
        if isinstance(schema, str):
            path = os.path.join(folder, schema)
            try:
                with open(path, encoding="utf-8") as file:
                    schema = json.load(file)
            except (OSError, ValueError) as problem:
                raise ConfigError(
                    f"json_schema: schema is {schema}, and {path} cannot be read as JSON: {problem}. Correct the path, "
                    "or the file."
                ) from problem
        checker = jsonschema.validators.validator_for(schema)
        try:
            checker.check_schema(schema)
        except jsonschema.SchemaError as problem:
            raise ConfigError(
                f"json_schema: schema is not a JSON schema: {problem.message}. Correct {shown(problem.instance)}."
            ) from problem
        validator = checker(schema)
        return lambda prompts, completions, **columns: [float(_matches(text, validator)) for text in completions]


def _matches(text: str, validator: Any) -> bool:
    try:
        return validator.is_valid(json.loads(behind_thought(text), parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    # Python accepts NaN and Infinity, which are not JSON.
    raise ValueError(name)


@dataclass(frozen=True)
class Length(Reward):
    """0 if the number of words is in a range; else minus the relative distance from the nearer limit, at least -1.

    Args:
        min_words (int): Default: 0.
        max_words (int): Default: None, no limit.
    """

    name: ClassVar[str] = "length"
    min_words: int = 0
    max_words: Optional[int] = None

    def __post_init__(self):
        check_number(self.min_words, "length: min_words", INDEX)
        if self.max_words is None and self.min_words == 0:
            raise ConfigError("length: min_words and max_words are missing. Set one of them, or both.")
        if self.max_words is not None:
            check_number(self.max_words, "length: max_words", INDEX)
            if self.max_words < self.min_words:
                raise ConfigError(
                    f"length: max_words is {self.max_words} and min_words is {self.min_words}. Raise max_words, or "
                    "lower min_words."
                )

    def load(self, folder: str) -> RewardFunction:
        """Returns the function."""
        return lambda prompts, completions, **columns: [self._rate(len(text.split())) for text in completions]

    def _rate(self, words: int) -> float:
        limit = min(max(words, self.min_words), words if self.max_words is None else self.max_words)
        return -min(1.0, abs(words - limit) / max(limit, 1))


@dataclass(frozen=True)
class RewardModel(Reward):
    """A reward model's score of a prompt and its completion, read as one text.

    ``mindlora serve``, or any server with vLLM's /v1/classify, serves the model.

    Args:
        url (str): The server's address, such as http://localhost:8000.
        model (str): The reward model's name there. Default: None, the server's only adapter.
    """

    url: str
    model: Optional[str] = None

    def __post_init__(self):
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"{self.url}: model is {self.model!r}: it must be the name of a model.")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the model."""
        return self.model or "reward_model"

    def load(self, folder: str) -> RewardFunction:
        """Returns the function, after asking the server for the model's name if needed."""
        model = self.model or self._only_adapter()

        def rate(prompts, completions, **columns):
            if not all(isinstance(prompt, str) for prompt in prompts):
                raise RewardError(
                    f"{model} of {self.url} reads prompt and completion as one text, and prompts of this data are "
                    "messages. Write them as texts, or rate them by a function of your own."
                )
            texts = [prompt + completion for prompt, completion in zip(prompts, completions)]
            scores: List[float] = []
            for begin in range(0, len(texts), _TEXTS):
                scores += self._scores(model, texts[begin : begin + _TEXTS])
            return scores

        return rate

    def _only_adapter(self) -> str:
        models = self._ask("models")["data"]
        adapters = [model["id"] for model in models if model.get("parent")]
        if len(adapters) != 1:
            raise ConfigError(
                f"rl.reward_funcs names {self.url}, which serves {len(adapters)} adapters: {', '.join(adapters)}. Name "
                f"the reward model: {{type: {self.url}, model: NAME}}."
            )
        return adapters[0]

    def _scores(self, model: str, texts: List[str]) -> List[float]:
        answer = self._ask("classify", {"model": model, "input": texts, "use_activation": False})
        rows = [row["probs"] for row in sorted(answer["data"], key=lambda row: row["index"])]
        if any(len(scores) != 1 for scores in rows):
            raise RewardError(
                f"{model} of {self.url} gives {len(rows[0])} scores to a text, but a reward model gives one. Name a "
                "reward model."
            )
        return [scores[0] for scores in rows]

    def _ask(self, path: str, body: Optional[Mapping[str, Any]] = None) -> Any:
        """Returns the server's answer at a path; the caller limits the total time."""
        return ask(path_of(self.url, f"v1/{path}"), body, RewardError, tell=print)


BUILT_IN: Dict[str, Type[Any]] = {kind.name: kind for kind in (ExactAnswer, NumericAnswer, JsonSchema, Regex, Length)}


def reward_of(entry: Any, key: str) -> Reward:
    """Returns the reward function named by an entry of rl.reward_funcs.

    Args:
        entry (str or mapping): ``path/to/file.py:function``, a name of BUILT_IN, the address of a server
            (``http://...``), or a mapping with one of these as ``type`` and the function's arguments.
        key (str): The entry's key, for messages.

    Raises:
        ConfigError: The entry names none of these, or an argument is missing, unknown or wrong.
    """
    arguments = {"type": entry} if isinstance(entry, str) else entry
    if not isinstance(arguments, Mapping) or not isinstance(arguments.get("type"), str):
        raise ConfigError(
            f"{key} is {entry!r}, but it must be a name, such as rewards.py:helpful, or a node with a type, such as "
            "{type: regex, pattern: '^yes'}."
        )
    arguments = dict(arguments)
    named = arguments.pop("type")
    path, _, function = named.rpartition(":")
    kind: Type[Reward]
    if named.startswith(("http://", "https://")):
        kind, given = RewardModel, {"url": named}
    elif path.endswith(".py") and function.isidentifier():
        kind, given = PythonFunction, {"path": path, "function": function, "key": key.partition("[")[0]}
    elif named in BUILT_IN:
        kind, given = BUILT_IN[named], {}
    else:
        raise ConfigError(
            f"{key} names {named!r}, which is neither a function (rewards.py:helpful) nor a server (http://...) nor "
            f"built in.{suggestion(named, list(BUILT_IN))}"
        )
    allowed = [field.name for field in fields(kind) if field.name not in given]
    for name in arguments:
        if name not in allowed:
            advice = suggestion(str(name), allowed) if allowed else " It takes no arguments. Remove it."
            raise ConfigError(f"{key}: {named} has no argument {name!r}.{advice}")
    for field in fields(kind):
        if field.default is MISSING and field.name not in {**arguments, **given}:
            raise ConfigError(f"{key}: {named} needs {field.name}. Write {{type: {named}, {field.name}: ...}}.")
    try:
        return kind(**given, **arguments)
    except ConfigError as refusal:
        raise ConfigError(f"{key}: {refusal}") from refusal


def shown_tool(function: Callable[..., Any]) -> Dict[str, Any]:
    """Returns a Python function as an OpenAI tool, from its type hints and docstring, like TRL's trainers.

    Raises ConfigError if a type hint or the description of an argument is missing.
    """
    try:
        from transformers.utils import get_json_schema
    except ImportError as missing:
        raise ConfigError("rl.tools needs transformers. Install it: pip install transformers") from missing
    try:
        schema: Dict[str, Any] = get_json_schema(function)
    except Exception as problem:
        raise ConfigError(
            f"transformers makes no tool of it: {problem} Write type hints, and a docstring with Args in Google's "
            "style."
        ) from problem
    # OpenAI's tools do not describe return values.
    schema["function"].pop("return", None)
    return schema
