"""Conversations of several turns to MindRecord: what the assistant says is learned, the rest is not."""

import collections
from typing import Any, List, Optional, Sequence, Union

from mindlora.data.chat_template import ChatTemplate, encode_spans, ends_of_learned, left_out, read_template
from mindlora.data.conversations import LAYOUT, Conversation, read_conversation, texts_of
from mindlora.data.conversion import DataReport, Encoded, Examples, UnusableRow
from mindlora.data.pipeline import Settings, convert_examples


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

    Rows that cannot be used (no conversation, no assistant, a template that refuses it, and so on) are skipped and
    reported.

    Args:
        inputs (str or sequence of str): As of convert_alpaca; for a record, see read_conversation.
        output_path, tokenizer, seq_length, **settings: As of convert_alpaca.
        chat_template (str, optional): File with a chat template. Default: None, the tokenizer's own.

    Returns:
        DataReport.

    Raises:
        DataError: As of convert_alpaca.
        TokenizerError: As of convert_alpaca, or the tokenizer has no chat template.
    """
    examples = ChatExamples(read_template(chat_template) if chat_template else None)
    return convert_examples(examples, inputs, output_path, tokenizer, Settings(seq_length, **settings))


class ChatExamples(Examples):
    """Conversations; without ``chat_template`` the tokenizer's own is used."""

    layout = LAYOUT

    def __init__(self, chat_template: Optional[str] = None):
        self.chat_template = chat_template
        self.template: Optional[ChatTemplate] = None
        self.endless = 0
        self.left_out: "collections.Counter[str]" = collections.Counter()

    def parse(self, record: Any) -> Conversation:
        """See Examples."""
        return read_conversation(record)

    def text(self, parsed: Conversation) -> str:
        """See Examples."""
        return texts_of(parsed)

    def prepare(self, tokenizer: Any) -> None:
        """See Examples."""
        self.template = ChatTemplate(tokenizer, self.chat_template)

    def encode(self, parsed: Conversation, tokenizer: Any) -> Encoded:
        """See Examples."""
        text, spans = self.template.spans(parsed)
        encoded = encode_spans(tokenizer, text, spans)
        self.endless += not all(self.template.is_ended(text[begin:end]) for begin, end in spans)
        self.left_out.update(left_out(parsed, text))
        return encoded

    def cut(self, encoded: Encoded, limit: int) -> Encoded:
        """Cuts at the end of the last assistant's turn that fits."""
        fitting = [end for end in ends_of_learned(encoded.learned) if end <= limit]
        if not fitting:
            raise UnusableRow(f"a first turn of the assistant that ends after more than {limit} tokens")
        return Encoded(encoded.tokens[: fitting[-1]], encoded.learned[: fitting[-1]])

    def notes(self) -> List[str]:
        """See Examples."""
        notes = [
            f"the chat template does not show all of the {what} of {rows} rows" for what, rows in self.left_out.items()
        ]
        if self.endless:
            notes.append(
                f"in {self.endless} rows, a turn of the assistant ends without a special token: a model may not learn "
                "from them when to stop"
            )
        return notes
