"""MindFormers' network with its cache and pools gives the logits of the merged model without a cache."""

import inspect
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.network.serving.multi_lora_dense import JoinsLinears
from mindlora.serving.network import ServedStep, build_network
from mindlora.serving.runner import StepInputs
from mindlora.serving.settings import EngineSettings
from tests.conftest import ROOT, in_mode
from tests.support.compilations import compilations
from tests.support.served_steps import Steps
from tests.support.tiny_serving import (
    SHAPES,
    Plain,
    adapter,
    base_weights,
    merged,
    save_adapter,
    save_base,
    vocabulary,
    with_head,
)

# Mixed ranks; scales of each kind; cells and layers on which there is nothing.
ADAPTERS = [
    adapter(1, {leaf: 1 + rank for rank, leaf in enumerate(SHAPES)}, {"attention.wv": 3.0}),
    with_head(adapter(2, {"attention.wq": 8, "feed_forward.w1": 3, "feed_forward.w2": 2}, size=0.2, use_rslora=True)),
    adapter(3, {"attention.wo": 16, "attention.wk": 5}, layers=[1]),
]
# For logits of about 8: in float32, in float16, and with products in bfloat16.
TOLERANCE, HALF, ROUNDED = 1e-4, 5e-2, 0.15
# Linear cells and the embedding are held in bfloat16.
IN_BFLOAT16 = {"param_init_type": "bfloat16"}


@pytest.fixture(scope="module")
def plain(mindformers):
    """The oracle."""
    with in_mode(0):
        yield Plain()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The adapters as folders."""
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(folder, str(number), made) for number, made in enumerate(ADAPTERS)]


def in_bfloat16(weights):
    """Returns the weights with those of linear cells and the embedding as bfloat16 holds them."""
    held = (*(f"{leaf}.weight" for leaf in SHAPES), "lm_head.weight", "embedding_weight")
    return {
        name: to_float32(from_float32(array, BFLOAT16)) if name.endswith(held) else array
        for name, array in weights.items()
    }


def in_nf4(weights):
    """Returns the weights that are left of those of linear cells in NF4."""
    linear = tuple(f"{leaf}.weight" for leaf in SHAPES)
    return {
        name: dequantize(quantize(array)).astype(np.float32) if name.endswith(linear) else array
        for name, array in weights.items()
    }


@pytest.fixture(scope="module", params=["apart", "joined", "nf4", "float16", "rounded", "rounded nf4"])
def served(request, library, plain, paths, tmp_path_factory):
    """A network with ADAPTERS in slots 2, 0 and 1, the base's weights, and the graphs that it compiles."""
    from mindlora.files.base.quantize import quantize_checkpoint

    weights, folder = base_weights(), tmp_path_factory.mktemp("base")
    if request.param == "rounded":
        weights = in_bfloat16(weights)
    checkpoint = save_base(folder / "base.ckpt", weights)
    if "nf4" in request.param:
        quantize_checkpoint(checkpoint, str(folder / "nf4.safetensors"))
        checkpoint, weights = str(folder / "nf4.safetensors"), in_nf4(weights)
    keys = {
        "joined": {"qkv_concat": True},
        "float16": {"compute_dtype": "float16"},
        "rounded": {"product_dtype": "bfloat16", **IN_BFLOAT16},
        "rounded nf4": {"product_dtype": "bfloat16"},
    }
    steps = Steps(checkpoint, quantize="nf4" in request.param, **keys.get(request.param, {}))
    with pytest.MonkeyPatch.context() as patch:
        compiled = compilations(patch)
        # So that chunks of these short prompts are many tokens, and decode steps are few.
        patch.setattr("mindlora.serving.network.FEW_TOKENS", 6)
        for slot, path in zip((2, 0, 1), paths):
            steps.put(slot, path)
        tolerance = {"float16": HALF, "rounded": ROUNDED, "rounded nf4": ROUNDED}.get(request.param, TOLERANCE)
        yield types.SimpleNamespace(
            steps=steps, weights=weights, paths=paths, compiled=compiled, plain=plain, tolerance=tolerance
        )


@pytest.mark.parametrize("keys", [{}, {"product_dtype": "bfloat16", **IN_BFLOAT16}], ids=["float32", "rounded"])
def test_every_parameter_has_its_values_before_the_first_step(library, mindformers, tmp_path, keys):
    # MindSpore 2.7 reads memory that is not there where a parameter has none.
    steps = Steps(save_base(tmp_path / "base.ckpt", in_bfloat16(base_weights())), **keys)
    assert [parameter.name for parameter in steps.runner.network.get_parameters() if parameter.has_init] == []


