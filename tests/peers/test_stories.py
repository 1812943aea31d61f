"""stories260K, whose weights nobody here made: golden values, and every step of an adapter's life judged by PEFT."""

import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mindlora import LoraConfig, apply_lora, eva_adapter, freeze_base, load_lora, merge_lora, quantize_base, save_lora
from mindlora.files.adapters import files
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from tests.conftest import in_mode
from tests.support import stories260k
from tests.support.peers.peer import read_json

# Nats for each token of the five stories, by transformers 5.17 on PyTorch 2.13. The author's 1.2968 is over many more.
LOSS = 1.26644
NF4_LOSS = 1.37829
CONTEXT = 512
CONFIG = LoraConfig(target_modules="all-linear", lora_rank=8, lora_alpha=16)
STEPS, RATE, ROW = 6, 1e-2, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return stories260k.write_folder(tmp_path_factory.mktemp("hub") / "stories260K")


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    """The weights under MindFormers' names."""
    path = tmp_path_factory.mktemp("converted") / "stories.safetensors"
    convert_base(str(folder), str(path), "hf", "mindformers", tied=True)
    return path


@pytest.fixture
def make_stories(folder, checkpoint, make_llama):
    """Returns a function that builds MindFormers' network with these weights."""
    config = read_json(folder, "config.json")
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "tie_word_embeddings")
    keys = {
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "theta": config["rope_theta"],
        **{key: config[key] for key in sizes},
    }

    def make(seq_length=CONTEXT):
        network = make_llama(seq_length=seq_length, **keys)
        missing, unexpected = ms.load_param_into_net(network, ms.load_checkpoint(str(checkpoint), format="safetensors"))
        assert not missing and not unexpected
        return network.set_train(False)

    return make


@pytest.fixture(scope="module")
def tokens(folder):
    """The five stories: padded token ids [5, CONTEXT], and how many of each row count."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = [story.ids for story in tokenizer.encode_batch(stories260k.stories())]
    ids = np.zeros((len(encoded), CONTEXT), np.int32)
    for row, story in zip(ids, encoded):
        row[: len(story)] = story
    return types.SimpleNamespace(ids=ids, lengths=[len(story) for story in encoded])


def logits_of(network, ids):
    with in_mode(ms.PYNATIVE_MODE):
        return network(Tensor(ids))[0].asnumpy()


def loss_of(logits, tokens):
    """Returns the mean negative log-likelihood of each token after a row's first."""
    logits = logits.astype(np.float64)
    highest = logits.max(-1, keepdims=True)
    likelihood = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    total = 0.0
    for row, ids, length in zip(likelihood, tokens.ids, tokens.lengths):
        total -= row[np.arange(length - 1), ids[1:length]].sum()
    return total / (sum(tokens.lengths) - len(tokens.lengths))


def assert_same_logits(ours, theirs, tokens):
    for row, other, length in zip(ours, theirs, tokens.lengths):
        np.testing.assert_allclose(row[:length], other[:length], rtol=0, atol=2e-5 * np.abs(other).max())


@pytest.fixture(scope="module")
def judged(peer, tokens, tmp_path_factory):
    """Returns a function that returns the logits of transformers, with an adapter of PEFT."""
    path = tmp_path_factory.mktemp("logits") / "logits.npy"

    def compute(model, adapter=None):
        peer.logits(model=model, ids=tokens.ids.tolist(), path=path, adapter=adapter)
        return np.load(path)

    return compute


