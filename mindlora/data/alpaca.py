"""Instruction data in Alpaca's format to MindRecord: the prompt is masked out of the loss, the output is learned."""

import contextlib
from typing import Any, Optional, Union

import numpy as np

from mindlora.data import tokenizers
from mindlora.data.conversion import IGNORE_TOKEN_ID, DataReport, Encoded, RowFormat, check_seq_length, describe_skipped
from mindlora.data.instruction_rows import read_rows, row_problem
from mindlora.data.mindrecord import check_mindrecord_output, replace_mindrecord, write_rows
from mindlora.data.progress import progress
from mindlora.data.templates import PromptTemplate, prompt_template
from mindlora.errors import DataError


def convert_alpaca(
    input_path: str,
    output_path: str,
    tokenizer: Any,
    seq_length: int,
    *,
    template: str = "alpaca",
    holdout: float = 0.0,
    truncate: bool = False,
    strict: bool = False,
    train_vocab_size: Optional[int] = None,
    ignore_token_id: int = IGNORE_TOKEN_ID,
    overwrite: bool = False,
) -> DataReport:
    """Writes instruction data as MindRecord with the prompt masked out of the loss.

    Rows that cannot be used (not an object, a field missing or not a string, an empty output, more than seq_length + 1
    tokens, and so on) are skipped and reported. Everything is checked before the first byte is written.

    Args:
        input_path (str): See read_rows.
        output_path (str): Must end in .mindrecord; an index is written beside it, as NAME.mindrecord.db.
        tokenizer (str or tokenizer): A path for load_tokenizer, or a tokenizer that it returned.
        seq_length (int): seq_length of the model.
        template (str): See prompt_template.
        holdout (float): Share of the usable rows, the last ones, to write to X-heldout.mindrecord instead. Default: 0.
        truncate (bool): Cut the end, eos included, off the output of rows that are too long. Default: False, skip them.
        strict (bool): Fail if any row cannot be used. Default: False.
        train_vocab_size (int, optional): Train a tokenizer of this size on the usable rows (see train_tokenizer) and
            save it at ``tokenizer``, which must then be a path.
        ignore_token_id (int): ignore_token_id of the model. Default: -100.
        overwrite (bool): Replace what exists at the output paths. Default: False.

    Returns:
        DataReport.

    Raises:
        DataError: The input, the template, a number or an output path is wrong; no row is usable; or ``strict`` is True
            and a row is not usable.
        TokenizerError: The tokenizer cannot be loaded, used or trained.
    """
    held_out_path = output_path[: -len(".mindrecord")] + "-heldout.mindrecord" if holdout else None
    _check_arguments(seq_length, holdout, [output_path, held_out_path], tokenizer, train_vocab_size, overwrite)
    prompts = prompt_template(template)
    good, skipped = _sort_rows(read_rows(input_path), prompts)
    _check_usable(input_path, good, skipped, strict)
    loaded, notes = _load_or_train(tokenizer, good, prompts, train_vocab_size)

    encoded, truncated, too_long = _encode_rows(good, loaded, prompts, seq_length, truncate)
    skipped.update(too_long)
    _check_usable(input_path, encoded, skipped, strict)
    kept = len(encoded) - _held_out_rows(len(encoded), holdout)
    row_format = RowFormat(loaded, seq_length, ignore_token_id)
    # What is entered first is moved into place last: the output exists only when everything else does.
    with contextlib.ExitStack() as outputs:
        for path, rows in ((output_path, encoded[:kept]), (held_out_path, encoded[kept:])):
            if path:
                write_rows(row_format.columns(rows), outputs.enter_context(replace_mindrecord(path)))
        if train_vocab_size is not None:
            tokenizers.save_tokenizer(loaded, tokenizer)
    return row_format.report(
        encoded,
        output_path,
        notes,
        rows=kept,
        held_out=held_out_path,
        held_out_rows=len(encoded) - kept,
        skipped=skipped,
        truncated=truncated,
    )


