"""Training data: instruction triples or plain text to the MindRecord that MindFormers' causal language models train on.

Every row has two columns, ``input_ids`` and ``labels``, int32 [seq_length + 1] each. In training LlamaForCausalLM drops
the last of the input_ids and the first of the labels, so that seq_length positions remain and position i predicts token
i + 1; labels are therefore written in place, not shifted. Labels that are ignore_token_id do not count in the loss:
those of the prompt and of the padding. The YAML that goes with it: ``train_dataset.data_loader.type: MindDataset`` with
``dataset_dir`` naming the file, ``input_columns: ["input_ids", "labels"]``, and ``train_dataset_task.type:
CausalLanguageModelDataset``. Name the file there, not its folder: of a folder MindFormers reads every MindRecord.
MindFormers' own evaluation (``do_eval``) drops no token: it wants rows of seq_length, so give one less for its data.
"""

import contextlib
import dataclasses
import re
from typing import Dict, Iterator, List, NamedTuple, Optional, Union

import numpy as np

from mindlora.data import tokenizers
from mindlora.data.instructions import DataError, PromptTemplate, prompt_template, read_rows, read_text, row_problem
from mindlora.data.mindrecord import beside, check_mindrecord_output, progress, write_mindrecord, write_rows

IGNORE_TOKEN_ID = -100
_CHARACTERS_A_CALL = 1 << 20
_PLACES_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What a conversion read, left out and wrote.

    Attributes:
        output (str): The MindRecord.
        rows (int): Rows in it.
        held_out (str or None): The MindRecord of the rows held out.
        held_out_rows (int): Rows in that.
        skipped (dict): For each reason the places of the rows left out, as {"no \\"output\\"": ["line 12"]}.
        truncated (list of str): Places of the rows whose output was cut.
        tokens (int): Tokens in all rows, padding not counted.
        trained_tokens (int): Labels that count in the loss.
        longest (int): Tokens in the longest row.
        seq_length (int): The model's; a row has one token more.
        vocab_size (int): The model's must not be smaller.
        pad_token_id (int): Id of the padding.
        ignore_token_id (int): Label that does not count in the loss.
        notes (list of str): What the user should know besides.
    """

    output: str
    rows: int
    held_out: Optional[str]
    held_out_rows: int
    skipped: Dict[str, List[str]]
    truncated: List[str]
    tokens: int
    trained_tokens: int
    longest: int
    seq_length: int
    vocab_size: int
    pad_token_id: int
    ignore_token_id: int
    notes: List[str]

    def __str__(self):
        lines = [f"{self.output}: {self.rows} rows of {self.seq_length + 1} tokens"]
        if self.held_out:
            lines.append(f"{self.held_out}: {self.held_out_rows} rows, held out")
        lines += [f"skipped, {line}" for line in _describe(self.skipped)]
        if self.truncated:
            lines.append(f"output cut at the end: {_shorten(self.truncated)}")
        lines.append(
            f"{self.tokens} tokens, {self.trained_tokens} of them in the loss; the longest row has {self.longest}"
        )
        lines += [f"note: {note}" for note in self.notes]
        lines.append(
            f"model_config: seq_length: {self.seq_length}, vocab_size: {self.vocab_size} or more, "
            f"pad_token_id: {self.pad_token_id}, ignore_token_id: {self.ignore_token_id}"
        )
        return "\n".join(lines)


class Encoded(NamedTuple):
    """The tokens of one row, int32 [n], and how many of them, from the start, are not to be learned."""

    tokens: np.ndarray
    prompt_length: int

    def columns(
        self, seq_length: int, pad_token_id: int, ignore_token_id: int = IGNORE_TOKEN_ID
    ) -> Dict[str, np.ndarray]:
        """Returns input_ids and labels, int32 [seq_length + 1] each, padded at the end."""
        input_ids = np.full(seq_length + 1, pad_token_id, np.int32)
        labels = np.full(seq_length + 1, ignore_token_id, np.int32)
        input_ids[: len(self.tokens)] = self.tokens
        labels[self.prompt_length : len(self.tokens)] = self.tokens[self.prompt_length :]
        return {"input_ids": input_ids, "labels": labels}


def encode_row(record: dict, tokenizer, template: Union[str, PromptTemplate] = "alpaca") -> Encoded:
    """Returns bos, prompt, output, eos as tokens; bos and prompt are not learned, output and eos are.

    Prompt and output are tokenized apart: so the prompt has the very tokens that it has when the model is asked.

    Args:
        record (dict): With the strings "instruction", "input" and "output".
        tokenizer: As load_tokenizer returns it.
        template (str or PromptTemplate): See prompt_template.

    Raises:
        DataError: The record or the template is wrong, or the template has no place for the record's input.
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


