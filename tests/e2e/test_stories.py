"""Pretrained weights that nobody here made: stories260K from its author's file, as its users would run it."""

import json

import pytest

from tests.support import stories260k
from tests.support.runs import python, succeeded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """stories260K as a folder from Hugging Face."""
    return stories260k.write_folder(tmp_path_factory.mktemp("hub") / "stories260K")


def test_generate_gives_the_published_text(library, folder):
    options = ["--model", folder, "--prompt", "Once upon a time", "--max-tokens", "60", "--json"]
    output = succeeded(python(["-m", "mindlora.cli", "generate", *options], folder))
    (answer,) = json.loads(output.splitlines()[-1])["answers"]
    assert (answer["prompt"] + answer["text"]).startswith(stories260k.PUBLISHED)
