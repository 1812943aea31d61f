"""merge_checkpoint onto a base with one table for embedding and head: what the adapter makes of them, one or two."""

import json

import numpy as np
import pytest

from mindlora.files.base.merge import merge_checkpoint
from tests.support.llama_checkpoints import HIDDEN, HUGGING_FACE, VOCAB, llama, load, save_base
from tests.support.merged_checkpoints import ALPHA, DTYPES, RANK, Q, pairs, save_adapter

EMBED, HEAD = "model.embed_tokens", "lm_head"
SCALE = ALPHA / RANK
rng = np.random.default_rng(7)
HEAD_PAIR = rng.normal(size=(RANK, HIDDEN)).astype(np.float32), rng.normal(size=(VOCAB, RANK)).astype(np.float32)
EMBED_PAIR = rng.normal(size=(RANK, VOCAB)).astype(np.float32), rng.normal(size=(HIDDEN, RANK)).astype(np.float32)
TABLE = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)


def merged(tmp_path, tensors, modules=None, says_tied=True, **config):
    """Merges an adapter with a pair of q and further tensors into a tied base; returns the base, the result, its
    config.json and the report."""
    source = llama(DTYPES["float32"], tied=True)
    settings = {**HUGGING_FACE, "vocab_size": VOCAB, **({"tie_word_embeddings": True} if says_tied else {})}
    base = save_base(tmp_path / "base", source, shards=3, **settings)
    adapter = save_adapter(tmp_path / "adapter", pairs(Q), tensors, modules_to_save=modules, **config)
    report = merge_checkpoint(base, adapter, str(tmp_path / "out"))
    return source, load(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text()), report


def of_head(base_layer=None):
    tensors = {f"{HEAD}.lora_{half}.weight": array for half, array in zip("AB", HEAD_PAIR)}
    return tensors | ({} if base_layer is None else {f"{HEAD}.base_layer.weight": base_layer})


def of_embedding(pair=EMBED_PAIR):
    return {f"{EMBED}.lora_embedding_{half}": array for half, array in zip("AB", pair)}


def delta(pair, embeds=False):
    a, b = (half.astype(np.float64) for half in pair)
    return SCALE * ((b @ a).T if embeds else b @ a)


@pytest.mark.parametrize("says_tied", [True, False])
@pytest.mark.parametrize("saves_base", [True, False])
def test_a_pair_on_the_head_gives_the_head_a_table_of_its_own(tmp_path, saves_base, says_tied):
    table = llama(DTYPES["float32"], tied=True)[f"{EMBED}.weight"]
    source, found, config, report = merged(tmp_path, of_head(table if saves_base else None), says_tied=says_tied)
    np.testing.assert_allclose(found[f"{HEAD}.weight"], table + delta(HEAD_PAIR), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[f"{EMBED}.weight"], table)
    assert found.keys() == {*source, f"{HEAD}.weight"} and config["tie_word_embeddings"] is False
    assert report.merged == 2 and "Build the model with tie_word_embeddings: False" in str(report)


def test_a_pair_on_the_embedding_leaves_the_head_as_the_base_has_it(tmp_path):
    source, found, config, _ = merged(tmp_path, of_embedding())
    table = source[f"{EMBED}.weight"]
    np.testing.assert_allclose(found[f"{EMBED}.weight"], table + delta(EMBED_PAIR, True), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[f"{HEAD}.weight"], table)
    assert config["tie_word_embeddings"] is False


def test_pairs_on_both_change_each_by_itself(tmp_path):
    source, found, _, _ = merged(tmp_path, of_head() | of_embedding())
    table = source[f"{EMBED}.weight"]
    np.testing.assert_allclose(found[f"{EMBED}.weight"], table + delta(EMBED_PAIR, True), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[f"{HEAD}.weight"], table + delta(HEAD_PAIR), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("held", ["both", "embedding", "head"])
def test_what_peft_keeps_equal_stays_one_table(tmp_path, held):
    """With ensure_weight_tying PEFT 0.21 saves both, A and B of the one the other's B and A; some tools keep one."""
    same = HEAD_PAIR[1].T.copy(), HEAD_PAIR[0].T.copy()
    tensors = {"both": of_head() | of_embedding(same), "embedding": of_embedding(same), "head": of_head()}[held]
    source, found, config, report = merged(tmp_path, tensors, ensure_weight_tying=True)
    table = source[f"{EMBED}.weight"]
    np.testing.assert_allclose(found[f"{EMBED}.weight"], table + delta(HEAD_PAIR), rtol=1e-5, atol=1e-5)
    assert found.keys() == source.keys() and config["tie_word_embeddings"] is True and report.merged == 2


@pytest.mark.parametrize(
    ("saved", "modules"),
    [
        ({f"{HEAD}.weight": TABLE}, [HEAD]),
        ({f"{EMBED}.weight": TABLE}, ["embed_tokens"]),
        ({f"{EMBED}.weight": TABLE, f"{HEAD}.weight": 2 * TABLE}, ["embed_tokens", HEAD]),
    ],
    ids=["head", "embedding", "both"],
)
def test_saved_modules_replace_the_table_that_they_are_of(tmp_path, saved, modules):
    source, found, config, report = merged(tmp_path, saved, modules)
    for name in (f"{EMBED}.weight", f"{HEAD}.weight"):
        np.testing.assert_array_equal(found[name], saved.get(name, source[f"{EMBED}.weight"]))
    assert config["tie_word_embeddings"] is False and report.replaced == len(saved)


def test_a_head_that_the_file_of_a_tied_base_holds_all_the_same_is_the_table(tmp_path):
    """transformers ties the two after loading, whatever lm_head.weight says."""
    source = llama(DTYPES["float32"])
    base = save_base(tmp_path / "base", source, tie_word_embeddings=True)
    merge_checkpoint(
        base, save_adapter(tmp_path / "adapter", pairs(Q), of_head(), modules_to_save=None), str(tmp_path / "out")
    )
    expected = source[f"{EMBED}.weight"] + delta(HEAD_PAIR)
    np.testing.assert_allclose(load(tmp_path / "out")[f"{HEAD}.weight"], expected, rtol=1e-5, atol=1e-5)


def test_a_single_file_without_a_configuration_says_so_in_a_note(tmp_path):
    base = save_base(tmp_path / "base", llama(DTYPES["float32"], tied=True))
    output = str(tmp_path / "out.safetensors")
    report = merge_checkpoint(
        base, save_adapter(tmp_path / "adapter", pairs(Q), of_head(), modules_to_save=None), output
    )
    assert f"{HEAD}.weight" in load(output) and "tie_word_embeddings: False" in report.notes[-1]
