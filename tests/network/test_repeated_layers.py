"""Which layers are compiled once: those that are alike in everything but the values of their parameters."""

import pytest

from mindlora.network.repeated_layers import are_alike, compile_layers_once
from mindlora.training.model.cpu_cells import use_cpu_cells
from tests.support.cpu_llama import ON_CPU


@pytest.fixture
def build(mindformers):
    """Returns a function that builds a Llama of three layers with an adapter, in graph mode."""
    import mindspore as ms
    from mindformers.models import LlamaConfig, LlamaForCausalLM

    from mindlora import LoraConfig, apply_lora

    def built(**keys):
        config = LlamaConfig(
            hidden_size=32, num_layers=3, num_heads=4, vocab_size=64, seq_length=16, pad_token_id=0, **ON_CPU
        )
        network = LlamaForCausalLM(config)
        apply_lora(network, LoraConfig(**{"lora_rank": 4, "target_modules": ".*wq|.*w2", **keys}))
        return network

    ms.set_context(mode=ms.GRAPH_MODE)
    yield built
    ms.set_context(mode=ms.PYNATIVE_MODE)


def names_of(network):
    """Returns the name under which each layer is compiled."""
    use_cpu_cells(network)
    compile_layers_once(network)
    return [layer.cell_init_args for layer in network.model.layers]


def test_layers_with_equal_adapters_are_compiled_once(build):
    assert len(set(names_of(build()))) == 1
    assert len(set(names_of(build(use_dora=True, lora_alpha=7)))) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"rank_pattern": {".*layers.1.*wq": 2}},
        {"alpha_pattern": {".*layers.1.*w2": 3}},
        {"layers_to_transform": [0, 2]},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_a_layer_with_another_adapter_is_compiled_by_itself(build, keys):
    first, second, third = names_of(build(**keys))
    assert first == third != second


def test_what_a_layer_computes_tells_it_apart(build):
    first, second, third = build().model.layers
    assert are_alike(first, second) and are_alike(second, third)
    second.attention_norm.eps = 0.5
    assert not are_alike(first, second)
    third.attention.wq.mindpet_delta_lora_a.requires_grad = False
    assert not are_alike(first, third)


def test_dropouts_draw_numbers_of_their_own(build):
    import mindspore as ms

    ms.set_seed(1)
    assert len(set(names_of(build(lora_dropout=0.1)))) == 3


def test_recomputed_layers_are_left_alone(build):
    network = build()
    for layer in network.model.layers:
        layer.recompute()
    assert len(set(names_of(network))) == 3
