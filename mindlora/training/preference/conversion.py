"""Conversion of preferences to MindRecord: pairs of answers, or judged answers, in rows that a train step compares.

A row has four int32 columns, which mindlora.training.preference.loss.PreferenceLoss takes: ``input_ids``,
``labels``, ``answers``, and ``pairs`` or ``judgments``. Without packing, a row holds one example as
[2, seq_length + 1], each part an answer after its prompt; packed rows hold many examples as [seq_length + 1].

A record in the layouts of TRL, LLaMA-Factory, Anthropic and UltraFeedback holds a pair, the chosen and the rejected
answer to one prompt, or one answer labeled as desirable or not::

    {"prompt", "chosen", "rejected"}         texts, or lists of messages (TRL)
    {"chosen", "rejected"}                   the same with the prompt in both, as their common beginning (TRL,
                                             UltraFeedback's binarized form), or two texts of "Human:" and "Assistant:"
                                             turns (Anthropic)
    {"conversations", "chosen", "rejected"}  messages, and one message each (LLaMA-Factory)
    {"instruction", "completions"}           of which the best and the worst overall_score are taken (UltraFeedback)
    {"prompt", "completion", "label"}        texts, or lists of messages (TRL)
    {"messages", "label"}                    the last message is what is judged (LLaMA-Factory)

"conversations" and "messages" are two names of one field, and so are "prompt" and "instruction". Each may come with
"system", a prompt, and "tools", a list of functions.
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.data import tokenizers
from mindlora.data.chat import ChatExamples
from mindlora.data.chat_template import read_template
from mindlora.data.conversations import (
    Conversation,
    check_unicode,
    from_json,
    read_message,
    read_tools,
    texts_of,
    with_system,
)
from mindlora.data.conversion import DataReport, Encoded, UnusableRow, all_parts
from mindlora.data.packing import Boundary, best_fit, join
from mindlora.data.pipeline import Settings, convert_examples
from mindlora.data.sources import Layout

FIELDS = ("prompt", "chosen", "rejected", "completion", "label", "messages", "completions", "system", "tools")
LAYOUT = Layout(FIELDS, defaults=dict.fromkeys(FIELDS), aliases={"messages": "conversations", "prompt": "instruction"})
Text = Union[str, List[Dict[str, Any]]]
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


class Preference(NamedTuple):
    """A prompt and the answers to it, all of them texts or lists of messages for a chat template.

    Attributes:
        prompt (str or list of dict): The prompt.
        answers (tuple): The chosen and the rejected answer, or the judged answer.
        desirable (bool or None): Whether the judged answer is desirable; None for a pair.
        tools (list of dict or None): As in Conversation.
    """

    prompt: Text
    answers: Tuple[Text, ...]
    desirable: Optional[bool]
    tools: Optional[List[Dict[str, Any]]]


def read_preference(record: Any) -> Preference:
    """Returns the preference in a row; raises UnusableRow if it holds none."""
    if not isinstance(record, dict):
        raise UnusableRow("not an object")
    present = {field: _value(record[field]) for field in FIELDS if record.get(field) is not None}
    prompt, answers, desirable = _judged(present) if "label" in present else _pair(present)
    if isinstance(prompt, str) != all(isinstance(answer, str) for answer in answers):
        raise UnusableRow("a prompt and answers of which some are texts and some are messages")
    if not isinstance(prompt, str):
        prompt = with_system(present.get("system"), prompt)
    elif present.get("system") or present.get("tools"):
        raise UnusableRow('a "system" or "tools" beside texts: write messages')
    if not all(map(_says_something, answers)):
        raise UnusableRow("an empty answer")
    if len(answers) == 2 and answers[0] == answers[1]:
        raise UnusableRow("two answers that are the same")
    preference = Preference(prompt, answers, desirable, read_tools(present.get("tools")))
    check_unicode(preference)
    return preference


def _value(value):
    """Returns the messages or label of a JSON string, the form that tables store; otherwise the value."""
    read = from_json(value)
    entries = read if isinstance(read, list) else [read]
    return read if isinstance(read, bool) or all(isinstance(entry, dict) for entry in entries) else value


def _judged(present):
    """Returns the prompt, the single answer, and whether it is desirable."""
    label = present["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise UnusableRow('a "label" that is neither true nor false')
    if "completion" in present and "prompt" in present:
        return _text(present["prompt"], "prompt"), (_text(present["completion"], "completion"),), bool(label)
    messages = _text(present.get("messages"), "messages")
    if isinstance(messages, str) or len(messages) < 2:
        raise UnusableRow('no "messages" with an answer, and no "prompt" with a "completion"')
    return messages[:-1], (messages[-1:],), bool(label)


def _pair(present):
    """Returns the prompt, the two answers, and None."""
    if "completions" in present:
        return (_text(present.get("prompt"), "prompt"), _best_and_worst(present["completions"]), None)
    for field in ("chosen", "rejected"):
        if field not in present:
            raise UnusableRow(f'no "{field}"')
    answers = tuple(_text(present[field], field) for field in ("chosen", "rejected"))
    # UltraFeedback's binarized form has both, and messages are the chosen answer again.
    prompt = next((_text(present[field], field) for field in ("prompt", "messages") if field in present), None)
    if all(isinstance(answer, str) for answer in answers):
        dialogues = [_dialogue(answer) for answer in answers]
        if prompt is None and all(dialogues):
            return (*_common_beginning(*dialogues), None)
        return (prompt, answers, None) if prompt is not None else (*_common_text(*answers), None)
    if isinstance(prompt, str) and all(not isinstance(a, str) and a[0]["role"] == "assistant" for a in answers):
        prompt = [{"role": "user", "content": prompt}]
    # The prompt may be a field, the beginning of both answers, or both.
    if isinstance(prompt, list) and any(answer[: len(prompt)] != prompt for answer in answers):
        return prompt, answers, None
    return (*_common_beginning(*answers), None)


def _text(value, field):
    """Returns a text, or the messages of a list or single object."""
    if isinstance(value, str):
        return value
    entries = [value] if isinstance(value, dict) else value
    if not isinstance(entries, list) or not entries:
        raise UnusableRow(f'"{field}" is neither a text nor messages')
    return [read_message(entry) for entry in entries]


def _dialogue(text):
    """Returns the messages of one of Anthropic's dialogues, or None for any other text."""
    parts = _TURN.split(text)
    if parts[0].strip() or len(parts) < 3:
        return None
    turns = zip(parts[1::2], parts[2::2])
    return [{"role": _SPEAKERS[speaker], "content": said.strip()} for speaker, said in turns]


