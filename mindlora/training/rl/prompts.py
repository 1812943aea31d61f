"""The prompts that a policy answers, rows of a file in the form of TRL's trainers, and constraints on the answers."""

import difflib
import json
import logging
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np

from mindlora.core.errors import ConfigError, DataError, LoraError
from mindlora.core.text import shown, suggestion
from mindlora.data.sources import read_rows
from mindlora.data.tokenizers import encode, special_ids
from mindlora.models.thoughts import marks_of
from mindlora.serving.chat_prompt import TemplatePrompt
from mindlora.serving.constraints import ConstraintCompiler, asked_outputs
from mindlora.serving.thoughts import Thoughts, thoughts_after
from mindlora.training.rl.settings import (
    COMPLETION,
    OUTPUT_ADVICE,
    OUTPUT_COLUMN,
    OUTPUT_KINDS,
    RlSettings,
    output_problem,
)
from mindlora.training.rl.tools import Tools

logger = logging.getLogger("mindlora")


class AnswerConstraints:
    """A compiler of the constraints on answers; it compiles each constraint once.

    Args:
        node (mapping): rl.structured_outputs. None: answers are unconstrained, except that their calls must be of
            ``tools``.
        tokenizer: As load_tokenizer returns it.
        folder (str): The folder from which paths of schemas start.
        tools (Tools): Tools that the turns of answers may call instead of answering. Default: None.
    """

    def __init__(self, node: Optional[Mapping[str, Any]], tokenizer: Any, folder: str, tools: Optional[Tools] = None):
        self._node = node
        self._folder = folder
        self._tools = tools
        self._compiler = ConstraintCompiler(tokenizer, "rl")
        self._compiled: Dict[str, Any] = {}

    def grammar(self, columns: Mapping[str, Any], where: str, thoughts: Optional[Thoughts] = None) -> Optional[Any]:
        """Returns the Grammar of the answers to a prompt; None if they are unconstrained.

        Args:
            columns (mapping): The other fields of the prompt's row; in the constraint's field, null means none, and a
                text is JSON.
            where (str): The row's location, for messages.
            thoughts (Thoughts): The thoughts that may precede an answer. Default: None.

        Raises:
            DataError: The row lacks the column, or its value there is not a node with one of vLLM's keys.
            ConfigError: A file cannot be read as JSON.
            ConstraintError: No answer can meet the constraint, or it cannot be used.
        """
        column = None if self._node is None else self._node.get(OUTPUT_COLUMN)
        if column is None:
            return self._of(self._node or {}, "rl.structured_outputs", thoughts)
        if column not in columns:
            raise DataError(
                f"{where}: the row has no field {column!r}, which rl.structured_outputs names."
                f"{suggestion(column, list(columns))} Add it, with null where an answer may be anything."
            )
        node, field = columns[column], f"{where}: {column}"
        if isinstance(node, str):
            try:
                node = json.loads(node)
            except ValueError as problem:
                raise DataError(f"{field} is not JSON: {problem}. {OUTPUT_ADVICE}, as JSON.") from problem
        problem = "" if node is None else output_problem(node, OUTPUT_KINDS)
        if problem:
            raise DataError(f"{field} {problem}. {OUTPUT_ADVICE}.")
        return self._of(node or {}, field, thoughts)

    def _of(self, node: Mapping[str, Any], field: str, thoughts: Optional[Thoughts]) -> Optional[Any]:
        """Returns the compiled constraint of a node with one key or none."""
        key = json.dumps([node, thoughts and thoughts.begun], sort_keys=True)
        if key not in self._compiled:
            schema = node.get("json")
            if isinstance(schema, str) and not schema.lstrip().startswith("{"):
                node = {"json": self._read(schema, field)}
            constraint = next(asked_outputs(node, field), None)
            if self._tools is not None:
                constraint = self._tools.constraint(constraint)
            if constraint is not None and thoughts is not None:
                constraint = thoughts.before(constraint)
            grammar = None if constraint is None else self._compiler.compile(constraint)
            for reason in [] if grammar is None else grammar.loosened:
                logger.warning("An answer need not keep all of %s. Change that argument's schema if it must.", reason)
            self._compiled[key] = grammar
        return self._compiled[key]

    def _read(self, name: str, field: str) -> Any:
        path = os.path.join(self._folder, name)
        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError) as problem:
            raise ConfigError(
                f"{field}: json is {name}, and {path} cannot be read as JSON: {problem}. Correct the path, or the file."
            ) from problem


