"""NEFTune's noise against numpy: its size, and that only training adds it."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import ConfigError, UnsupportedCellError
from mindlora.network.cells.embedding import NoisyEmbedding, add_embedding_noise
from mindlora.run.checks.pet_config import PetLoraConfig
from tests.support.lora_dense import Each
from tests.support.networks import randomize

VOCABULARY, DIM, ROWS, LENGTH, ALPHA = 11, 24, 3, 50, 5
BOUND = ALPHA / np.sqrt(LENGTH * DIM)
IDS = Tensor(np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32))


class Network(nn.Cell):
    """An embedding and a linear cell."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.head = nn.Embedding(VOCABULARY, DIM), nn.Dense(DIM, 2)

    def construct(self, ids):
        return self.tok_embeddings(ids)


def network(adapted=False, seed=7):
    ms.set_seed(seed)
    made = Network()
    if adapted:
        apply_lora(made, LoraConfig(lora_rank=2, target_modules=["tok_embeddings"]))
        freeze_base(made)
    randomize(made.get_parameters(), seed=2)
    names = [parameter.name for parameter in made.get_parameters()]
    still = made(IDS).asnumpy()
    add_embedding_noise(made, ALPHA)
    assert [parameter.name for parameter in made.get_parameters()] == names
    assert list(made.parameters_dict()) == names
    return made, still


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "LoRA"])
def test_training_adds_uniform_noise_and_evaluation_none(mode, adapted):
    made, still = network(adapted)
    assert isinstance(made.tok_embeddings, NoisyEmbedding)
    # One network under a train step and under an evaluation, as in a run.
    evaluated, trained = Each(made), Each(made)
    np.testing.assert_array_equal(evaluated.set_train(False)(IDS)[0].asnumpy(), still)
    trained.set_train()
    first, second = (trained(IDS)[0].asnumpy() - still for _ in range(2))
    np.testing.assert_array_equal(evaluated.set_train(False)(IDS)[0].asnumpy(), still)
    assert np.abs(first - second).max() > BOUND  # new at each call
    for noise in (first, second):
        assert 0.99 * BOUND < np.abs(noise).max() < BOUND + 1e-5
        # Mean 0, standard deviation bound / sqrt(3), and no two tokens or channels alike.
        assert abs(noise.mean()) < 5 * BOUND / np.sqrt(3 * noise.size)
        np.testing.assert_allclose(noise.std(), BOUND / np.sqrt(3), rtol=0.05)
        assert len(np.unique(noise.round(6))) > 0.9 * noise.size


def test_the_seed_fixes_the_noise(pynative_mode):
    def noises(seed):
        made, still = network(seed=seed)
        made.set_train()
        return [made(IDS).asnumpy() - still for _ in range(2)]

    first, again, other = noises(3), noises(3), noises(4)
    np.testing.assert_allclose(first, again, atol=1e-6)
    assert np.abs(first[0] - other[0]).max() > BOUND


def test_gradients_pass_the_noise(mode):
    made, _ = network()
    made.set_train()
    table = made.tok_embeddings.embedding.embedding_table
    (gradient,) = ms.grad(made, None, [table])(IDS)
    counts = np.bincount(IDS.asnumpy().ravel(), minlength=VOCABULARY)
    np.testing.assert_array_equal(gradient.asnumpy(), np.tile(counts[:, None], DIM))


def test_one_embedding_is_expected():
    for cell, found in ((nn.Dense(2, 3), "0: none"), (nn.CellList([Network(), Network()]), "2: 0.tok_embeddings, 1.")):
        with pytest.raises(UnsupportedCellError, match=f"neftune_alpha adds noise .* has {found}"):
            add_embedding_noise(cell, 5)


@pytest.mark.parametrize("alpha", [0, -1, True, "5", float("inf")])
def test_a_wrong_alpha(alpha):
    with pytest.raises(ConfigError, match="^neftune_alpha is .*: it must be a number above 0."):
        PetLoraConfig(target_modules=["wq"], neftune_alpha=alpha)


def test_a_llama_gets_it_from_pet_config(make_llama):
    from mindformers.pet import get_pet_model

    from mindlora.training.launch import hooks  # noqa: F401

    model = get_pet_model(make_llama(), {"pet_type": "lora", "target_modules": ["wq"], "neftune_alpha": 5})
    cells = [cell for _, cell in model.cells_and_names() if isinstance(cell, NoisyEmbedding)]
    assert len(cells) == 1 and cells[0].alpha == 5
    assert "model.tok_embeddings.embedding_weight" in [name.split("network.")[-1] for name in model.parameters_dict()]
    assert isinstance(cells[0].embedding.embedding_weight, Parameter)