def _common_beginning(chosen, rejected):
    """Returns the common prompt of two conversations, and the rest of each, which begins with an assistant's turn."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise UnusableRow("one answer is a text and the other messages")
    length = _common_length(chosen, rejected)
    # If the answers begin alike, or are the same, the assistant's last turn was judged.
    while length and not (length < min(len(chosen), len(rejected)) and chosen[length]["role"] == "assistant"):
        length -= 1
    if not length:
        raise UnusableRow("two conversations without a common prompt before the assistant's turn")
    return chosen[:length], (chosen[length:], rejected[length:])


def _common_text(chosen, rejected):
    length = _common_length(chosen, rejected)
    # Do not split a word.
    length = chosen.rfind(" ", 0, length) if not chosen[:length].endswith("\n") else length
    if length <= 0:
        raise UnusableRow('no "prompt", and two texts without a common beginning')
    return chosen[:length], (chosen[length:], rejected[length:])


def _common_length(first, second):
    """Returns the length of the common beginning of two texts or conversations, in characters or messages."""
    differing = (number for number, (one, other) in enumerate(zip(first, second)) if one != other)
    return next(differing, min(len(first), len(second)))


def _best_and_worst(completions):
    """Returns the responses with the highest and the lowest overall_score."""
    scored = []
    for entry in completions if isinstance(completions, list) else ():
        score = entry.get("overall_score") if isinstance(entry, dict) else None
        if isinstance(score, (int, float)) and isinstance(entry.get("response"), str):
            scored.append((score, entry["response"]))
    scores = [score for score, _ in scored]
    if len(set(scores)) < 2:
        raise UnusableRow('"completions" without two responses of different overall_score')
    return scored[scores.index(max(scores))][1], scored[scores.index(min(scores))][1]


def _says_something(answer):
    if isinstance(answer, str):
        return bool(answer.strip())
    last = answer[-1]
    return last["role"] == "assistant" and bool(last.get("tool_calls") or last["content"].strip())


NO_ANSWER = -1


def convert_preference(
    inputs: Union[str, Sequence[str]],
    output_path: str,
    tokenizer: Any,
    seq_length: int,
    *,
    chat_template: Optional[str] = None,
    **settings: Any,
) -> DataReport:
    """Writes preferences as MindRecord: pairs of answers, or answers with labels, each with its prompt.

    Texts and messages go through the chat template; texts without one are used unchanged, with eos after an answer.
    Rows that cannot be used are skipped and reported. With ``truncate``, the beginning of a prompt that is too long is
    cut off, never an answer.

    Args:
        inputs (str or sequence of str): As for convert_alpaca; for a record, see this module's docstring.
        output_path, tokenizer, seq_length, **settings: As for convert_alpaca.
        chat_template (str, optional): File with a chat template. Default: None, the tokenizer's own.

    Returns:
        DataReport.

    Raises:
        DataError: As for convert_alpaca, or some rows are pairs and some are judged.
        TokenizerError: As for convert_alpaca, or there are messages and the tokenizer has no chat template.
    """
    options = Settings(seq_length, **settings)
    template = read_template(chat_template) if chat_template else None
    examples = PreferenceExamples(seq_length, template, shares_rows=options.pack)
    return convert_examples(examples, inputs, output_path, tokenizer, options, pack_examples)


class Example(NamedTuple):
    """Two answers, each after its prompt, that a loss compares.

    Attributes:
        first (Encoded): The chosen answer, or the judged answer.
        second (Encoded or None): The rejected answer, or the answer of another example; None until known.
        desirable (bool or None): Whether the judged answer is desirable; None for a pair.
        prompt (np.ndarray): The tokens of the first answer's prompt, int32 [n], before anything is cut.
    """

    first: Encoded
    second: Optional[Encoded]
    desirable: Optional[bool]
    prompt: np.ndarray

    @property
    def mark(self) -> int:
        """The example's value in the column ``pairs`` or ``judgments``."""
        return -1 if self.desirable is False else 1

    @property
    def parts(self) -> Tuple[Encoded, ...]:
        """Both answers."""
        return tuple(part for part in (self.first, self.second) if part is not None)

    def columns(
        self, seq_length: int, pad_token_id: int, ignore_token_id: int = IGNORE_TOKEN_ID
    ) -> Dict[str, np.ndarray]:
        """Returns the columns of a row that holds only this example."""
        first, second = (part.columns(seq_length, pad_token_id, ignore_token_id) for part in self.parts)
        columns = {name: np.stack([first[name], second[name]]) for name in first}
        answers = np.where(columns["labels"] == ignore_token_id, NO_ANSWER, np.arange(2)[:, None])
        return {**columns, "answers": answers.astype(np.int32), column_of(self): np.array([self.mark], np.int32)}


