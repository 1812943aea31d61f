"""LoRA on the stacked weights of routed experts, each against dense NumPy, and in MindFormers' FFNGroupedGEMM."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import ConfigError, UnsupportedCellError
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight
from mindlora.network.cells.routed_experts import RoutedExperts
from tests.support import moe_networks
from tests.support.mcore_networks import in_training, tokens
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.moe_cells import Grouped, LanguageModelLoss, WeightedOutput
from tests.support.moe_networks import EXPERTS, HIDDEN, INNER, changed_weight, dense_experts, routed
from tests.support.networks import as_array, assert_close, gradients, normal, randomize, snapshot

RANK, ALPHA = 2, 3
SCALE = ALPHA / RANK
# Where each expert's tokens end: the second one has none.
ENDS = (2, 2, 5, 6)


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu(mindformers):
    with in_training():
        yield


def adapted(leaf="weight1", **keys):
    """Returns one stacked weight with an adapter, whose A and B are random."""
    config = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, **keys)
    cell = LoRAExpertWeight.from_cell(ExpertWeight(experts_of(moe_networks.experts_alone()), leaf), config)
    randomize(cell.lora_parameters())
    return cell


def experts_of(network):
    return network.decoder.layers[0].mlp.experts


def values(cell):
    """Returns W [experts, in, out], A and B of a cell in float64."""
    weight, a, b = (as_array(parameter) for parameter in (cell.weight, *cell.lora_parameters()))
    return weight.reshape(len(a), a.shape[2], b.shape[1]), a, b


# One stacked weight -----------------------------------------------------------------------------------------------


def test_output_and_gradients_are_those_of_dense_experts(mode):
    cell, sizes = adapted("weight1"), (HIDDEN, 2 * INNER)
    x, weights = normal(ENDS[-1], sizes[0]), normal(ENDS[-1], sizes[1], seed=4)
    network = Grouped(cell, Tensor(ENDS, ms.int64))
    weight, a, b = values(cell)
    assert weight.shape == (EXPERTS, *sizes)
    expert_of = np.searchsorted(ENDS, np.arange(ENDS[-1]), side="right")
    changed = weight + SCALE * np.einsum("eri,eor->eio", a, b)
    assert_close(network(Tensor(x)), np.einsum("ti,tio->to", x, changed[expert_of]))
    found = gradients(network, x, weights)
    assert_close(found[0], np.einsum("to,tio->ti", weights, changed[expert_of]))
    by_a, by_b = np.zeros(a.shape), np.zeros(b.shape)
    for row, expert in enumerate(expert_of):
        by_a[expert] += SCALE * np.outer(weights[row] @ b[expert], x[row])
        by_b[expert] += SCALE * np.outer(weights[row], a[expert] @ x[row])
    assert_close(found[1], by_a)
    assert_close(found[2], by_b)
    assert not by_a[1].any() and not as_array(found[1])[1].any()


def test_a_is_he_uniform_for_the_inputs_of_one_expert_and_b_is_zero():
    config = LoraConfig(lora_rank=50, lora_alpha=1)
    cell = LoRAExpertWeight.from_cell(ExpertWeight(experts_of(moe_networks.experts_alone()), "weight1"), config)
    a, b = (as_array(parameter) for parameter in cell.lora_parameters())
    assert a.shape == (EXPERTS, 50, HIDDEN) and b.shape == (EXPERTS, 2 * INNER, 50)
    bound = 1 / np.sqrt(HIDDEN)
    assert 0.98 * bound < np.abs(a).max() <= bound and abs(a.std() - bound / np.sqrt(3)) < 0.02 * bound
    assert not b.any()


def test_the_base_keeps_its_weight_and_gets_it_back():
    holder = experts_of(moe_networks.experts_alone())
    plain = ExpertWeight(holder, "weight2")
    cell = LoRAExpertWeight.from_cell(plain, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA))
    assert cell.weight is holder.weight2 and cell.plain_cell() is plain


def test_gaussian_initialization_and_frozen_a():
    cell = LoRAExpertWeight.from_cell(
        ExpertWeight(experts_of(moe_networks.experts_alone()), "weight1"),
        LoraConfig(lora_rank=50, lora_alpha=1, lora_init="gaussian", freeze_lora_a=True),
    )
    assert abs(as_array(cell.mindpet_delta_lora_a).std() - 1 / 50) < 0.002
    assert cell.trained_parameters() == (cell.mindpet_delta_lora_b,)


# What is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "lora_dropout": {"lora_dropout": 0.1},
    "use_dora": {"use_dora": True},
    "use_vera": {"use_vera": True, "lora_alpha": RANK},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_experts_do_not_have_is_refused_by_name(field):
    network = moe_networks.experts_alone()
    before = snapshot(network)
    with pytest.raises(UnsupportedCellError, match=f"{field} is not supported on stacked experts: .* Leave"):
        apply_lora(network, LoraConfig(target_parameters=["mlp.experts"], lora_rank=RANK, **REFUSED[field]))
    assert snapshot(network) == before


def test_initializers_that_need_the_weight_are_refused():
    with pytest.raises(UnsupportedCellError, match="lora_init 'pissa' is not supported on stacked experts"):
        adapted(lora_init="pissa")


@pytest.mark.parametrize("field, value", [("rank_pattern", 4), ("alpha_pattern", 8)])
@pytest.mark.parametrize(
    "expression", ["experts.0.gate_proj", r"mlp\.experts\.\d+\.down_proj", "experts.3", r".*\.2\.up_proj"]
)
def test_patterns_for_single_experts_are_refused_by_name(field, value, expression):
    config = LoraConfig(target_parameters=["mlp.experts"], **{field: {expression: value}})
    with pytest.raises(ConfigError) as error:
        apply_lora(moe_networks.experts_alone(), config)
    assert str(error.value).startswith(f"{field} {expression!r} names single experts, but all experts of a layer have")


def test_patterns_for_the_weights_are_taken():
    network = moe_networks.experts_alone()
    patterns = {"mlp.experts.down_proj": 3, "experts.weight1": 5}
    apply_lora(network, LoraConfig(target_parameters=["mlp.experts"], rank_pattern=patterns))
    shapes = {p.name.split("experts.")[1]: p.shape for p in network.get_parameters() if p.name.endswith("lora_a")}
    assert shapes == {
        "weight1.mindpet_delta_lora_a": (EXPERTS, 5, HIDDEN),
        "weight2.mindpet_delta_lora_a": (EXPERTS, 3, INNER),
    }


def test_experts_that_move_or_compute_otherwise_are_refused():
    network = moe_networks.experts_alone()
    experts = experts_of(network)
    experts.config.enable_expert_relocation = True
    with pytest.raises(UnsupportedCellError, match="moves experts between devices \\(enable_expert_relocation\\)"):
        apply_lora(network, LoraConfig(target_parameters=["mlp.experts"]))
    experts.config.enable_expert_relocation = False

    class Other(type(experts)):
        def construct(self, tokens, probs, routing_map):
            return tokens

    experts.__class__ = Other
    with pytest.raises(UnsupportedCellError, match="Other has a forward of its own"):
        apply_lora(network, LoraConfig(target_parameters=["mlp.experts"]))


# In FFNGroupedGEMM's place ----------------------------------------------------------------------------------------


def test_experts_with_adapters_compute_and_differentiate_what_changed_weights_would(graph_mode):
    network = moe_networks.experts_alone()
    apply_lora(network, LoraConfig(target_parameters=["mlp.experts"], lora_rank=RANK, lora_alpha=ALPHA))
    freeze_base(network)
    randomize(network.trainable_params())
    (x, probs, chosen), weights = routed(), normal(1, 5, HIDDEN, seed=4)
    arrays = {p.name.split("experts.")[1]: as_array(p) for p in network.get_parameters()}

    def output(changed=None):
        found = {**arrays, **(changed or {})}
        halves = [
            [found[f"{leaf}{part}"] for part in ("", ".mindpet_delta_lora_a", ".mindpet_delta_lora_b")]
            for leaf in ("weight1", "weight2")
        ]
        return dense_experts(x, probs, chosen, *(changed_weight(*half, SCALE) for half in halves))

    parameters = network.trainable_params()
    loss, found = ms.value_and_grad(WeightedOutput(network), None, parameters)(
        *map(Tensor, (x, probs, chosen, weights))
    )
    expected = (output() * weights).sum()
    assert abs(as_array(loss) - expected) < 1e-5 * np.abs(output() * weights).sum()
    rng = np.random.default_rng(0)
    assert len(parameters) == 4
    for parameter, gradient in zip(parameters, found):
        name, gradient = parameter.name.split("experts.")[1], as_array(gradient)
        # Along a random direction, since a finite difference of every element would take long.
        direction = rng.normal(size=gradient.shape)
        sums = [(output({name: arrays[name] + step * direction}) * weights).sum() for step in (1e-5, -1e-5)]
        np.testing.assert_allclose((gradient * direction).sum(), (sums[0] - sums[1]) / 2e-5, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name, targets, trained",
    [
        ("qwen3_moe", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ("weight1", "weight2")),
        # It has shared experts besides the routed ones.
        ("deepseek_v3", ["experts.down_proj"], ("weight2",)),
    ],
)
def test_a_model_trains_its_experts_adapters_and_nothing_else(name, targets, trained):
    network = moe_networks.tiny_moe(name)
    apply_lora(network, LoraConfig(target_parameters=targets, lora_rank=RANK, lora_alpha=ALPHA))
    freeze_base(network)
    before = snapshot(network)
    network.set_train(True)
    step = nn.TrainOneStepCell(LanguageModelLoss(network), nn.Adam(network.trainable_params(), learning_rate=0.05))
    step.set_train()
    ids = Tensor(tokens())
    with mcore_in_pynative():
        losses = [float(as_array(step(ids, ids)).sum()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]
    changed = {name.split("mlp.")[1] for name, after in snapshot(network).items() if after != before[name]}
    # DeepSeek's router counts its tokens.
    changed.discard("router.expert_load")
    assert changed == {f"experts.{leaf}.mindpet_delta_lora_{half}" for leaf in trained for half in "ab"}


def test_adapters_are_divided_among_devices_as_their_experts_are(monkeypatch):
    from mindformers.parallel_core.training_graph import device_matrix
    from mindformers.parallel_core.training_graph.transformer.moe import ffn, token_dispatcher

    for name in ("_layout", "_layout_type", "_config"):
        monkeypatch.setattr(device_matrix.layout_moe, name, None, raising=False)
    monkeypatch.setattr(token_dispatcher, "get_ep_group_name", lambda *_: None)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4, global_rank=0)
    try:
        network = moe_networks.experts_alone(data_parallel_size=4, expert_model_parallel_size=2)
        assert isinstance(experts_of(network), ffn.FFNGroupedGEMM)
        apply_lora(network, LoraConfig(target_parameters=["experts.weight1"]))
        experts = experts_of(network)
        assert isinstance(experts, RoutedExperts)
        found = [len(layout["tensor_map"]) for layout in experts.morphed_forward.attrs["in_layout"]]
    finally:
        ms.reset_auto_parallel_context()
    # tokens, probs, routing_map; W, A and B of weight1; weight2, which stands in for the missing A and B.
    assert found == [3, 3, 3, 2, 3, 3, 2, 2, 2, 1]
