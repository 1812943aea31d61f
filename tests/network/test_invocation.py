"""aLoRA against NumPy: which tokens adapters act on, and what a network computes of them; and what is refused."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, merge_lora, save_lora
from mindlora.core.errors import AdapterError, ConfigError, LoraError, MergeError, UnsupportedCellError
from mindlora.network import invocation
from mindlora.network.cells.embedding import add_embedding_noise
from mindlora.network.invocation import InvocationMarker, InvocationMask, pack_invocations
from mindlora.network.tree import copy_cells, lora_cells
from mindlora.training.several.stack import stack_adapters
from tests.support.lora_dense import Each
from tests.support.networks import as_array, assert_close, randomize

VOCABULARY, DIM, BEGIN = 9, 6, 3
INVOCATION = [2, 1]
CONFIG = LoraConfig(lora_rank=2, lora_alpha=6, target_modules=["first", "second"], alora_invocation_tokens=INVOCATION)


def random_ids(*shape, most=4, seed=0):
    return np.random.default_rng(seed).integers(0, most, shape).astype(np.int32)


def active(ids, tokens, boundary=None):
    """The oracle: 1 from the last occurrence of the tokens on, in each row, or in each example of packed rows."""
    found = np.zeros(ids.shape, np.float32)
    for row, out in zip(ids.tolist(), found):
        begins = [i for i, token in enumerate(row) if i and token == boundary]
        for begin, end in zip([0, *begins], [*begins, len(row)]):
            starts = [i for i in range(begin, end - len(tokens) + 1) if row[i : i + len(tokens)] == list(tokens)]
            if starts:
                out[starts[-1] : end] = 1
    return found


TOKENS = [[2], [2, 1], [1, 2, 1], [1, 3], [1] * 9]
# In graph mode, each with rows or with packed ones.
MASKED = [(tokens, boundary, 0) for tokens, boundary in zip(TOKENS, [None, BEGIN, BEGIN, None, BEGIN])]
MASKED += [(tokens, boundary, 1) for tokens in TOKENS for boundary in (None, BEGIN)]


@pytest.mark.parametrize("tokens, boundary, mode", MASKED, indirect=["mode"], ids=str)
def test_the_tokens_from_the_last_occurrence_on_are_active(tokens, boundary, mode):
    batches = [random_ids(*shape, seed=7) for shape in ((1, 1), (3, 8), (20, 30))]
    found = Each(InvocationMask(tokens, boundary))(*map(Tensor, batches))
    for ids, mask in zip(batches, found):
        np.testing.assert_array_equal(mask.asnumpy(), active(ids, tokens, boundary))


class Network(nn.Cell):
    """An embedding and two linear cells."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.first = nn.Dense(DIM, 5, activation="relu")
        self.second = nn.Dense(5, 4)

    def construct(self, ids):
        return self.second(self.first(self.table(ids)))


def network(config=CONFIG):
    """Returns a network with adapters, all of it random, and the names that its parameters had before."""
    made = Network()
    apply_lora(made, config)
    freeze_base(made)
    randomize(made.get_parameters(), seed=2)
    return made


def outputs(made, ids, boundary=None):
    """What a network computes, in NumPy."""
    mask = active(ids, INVOCATION, boundary)[..., None]
    x = as_array(made.table.embedding.embedding_table)[ids]
    for cell in (made.first, made.second):
        a, b = map(as_array, cell.pair())
        y = x @ as_array(cell.weight).T + as_array(cell.bias) + cell.scale * mask * (x @ a.T) @ b.T
        x = np.maximum(y, 0) if cell is made.first else y
    return x


def test_adapters_act_on_active_tokens_alone_whatever_the_batch(mode):
    made = network()
    assert isinstance(made.table, InvocationMarker)
    batches = [random_ids(*shape, seed=5) for shape in ((4, 9), (1, 3), (2, 20))]
    for ids, y in zip(batches, Each(made)(*map(Tensor, batches))):
        assert_close(y, outputs(made, ids))
    # Another shape, compiled anew, and the first one again.
    for ids in (random_ids(3, 5, seed=8), batches[0]):
        assert_close(made(Tensor(ids)), outputs(made, ids))


def test_examples_of_packed_rows_have_invocations_of_their_own(mode):
    made = network()
    pack_invocations(made, BEGIN)
    ids = random_ids(6, 24, seed=4)
    assert np.abs(outputs(made, ids) - outputs(made, ids, BEGIN)).max() > 0.1
    assert_close(made(Tensor(ids)), outputs(made, ids, BEGIN))