PROMPT = "prompt"
# The name under which reward functions get the messages of answers with tools.
MESSAGES = "messages"


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        given (str or list of dict): A text, or messages for the tokenizer's chat template, as in the file.
        tokens (list of int): The tokens that the policy continues.
        columns (dict): The row's other fields, which reward functions get.
        grammar (Grammar or None): The constraint on answers: see mindlora.serving.constraints.
        completion (list of int): The row's answer, with the end token, for gkd; empty in other runs.
    """

    given: Union[str, List[Dict[str, Any]]]
    tokens: List[int]
    columns: Dict[str, Any]
    grammar: Optional[Any] = None
    completion: List[int] = []


def prompts_of_run(
    settings: RlSettings, tokenizer: Any, seq_length: int, folder: str, tools: Optional[Tools] = None
) -> Tuple[List[Prompt], List[Prompt]]:
    """Returns the prompts of a run, and its held-out prompts.

    Args:
        settings (RlSettings): The run's.
        tokenizer: As load_tokenizer returns it.
        seq_length (int): Maximum number of tokens of a prompt and its answer.
        folder (str): The folder from which paths of schemas start.
        tools (Tools): Tools that answers may call. Default: None.

    Raises DataError as read_prompts does, or if rl.gkd needs completions and a row has none or one that is too long,
    and the errors of AnswerConstraints.grammar.
    """
    longest = seq_length - settings.max_completion_length
    outputs = settings.structured_outputs
    constraints = None
    if outputs is not None or tools is not None:
        constraints = AnswerConstraints(outputs, tokenizer, folder, tools)
    paths = (settings.prompts, settings.held_out_prompts)
    variables = settings.chat_template_kwargs
    prompts, held_out = (
        read_prompts(path, tokenizer, longest, constraints, tools, variables) if path else [] for path in paths
    )
    if settings.gkd is not None and settings.gkd.reads_completions:
        prompts = [_with_completion(prompt, tokenizer, settings) for prompt in prompts]
    return prompts, held_out


def _with_completion(prompt: Prompt, tokenizer: Any, settings: RlSettings) -> Prompt:
    """Returns a prompt with the tokens of its row's completion.

    Raises DataError if the row has no completion, or one that is too long.
    """
    where = f"{settings.prompts}: the row with the prompt {shown(prompt.given)}"
    text = prompt.columns.get(COMPLETION)
    if not isinstance(text, str) or not text:
        raise DataError(
            f'{where} has no "{COMPLETION}", and rl.gkd.lmbda is {settings.gkd.lmbda}: {1 - settings.gkd.lmbda:.0%} of '
            "the rows have the completions of the data. Write a text there, let the teacher answer them (seq_kd: "
            "True), or set lmbda to 1."
        )
    tokens = [*encode(tokenizer, text), special_ids(tokenizer).eos]
    if len(tokens) > settings.max_completion_length:
        raise DataError(
            f"{where} has a completion of {len(tokens)} tokens, and rl.max_completion_length is "
            f"{settings.max_completion_length}. Shorten it, or raise that."
        )
    return prompt._replace(completion=tokens)


def read_prompts(
    path: str,
    tokenizer: Any,
    longest: int,
    constraints: Optional[AnswerConstraints] = None,
    tools: Optional[Tools] = None,
    variables: Optional[Mapping[str, Any]] = None,
) -> List[Prompt]:
    """Returns the prompts of a file: rows with ``prompt``, a text or messages, and other fields for rewards.

    A text is used unchanged, after the tokenizer's begin-of-sequence token, if it has one; messages go through the
    tokenizer's chat template. An answer to messages may begin with a thought, if the template supports thoughts.

    Args:
        path (str): A .jsonl, .json, .csv or .parquet file.
        tokenizer: As load_tokenizer returns it.
        longest (int): Maximum number of tokens of a prompt.
        constraints (AnswerConstraints): Constraints on the answers. Default: None, unconstrained.
        tools (Tools): Tools that answers may call, which prompts of messages show. Default: None.
        variables (mapping): Further variables of the chat template, such as enable_thinking. Default: None.

    Raises:
        DataError: The file cannot be read, a row has no prompt or one that is too long, or rows differ in their fields.
    """
    rows = read_rows(path, None, ())
    if not rows.rows:
        raise DataError(f"{path} has no rows. Write one for each prompt.")
    form = _Form(tokenizer, tools, variables)
    prompts: List[Prompt] = []
    for row in rows.rows:
        where = f"{path}, {row.location}"
        given = row.record.get(PROMPT) if isinstance(row.record, dict) else None
        if not given or not isinstance(given, (str, list)):
            raise DataError(f'{where}: "{PROMPT}" is missing.{_alike(row.record)} Write a text, or a list of messages.')
        if tools is not None and (isinstance(given, str) or MESSAGES in row.record):
            problem = f'"{PROMPT}" is a text' if isinstance(given, str) else f"there is a field {MESSAGES}"
            raise DataError(
                f"{where}: {problem}, and with rl.tools a prompt is a list of messages, and reward functions get those "
                f"of the answers as {MESSAGES}. Change it."
            )
        tokens, thoughts = form.read(given, where)
        if len(tokens) > longest:
            raise DataError(
                f"{where}: the prompt has {len(tokens)} tokens, and seq_length less max_completion_length leaves "
                f"{longest}. Shorten it, lower rl.max_completion_length, or raise model.model_config.seq_length."
            )
        columns = {name: value for name, value in row.record.items() if name != PROMPT}
        if prompts and set(columns) != set(prompts[0].columns):
            differing = sorted(set(columns) ^ set(prompts[0].columns))
            raise DataError(
                f"{where}: {shown(differing[0])} is a field of some rows alone. Give every row the same fields."
            )
        grammar = None if constraints is None else constraints.grammar(columns, where, thoughts)
        prompts.append(Prompt(given, tokens, columns, grammar))
    return prompts


class _Form:
    """The conversion of prompts to tokens: texts unchanged, messages through the chat template."""

    def __init__(self, tokenizer: Any, tools: Optional[Tools], variables: Optional[Mapping[str, Any]]):
        self._tokenizer = tokenizer
        begin = special_ids(tokenizer).bos
        self._begin = [] if begin is None else [begin]
        self._variables = variables
        self._shown_tools = None if tools is None else tools.shown
        self._chat: Optional[TemplatePrompt] = None

    def read(self, given: Union[str, list], where: str) -> Tuple[List[int], Optional[Thoughts]]:
        """Returns the tokens of a prompt, and the thoughts that may precede its answer, or None."""
        if isinstance(given, str):
            return self._begin + encode(self._tokenizer, given), None
        try:
            self._chat = self._chat or TemplatePrompt(self._tokenizer, variables=self._variables)
            tokens = self._chat.tokens(given, self._shown_tools)
        except LoraError as error:
            raise DataError(f"{where}: {error}") from error
        marks = marks_of(self._chat.template)
        return tokens, None if marks is None else thoughts_after(tokens, self._tokenizer, marks)


def _alike(record: Any) -> str:
    close = difflib.get_close_matches(PROMPT, list(record) if isinstance(record, dict) else [], n=1)
    return f" It has {shown(close[0])}." if close else ""


def prompts_of_step(prompts: int, step: int, count: int, seed: int) -> np.ndarray:
    """Returns the indices of the prompts of a step: int64 [count].

    Each pass over the prompts has its own order, determined by the seed; prompts left over after a pass's last complete
    step are dropped.

    Args:
        prompts (int): The number of prompts.
        step (int): The step, counted from 0.
        count (int): Prompts of a step.
        seed (int): The run's.
    """
    epoch, place = divmod(step, prompts // count)
    order = np.random.default_rng([seed, epoch]).permutation(prompts)
    return order[place * count : (place + 1) * count]