# Four steps, the first of which compiles their graph.
FOUR_STEPS = """
import sys
import mindspore as ms
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
from tests.support.served_steps import Steps
steps = Steps(sys.argv[1])
line = steps.begin([3, 4, 5, 6])
for _ in range(4):
    steps.step((line, 1))
"""


def test_parameters_are_prepared_once_and_not_before_each_step(library, tmp_path):
    checkpoint = save_base(tmp_path / "base.ckpt", base_weights())
    # MindSpore's log says when it prepares them: with an input that nothing reads, it would each time.
    environment = {**os.environ, "GLOG_v": "1", "RUN_MODE": "predict", "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", FOUR_STEPS, str(checkpoint)]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (run.stdout + run.stderr).count("Prepare store data") == 1


def test_a_step_has_the_inputs_in_which_mindspore_looks_for_the_lengths_on_ascend():
    # PagedAttention takes them on the host, from the inputs of the graph that have these names.
    names = list(inspect.signature(ServedStep.construct).parameters)
    assert names[4:6] == ["batch_valid_length", "q_seq_lens"]


def decoded(steps, count):
    """Gives the logits of two steps that decode so many requests, of the base and the adapters."""
    lines = [steps.begin(prompt(3 + number % 4, number), number % 4 - 1) for number in range(count)]
    steps.step(*((line, len(line.tokens)) for line in lines))
    for token in (3, 7):
        for line in lines:
            line.tokens.append(token)
        yield steps.step(*((line, 1) for line in lines))
    steps.end(*lines)


def of_slot(served, slot):
    """The weights with which a slot computes."""
    return merged(served.weights, {2: ADAPTERS[0], 0: ADAPTERS[1], 1: ADAPTERS[2], -1: None}[slot])


def assert_logits(found, served, weights, tokens):
    expected = served.plain.logits(weights, tokens)[-1]
    assert np.abs(expected).max() > 2
    np.testing.assert_allclose(found, expected, rtol=0, atol=served.tolerance)


def prompt(length, seed):
    return np.random.default_rng([seed, length]).integers(3, vocabulary(), length)


def test_products_of_one_input_are_one_operator_where_they_are_rounded(served):
    cells = [cell for _, cell in served.steps.runner.network.cells_and_names() if isinstance(cell, JoinsLinears)]
    rounded = served.tolerance == ROUNDED
    assert {cell.joins for cell in cells} <= {rounded}
    if rounded:
        assert {type(cell).__name__ for cell in cells} == {"CpuLlamaAttention", "CpuLlamaFeedForward"}


def test_chunks_of_prompts_and_decode_steps_of_mixed_adapters(served):
    steps = served.steps
    slots = (2, -1, 0, 1, 2)
    lines = [
        steps.begin(prompt(length, seed), slot) for seed, (length, slot) in enumerate(zip((21, 7, 1, 18, 4), slots))
    ]
    weights = [of_slot(served, slot) for slot in slots]
    a, b, c, d, e = lines
    # Prompts in chunks that end within blocks and at their ends, with a decode token between them in the last step.
    found = {}
    found[1], found[2] = steps.step((a, 10), (b, 7), (c, 1), (d, 8))
    for line, row in ((b, found[1]), (c, found[2])):
        line.tokens.append(int(row.argmax()))
    assert_logits(found[1], served, weights[1], b.tokens[:-1])
    assert_logits(found[2], served, weights[2], c.tokens[:-1])
    rows = steps.step((c, 1), (a, 11), (b, 1), (d, 10), (e, 4))
    assert len(rows) == 5
    for turn in range(4):
        order = [c, a, b, d, e]
        for line, row in zip(order, rows):
            assert_logits(row, served, weights[lines.index(line)], line.tokens)
            line.tokens.append(int(row.argmax()))
        rows = steps.step(*((line, 1) for line in order))
        assert len(rows) == 5, turn
    # The adapters and the base do not say the same.
    assert len({tuple(line.generated[:3]) for line in lines}) == 5
    steps.end(*lines)


def test_a_request_has_the_same_logits_alone(served):
    steps, tokens = served.steps, prompt(13, 5)
    together = [steps.begin(tokens, slot) for slot in (1, 2, -1)]
    rows = steps.step(*((line, 13) for line in together))
    for slot, row, line in zip((1, 2, -1), rows, together):
        alone = steps.begin(tokens, slot)
        np.testing.assert_allclose(steps.step((alone, 13))[0], row, rtol=0, atol=served.tolerance / 10)
        steps.end(alone, line)