def column_of(example: Example) -> str:
    """Returns the name of the column that marks examples of this kind."""
    return "pairs" if example.desirable is None else "judgments"


class PackedExamples(NamedTuple):
    """A row of several examples: tokens, learned positions and answer numbers, [n] each, and {column: marks}."""

    tokens: np.ndarray
    learned: np.ndarray
    answers: np.ndarray
    marks: Dict[str, np.ndarray]

    def columns(
        self, seq_length: int, pad_token_id: int, ignore_token_id: int = IGNORE_TOKEN_ID
    ) -> Dict[str, np.ndarray]:
        """Returns the columns of the row."""
        columns = Encoded(self.tokens, self.learned).columns(seq_length, pad_token_id, ignore_token_id)
        answers = np.full(seq_length + 1, NO_ANSWER, np.int32)
        answers[: len(self.answers)] = self.answers
        return {**columns, "answers": answers, **self.marks}


def pack_examples(
    examples: Sequence[Example], boundary: Boundary, seq_length: int, seed: int = 0
) -> List[PackedExamples]:
    """Packs all examples into rows as mindlora.data.packing.pack does, an example's two answers in the same row."""
    sizes = []
    for example in examples:
        sizes.append(sum(boundary.size(len(part.tokens)) for part in example.parts))
    rows = best_fit(sizes, boundary.capacity(seq_length))
    most = max(map(len, rows))
    packed = []
    for number in np.random.default_rng(seed).permutation(len(rows)):
        packed.append(_packed([examples[item] for item in rows[number]], boundary, most))
    return packed


