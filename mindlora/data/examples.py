"""What a kind of examples is: from a row to tokens."""

import abc
from typing import Any, List, Optional

from mindlora.data.conversion import Encoded
from mindlora.data.rows import Layout


class UnusableRow(Exception):
    """Why a row cannot be used, in words that group rows with the same problem."""


class Examples(abc.ABC):
    """A kind of examples: what makes tokens of a row.

    Attributes:
        layout (Layout): Which columns it takes.
        chat_template (str or None): Saved with a tokenizer that is trained on the examples.
    """

    layout: Layout
    chat_template: Optional[str] = None

    @abc.abstractmethod
    def parse(self, record: Any) -> Any:
        """Returns what ``text`` and ``encode`` take; raises UnusableRow if there is a problem with the record."""

    @abc.abstractmethod
    def text(self, parsed: Any) -> str:
        """Returns what a tokenizer is trained on."""

    def prepare(self, tokenizer: Any) -> None:  # noqa: B027 (most kinds have nothing to prepare)
        """Takes the tokenizer that ``encode`` will use; raises TokenizerError if it cannot be used."""

    def notes(self) -> List[str]:
        """Returns what the user should know once all rows have been encoded."""
        return []

    @abc.abstractmethod
    def encode(self, parsed: Any, tokenizer: Any) -> Encoded:
        """Returns the tokens of what ``parse`` returned; raises UnusableRow if they show a problem."""

    @abc.abstractmethod
    def cut(self, encoded: Encoded, limit: int) -> Encoded:
        """Returns the first ``limit`` tokens at most; raises UnusableRow if nothing to learn would remain."""
