"""hold_base: networks whose linear cells hold a checkpoint's own bits; adapters on them, and refusals by name."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.nn.utils import no_init_parameters

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import CheckpointError, ConfigError, LoraError
from mindlora.files.base.convert import in_mindformers_names
from mindlora.files.base.held import held_tensors
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.network.base_fingerprint import base_fingerprint
from mindlora.network.load_base import hold_base, load_base
from mindlora.network.quantized.nf4 import parameter_count
from mindlora.network.quantized.quantized_dense import IntegerDense
from mindlora.network.tree import lora_cells
from tests.conftest import in_mode
from tests.support import held_bases
from tests.support.held_bases import node, save_bases
from tests.support.networks import randomize
from tests.support.quantized_checkpoints import save_quantized


@pytest.fixture
def make(make_llama):
    """Returns a Llama without values, of the sizes of the held bases."""

    def build(**keys):
        config = {key: value for key, value in node("llama")["model_config"].items() if key != "type"}
        with no_init_parameters():
            return make_llama(**{**config, "seq_length": 16, **keys})

    return build


def adapted(network, path, holds, targets="all-linear"):
    """Returns a network with the base in ``path`` and random adapters."""
    form = {"quantize_base": "as_stored"} if holds else {}
    if holds:
        hold_base(network, path)
    config = LoraConfig(lora_rank=4, target_modules=targets, **form)
    apply_lora(network, config)
    freeze_base(network, config)
    load_base(network, path)
    network.init_parameters_data()
    for index, (_, cell) in enumerate(sorted(lora_cells(network))):
        randomize(cell.lora_parameters(), seed=index)
    return network.set_train()


def loss_and_gradients(network):
    """Returns the loss of a batch, and name -> gradient of each parameter that trains."""
    ids = Tensor(np.random.default_rng(0).integers(3, 300, (2, 17)).astype(np.int32))
    parameters = network.trainable_params()
    loss, grads = ms.value_and_grad(network, None, parameters)(ids)
    return float(loss.asnumpy().sum()), {p.name: grad.asnumpy() for p, grad in zip(parameters, grads)}


@pytest.mark.parametrize("form, keys", [("gptq", {}), ("awq", {"qkv_concat": True}), ("w8a8-zeros", {})])
def test_the_loss_and_all_gradients_are_those_of_the_decoded_base(make, graph_mode, form, keys, tmp_path):
    held, decoded, _ = save_bases(tmp_path, "llama", form)
    network = adapted(make(**keys), held, True)
    cells = {path for path, cell in lora_cells(network) if cell.quantization}
    assert len(cells) == (8 if keys else 14) and all(cell.quantization for _, cell in lora_cells(network))
    loss, gradients = loss_and_gradients(network)
    with in_mode(ms.PYNATIVE_MODE):
        expected_loss, expected = loss_and_gradients(adapted(make(**keys), decoded, False))
    assert loss == pytest.approx(expected_loss, rel=1e-6) and gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(
            gradients[name], gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max(), err_msg=name
        )


def test_cells_without_an_adapter_hold_their_integers_too(make, graph_mode, tmp_path):
    from mindlora.training.model.held_weights import hold_weights

    held, decoded, _ = save_bases(tmp_path, "llama", "gptq")
    network = adapted(make(), held, True, ["wq"])
    # Scales in float16 are not weights that a cell would have to be taught to read.
    hold_weights(network, "float32")
    assert sum(isinstance(cell, IntegerDense) for _, cell in network.cells_and_names()) == 12
    loss = loss_and_gradients(network)[0]
    with in_mode(ms.PYNATIVE_MODE):
        plain = adapted(make(), decoded, False, ["wq"])
        assert loss == pytest.approx(loss_and_gradients(plain)[0], rel=1e-6)


def test_a_fingerprint_names_the_form_and_parameters_are_counted_as_numbers(make, tmp_path):
    held, decoded, _ = save_bases(tmp_path, "llama", "gptq")
    network, plain = adapted(make(), held, True), adapted(make(), decoded, False)
    assert base_fingerprint(network)["quantization"] == "int4"
    assert base_fingerprint(network)["shapes"] == base_fingerprint(plain)["shapes"]
    assert parameter_count(network) == parameter_count(plain)


@pytest.mark.parametrize(
    "form, message",
    [
        ("gptq-order", "its groups are not in the order of its columns (desc_act)"),
        ("gptq-2", "it is in GPTQ in 2 bits, but only integers of 4 or 8 bits can be held"),
        ("gptq-16", "its groups have 16 columns, but only a multiple of 32 can be held"),
        ("decoded", "holds no weights in a quantized form"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name_and_says_what_to_choose(make, form, message, tmp_path):
    held, decoded, _ = save_bases(tmp_path, "llama", "gptq" if form == "decoded" else form)
    network = make()
    with pytest.raises(CheckpointError) as error:
        hold_base(network, decoded if form == "decoded" else held)
    assert message in str(error.value) and "eave" in str(error.value)
    assert not any(isinstance(cell, IntegerDense) for _, cell in network.cells_and_names())


def test_a_row_that_is_not_whole_blocks_is_refused(make, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.held_bases.SHAPES", {"mlp.up_proj": (128, 96)})
    held, *_ = save_bases(tmp_path, "llama", "gptq")
    with pytest.raises(CheckpointError, match="a row has 96 numbers, but only a multiple of 64 can be held"):
        hold_base(make(), held)


@pytest.mark.parametrize("other", ["w8a8", None, "packed"])
def test_parts_of_a_joined_cell_in_different_forms_are_refused(make, other, tmp_path):
    held, *_ = save_bases(tmp_path, "llama", "packed-groups", other={"self_attn.k_proj": other})
    with pytest.raises(CheckpointError, match="the weights of a joined cell must be in one form"):
        hold_base(make(qkv_concat=True), held)
    network = make()
    hold_base(network, held)
    load_base(network, held)


def test_zeros_that_are_no_whole_numbers_are_refused(make, tmp_path, monkeypatch):
    def with_half(path, shape, rng):
        tensors, weight = held_bases.modelslim(path, shape, rng)
        tensors[f"{path}.weight_offset"] += np.float32(0.5)
        return tensors, weight

    monkeypatch.setitem(held_bases.FORMS, "modelslim", (with_half, {}, None, "int8"))
    held, *_ = save_bases(tmp_path, "llama", "modelslim")
    network = make()
    hold_base(network, held)
    with pytest.raises(CheckpointError, match=r"q_proj.weight has zeros from -2.5 to 3.5, but only whole ones"):
        load_base(network, held)


def test_on_an_npu_nothing_is_held(make, tmp_path, monkeypatch):
    held, *_ = save_bases(tmp_path, "llama", "gptq")
    real = ms.get_context
    network = make()
    monkeypatch.setattr(ms, "get_context", lambda key: "Ascend" if key == "device_target" else real(key))
    with pytest.raises(
        ConfigError, match="as_stored, but the device is Ascend, for which no operator multiplies by int"
    ):
        hold_base(network, held)


def test_adapters_are_put_on_a_base_that_is_held(make):
    config = LoraConfig(lora_rank=4, target_modules="all-linear", quantize_base="as_stored")
    with pytest.raises(LoraError, match="no cell of the network holds integers. Call hold_base"):
        apply_lora(make(), config)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"quantize_exclude": "w2"}, "the checkpoint says which weights are quantized"),
        ({"lora_init": "loftq"}, "makes up for the error of quantizing the base to NF4"),
        ({"lora_init": "olora"}, "quantize_base is 'as_stored' and lora_init is 'olora'"),
    ],
)
def test_what_does_not_go_with_a_held_base(fields, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(target_modules="all-linear", quantize_base="as_stored", **fields)


def test_routed_experts_in_integers_are_refused(tmp_path):
    stored, _ = held_bases.tensors_of("qwen3", "gptq", other=dict.fromkeys(held_bases.SHAPES))
    make, options, settings, _ = held_bases.FORMS["gptq"]
    rng = np.random.default_rng(0)
    for layer in range(held_bases.LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        stored[f"{mlp}.gate.weight"] = rng.normal(0, 0.2, (2, held_bases.HIDDEN)).astype("f4")
        for name in ("gate_proj", "up_proj", "down_proj"):
            del stored[f"{mlp}.{name}.weight"]
            for expert in range(2):
                made, _ = make(f"{mlp}.experts.{expert}.{name}", held_bases.SHAPES[f"mlp.{name}"], rng, **options)
                stored.update(made)
    config = {**held_bases.CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config.update(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=held_bases.FFN)
    path = save_quantized(str(tmp_path / "experts"), "gptq", stored, settings=settings, **config)
    refused = pytest.raises(CheckpointError, match="holds routed experts in a quantized form, but quantize_base: as_st")
    with BaseCheckpoint(path, decode_to=np.dtype(np.float32)) as base, refused:
        held_tensors(base, lambda of: {tensor.name: tensor for tensor in in_mindformers_names(of)[0]})
