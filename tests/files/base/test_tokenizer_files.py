"""The token that a chat template ends turns with, and what a merged model says of it."""

import json
import os

import pytest

from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.reader import companions_in
from mindlora.files.base.tokenizer_files import stated_ends, turn_end
from tests.support.chat_templates import CHATML, HERMES_TOOLS, LLAMA3, MARKED, MISTRAL, PHI, THINKING, chat_tokenizer
from tests.support.llama_checkpoints import HUGGING_FACE, VOCAB, llama, save_base
from tests.support.merged_checkpoints import DTYPES, Q, pairs, save_adapter


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes the files of a model beside its weights."""

    def write(template=CHATML, **files):
        path = str(tmp_path / "model")
        chat_tokenizer(template).save_pretrained(path)
        for name, content in files.items():
            with open(os.path.join(path, f"{name}.json"), "w", encoding="utf-8") as file:
                json.dump(content, file)
        return path

    return write


@pytest.mark.parametrize(
    "template, end",
    [
        *((template, "<|im_end|>") for template in (CHATML, HERMES_TOOLS, MARKED, PHI, THINKING)),
        *((LLAMA3, "<|eot_id|>"), (MISTRAL, "</s>")),
    ],
)
def test_the_end_is_what_the_template_writes_behind_an_answer(folder, template, end):
    found = turn_end(companions_in(folder(template)))
    assert found.text == end and found.token == chat_tokenizer(template).convert_tokens_to_ids(end)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ raise_exception('never') }}", None])
def test_a_template_that_shows_none_tells_none(folder, template):
    assert turn_end(companions_in(folder(template))) is None


def test_a_template_may_be_one_of_several_in_the_settings(folder):
    path = folder(CHATML)
    os.remove(os.path.join(path, "chat_template.jinja"))
    settings = os.path.join(path, "tokenizer_config.json")
    with open(settings, encoding="utf-8") as file:
        content = json.load(file)
    templates = [{"name": "tool_use", "template": LLAMA3}, {"name": "default", "template": CHATML}]
    with open(settings, "w", encoding="utf-8") as file:
        json.dump({**content, "chat_template": templates}, file)
    assert turn_end(companions_in(path)).text == "<|im_end|>"


def test_generation_config_is_asked_before_config(folder):
    assert stated_ends(companions_in(folder())) is None
    assert stated_ends(companions_in(folder(config={"eos_token_id": 7}))) == (7,)
    both = folder(config={"eos_token_id": 7}, generation_config={"eos_token_id": [8, 9]})
    assert stated_ends(companions_in(both)) == (8, 9)


def save_tokenizer(folder, template=CHATML):
    """Writes a tokenizer whose tokens 60 to 63 are special, and its chat template."""
    vocabulary = {chr(ord("!") + number): number for number in range(60)}
    special = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|beyond|>"]
    added = [{"id": 60 + number, "content": text, "special": True} for number, text in enumerate(special)]
    content = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": added}
    for name, each in (("tokenizer.json", content), ("tokenizer_config.json", {"chat_template": template})):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(each, file)


def merged(tmp_path, generation=None, template=CHATML, output="out", **config):
    """Merges an adapter into a Llama with files; returns the report, and generation_config.json of the result."""
    settings = {**HUGGING_FACE, "vocab_size": VOCAB, **config}
    base = save_base(tmp_path / "base", llama(DTYPES["float32"]), **settings)
    save_tokenizer(base, template)
    if generation is not None:
        (tmp_path / "base" / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    report = merge_checkpoint(base, save_adapter(tmp_path / "adapter", pairs(Q), {}), str(tmp_path / output))
    written = tmp_path / output / "generation_config.json"
    return report, json.loads(written.read_text(encoding="utf-8")) if written.is_file() else None


def test_a_merged_model_stops_at_the_end_of_a_turn_too(tmp_path):
    report, generation = merged(tmp_path, {"eos_token_id": 0, "temperature": 0.6}, eos_token_id=0)
    assert generation == {"eos_token_id": [0, 61], "temperature": 0.6}
    assert report.notes[-1] == (
        "generation_config.json: eos_token_id is [0, 61], since the chat template ends the assistant's turns with "
        "'<|im_end|>' (61), and the base stops at 0 alone."
    )


def test_without_a_generation_config_it_gets_one(tmp_path):
    _, generation = merged(tmp_path, eos_token_id=[0, 62], bos_token_id=1)
    assert generation == {"bos_token_id": 1, "eos_token_id": [0, 62, 61]}


@pytest.mark.parametrize("template, ends", [(CHATML, [0, 61]), ("{{ messages[0].content }}", 0)])
def test_a_model_that_stops_there_or_has_no_end_stays_as_it_is(tmp_path, template, ends):
    report, generation = merged(tmp_path, {"eos_token_id": ends}, template)
    assert generation == {"eos_token_id": ends} and "chat template" not in "".join(report.notes)


def test_an_end_that_the_model_has_no_row_for_is_not_added(tmp_path):
    beyond = CHATML.replace("<|im_end|>", "<|beyond|>")
    assert merged(tmp_path, {"eos_token_id": 0}, beyond)[1] == {"eos_token_id": [0, 63]}
    content = json.loads((tmp_path / "base" / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"][-1]["id"] = VOCAB
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    merge_checkpoint(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "second"))
    assert json.loads((tmp_path / "second" / "generation_config.json").read_text()) == {"eos_token_id": 0}
