"""Which cells of Qwen3-MoE and DeepSeek-V3 get adapters, and that DeepSeek-V3 trains, is saved and loaded with them."""

import contextlib
import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from safetensors.numpy import load_file

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.network.tree import lora_cells
from tests.support.mcore_networks import Loss, tiny_deepseek_v3, tiny_qwen3_moe, tokens, train
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.networks import normal
from tests.support.what_runs import shows

pytestmark = pytest.mark.usefixtures("module_in_graph_mode")

WEIGHTS = "adapter_model.safetensors"
LATENTS = ("linear_qkv", "linear_qb", "linear_kvb", "linear_proj")


def replaced(network):
    """Returns the ends, below the layers, of the cells on which all-linear puts adapters."""
    paths = apply_lora(network, LoraConfig(target_modules="all-linear", lora_rank=2, lora_alpha=4)).replaced
    return {path.removeprefix("model.decoder.layers.") for path in paths}


def test_all_linear_takes_what_is_no_expert_in_a_mixture_of_experts_and_leaves_the_router_alone():
    assert replaced(tiny_qwen3_moe()) == {"0.self_attention.linear_qkv", "0.self_attention.linear_proj"}
    shared = {"0.mlp.shared_experts.linear_fc1", "0.mlp.shared_experts.linear_fc2"}
    assert replaced(tiny_deepseek_v3()) == shared | {f"0.self_attention.{cell}" for cell in LATENTS}


class Gradients(nn.Cell):
    """The gradients of a network's loss with respect to its parameters that train."""

    def __init__(self, loss):
        super().__init__(auto_prefix=False)
        self.loss, self.weights = loss, ms.ParameterTuple(loss.trainable_params())
        self.gradients = ops.GradOperation(get_by_list=True)

    def construct(self, input_ids, labels):
        return self.gradients(self.loss, self.weights)(input_ids, labels)


BATCH = (tokens(), np.roll(tokens(), -1, 1))


@pytest.fixture(scope="module")
def adapted():
    """The loss of a DeepSeek-V3 with adapters and its router as a saved module, and what computes its gradients."""
    network = tiny_deepseek_v3(moe_router_bias_update_rate=0.25)
    targets = {"target_modules": "all-linear", "modules_to_save": ["router"]}
    apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=4, **targets))
    freeze_base(network)
    parts = [parameter for _, cell in lora_cells(network) for parameter in cell.lora_parameters()]
    for number, parameter in enumerate(parts):
        parameter.set_data(Tensor(0.2 * normal(*parameter.shape, seed=number)))
    loss = Loss(network).set_train()
    return loss, Gradients(loss)


# What makes a whole model, and the mode that computes its gradients; None is the DeepSeek-V3 with adapters.
MODELS = [
    pytest.param(tiny_deepseek_v3, 0, id="deepseek_v3", marks=shows("whole", "deepseek_v3")),
    pytest.param(tiny_qwen3_moe, 1, id="qwen3_moe"),
    pytest.param(tiny_qwen3_moe, 0, id="qwen3_moe, graph", marks=[shows("whole", "qwen3_moe"), pytest.mark.long]),
    pytest.param(None, 1, id="adapters"),
]


@pytest.mark.parametrize("make, mode_of_gradients", MODELS)
def test_the_gradients_are_the_slopes_of_the_loss_at_each_call(make, mode_of_gradients, request):
    """Whole models cover a Qwen3, which has their attention and dense layers. PyNative computes the slopes."""
    if make:
        loss = Loss(make()).set_train()
        gradients = Gradients(loss)
    else:
        loss, gradients = request.getfixturevalue("adapted")
    network, batch = loss.network, tuple(map(Tensor, BATCH))
    with mcore_in_pynative() if mode_of_gradients else contextlib.nullcontext():
        first, *later = ([gradient.asnumpy() for gradient in gradients(*batch)] for _ in range(3))
    for again in later:
        assert all(np.array_equal(*pair) for pair in zip(first, again))
    for number, (parameter, gradient) in enumerate(zip(network.trainable_params(), first)):
        before, direction, sides = parameter.asnumpy().copy(), normal(*parameter.shape, seed=100 + number), []
        for step in (2e-4, -2e-4):
            parameter.set_data(Tensor(before + np.float32(step) * direction))
            with mcore_in_pynative():
                sides.append(float(loss(*batch).asnumpy().sum()))
        parameter.set_data(Tensor(before))
        slope = (sides[0] - sides[1]) / 4e-4
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=2e-2, abs=8e-3), parameter.name


def test_the_bias_that_a_callback_moves_is_saved_with_the_adapter(adapted, tmp_path):
    """After two micro-batches: 0.25 down for experts that got more than their share of the tokens, else up."""
    from mindformers.core.callback.callback import TopkBiasBalanceCallback

    loss = adapted[0]
    router = loss.network.model.decoder.layers[0].mlp.router
    router.expert_load.set_data(Tensor(np.zeros(4, np.float32)))
    before = router.expert_bias.asnumpy().copy()
    with mcore_in_pynative():
        for _ in range(2):
            loss(*map(Tensor, BATCH))
    load = router.expert_load.asnumpy().copy()
    assert load.sum() == pytest.approx(2) and load.min() < 0.45 and load.max() > 0.55
    run = types.SimpleNamespace(cur_step_num=1, train_network=loss)
    context = types.SimpleNamespace(original_args=lambda: run)
    TopkBiasBalanceCallback(gradient_accumulation_steps=2).on_train_step_end(context)
    bias = router.expert_bias.asnumpy()
    np.testing.assert_allclose(bias - before, 0.25 * np.sign(0.5 - load), atol=1e-6)
    save_lora(loss.network, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / WEIGHTS)
    np.testing.assert_array_equal(saved["base_model.model.model.layers.0.mlp.gate.e_score_correction_bias"], bias)


@pytest.fixture(scope="module")
def deepseek():
    """A DeepSeek-V3 of a dense layer that has trained with adapters, and its losses."""
    network = tiny_deepseek_v3(first_k_dense_replace=1)
    dense = {"0.mlp.linear_fc1", "0.mlp.linear_fc2"}
    assert replaced(network) == dense | {f"0.self_attention.{cell}" for cell in LATENTS}
    freeze_base(network)
    with mcore_in_pynative():
        return network, train(network, 10, 2e-2)


def test_deepseek_v3_trains_with_latent_attention(deepseek):
    network, losses = deepseek
    assert losses[-5:].mean() < losses[:5].mean() - 0.1
    for path, cell in lora_cells(network):
        assert np.abs(cell.pair()[1]).max() > 0, path


def test_deepseek_v3s_adapter_is_saved_under_hugging_faces_names_and_comes_back(deepseek, tmp_path):
    save_lora(deepseek[0], tmp_path / "adapter")
    prefix = "base_model.model.model.layers."
    names = {name.removeprefix(prefix).rpartition(".lora_")[0] for name in load_file(tmp_path / "adapter" / WEIGHTS)}
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    forward = ("gate_proj", "up_proj", "down_proj")
    assert names == {f"0.self_attn.{cell}" for cell in attention} | {f"0.mlp.{cell}" for cell in forward}
    other = tiny_deepseek_v3(first_k_dense_replace=1)
    load_lora(other, tmp_path / "adapter")
    pairs = {path: cell.pair() for path, cell in lora_cells(deepseek[0])}
    for path, cell in lora_cells(other):
        for loaded, mine in zip(cell.pair(), pairs.pop(path)):
            assert np.array_equal(loaded, mine), path
    assert not pairs
