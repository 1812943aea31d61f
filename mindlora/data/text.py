"""Conversion of plain text to MindRecord, packed into full rows, for pretraining."""

import re
from typing import Any, Iterator, List, Optional, Sequence

import numpy as np

from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.data import tokenizers
from mindlora.data.conversion import DataReport, Encoded, RowFormat, check_seq_length, progress
from mindlora.data.mindrecord import check_mindrecord_output, replace_mindrecord, write_rows
from mindlora.data.sources import CHARACTERS_PER_CALL, pieces, read_text


def convert_text(
    input_path: str,
    output_path: str,
    tokenizer: Any,
    seq_length: int,
    *,
    paragraphs: bool = False,
    train_vocab_size: Optional[int] = None,
    train_texts: Sequence[str] = (),
    base: Optional[str] = None,
    ignore_token_id: int = IGNORE_TOKEN_ID,
    overwrite: bool = False,
) -> DataReport:
    """Packs a text file into rows of seq_length + 1 tokens, all of which count in the loss.

    The file is one sequence: bos, its text, eos, cut into rows that do not overlap. The last row is padded.

    Args:
        input_path (str): Text in UTF-8.
        output_path, tokenizer, seq_length: As in convert_alpaca.
        paragraphs (bool): Make each paragraph a document, with bos and eos around it; blank lines separate paragraphs.
            Default: False, the file is one document.
        train_vocab_size, train_texts, base, ignore_token_id, overwrite: As in Settings.

    Returns:
        DataReport.

    Raises:
        DataError: The file is missing, empty or not UTF-8, or an output path is wrong.
        TokenizerError: The tokenizer cannot be loaded or used.
    """
    check_seq_length(seq_length)
    check_mindrecord_output(output_path, overwrite)
    vocabulary = tokenizers.Vocabulary(tokenizer, train_vocab_size, train_texts, base)
    vocabulary.check(overwrite)
    text = read_text(input_path)
    if not text.strip():
        raise DataError(f"{input_path} holds no text. Give another file.")
    loaded, notes = vocabulary.load(pieces(text))
    documents = [text]
    if paragraphs:
        documents = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    parts: List[np.ndarray] = []
    for document in progress(documents, "tokenizing"):
        parts.extend(_encode(document, loaded))
    tokens = np.concatenate(parts)
    rows = [tokens[start : start + seq_length + 1] for start in range(0, len(tokens), seq_length + 1)]
    # A single leftover token has nothing to predict.
    encoded = [Encoded(row, np.ones(len(row), bool)) for row in rows if len(row) > 1]
    row_format = RowFormat(loaded, seq_length, ignore_token_id)
    with replace_mindrecord(output_path) as path:
        write_rows(row_format.columns(encoded), path)
        vocabulary.save(loaded)
    return row_format.report(encoded, output_path, len(encoded), notes)


def _encode(document, tokenizer) -> Iterator[np.ndarray]:
    """Yields bos, the tokens of a document, and eos."""
    special = tokenizers.special_ids(tokenizer)
    yield np.array([] if special.bos is None else [special.bos], np.int32)
    for piece in pieces(document, CHARACTERS_PER_CALL):
        yield np.array(tokenizers.encode(tokenizer, piece), np.int32)
    yield np.array([special.eos], np.int32)