def encode_row(record: dict, tokenizer: Any, template: Union[str, PromptTemplate] = "alpaca") -> Encoded:
    """Returns bos, prompt, output, eos as tokens; bos and prompt are not learned, output and eos are.

    Prompt and output are tokenized separately, so the prompt has the same tokens as at inference.

    Args:
        record (dict): Holds the strings "instruction", "input" and "output".
        tokenizer: As load_tokenizer returns it.
        template (str or PromptTemplate): See prompt_template.

    Returns:
        Encoded.

    Raises:
        DataError: The record or the template is wrong, or the template cannot take the record's input.
        TokenizerError: The tokenizer has no end-of-sequence token.
    """
    template = prompt_template(template) if isinstance(template, str) else template
    problem = row_problem(record) or template.problem(record)
    if problem:
        raise DataError(f"This record cannot be encoded: {problem}.")
    special = tokenizers.special_ids(tokenizer)
    prompt = ([] if special.bos is None else [special.bos]) + tokenizers.encode(tokenizer, template.prompt(record))
    tokens = prompt + tokenizers.encode(tokenizer, record["output"]) + [special.eos]
    return Encoded(np.array(tokens, np.int32), len(prompt))


def _check_arguments(seq_length, holdout, outputs, tokenizer, train_vocab_size, overwrite):
    check_seq_length(seq_length)
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is {holdout}: it must be a share of the rows, at least 0 and below 1.")
    for path in filter(None, outputs):
        check_mindrecord_output(path, overwrite)
    if train_vocab_size is not None:
        if not isinstance(tokenizer, str):
            raise DataError(
                "train_vocab_size asks for a new tokenizer: give the path to save it at, not a loaded tokenizer."
            )
        tokenizers.check_tokenizer_output(tokenizer, overwrite)


def _sort_rows(rows, template):
    """Returns the usable rows, and {problem: locations} of the others."""
    good, skipped = [], {}
    for row in rows:
        problem = row_problem(row.record) or template.problem(row.record)
        if problem:
            skipped.setdefault(problem, []).append(row.location)
        else:
            good.append(row)
    return good, skipped


def _check_usable(path, good, skipped, strict):
    problems = "; ".join(describe_skipped(skipped))
    if not good:
        raise DataError(f"{path} has no row that can be used. {problems}")
    if skipped and strict:
        raise DataError(f"{path} has rows that cannot be used, and strict allows none. {problems}")


def _load_or_train(tokenizer, rows, template, vocab_size):
    """Returns the tokenizer, trained on ``rows`` if there is a vocab_size, and notes on it for the report."""
    if vocab_size is None:
        return tokenizers.load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer, []
    texts = (template.prompt(row.record) + row.record["output"] for row in rows)
    trained = tokenizers.fit_tokenizer(texts, vocab_size)
    notes = [f"{tokenizer}: a tokenizer of {len(trained)} tokens, trained on these rows"]
    if len(trained) < vocab_size:
        notes.append(f"it is smaller than the {vocab_size} tokens asked for, because no other pair occurs twice")
    return trained, notes


def _encode_rows(rows, tokenizer, template, seq_length, truncate):
    """Returns the encoded rows, the locations of those that were cut, and {problem: locations} of those too long."""
    encoded, truncated, too_long = [], [], {}
    for row in progress(rows, "tokenizing"):
        tokens, prompt_length = encode_row(row.record, tokenizer, template)
        if len(tokens) > seq_length + 1:
            if not truncate:
                too_long.setdefault(f"more than {seq_length + 1} tokens", []).append(row.location)
                continue
            if prompt_length > seq_length:
                too_long.setdefault(f"a prompt of more than {seq_length} tokens", []).append(row.location)
                continue
            tokens = tokens[: seq_length + 1]
            truncated.append(row.location)
        encoded.append(Encoded(tokens, prompt_length))
    return encoded, truncated, too_long


def _held_out_rows(rows, share):
    if not share:
        return 0
    if rows < 2:
        raise DataError("holdout needs at least two usable rows, and there is one.")
    return min(max(round(rows * share), 1), rows - 1)