def test_dropout_touches_active_tokens_alone(mode):
    made = network(LoraConfig(**{**CONFIG.to_dict(), "lora_dropout": 0.5}))
    ids = random_ids(4, 20, seed=5)
    evaluated, trained = Each(made), Each(made)
    still = evaluated.set_train(False)(Tensor(ids))[0].asnumpy()
    drawn = trained.set_train()(Tensor(ids))[0].asnumpy()
    changed = np.abs(drawn - still).max(-1) > 1e-6
    assert changed.any() and not changed[active(ids, INVOCATION) == 0].any()


def test_noise_on_the_embedding_leaves_the_mask(mode):
    made = network()
    add_embedding_noise(made, 5)
    ids = random_ids(4, 9, seed=5)
    y = made.set_train(False)(Tensor(ids)).asnumpy()
    made.table.embedding = made.table.embedding.embedding
    assert_close(y, outputs(made, ids))


def test_mindspore_does_not_list_what_describes_a_batch(mode):
    plain = [parameter.name for parameter in Network().get_parameters()]
    made = network()
    assert [p.name for p in made.get_parameters() if "mindpet" not in p.name] == plain
    copied, _ = copy_cells(made)
    assert copied.first.low_rank.active is copied.table.active is made.table.active


def test_a_saved_adapter_is_loaded_with_its_tokens(mode, tmp_path):
    made = network()
    save_lora(made, str(tmp_path / "adapter"))
    ids = random_ids(4, 9, seed=5)
    fresh = Network()
    base = {p.name: p for p in made.get_parameters() if "mindpet" not in p.name}
    ms.load_param_into_net(fresh, base)
    load_lora(fresh, str(tmp_path / "adapter"))
    assert {cell.invocation_tokens for _, cell in lora_cells(fresh)} == {tuple(INVOCATION)}
    assert_close(fresh(Tensor(ids)), outputs(made, ids))


@pytest.mark.parametrize("tokens, named", [(None, "None"), ([2, 1, 1], r"\[2, 1, 1\]")])
def test_an_adapter_of_other_tokens_is_refused(tmp_path, tokens, named):
    save_lora(network(), str(tmp_path / "adapter"))
    other = network(LoraConfig(**{**CONFIG.to_dict(), "alora_invocation_tokens": tokens}))
    message = rf"was trained with alora_invocation_tokens \[2, 1\], but the network was built with {named}: set"
    with pytest.raises(AdapterError, match=message):
        load_lora(other, str(tmp_path / "adapter"))


def test_it_has_no_merged_form_and_is_saved_for_peft_alone(tmp_path):
    with pytest.raises(MergeError, match="at first, second, and merged weights act on all tokens"):
        merge_lora(network().set_train(False))
    with pytest.raises(LoraError, match="for which 'mindformers' has no place. Save it with format 'peft'."):
        save_lora(network(), str(tmp_path / "adapter.safetensors"), format="mindformers")


def test_it_does_not_train_beside_others():
    with pytest.raises(ConfigError, match="alora_invocation_tokens is set for one of several adapters"):
        stack_adapters(Network(), [CONFIG, LoraConfig(target_modules=["first"])])


class Blind(nn.Cell):
    """A network that sees no tokens."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(DIM, DIM)


@pytest.mark.parametrize(
    "make, targets, message",
    [
        (Blind, ["first"], "finds its tokens at the one embedding of a network, but Blind has 0: none."),
        (Network, ["table"], "is not supported on embeddings: only linear cells get the tokens of a batch in their"),
    ],
)
def test_networks_and_cells_without_tokens_are_refused_and_stay(make, targets, message):
    made = make()
    with pytest.raises(UnsupportedCellError, match=message):
        apply_lora(made, LoraConfig(target_modules=targets, alora_invocation_tokens=INVOCATION))
    assert not list(lora_cells(made))


def test_a_batch_of_too_many_tokens_is_refused(mode, monkeypatch):
    monkeypatch.setattr(invocation, "CAPACITY", 8)
    with pytest.raises(ConfigError, match="A batch has 9 tokens, but a network with alora_invocation_tokens takes at"):
        network()(Tensor(random_ids(1, 9)))


def test_a_4_bit_base(mode):
    config = LoraConfig(**{**CONFIG.to_dict(), "quantize_base": "nf4", "target_modules": "all-linear"})
    made = nn.SequentialCell(nn.Embedding(VOCABULARY, 64), nn.Dense(64, 64))
    randomize(made.get_parameters(), seed=1)
    apply_lora(made, config)
    ids = random_ids(3, 12, seed=5)
    before = made(Tensor(ids)).asnumpy()
    randomize([p for p in made.get_parameters() if "mindpet" in p.name], seed=3)
    changed = np.abs(made(Tensor(ids)).asnumpy() - before).max(-1) > 1e-6
    np.testing.assert_array_equal(changed, active(ids, INVOCATION) == 1)
    assert isinstance(made[1].weight, Parameter)
