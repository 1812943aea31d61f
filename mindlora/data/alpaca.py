"""Instruction data in Alpaca's format to MindRecord: the prompt is masked out of the loss, the output is learned."""

from typing import Any, Sequence, Union

import numpy as np

from mindlora.data import tokenizers
from mindlora.data.conversion import DataReport, Encoded
from mindlora.data.examples import Examples, UnusableRow
from mindlora.data.instruction_rows import LAYOUT, row_problem
from mindlora.data.pipeline import convert_examples
from mindlora.data.settings import Settings
from mindlora.data.templates import PromptTemplate, prompt_template
from mindlora.errors import DataError


def convert_alpaca(
    inputs: Union[str, Sequence[str]],
    output_path: str,
    tokenizer: Any,
    seq_length: int,
    *,
    template: str = "alpaca",
    **settings: Any,
) -> DataReport:
    """Writes instruction data as MindRecord with the prompt masked out of the loss.

    Rows that cannot be used (not an object, a field missing or not a string, an empty output, more than seq_length + 1
    tokens, and so on) are skipped and reported. Everything is checked before the first byte is written.

    Args:
        inputs (str or sequence of str): See mindlora.data.sources.read_inputs. A record is {"instruction", "input",
            "output"}, or, as in Alpaca's seed tasks, {"instruction", "instances": [{"input", "output"}, ...]}.
        output_path (str): Must end in .mindrecord; an index is written beside it, as NAME.mindrecord.db.
        tokenizer (str or tokenizer): A path for load_tokenizer, or a tokenizer that it returned.
        seq_length (int): seq_length of the model.
        template (str): See prompt_template.
        **settings: The other fields of Settings.

    Returns:
        DataReport.

    Raises:
        DataError: The input, the template, a number or an output path is wrong; no row is usable; or ``strict`` is True
            and a row is not usable.
        TokenizerError: The tokenizer cannot be loaded, used or trained.
    """
    examples = AlpacaExamples(prompt_template(template))
    return convert_examples(examples, inputs, output_path, tokenizer, Settings(seq_length, **settings))


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
    examples = AlpacaExamples(prompt_template(template) if isinstance(template, str) else template)
    try:
        return examples.encode(examples.parse(record), tokenizer)
    except UnusableRow as problem:
        raise DataError(f"This record cannot be encoded: {problem}.") from problem


class AlpacaExamples(Examples):
    """Records of instruction, input and output.

    Args:
        template (PromptTemplate): Makes the prompt.
    """

    layout = LAYOUT

    def __init__(self, template: PromptTemplate):
        self.template = template

    def parse(self, record: Any) -> Any:
        """See Examples."""
        problem = row_problem(record) or self.template.problem(record)
        if problem:
            raise UnusableRow(problem)
        return record

    def text(self, parsed: Any) -> str:
        """See Examples."""
        return self.template.prompt(parsed) + parsed["output"]

    def encode(self, parsed: Any, tokenizer: Any) -> Encoded:
        """See Examples, and encode_row."""
        special = tokenizers.special_ids(tokenizer)
        bos = [] if special.bos is None else [special.bos]
        prompt = bos + tokenizers.encode(tokenizer, self.template.prompt(parsed))
        tokens = prompt + tokenizers.encode(tokenizer, parsed["output"]) + [special.eos]
        return Encoded(np.array(tokens, np.int32), np.arange(len(tokens)) >= len(prompt))

    def cut(self, encoded: Encoded, limit: int) -> Encoded:
        """Cuts the end, eos included, off the output, never the prompt."""
        if not encoded.learned[:limit].any():
            raise UnusableRow(f"a prompt of more than {limit - 1} tokens")
        return Encoded(encoded.tokens[:limit], encoded.learned[:limit])
