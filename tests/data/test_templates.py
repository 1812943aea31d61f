"""The templates that turn instructions into prompts."""

import pytest

from mindlora.core.errors import DataError
from mindlora.data.templates import prompt_template


def test_templates():
    with_input, without_input = {"instruction": "{Do}", "input": "{it}"}, {"instruction": "{Do}", "input": ""}
    alpaca = prompt_template("alpaca")
    assert alpaca.prompt(with_input).endswith(
        "completes the request.\n\n### Instruction:\n{Do}\n\n### Input:\n{it}\n\n### Response:"
    )
    assert alpaca.prompt(without_input).endswith("completes the request.\n\n### Instruction:\n{Do}\n\n### Response:")
    plain = prompt_template("plain")
    assert (plain.prompt(with_input), plain.prompt(without_input)) == ("{Do}\n{it}\n", "{Do}\n")
    own = prompt_template("{{Q}} {instruction}|{input}>")
    assert (own.prompt(with_input), own.prompt(without_input)) == ("{Q} {Do}|{it}>", "{Q} {Do}|>")


@pytest.mark.parametrize(
    "text, message",
    [
        ("alpacca", "neither alpaca nor plain nor a text with {instruction}"),
        ("{input}", "neither alpaca"),
        ("{instruction} {output}", r"has \{output\}"),
        ("{instruction} {}", r"has \{\}"),
        ("{instruction.upper}", r"has \{instruction.upper\}"),
        ("{instruction!r}", "with a format or a conversion"),
        ("{instruction:>9}", "with a format or a conversion"),
        ("{instruction", "expected '}'"),
    ],
)
def test_wrong_templates(text, message):
    with pytest.raises(DataError, match=message):
        prompt_template(text)
