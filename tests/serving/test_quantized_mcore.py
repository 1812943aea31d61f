"""NF4 bases of mcore models, served: weights are what the file decodes to, tokens those of these in float."""

import dataclasses
import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, save_lora
from mindlora.core.errors import CheckpointError, ConfigError
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics.nf4 import Nf4Array, dequantize
from mindlora.files.base.convert import convert_base
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.network.load_base import load_base
from mindlora.network.quantized.nf4 import NF4Dense, nf4_array
from mindlora.network.tree import lora_cells
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import check_groups, make_engine, quantize_as
from mindlora.serving.network import build_network, stacked_experts
from mindlora.serving.request import Sampling
from mindlora.serving.settings import EngineSettings
from tests.conftest import in_mode
from tests.support import mcore_networks, mcore_serving, tiny_serving
from tests.support.llama_checkpoints import load, save_base
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.mcore_serving import COMMON, ROUTED, checkpoint, node
from tests.support.networks import randomize
from tests.support.what_runs import shows

SETTINGS = EngineSettings(
    seq_length=96, block_size=8, max_running=8, max_tokens_per_step=300, slots=3, max_rank=8, product_dtype="float32"
)
# In one batch they are for the graph of many tokens, and those of an answer for that of few.
PROMPTS = (tuple(range(3, 9)), tuple(range(40, 110)))


def bases(folder, kind, to="mcore", **options):
    """Writes a base in NF4, and what it decodes to in float under the same names; returns both paths."""
    source = save_base(folder / "hf", checkpoint(kind), **COMMON)
    plain, packed, decoded = (str(folder / f"{name}.safetensors") for name in ("plain", "nf4", "decoded"))
    convert_base(source, plain, None, to)
    quantize_checkpoint(plain, packed, **options)
    write_decoded(packed, plain, decoded)
    return packed, decoded


def write_decoded(packed, plain, path):
    """Writes what a quantized base decodes to; ``plain`` is the file of which it was made."""
    found, arrays = load(packed), load(plain)
    for name, array in arrays.items():
        if f"{name}_absmax" in found:
            fields = [found[f"{name}{field}"] for field in ("", "_absmax", "_scales", "_offsets")]
            arrays[name] = dequantize(Nf4Array(*fields, array.shape))
    write_arrays(path, arrays, {"format": "ms"})


def decoded_weights(network):
    """Returns name -> W of every quantized weight, as a network in float has it."""
    weights = {}
    for path, cell in network.cells_and_names():
        if isinstance(cell, NF4Dense):
            weights[f"{path}.weight"] = dequantize(nf4_array(cell))
    for path, cell in stacked_experts(network).items():
        for name, (experts, rows, columns) in cell.shapes.items():
            fields = [getattr(cell, f"{name}{field}").asnumpy() for field in ("", "_absmax", "_scales", "_offsets")]
            matrix = dequantize(Nf4Array(*fields, (experts * columns, rows)))
            weights[f"{path}.{name}"] = matrix.reshape(experts, columns, rows).swapaxes(1, 2)
    return weights


@pytest.mark.parametrize(
    "kind, to",
    [("qwen3", "mcore"), ("qwen3-moe", "mcore"), ("qwen2", "mcore"), ("qwen2", "mindformers"), ("glm4", "mcore")],
)
def test_every_weight_is_what_the_file_decodes_to(tmp_path, kind, to):
    packed, decoded = bases(tmp_path, kind, to)
    network, plain = (build_network(node(kind), SETTINGS) for _ in range(2))
    quantize_as(network, packed)
    load_base(network, packed)
    load_base(plain, decoded)
    weights = decoded_weights(network)
    expected = {parameter.name: parameter.asnumpy() for parameter in plain.get_parameters()}
    linear = {name for name in expected if name.endswith("_proj.weight") or ".experts." in name}
    assert weights.keys() == linear
    for name, array in weights.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    for parameter in network.get_parameters():
        if not parameter.name.startswith(tuple(linear)):
            np.testing.assert_array_equal(parameter.asnumpy(), expected[parameter.name], err_msg=parameter.name)


def test_what_was_left_out_stays_in_float(tmp_path):
    packed, decoded = bases(tmp_path, "qwen3-moe", exclude=["linear_qkv", "experts"])
    network, plain = (build_network(node("qwen3-moe"), SETTINGS) for _ in range(2))
    quantize_as(network, packed)
    load_base(network, packed)
    load_base(plain, decoded)
    quantized = {path for path, cell in network.cells_and_names() if isinstance(cell, NF4Dense)}
    assert quantized == {f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)}
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"):
        np.testing.assert_array_equal(
            network.parameters_dict()[name].asnumpy(), plain.parameters_dict()[name].asnumpy()
        )


def test_experts_of_which_one_weight_alone_is_quantized_are_refused(tmp_path):
    packed, _ = bases(tmp_path, "qwen3-moe", exclude=["mlp.experts.down_proj"])
    with pytest.raises(ConfigError, match="gate_up_proj in NF4, but the other weight of these experts in float"):
        quantize_as(build_network(node("qwen3-moe"), SETTINGS), packed)


def test_parts_of_a_joined_weight_are_refused_for_an_npu():
    whole = {"o_proj.weight": (80, 96), "o_proj.weight_absmax": (80, 4), "o_proj.weight_scales": (2,)}
    check_groups(whole, "base")
    parts = {"k_proj.weight": (80, 96), "k_proj.weight_absmax": (80, 4), "k_proj.weight_scales": (80,)}
    with pytest.raises(ConfigError, match="an NPU does not decode their parts: k_proj.weight. Serve"):
        check_groups({**whole, **parts}, "base")