def convert_alpaca(
    input_path: str,
    output_path: str,
    tokenizer,
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
    tokens, ...) are left out and reported. Everything is checked before the first byte is written.

    Args:
        input_path (str): See read_rows.
        output_path (str): Its name ends in .mindrecord; an index is written beside it, as NAME.mindrecord.db.
        tokenizer (str or tokenizer): Path for load_tokenizer, or what that returned.
        seq_length (int): The model's.
        template (str): See prompt_template.
        holdout (float): Share of the good rows, the last ones, that go to X-heldout.mindrecord instead. Default: 0.
        truncate (bool): Cut the end (and with it eos) off the output of rows that are too long. Default: False.
        strict (bool): Fail if any row cannot be used. Default: False.
        train_vocab_size (int, optional): Train a tokenizer of this size on the good rows (see train_tokenizer) and
            save it at ``tokenizer``, which must then be a path.
        ignore_token_id (int): The model's. Default: -100.
        overwrite (bool): Replace what stands at the output paths. Default: False.

    Returns:
        DataReport.

    Raises:
        DataError: The input, the template, a number or an output path is wrong; no row is good; ``strict`` and one
            is bad.
        TokenizerError: The tokenizer cannot be loaded, used or trained.
    """
    _check_seq_length(seq_length)
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is {holdout}: it is a share of the rows, at least 0 and less than 1.")
    held_out_path = output_path[: -len(".mindrecord")] + "-heldout.mindrecord" if holdout else None
    for path in filter(None, (output_path, held_out_path)):
        check_mindrecord_output(path, overwrite)
    if train_vocab_size is not None:
        if not isinstance(tokenizer, str):
            raise DataError("A tokenizer is to be trained: give the path to save it at, not a loaded tokenizer.")
        tokenizers.check_tokenizer_output(tokenizer, overwrite)
    prompts = prompt_template(template)

    good, skipped = _sort_rows(read_rows(input_path), prompts)
    _check_usable(input_path, good, skipped, strict)
    tokenizer_path, notes = tokenizer, []
    if train_vocab_size is not None:
        texts = (prompts.prompt(row.record) + row.record["output"] for row in good)
        tokenizer = tokenizers.fit_tokenizer(texts, train_vocab_size)
        notes.append(f"{tokenizer_path}: a tokenizer of {len(tokenizer)} tokens, trained on these rows")
        if len(tokenizer) < train_vocab_size:
            notes.append(f"no pair is left that occurs twice, so it is smaller than the {train_vocab_size} asked for")
    elif isinstance(tokenizer, str):
        tokenizer = tokenizers.load_tokenizer(tokenizer)
    special = tokenizers.special_ids(tokenizer)

    encoded, truncated, too_long = _encode_rows(good, tokenizer, prompts, seq_length, truncate)
    skipped.update(too_long)
    _check_usable(input_path, encoded, skipped, strict)
    kept = len(encoded) - _held_out_rows(len(encoded), holdout)
    # What is entered first moves last: the output stands only when all else does.
    with contextlib.ExitStack() as outputs:
        for path, rows in ((output_path, encoded[:kept]), (held_out_path, encoded[kept:])):
            if path:
                written = outputs.enter_context(beside(path))
                write_rows(_columns(rows, seq_length, special.pad, ignore_token_id), written)
        if train_vocab_size is not None:
            tokenizers.save_tokenizer(tokenizer, tokenizer_path)
    return _report(
        output_path,
        kept,
        held_out_path,
        encoded,
        skipped=skipped,
        truncated=truncated,
        seq_length=seq_length,
        tokenizer=tokenizer,
        ignore_token_id=ignore_token_id,
        notes=notes,
    )


def convert_text(
    input_path: str,
    output_path: str,
    tokenizer,
    seq_length: int,
    *,
    paragraphs: bool = False,
    ignore_token_id: int = IGNORE_TOKEN_ID,
    overwrite: bool = False,
) -> DataReport:
    """Packs a text file into rows of seq_length + 1 tokens that all count in the loss, to pretrain a model on.

    The file is one sequence: bos, its text, eos, cut into rows that do not overlap. The last row is padded.

    Args:
        input_path (str): Text in UTF-8.
        paragraphs (bool): Each paragraph, as blank lines part them, is a document of its own, with bos and eos around
            it. Default: False, the whole file is one.
        output_path, tokenizer, seq_length, ignore_token_id, overwrite: As in convert_alpaca.

    Returns:
        DataReport.

    Raises:
        DataError: The file is missing, empty or not UTF-8, or an output path is wrong.
        TokenizerError: The tokenizer cannot be loaded or used.
    """
    _check_seq_length(seq_length)
    check_mindrecord_output(output_path, overwrite)
    text = read_text(input_path)
    if not text.strip():
        raise DataError(f"{input_path} holds no text.")
    tokenizer = tokenizers.load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    special = tokenizers.special_ids(tokenizer)
    begin = np.array([] if special.bos is None else [special.bos], np.int32)
    end = np.array([special.eos], np.int32)
    documents = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()] if paragraphs else [text]
    tokens = np.concatenate(
        [
            part
            for document in progress(documents, "tokenizing")
            for part in (
                begin,
                *(np.array(tokenizers.encode(tokenizer, piece), np.int32) for piece in _pieces(document)),
                end,
            )
        ]
    )
    encoded = [Encoded(tokens[start : start + seq_length + 1], 0) for start in range(0, len(tokens), seq_length + 1)]
    if len(encoded[-1].tokens) == 1:
        encoded.pop()  # one token alone predicts nothing
    write_mindrecord(_columns(encoded, seq_length, special.pad, ignore_token_id), output_path, overwrite=overwrite)
    return _report(
        output_path,
        len(encoded),
        None,
        encoded,
        skipped={},
        truncated=[],
        seq_length=seq_length,
        tokenizer=tokenizer,
        ignore_token_id=ignore_token_id,
        notes=[],
    )


def _sort_rows(rows, template):
    good, skipped = [], {}
    for row in rows:
        problem = row_problem(row.record) or template.problem(row.record)
        if problem:
            skipped.setdefault(problem, []).append(row.place)
        else:
            good.append(row)
    return good, skipped


def _encode_rows(rows, tokenizer, template, seq_length, truncate):
    encoded, truncated, too_long = [], [], {}
    for row in progress(rows, "tokenizing"):
        tokens, prompt_length = encode_row(row.record, tokenizer, template)
        if len(tokens) > seq_length + 1:
            if not truncate:
                too_long.setdefault(f"more than {seq_length + 1} tokens", []).append(row.place)
                continue
            if prompt_length > seq_length:
                too_long.setdefault(f"a prompt of more than {seq_length} tokens", []).append(row.place)
                continue
            tokens = tokens[: seq_length + 1]
            truncated.append(row.place)
        encoded.append(Encoded(tokens, prompt_length))
    return encoded, truncated, too_long


def _columns(encoded, seq_length, pad_token_id, ignore_token_id) -> Iterator[Dict[str, np.ndarray]]:
    # One by one, for padding can take many times the memory of the tokens.
    return (row.columns(seq_length, pad_token_id, ignore_token_id) for row in encoded)


def _held_out_rows(rows, share):
    if not share:
        return 0
    if rows < 2:
        raise DataError("One row is too little to hold some out.")
    return min(max(round(rows * share), 1), rows - 1)


def _pieces(text) -> Iterator[str]:
    """Cuts a long text at ends of lines, so that no call of a tokenizer gets all of it."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start + _CHARACTERS_A_CALL)
        end = len(text) if newline == -1 else newline + 1
        yield text[start:end]
        start = end