def shakespeare(folder, rows):
    """Returns rows of ROW + 1 tokens of plays."""
    text = stories260k.data_file("tinyshakespeare.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text[: 8 * rows * ROW]).ids
    return np.array(ids[: rows * (ROW + 1)], np.int32).reshape(rows, ROW + 1)


@pytest.fixture
def trained(make_stories, folder, tokens, tmp_path):
    """An adapter that learned from a few plays: its folder, and the loss of each step."""
    network = make_stories(seq_length=ROW)
    with in_mode(ms.PYNATIVE_MODE):
        ms.set_seed(1)
        apply_lora(network, CONFIG)
        freeze_base(network)
        network.set_train(True)
        optimizer = nn.Adam(network.trainable_params(), RATE)
        gradient = ms.value_and_grad(network, None, optimizer.parameters)
        losses = []
        for rows in np.split(shakespeare(folder, 4 * STEPS), STEPS):
            loss, gradients = gradient(Tensor(rows))
            optimizer(gradients)
            losses.append(float(loss.asnumpy()))
        network.set_train(False)
    save_lora(network, str(tmp_path / "plays"), base_model="stories260K")
    return types.SimpleNamespace(losses=losses, folder=tmp_path / "plays")


def test_the_loss_on_five_stories(make_stories, judged, folder, tokens):
    logits = logits_of(make_stories(), tokens.ids)
    assert loss_of(logits, tokens) == pytest.approx(LOSS, abs=2e-5)
    assert_same_logits(logits, judged(folder), tokens)


def test_the_folder_survives_the_way_to_mindformers_and_back(folder, checkpoint, tmp_path):
    convert_base(str(checkpoint), str(tmp_path / "back"), "mindformers", "hf")
    before, after = load_file(folder / "model.safetensors"), {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        after.update(load_file(file))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_an_adapter_of_plays_is_the_same_in_peft_and_merged(trained, make_stories, judged, folder, tokens, tmp_path):
    assert trained.losses[-1] < trained.losses[0] - 0.3
    network = make_stories()
    load_lora(network, str(trained.folder))
    ours = logits_of(network, tokens.ids)
    assert loss_of(ours, tokens) > LOSS + 0.1  # it forgot some of the stories
    assert_same_logits(ours, judged(folder, trained.folder), tokens)
    with in_mode(ms.PYNATIVE_MODE):
        merge_lora(network)
    assert_same_logits(logits_of(network, tokens.ids), ours, tokens)
    merge_checkpoint(str(folder), str(trained.folder), str(tmp_path / "merged"))
    assert_same_logits(judged(tmp_path / "merged"), ours, tokens)


def test_nf4_costs_little_of_the_loss(make_stories, tokens):
    network = make_stories()
    quantize_base(network)
    assert loss_of(logits_of(network, tokens.ids), tokens) == pytest.approx(NF4_LOSS, abs=1e-3)


EVA_BATCHES, EVA_ROWS, EVA_RANK = 8, 4, 4


@pytest.fixture(scope="module")
def eva_batches(folder):
    """Batches of plays, in each row of which the first half does not count."""
    rows = shakespeare(folder, EVA_BATCHES * EVA_ROWS)[:, :ROW]
    counted = np.broadcast_to(np.arange(ROW) >= ROW // 2, rows.shape)
    return list(zip(np.split(rows, EVA_BATCHES), np.split(counted, EVA_BATCHES)))


def test_eva_finds_what_peft_finds_on_the_same_rows(make_stories, eva_batches, peer, judged, folder, tokens, tmp_path):
    ours = eva_adapter(make_stories(ROW), eva_batches * 9, LoraConfig(target_modules="all-linear", lora_rank=EVA_RANK))
    peer.eva(
        model=folder,
        batches=[
            {"input_ids": ids.tolist(), "labels": np.where(counted, ids, -100).tolist()} for ids, counted in eva_batches
        ],
        config={"r": EVA_RANK, "lora_alpha": 16, "target_modules": "all-linear"},
        eva_config={"rho": 2.0, "tau": 0.99},
        folder=str(tmp_path / "theirs"),
    )
    theirs = files.read(str(tmp_path / "theirs"))
    ranks = {path: theirs.rank(path) if path in theirs.paths else 0 for path in ours.ranks}
    assert not ours.unsettled and len(set(ranks.values())) > 3
    # PEFT breaks the ties of cells that read the same by an order of its own.
    assert all(abs(ranks[path] - rank) <= 1 for path, rank in ours.ranks.items())
    for path in theirs.paths:
        a, b = (adapter.tensors[path, "A"] for adapter in (ours.adapter, theirs))
        shared = min(len(a), len(b)) - 1
        assert np.linalg.norm(a[:shared] @ b.T, axis=1).min(initial=1) > 0.98
        assert ours.adapter.scale(path) == theirs.scale(path) == 4
    files.write(ours.adapter, str(tmp_path / "ours"))
    assert_same_logits(judged(folder, tmp_path / "ours"), judged(folder), tokens)
