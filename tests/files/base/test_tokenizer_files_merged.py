"""merge_checkpoint and the tokenizer that a training saved in the adapter's folder."""

import json
import os

import gguf
import numpy as np
import pytest

from mindlora.core.formats.gguf_file import ENDING
from mindlora.files.base.merge import merge_checkpoint
from tests.support.llama_checkpoints import HIDDEN, HUGGING_FACE, VOCAB, llama, save_base
from tests.support.merged_checkpoints import DTYPES, Q, pairs, save_adapter

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def save_tokenizer(folder, tokens, **settings):
    """Writes a tokenizer.json of the first bytes of GPT-2's, with the last of ``tokens`` added; and its settings."""
    vocabulary = {chr(ord("!") + number): number for number in range(VOCAB)}
    added = [{"id": number, "content": f"<{number}>", "special": True} for number in range(VOCAB, tokens)]
    content = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "pre_tokenizer": BYTE_LEVEL}
    for name, each in (("tokenizer.json", {**content, "added_tokens": added}), ("tokenizer_config.json", settings)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(each, file)


def merged(tmp_path, rows, tokens, output="out", template=None):
    """Merges an adapter with embedding and head of ``rows`` tokens and a tokenizer of ``tokens``."""
    base = save_base(tmp_path / "base", llama(DTYPES["float32"]), **HUGGING_FACE, vocab_size=VOCAB)
    save_tokenizer(base, VOCAB, pad_token="!")
    (tmp_path / "base" / "special_tokens_map.json").write_text("{}")
    (tmp_path / "base" / "chat_template.jinja").write_text("the base's")
    table = np.ones((rows, HIDDEN), np.float32)
    saved = {"model.embed_tokens.weight": table, "lm_head.weight": table} if rows > VOCAB else {}
    adapter = save_adapter(tmp_path / "adapter", pairs(Q), saved)
    save_tokenizer(adapter, tokens, pad_token="<64>", **({"chat_template": template} if template else {}))
    return merge_checkpoint(base, adapter, str(tmp_path / output))


@pytest.mark.parametrize("template", ["the adapter's", None])
def test_a_tokenizer_that_grew_with_the_vocabulary_is_the_merged_model_s(tmp_path, template):
    report = merged(tmp_path, VOCAB + 3, VOCAB + 2, template=template)
    assert "has a tokenizer of 66 tokens, but the base's has 64: the adapter's was taken." in report.notes[-1]
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_text() == (tmp_path / "adapter" / "tokenizer.json").read_text()
    assert json.loads((out / "tokenizer_config.json").read_text())["pad_token"] == "<64>"
    # What belongs to the base's tokenizer is not mixed with it; its template stays where the adapter has none.
    assert not (out / "special_tokens_map.json").exists() and (out / "chat_template.jinja").exists() == (not template)


def test_a_gguf_file_has_the_tokens_that_were_added(tmp_path):
    merged(tmp_path, VOCAB + 2, VOCAB + 2, output=f"x{ENDING}")
    fields = gguf.GGUFReader(tmp_path / f"x{ENDING}").fields
    assert fields["tokenizer.ggml.tokens"].contents()[-2:] == ["<64>", "<65>"]


def test_one_with_more_tokens_than_the_model_has_rows_is_left_and_named(tmp_path):
    report = merged(tmp_path, VOCAB, VOCAB + 1)
    assert report.notes[-1].endswith("it was not taken, since the model has 64 rows, none for <64>.")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (tmp_path / "base" / "tokenizer.json").read_text()


def test_the_same_tokens_say_nothing(tmp_path):
    assert merged(tmp_path, VOCAB, VOCAB).notes == ()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["pad_token"] == "!"