def _report(output, rows, held_out, encoded, *, skipped, truncated, seq_length, tokenizer, ignore_token_id, notes):
    special = tokenizers.special_ids(tokenizer)
    return DataReport(
        output=output,
        rows=rows,
        held_out=held_out,
        held_out_rows=len(encoded) - rows,
        skipped=skipped,
        truncated=truncated,
        tokens=sum(len(row.tokens) for row in encoded),
        # The first token of a row is predicted by none.
        trained_tokens=sum(len(row.tokens) - max(row.prompt_length, 1) for row in encoded),
        longest=max(len(row.tokens) for row in encoded),
        seq_length=seq_length,
        vocab_size=tokenizers.vocabulary_size(tokenizer),
        pad_token_id=special.pad,
        ignore_token_id=ignore_token_id,
        notes=[*notes, *special.notes],
    )


def _check_seq_length(seq_length):
    if not isinstance(seq_length, int) or seq_length < 1:
        raise DataError(f"seq_length is {seq_length!r}: it is the model's, an integer of 1 or more.")


def _check_usable(path, good, skipped, strict):
    found = "; ".join(_describe(skipped))
    if not good:
        raise DataError(f"{path} has no row that can be used. {found}")
    if skipped and strict:
        raise DataError(f"{path} has rows that cannot be used, and strict allows none. {found}")


def _describe(skipped):
    return [f"{reason}: {_shorten(places)}" for reason, places in skipped.items()]


def _shorten(places):
    shown = ", ".join(places[:_PLACES_SHOWN])
    return f"{len(places)} ({shown}{', ...' if len(places) > _PLACES_SHOWN else ''})"