def test_a_step_in_the_middle_of_prompts_gives_no_rows(served):
    line = served.steps.begin(prompt(9, 6), 1)
    assert served.steps.step((line, 5)).shape == (0, vocabulary())
    assert_logits(served.steps.step((line, 4))[0], served, of_slot(served, 1), line.tokens)
    served.steps.end(line)


def test_a_slot_that_is_written_again_holds_nothing_of_the_adapter_before(served):
    steps, tokens = served.steps, prompt(11, 7)
    for number in (0, 2, 1):  # from all cells to some, and to others
        steps.put(3, served.paths[number])
        line = steps.begin(tokens, 3)
        assert_logits(steps.step((line, 11))[0], served, merged(served.weights, ADAPTERS[number]), tokens)
        line.tokens.append(5)
        row = steps.step((line, 1))[0]
        assert_logits(row, served, merged(served.weights, ADAPTERS[number]), line.tokens)
        steps.end(line)


def test_nothing_is_compiled_for_other_numbers_of_requests_and_tokens(served):
    steps, known = served.steps, 0
    for count in (1, 5, 3):
        lines = [steps.begin(prompt(2 + 3 * number, count), number % 4 - 1) for number in range(count)]
        steps.step(*((line, len(line.tokens)) for line in lines))
        for line in lines:
            line.tokens.append(3)
        steps.step(*((line, 1) for line in lines))
        steps.put(3, served.paths[count % 3])
        steps.end(*lines)
        known = known or len(served.compiled)
        assert len(served.compiled) == known >= 3


# 6 requests would be many tokens for a graph of 7, and are few.
@pytest.mark.parametrize("served", ["apart"], indirect=True)
def test_fixed_batches_change_no_bit_and_compile_nothing_later(served, tmp_path):
    fixed = Steps(save_base(tmp_path / "base.ckpt", base_weights()), fixed_batches=(1, 4, 7))
    filled = []
    with in_mode(0), pytest.MonkeyPatch.context() as patch:
        compiled = compilations(patch)
        for slot, path in zip((2, 0, 1), served.paths):
            fixed.put(slot, path)
        for steps in (fixed, served.steps):
            steps.runner.warm_up(scores=False)
        known, fill_up = len(compiled), StepInputs.filled_up
        patch.setattr(StepInputs, "filled_up", lambda self, batch: filled.append(batch) or fill_up(self, batch))
        for count in (7, 6, 5, 4, 3, 2, 1):
            np.testing.assert_array_equal([*decoded(fixed, count)], [*decoded(served.steps, count)])
        assert len(compiled) == known
        # An adapter with gains takes the graph of its own.
        fixed.runner.pools.gained.add(0)
        assert np.isfinite([*decoded(fixed, 3)]).all()
    # 2 would be filled up to twice as many, and 5 and 6 to many tokens.
    assert filled == [7, 7, 4, 4, 4, 4, 1, 1]


def test_graphs_that_are_not_expected_are_compiled_by_the_first_step_that_needs_them(library, mindformers, tmp_path):
    checkpoint = save_base(tmp_path / "base.ckpt", base_weights())
    with in_mode(0), pytest.MonkeyPatch.context() as patch:
        compiled = compilations(patch)
        patch.setattr("mindlora.serving.network.FEW_TOKENS", 6)
        steps = Steps(checkpoint)
        steps.runner.warm_up(many_tokens=False, scores=False)
        few = len(compiled)
        steps.step((steps.begin(prompt(5, 0)), 5))
        assert len(compiled) == few
        line = steps.begin(prompt(9, 0))
        many = steps.step((line, 9))
        assert len(compiled) == few + 1
        np.testing.assert_allclose(steps.runner.logits_after([8]), many, rtol=0, atol=TOLERANCE)
        assert len(compiled) == few + 2


def test_equal_layers_are_compiled_once(served):
    (name,) = {layer.cell_init_args for layer in served.steps.runner.network.model.layers}
    assert name.startswith("lazy_inline_")


