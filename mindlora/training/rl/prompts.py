"""The prompts that a policy answers: rows of a file, in the form of TRL's trainers."""

import difflib
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np

from mindlora.core.errors import DataError, LoraError
from mindlora.core.text import shown
from mindlora.data.sources import read_rows
from mindlora.data.tokenizers import encode, special_ids
from mindlora.models.thoughts import marks_of
from mindlora.serving.chat_prompt import TemplatePrompt
from mindlora.serving.thoughts import Thoughts, thoughts_after
from mindlora.training.rl.answer_constraints import AnswerConstraints
from mindlora.training.rl.gkd import COMPLETION
from mindlora.training.rl.settings import RlSettings
from mindlora.training.rl.tools import Tools

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
