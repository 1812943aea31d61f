"""take_tables: which embedding and head an adapter has of its own, where the base's are tied and where not."""

import numpy as np
import pytest

from mindlora.core.errors import ShapeMismatchError, UnexpectedTensorsError
from mindlora.files.adapters.adapter import Adapter
from mindlora.serving.adapter_tables import BaseTables, take_tables
from tests.support.networks import normal
from tests.support.refusals import part, refused

VOCABULARY, HIDDEN = 7, 4
EMBEDDING, HEAD = "model.tok_embeddings.embedding_weight", "lm_head.weight"
BASE = BaseTables(normal(VOCABULARY, HIDDEN, seed=1), tied=False)
TIED = BASE._replace(tied=True)
TOKENS = np.int32([3, 0, 3])


def saved(*names, **fields):
    """Returns an adapter with a pair of wq, and saved modules."""
    modules = {name: normal(VOCABULARY, HIDDEN, seed=seed) for seed, name in enumerate(names, 5)}
    return with_pair(Adapter({}, saved_modules=modules, **fields), "model.layers.0.attention.wq", HIDDEN, HIDDEN)


def with_pair(adapter, path, wide, high, rank=2):
    adapter.tensors.update({(path, "A"): normal(rank, wide, seed=2), (path, "B"): normal(high, rank, seed=3)})
    adapter.alphas[path] = 3.0 * rank
    return adapter


def test_saved_tables_take_the_place_of_the_base_s():
    adapter = saved(EMBEDDING, HEAD)
    modules = dict(adapter.saved_modules)
    for base in (BASE, TIED):
        tables = take_tables(saved(EMBEDDING, HEAD), base, "it")
        np.testing.assert_array_equal(tables.embed(TOKENS, base), modules[EMBEDDING][TOKENS])
        np.testing.assert_allclose(tables.logits(BASE.embedding[0]), modules[HEAD] @ BASE.embedding[0], rtol=1e-6)
        assert tables.nbytes == 2 * modules[HEAD].nbytes


@pytest.mark.parametrize(
    "base, fields, shares",
    [
        (BASE, {"fingerprint": {"values": "1"}}, False),
        # PEFT, asked for the embedding alone, leaves the head as it was; training here cannot.
        (TIED, {"peft_fields": {"modules_to_save": ["embed_tokens"]}}, False),
        (TIED, {"peft_fields": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}}, True),
        (TIED, {"fingerprint": {"values": "1"}}, True),
    ],
)
def test_an_embedding_alone_is_the_head_s_table_too_if_they_were_tied_in_training(base, fields, shares):
    tables = take_tables(saved(EMBEDDING, **fields), base, "it")
    assert (tables.head is tables.embedding) == shares and (shares or tables.head is None)


def test_pairs_of_both_tables():
    adapter = with_pair(saved(HEAD), "model.tok_embeddings", VOCABULARY, HIDDEN)
    adapter.embeddings.add("model.tok_embeddings")
    with_pair(adapter, "lm_head", HIDDEN, VOCABULARY)
    deltas = {path: adapter.delta(path) for path in ("model.tok_embeddings", "lm_head")}
    head = adapter.saved_modules[HEAD]
    tables = take_tables(adapter, BASE, "it")
    expected = (BASE.embedding + deltas["model.tok_embeddings"])[TOKENS]
    np.testing.assert_allclose(tables.embed(TOKENS, BASE), expected, rtol=1e-5)
    np.testing.assert_allclose(tables.head, head + deltas["lm_head"], rtol=1e-6)
    assert adapter.paths == ["model.layers.0.attention.wq"] and not adapter.saved_modules
    # A pair of a head that is the base's goes into the pool.
    adapter = with_pair(saved(), "lm_head", HIDDEN, VOCABULARY)
    assert take_tables(adapter, BASE, "it").head is None and "lm_head" in adapter.paths


@pytest.mark.parametrize("base", [BASE._replace(head=normal(VOCABULARY, HIDDEN, seed=9)), TIED], ids=["two", "tied"])
def test_the_base_s_own_table_beside_a_pair_leaves_the_pair_to_the_pool(base):
    """PEFT saves it by default beside LoRA on the head; of a base with another one, it is the adapter's."""
    adapter = with_pair(saved(HEAD), "lm_head", HIDDEN, VOCABULARY)
    adapter.saved_modules[HEAD] = base.weight_of(HEAD).copy()
    assert take_tables(adapter, base, "it").head is None and "lm_head" in adapter.paths and not adapter.saved_modules
    adapter.saved_modules[HEAD] = base.weight_of(HEAD) * np.float32(2)
    expected = adapter.saved_modules[HEAD] + adapter.delta("lm_head")
    np.testing.assert_allclose(take_tables(adapter, base, "it").head, expected, rtol=1e-6)


def test_a_pair_that_peft_keeps_equal_in_embedding_and_head_is_in_both():
    """PEFT's ensure_weight_tying: the one's A and B are the other's B and A; a file may hold one of them."""
    adapter = with_pair(saved(peft_fields={"ensure_weight_tying": True}), "lm_head", HIDDEN, VOCABULARY)
    expected = (TIED.embedding + adapter.delta("lm_head"))[TOKENS]
    tables = take_tables(adapter, TIED, "it")
    np.testing.assert_allclose(tables.embed(TOKENS, TIED), expected, rtol=1e-5)
    assert tables.head is None and adapter.paths == ["model.layers.0.attention.wq", "lm_head"]


def test_what_has_no_place_is_refused():
    message = "it cannot be served beside other adapters: it holds saved modules (modules_to_save), which replace the"
    refused(UnexpectedTensorsError, part(message), take_tables, saved(EMBEDDING, "model.norm_out.weight"), BASE, "it")
    adapter = saved(HEAD)
    adapter.saved_modules[HEAD] = normal(VOCABULARY + 1, HIDDEN)
    message = f"it: {HEAD} has {VOCABULARY + 1} rows and the base {VOCABULARY}: tokens were added"
    refused(ShapeMismatchError, part(message), take_tables, adapter, BASE, "it")
    adapter.saved_modules[HEAD] = normal(VOCABULARY, HIDDEN + 1)
    refused(ShapeMismatchError, part(f"it: {HEAD}, a saved module"), take_tables, adapter, BASE, "it")