def test_pools_of_16_bits_compute_what_was_saved(library, plain, tmp_path):
    made = adapter(5, {"attention.wq": 8, "attention.wo": 3, "feed_forward.w2": 2})
    made.tensors = {key: from_float32(array, BFLOAT16) for key, array in made.tensors.items()}
    weights = base_weights()
    steps = Steps(save_base(tmp_path / "base.ckpt", weights), adapter_dtype="bfloat16")
    steps.put(1, save_adapter(tmp_path, "bfloat16", made))
    tokens = prompt(9, 0)
    own, base = steps.begin(tokens, 1), steps.begin(tokens)
    # A chunk in the graph of many tokens, and the rest in that of few.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindlora.serving.network.FEW_TOKENS", 6)
        steps.step((own, 8), (base, 8))
        found = steps.step((own, 1), (base, 1))
    for row, of in zip(found, (merged(weights, made), weights)):
        np.testing.assert_allclose(row, plain.logits(of, tokens)[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"param_init_type": "float32"}, "the linear cells hold their weights in Float32: hold them in bfloat16"),
        ({"compute_dtype": "float16", **IN_BFLOAT16}, "the network computes in Float16: set model"),
    ],
)
def test_products_in_bfloat16_of_other_networks_are_refused(library, mindformers, tmp_path, keys, message):
    checkpoint = save_base(tmp_path / "base.ckpt", base_weights())
    with pytest.raises(ConfigError, match=f"^product_dtype is bfloat16 and {message}"):
        Steps(checkpoint, product_dtype="bfloat16", **keys)


def test_a_processor_on_which_products_in_bfloat16_save_no_time_is_named(
    library, mindformers, tmp_path, monkeypatch, caplog
):
    checkpoint = save_base(tmp_path / "base.ckpt", in_bfloat16(base_weights()))
    for able, warned in ((True, False), (False, True)):
        monkeypatch.setattr("mindlora.serving.network.multiplies_bfloat16", lambda able=able: able)
        Steps(checkpoint, product_dtype="bfloat16", **IN_BFLOAT16)
        assert ("this processor has no instructions that multiply bfloat16" in caplog.text) == warned


@pytest.mark.parametrize("able", [False, True])
def test_products_are_in_bfloat16_where_nothing_is_asked_for_and_that_is_faster(
    library, mindformers, tmp_path, monkeypatch, able
):
    monkeypatch.setattr("mindlora.serving.network.rounds_faster", lambda: able)
    from mindlora.files.base.quantize import quantize_checkpoint

    wide, narrow, packed = (str(tmp_path / name) for name in ("wide.ckpt", "narrow.ckpt", "packed.safetensors"))
    save_base(wide, base_weights())
    save_base(narrow, in_bfloat16(base_weights()))
    quantize_checkpoint(wide, packed)
    assert Steps(narrow, product_dtype=None, **IN_BFLOAT16).runner.rounds == able
    assert Steps(packed, quantize=True, product_dtype=None).runner.rounds == able
    assert not Steps(wide, product_dtype=None).runner.rounds
    assert not Steps(narrow, product_dtype="float32", **IN_BFLOAT16).runner.rounds


def test_products_in_another_dtype_are_refused():
    with pytest.raises(ConfigError, match="^product_dtype is 'float16': it must be one of float32, bfloat16.$"):
        EngineSettings(seq_length=16, product_dtype="float16")


def test_fixed_batches_that_no_step_has_are_refused():
    message = "fixed_batches has 9 and max_running is 8: no step decodes so many requests. Raise max_running"
    with pytest.raises(ConfigError, match=f"^{message}"):
        EngineSettings(seq_length=16, max_running=8, fixed_batches=(1, 9))
    with pytest.raises(ConfigError, match="^fixed_batches is 0: it must be a whole number of at least 1.$"):
        EngineSettings(seq_length=16, fixed_batches=(0,))


def test_pools_of_another_dtype_than_a_network_in_16_bits_are_refused(library, mindformers, tmp_path):
    checkpoint = save_base(tmp_path / "base.ckpt", base_weights())
    with pytest.raises(
        ConfigError, match="^adapter_dtype is BFloat16 and the network computes in Float16: adapters are"
    ):
        Steps(checkpoint, adapter_dtype="bfloat16", compute_dtype="float16")
    with pytest.raises(ConfigError, match="^adapter_dtype is 'int8': it must be one of float32, float16, bfloat16"):
        Steps(checkpoint, adapter_dtype="int8")


def test_models_without_a_paged_cache_are_refused(mindformers):
    settings = EngineSettings(seq_length=16, max_running=1, max_tokens_per_step=4)
    node = {
        "model_config": {"type": "ChatGLM2Config", "num_layers": 1, "padded_vocab_size": 64, "hidden_size": 32},
        "arch": {"type": "ChatGLM2ForConditionalGeneration"},
    }
    with pytest.raises(
        ConfigError, match="model.model_config.type is ChatGLM2Config: its attention has no paged cache"
    ):
        build_network(node, settings)
