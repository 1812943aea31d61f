"""eva_adapter: A holds the directions that a cell reads, and ranks go where they explain the most."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora import LoraConfig, apply_lora, eva_adapter
from mindlora.core.errors import ConfigError, DataError, UnsupportedCellError
from tests.conftest import in_mode

WIDTH, TOKENS = 24, 60
# How many directions the inputs of each cell have.
DIRECTIONS = {"few": 2, "same": 2, "many": 9}


class Readers(nn.Cell):
    """Cells that read tables of tokens: ``few`` and ``same`` one, ``many`` another."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.tables = []
        for directions in (DIRECTIONS["few"], DIRECTIONS["many"]):
            axes = np.linalg.qr(rng.normal(size=(WIDTH, directions)))[0].T
            table = rng.normal(size=(TOKENS, directions)) * 0.8 ** np.arange(directions) @ axes
            self.tables.append(table.astype(np.float32))
        self.first, self.second = map(Tensor, self.tables)
        self.few, self.same, self.many = nn.Dense(WIDTH, 5), nn.Dense(WIDTH, 5), nn.Dense(WIDTH, 5)
        self.conv = nn.Conv2d(1, 1, 1)

    def construct(self, tokens):
        first = ops.gather(self.first, tokens, 0)
        return self.few(first) + self.same(first) + self.many(ops.gather(self.second, tokens, 0))


def batches(count=12, rows=20, seed=1, counted=0.7):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = rng.integers(0, TOKENS, (rows, 10)).astype(np.int32)
        made.append((tokens, rng.random((rows, 10)) < counted))
    return made


def config(**keys):
    return LoraConfig(**{"lora_rank": 4, "lora_alpha": 8, "target_modules": ["few", "same", "many"], **keys})


def test_ranks_go_to_the_cells_whose_inputs_have_more_directions():
    found = eva_adapter(Readers(), batches(), config())
    assert sum(found.ranks.values()) == 12 and not found.unsettled
    # Two directions explain all of what `few` and `same` read; rho = 2 lets `many` have 8.
    assert found.ranks == {"few": 2, "same": 2, "many": 8}
    assert found.batches < 12


@pytest.mark.parametrize("mode", [0, 1])
def test_a_holds_the_principal_components_of_what_counted(mode):
    network, given = Readers(), batches(3)
    with in_mode(mode):
        adapter = eva_adapter(network, given, config(), rho=1.0, tau=0.999999).adapter
    tokens = np.concatenate([ids[counted] for ids, counted in given])
    for path, table in (("few", network.tables[0]), ("many", network.tables[1])):
        rows = table[tokens].astype(np.float64)
        directions = min(3, DIRECTIONS[path])
        vectors = np.linalg.svd(rows - rows.mean(axis=0))[2][:directions]
        a = adapter.tensors[path, "A"].astype(np.float64)
        np.testing.assert_allclose(a @ a.T, np.eye(len(a)), atol=1e-5)
        # Where there are more directions than components, each batch loses a little of the others.
        assert np.linalg.norm(vectors @ a.T, axis=1).min() > (0.9999 if path == "few" else 0.99)
        assert not adapter.tensors[path, "B"].any() and adapter.scale(path) == 2


@pytest.mark.parametrize("rslora", [False, True])
def test_the_keys_give_each_cell_its_rank_and_the_scale_of_before(rslora):
    asked = config(use_rslora=rslora)
    found = eva_adapter(Readers(), batches(), asked)
    network = Readers()
    apply_lora(network, config(use_rslora=rslora, **found.keys))
    assert {name: getattr(network, name).lora_rank for name in found.ranks} == found.ranks
    scales = [getattr(network, name).scale for name in found.ranks]
    np.testing.assert_allclose(scales, asked.lora_alpha / (2 if rslora else 4))
    np.testing.assert_allclose([found.adapter.scale(path) for path in found.ranks], scales)


@pytest.mark.parametrize("excluded, expected", [(None, ["few"]), (["same"], ["same", "few"]), ("same", "same|few")])
def test_cells_whose_directions_explain_least_get_no_adapter(excluded, expected):
    class Constant(Readers):
        def construct(self, tokens):
            read = ops.gather(self.second, tokens, 0)
            return self.many(read) + self.few(read * 0)

    targets = ["few", "many"] if excluded is None else ["few", "same", "many"]
    asked = config(target_modules=targets, lora_rank=2, exclude_modules=excluded)
    found = eva_adapter(Constant(), batches(), asked)
    assert found.ranks == {"few": 0, "many": 4} and set(found.adapter.paths) == {"many"}
    assert found.keys["exclude_modules"] == expected


def test_too_few_tokens_are_an_error_that_names_the_cells():
    with pytest.raises(DataError, match="too few tokens count for the components of few"):
        eva_adapter(Readers(), batches(1, rows=1, counted=0.1), config())
    with pytest.raises(DataError, match="0 batches were read"):
        eva_adapter(Readers(), [], config())


@pytest.mark.parametrize(
    "keys, arguments, error, message",
    [
        ({"use_dora": True}, {}, ConfigError, "plain LoRA on a float base, but pet_config has DoRA"),
        ({"quantize_base": "nf4"}, {}, ConfigError, "pet_config has quantize_base nf4"),
        ({"lora_init": "pissa"}, {}, ConfigError, "lora_init is 'pissa'"),
        ({"target_modules": ["few", "conv"]}, {}, UnsupportedCellError, "target_modules selects conv"),
        ({}, {"rho": 0.5}, ConfigError, "rho is 0.5"),
        ({}, {"tau": 1.0}, ConfigError, "tau is 1.0"),
    ],
)
def test_what_it_cannot_do_is_an_error(keys, arguments, error, message):
    with pytest.raises(error, match=message):
        eva_adapter(Readers(), batches(), config(**keys), **arguments)
