"""load_lora of each form of PEFT's adapters that is found in public: it loads, or one error says why not."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.nn.utils import no_init_parameters

from mindlora import LoraError, load_lora, quantize_base
from tests.support import peft_corpus, quantized_networks
from tests.support.networks import randomize, snapshot
from tests.support.peft_corpus import FORMS, HIDDEN, INNER, VOCABULARY


class Tree(nn.Cell):
    """Cells by path."""

    def __init__(self, cells):
        super().__init__()
        for name in dict.fromkeys(path.split(".")[0] for path in cells):
            below = {path.partition(".")[2]: cell for path, cell in cells.items() if path.split(".")[0] == name}
            if name == "layers":
                numbers = dict.fromkeys(path.split(".")[0] for path in below)
                self.layers = nn.CellList([Tree(inside(below, number)) for number in numbers])
            else:
                setattr(self, name, below[""] if "" in below else Tree(below))


class Weight(nn.Cell):
    """A norm or an embedding: a weight alone."""

    def __init__(self, name, *shape):
        super().__init__()
        setattr(self, name, Parameter(Tensor(np.ones(shape, np.float32))))


def inside(cells, name):
    return {path.partition(".")[2]: cell for path, cell in cells.items() if path.split(".")[0] == name}


def llama(values=True):
    """The cells of the corpus' Llama under MindFormers' names, with random values."""
    cells = {"model.tok_embeddings": Weight("embedding_weight", VOCABULARY, HIDDEN)}
    for layer in range(2):
        start = f"model.layers.{layer}."
        cells[f"{start}attention_norm"] = Weight("weight", HIDDEN)
        for leaf in ("wq", "wk", "wv", "wo"):
            cells[f"{start}attention.{leaf}"] = nn.Dense(HIDDEN, HIDDEN, has_bias=False)
        for leaf in ("w1", "w3"):
            cells[f"{start}feed_forward.{leaf}"] = nn.Dense(HIDDEN, INNER, has_bias=False)
        cells[f"{start}feed_forward.w2"] = nn.Dense(INNER, HIDDEN, has_bias=False)
    cells["lm_head"] = nn.Dense(HIDDEN, VOCABULARY, has_bias=False)
    network = Tree(cells)
    if values:
        randomize(network.get_parameters())
    return network


@pytest.mark.parametrize("name", FORMS)
def test_a_form(tmp_path, name):
    form, path, network = FORMS[name], peft_corpus.write(str(tmp_path / "A"), FORMS[name]), llama()
    if name == "an embedding":
        # The made-up table above is not a cell that takes an adapter; tests/peers loads it into MindFormers' own.
        form = form._replace(loads="no place")
    if peft_corpus.is_loaded(name) and not form.loads:
        before = {p.name: p.asnumpy().copy() for p in network.get_parameters()}
        load_lora(network, path)
        after = {p.name: p.asnumpy() for p in network.get_parameters()}
        assert len(after) > len(before)
        # Nothing of the base changes but what the file holds.
        changed = {key for key, array in before.items() if not np.array_equal(after[key], array)}
        assert bool(changed) is ("saved" in name or name == "trained tokens")
        return
    with pytest.raises(LoraError) as error:
        load_lora(network, path)
    assert (form.loads or form.reads) in str(error.value)


def test_trained_tokens_replace_rows(tmp_path):
    form, network = FORMS["trained tokens"], llama()
    before = network.model.tok_embeddings.embedding_weight.asnumpy().copy()
    load_lora(network, peft_corpus.write(str(tmp_path / "A"), form))
    rows = peft_corpus.tensors_of(form)[peft_corpus.PREFIX + next(iter(form.extra))]
    before[[3, 7]] = rows
    np.testing.assert_array_equal(network.model.tok_embeddings.embedding_weight.asnumpy(), before)


@pytest.mark.parametrize("name", ["pissa", "olora"])
def test_a_raw_adapter_gets_its_initial_pairs_from_the_base(tmp_path, name):
    """W' + scale B A with W' = W - scale B0 A0: of PiSSA, W' is W without its largest singular values."""
    network, tensors = llama(), peft_corpus.tensors_of(FORMS[name])
    weight = network.model.layers[0].attention.wq.weight.asnumpy().astype(np.float64)
    load_lora(network, peft_corpus.write(str(tmp_path / "A"), FORMS[name]))
    if name == "pissa":
        u, s, v = np.linalg.svd(weight)
        residual = (u[:, 4:] * s[4:]) @ v[4:]
    else:
        q, r = np.linalg.qr(weight)
        residual = weight - 2 * q[:, :4] @ r[:4]
    a, b = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight"] for half in "AB")
    cell = network.model.layers[0].attention.wq
    assert cell.lora_rank == 8
    found = cell.weight.asnumpy() + cell.scale * cell.pair()[1] @ cell.pair()[0]
    np.testing.assert_allclose(found, residual + 2 * b @ a, rtol=0, atol=1e-4)


def test_a_raw_adapter_is_refused_on_a_quantized_base(tmp_path):
    network = quantized_networks.plain()
    quantize_base(network)
    before = snapshot(network)
    with pytest.raises(LoraError, match="whose initial pairs follow from the base, and the weight of .* is quantized"):
        load_lora(network, peft_corpus.write(str(tmp_path / "A"), FORMS["pissa"]))
    assert snapshot(network) == before


def test_a_raw_adapter_is_refused_before_the_base_is_loaded(tmp_path):
    """As MindFormers builds a network that gets load_checkpoint."""
    with no_init_parameters():
        network = llama(values=False)
    with pytest.raises(LoraError, match="has no values yet. Load the base first, or merge the adapter into it"):
        load_lora(network, peft_corpus.write(str(tmp_path / "A"), FORMS["olora"]))
