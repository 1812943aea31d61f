"""Conversion of conversations with several turns to MindRecord; only the assistant's turns count in the loss."""

import collections
import contextlib
import os
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

from mindlora.data.chat_template import ChatTemplate, encode_spans, ends_of_learned, left_out, read_template
from mindlora.data.conversations import LAYOUT, Conversation, has_nulls, read_conversation, texts_of
from mindlora.data.conversion import DataReport, Encoded, Examples, UnusableRow
from mindlora.data.pipeline import Settings, convert_examples
from mindlora.files.base.reader import companions_in
from mindlora.files.base.tokenizer_files import TurnEnd, stated_ends

_ENDLESS = (
    "in {} rows, a turn of the assistant ends without a special token: a model may not learn from them when to stop"
)
_NULLS = (
    "in {} rows, arguments of a call or fields of a tool are null, and are shown as null: if datasets' to_json wrote "
    "them for what is absent, give the data as Parquet or as save_to_disk writes it, of which nulls are left out"
)


def convert_chat(
    inputs: Union[str, Sequence[str]],
    output_path: str,
    tokenizer: Any,
    seq_length: int,
    *,
    chat_template: Optional[str] = None,
    **settings: Any,
) -> DataReport:
    """Writes conversations as MindRecord with the loss on the assistant's turns alone, their end tokens included.

    Rows that cannot be used (no conversation, no assistant, rejected by the template, and so on) are skipped and
    reported.

    Args:
        inputs (str or sequence of str): As for convert_alpaca; for a record, see read_conversation.
        output_path, tokenizer, seq_length, **settings: As for convert_alpaca.
        chat_template (str, optional): File with a chat template. Default: None, the tokenizer's own.

    Returns:
        DataReport.

    Raises:
        DataError: As for convert_alpaca.
        TokenizerError: As for convert_alpaca, or the tokenizer has no chat template.
    """
    examples = ChatExamples(read_template(chat_template) if chat_template else None)
    return convert_examples(examples, inputs, output_path, tokenizer, Settings(seq_length, **settings))


class ChatExamples(Examples):
    """Conversations; without ``chat_template`` the tokenizer's own is used."""

    layout = LAYOUT

    def __init__(self, chat_template: Optional[str] = None):
        self.chat_template = chat_template
        self.template: Optional[ChatTemplate] = None
        self.unstated_end: Optional[str] = None
        # Note -> number of rows that it applies to; and the notes of the row being encoded, in order.
        self._rows: "collections.Counter[str]" = collections.Counter()
        self._of_row: Dict[str, None] = {}

    def parse(self, record: Any) -> Conversation:
        """See Examples."""
        return read_conversation(record)

    def text(self, parsed: Conversation) -> str:
        """See Examples."""
        return texts_of(parsed)

    def prepare(self, tokenizer: Any) -> None:
        """See Examples."""
        self.template = ChatTemplate(tokenizer, self.chat_template)
        self.unstated_end = unstated_end(self.template)

    def encode(self, parsed: Conversation, tokenizer: Any) -> Encoded:
        """See Examples."""
        with self.noting_row():
            return self.encode_conversation(parsed, tokenizer)

    @contextlib.contextmanager
    def noting_row(self) -> Iterator[None]:
        """Counts each note made inside the block once for the row, unless the row cannot be used."""
        self._of_row = {}
        yield
        self._rows.update(list(self._of_row))

    def encode_conversation(self, conversation: Conversation, tokenizer: Any, first: int = 0) -> Encoded:
        """Returns the tokens of a conversation; the assistant's turns from message ``first`` on are learned.

        Parts that the template does not show, turns without an end and arguments without a value are noted. Raises
        UnusableRow as ChatTemplate.spans does.
        """
        conversation = self.template.with_thoughts(conversation)
        text, spans = self.template.spans(conversation, first)
        encoded = encode_spans(tokenizer, text, spans)
        for what in left_out(conversation, text):
            self._of_row[f"the chat template does not show all of the {what} of {{}} rows"] = None
        if not all(self.template.is_ended(text[begin:end]) for begin, end in spans):
            self._of_row[_ENDLESS] = None
        if has_nulls(conversation):
            self._of_row[_NULLS] = None
        return encoded

    def cut(self, encoded: Encoded, limit: int) -> Encoded:
        """Cuts at the end of the last turn of the assistant that fits."""
        fitting = [end for end in ends_of_learned(encoded.learned) if end <= limit]
        if not fitting:
            raise UnusableRow(f"a first turn of the assistant that ends after more than {limit} tokens")
        return Encoded(encoded.tokens[: fitting[-1]], encoded.learned[: fitting[-1]])

    def notes(self) -> List[str]:
        """See Examples."""
        notes = [note.format(rows) for note, rows in self._rows.items()]
        if self.unstated_end:
            notes.append(self.unstated_end)
        return notes


def unstated_end(template: ChatTemplate) -> Optional[str]:
    """Returns a note if the model of a tokenizer's folder would not stop where the chat template ends a turn."""
    tokenizer, text = template.tokenizer, template.turn_end
    if text is None:
        return None
    folder = str(getattr(tokenizer, "name_or_path", ""))
    stated = stated_ends(companions_in(folder)) if os.path.isdir(folder) else None
    ends = (tokenizer.eos_token_id,) if stated is None else stated
    end = TurnEnd(text, tokenizer.convert_tokens_to_ids(text))
    if end.token in ends:
        return None
    return (
        f"the chat template ends the assistant's turns with {end}, and the model stops at {', '.join(map(str, ends))} "
        "alone: generate, chat and serve stop at both, and mindlora base merge and mindlora configs --from add it; "
        "elsewhere set eos_token_id"
    )