def _packed(examples, boundary, most):
    parts = all_parts(examples)
    row = join(parts, boundary)
    answers = []
    for number, part in enumerate(parts):
        gap = boundary.is_padding and number > 0
        # The first token of an example is not learned.
        learned = np.append(np.zeros(1 + gap, bool), part.learned[1:])
        answers.append(np.where(learned, number, NO_ANSWER))
    marks = np.zeros(most, np.int32)
    marks[: len(examples)] = [example.mark for example in examples]
    numbers = np.concatenate(answers).astype(np.int32)
    return PackedExamples(row.tokens, row.learned, numbers, {column_of(examples[0]): marks})


class PreferenceExamples(ChatExamples):
    """Preferences; without ``chat_template``, the tokenizer's own is used, and texts need none.

    ``shares_rows`` says that an example's two answers must share a row, as in packed rows.
    """

    layout = LAYOUT
    cut_at = "beginning"

    def __init__(self, seq_length: int, chat_template: Optional[str] = None, shares_rows: bool = False):
        super().__init__(chat_template)
        self.limit = seq_length + 1
        self.shares_rows = shares_rows
        self.pairs: Optional[bool] = None
        self.has_messages = False

    def parse(self, record: Any) -> Preference:
        """See Examples."""
        preference = read_preference(record)
        is_pair = preference.desirable is None
        if self.pairs not in (None, is_pair):
            raise UnusableRow("a pair among answers with labels" if is_pair else "an answer with a label among pairs")
        self.pairs = is_pair
        self.has_messages = self.has_messages or not isinstance(preference.prompt, str)
        return preference

    def text(self, parsed: Preference) -> str:
        """See Examples."""
        texts = [parsed.prompt, *parsed.answers]
        return "\n".join(text if isinstance(text, str) else texts_of(Conversation(text, None)) for text in texts)

    def prepare(self, tokenizer: Any) -> None:
        """See Examples."""
        has_template = self.chat_template is not None or getattr(tokenizer, "chat_template", None)
        if has_template or self.has_messages:
            super().prepare(tokenizer)

    def encode(self, parsed: Preference, tokenizer: Any) -> Example:
        """See Examples."""
        with self.noting_row():
            answers = [self._encode(parsed, answer, tokenizer) for answer in parsed.answers]
        prompt = answers[0].tokens[: _prompt_length(answers[0])]
        if parsed.desirable is None:
            if np.array_equal(answers[0].tokens, answers[1].tokens):
                raise UnusableRow("two answers that are the same as tokens")
            return Example(*answers, None, prompt)
        return Example(answers[0], None, parsed.desirable, prompt)

    def _encode(self, parsed, answer, tokenizer):
        """Returns one answer after its prompt."""
        if self.template is None:
            special = tokenizers.special_ids(tokenizer)
            bos = [] if special.bos is None else [special.bos]
            prompt = bos + tokenizers.encode(tokenizer, parsed.prompt)
            tokens = prompt + tokenizers.encode(tokenizer, answer) + [special.eos]
            learned = np.arange(len(tokens)) >= max(len(prompt), 1)
            return Encoded(np.array(tokens, np.int32), learned)
        prompt = _messages(parsed.prompt, "user")
        conversation = Conversation(prompt + _messages(answer, "assistant"), parsed.tools)
        return self.encode_conversation(conversation, tokenizer, first=len(prompt))

    def length(self, encoded: Example) -> int:
        """See Examples: the longer answer with its prompt, or both in one row with padding between them."""
        lengths = [len(part.tokens) for part in encoded.parts]
        if encoded.second is None:
            # At least one token of another example's answer, after the same prompt.
            lengths.append(_prompt_length(encoded.first) + 1)
        return sum(lengths) + 1 if self.shares_rows else max(lengths)

    def cut(self, encoded: Example, limit: int) -> Example:
        """Cuts the beginning of the prompt except its first token, and never an answer."""
        parts = encoded.parts
        prompts = [_prompt_length(part) for part in parts]
        lengths = [len(part.tokens) - prompt for part, prompt in zip(parts, prompts)]
        if encoded.second is None:
            lengths.append(1)
        room = (limit - 1 - sum(lengths)) // 2 if self.shares_rows else limit - max(lengths)
        if room < 1:
            raise UnusableRow(f"answers that leave no room for a prompt in {limit} tokens")
        cut = [_cut_prompt(part, room) for part in parts]
        return encoded._replace(first=cut[0], second=cut[1] if len(cut) > 1 else None)

    def complete(self, encoded: List[Example]) -> List[Example]:
        """Adds to each judged answer the answer of another example: the last one before it with a different prompt."""
        if self.pairs:
            return encoded
        return [self._with_other(example, encoded, number) for number, example in enumerate(encoded)]

    def _with_other(self, example, encoded, number):
        prompt = example.first.tokens[: _prompt_length(example.first)]
        room = self.limit - 1 - len(example.first.tokens) if self.shares_rows else self.limit
        for step in range(1, len(encoded)):
            if not np.array_equal(encoded[number - step].prompt, example.prompt):
                other = encoded[number - step].first
                begin = _prompt_length(other)
                tokens = np.concatenate([prompt, other.tokens[begin:]])
                learned = np.concatenate([np.zeros(len(prompt), bool), other.learned[begin:]])
                return example._replace(second=Encoded(tokens[:room], learned[:room]))
        raise DataError(
            f"All {len(encoded)} answers with a label have the same prompt, but the distance from the reference is "
            "estimated by answers to other prompts. Give rows with several prompts."
        )

    def notes(self) -> List[str]:
        """See Examples."""
        notes = super().notes()
        if self.template is None:
            notes.append("the texts are taken as they are, because there is no chat template")
        return notes


def _messages(text, role):
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _prompt_length(encoded: Encoded) -> int:
    """Returns the number of tokens before the answer."""
    return int(np.argmax(encoded.learned))


def _cut_prompt(encoded: Encoded, room: int) -> Encoded:
    """Returns an answer after the end of its prompt, which is cut to ``room`` tokens but keeps its first token."""
    prompt = _prompt_length(encoded)
    if prompt <= room:
        return encoded
    kept = np.r_[0, prompt - room + 1 : len(encoded.tokens)] if room > 1 else np.r_[prompt - 1 : len(encoded.tokens)]
    return Encoded(encoded.tokens[kept], encoded.learned[kept])