def test_a_base_of_another_model_is_refused(tmp_path):
    packed, _ = bases(tmp_path, "qwen3")
    network = build_network(node("qwen3", intermediate_size=96), SETTINGS)
    quantize_as(network, packed)
    with pytest.raises(CheckpointError, match="gate_proj.weight is .80, 96. of uint8, but the network needs .96, 96."):
        load_base(network, packed)


def write_adapters(folder, kind):
    """Writes two adapters; returns name -> path."""
    mcore_serving.write_adapters(folder, kind)
    return {name: str(folder / path) for name, path in mcore_serving.ADAPTERS.items()}


def answers(kind, path, adapters, quantize, settings=SETTINGS):
    """Returns (adapter, prompt) -> (tokens, logprobs of the prompt's tokens and of these)."""
    engine = make_engine(
        node(kind), path, tiny_serving.tokenizer(), AdapterRegistry(None, adapters), settings, quantize
    )
    engine.start()
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    streams = {}
    for adapter in (None, *adapters):
        for prompt in PROMPTS:
            streams[adapter, prompt] = engine.submit(list(prompt), sampling, adapter)
    found = {}
    for key, stream in streams.items():
        pieces = list(stream)
        sampled = [*pieces[0].prompt_logprobs[1:], *(one for piece in pieces for one in piece.logprobs or ())]
        found[key] = stream.request.generated, [one.logprob for one in sampled]
    engine.stop()
    return found


@pytest.fixture(scope="module")
def in_float(tmp_path_factory, mindformers, library):
    """Returns a function: kind -> the path of its base in NF4, its adapters, and the answers of the base in float."""

    @functools.lru_cache(maxsize=None)
    def make(kind):
        folder = tmp_path_factory.mktemp(kind)
        packed, decoded = bases(folder, kind)
        adapters = write_adapters(folder, kind)
        with in_mode(0):
            return packed, adapters, answers(kind, decoded, adapters, False)

    return make


@pytest.mark.parametrize("kind", ["qwen3-moe", "glm4"])
@shows("served", "qwen3_moe")
def test_tokens_are_those_of_the_same_weights_in_float(in_float, kind):
    packed, adapters, expected = in_float(kind)
    with in_mode(0):
        found = answers(kind, packed, adapters, True)
    for key, (tokens, logprobs) in expected.items():
        assert found[key][0] == tokens, key
        np.testing.assert_allclose(found[key][1], logprobs, atol=1e-3, err_msg=str(key))
    assert len({tuple(tokens) for tokens, _ in found.values()}) == len(found), "adapters change answers"


def test_products_in_bfloat16_are_near_those_in_float(in_float):
    packed, adapters, expected = in_float("glm4")
    with in_mode(0):
        found = answers("glm4", packed, adapters, True, dataclasses.replace(SETTINGS, product_dtype="bfloat16"))
    for key, (_, logprobs) in expected.items():
        # For the prompt alone: answers may part where two tokens are nearly as likely.
        count = len(key[1]) - 1
        off = np.abs(np.subtract(found[key][1][:count], logprobs[:count])).max()
        assert 1e-4 < off < 0.1, key


def test_products_in_bfloat16_of_routed_experts_are_refused(mindformers, library, tmp_path):
    packed, _ = bases(tmp_path, "qwen3-moe")
    settings = dataclasses.replace(SETTINGS, product_dtype="bfloat16")
    with pytest.raises(ConfigError, match="^product_dtype is bfloat16 and the model has routed experts"):
        answers("qwen3-moe", packed, {}, True, settings)


TRAINED = {
    "qwen3-moe": (mcore_networks.tiny_qwen3_moe, ROUTED, {"target_parameters": ["mlp.experts"]}),
    "qwen3": (mcore_networks.tiny_qwen3, {}, {"use_dora": True}),
}


@pytest.mark.parametrize("kind", TRAINED)
def test_an_adapter_says_what_it_says_on_the_quantized_network_that_it_was_trained_on(
    mindformers, library, tmp_path, kind
):
    make, sizes, fields = TRAINED[kind]
    keys = {**COMMON, **sizes, "num_hidden_layers": 1, "max_position_embeddings": 96}
    plain, packed = str(tmp_path / "plain.safetensors"), str(tmp_path / "nf4.safetensors")
    tokens = list(PROMPTS[1][: mcore_networks.TINY["seq_length"]])
    with in_mode(0), mcore_networks.in_training():
        network = make(**keys).set_train(False)
        write_arrays(plain, mcore_networks.arrays(network), {"format": "ms"})
        config = {"target_modules": "all-linear", "lora_rank": 2, "lora_alpha": 1, **fields}
        apply_lora(network, LoraConfig(**config, quantize_base="nf4"))
        randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()])
        with mcore_in_pynative():
            logits = network(Tensor([tokens], ms.int32)).asnumpy().reshape(len(tokens), -1)
        save_lora(network, tmp_path / "adapter")
    quantize_checkpoint(plain, packed)
    with in_mode(0):
        registry = AdapterRegistry(None, {"adapter": str(tmp_path / "adapter")})
        model = node(kind, num_hidden_layers=1)
        engine = make_engine(model, packed, tiny_serving.tokenizer(), registry, SETTINGS, True)
        engine.start()
        sampling = Sampling(max_tokens=0, prompt_logprobs=1)
        scored = list(engine.submit(tokens, sampling, "adapter"))[0].prompt_logprobs[1:]
        engine.stop()
    expected = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    expected = (expected - logits.max(axis=1, keepdims=True))[range(len(tokens) - 1), tokens[1:]]
    # MindFormers computes attention in float16, whatever compute_dtype is.
    np.testing.assert_allclose([one.logprob for one in scored], expected, atol=3e-3 * np.abs(logits).max())
