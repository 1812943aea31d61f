"""Pretrained weights that nobody here made: stories260K from its author's file, as its users would run it."""

import json

import openai
import pytest

from tests.support import stories260k
from tests.support.runs import python, succeeded
from tests.support.served_llama import serving

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """stories260K as a folder from Hugging Face."""
    return stories260k.write_folder(tmp_path_factory.mktemp("hub") / "stories260K")


def test_generate_gives_the_published_text(library, folder):
    options = ["--model", folder, "--prompt", PROMPT, "--max-tokens", "60", "--json"]
    output = succeeded(python(["-m", "mindlora.cli", "generate", *options], folder))
    (answer,) = json.loads(output.splitlines()[-1])["answers"]
    assert (answer["prompt"] + answer["text"]).startswith(stories260k.PUBLISHED)


@pytest.fixture
def client(library, folder, tmp_path):
    """A client of `mindlora serve` on that folder."""
    with serving(str(tmp_path), source=("--model", str(folder))) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_server_gives_the_published_text(client):
    answer = client.completions.create(model="stories260K", prompt=PROMPT, max_tokens=60, temperature=0)
    assert (PROMPT + answer.choices[0].text).startswith(stories260k.PUBLISHED)
