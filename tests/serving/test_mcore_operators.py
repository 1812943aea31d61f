"""What an mcore network computes otherwise on Ascend, as far as a CPU can: positions, masks, dtypes and refusals.

tests/ascend_backend/test_mcore_serving.py runs the whole network on MindSpore's Ascend backend.
"""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.core.errors import ConfigError
from mindlora.models.architectures.mcore_sizes import DecoderSizes
from mindlora.run.checks.mcore import check_served
from mindlora.run.yaml_run import YamlRun
from mindlora.serving.mcore_operators import AscendPositions, CpuPositions, Dtypes, dtypes_of
from mindlora.serving.stacked_experts import check_slots
from tests.conftest import in_mode

LENGTH, HEAD_DIM = 12, 16
SIZES = DecoderSizes(
    layers=1,
    vocabulary=8,
    hidden=32,
    inner=8,
    heads=2,
    kv_heads=1,
    head_dim=HEAD_DIM,
    norm_eps=1e-6,
    rope_theta=100.0,
    has_bias=False,
    has_head_norms=False,
    tied=False,
    rotary=HEAD_DIM,
)
GLM4 = dataclasses.replace(SIZES, rotary=HEAD_DIM // 2, interleaved=True)
FLOATS = Dtypes(*[ms.float32] * len(Dtypes._fields))
QWEN3 = {"architectures": "Qwen3ForCausalLM", "head_dim": 128}


def int32(values):
    return Tensor(np.array(values, np.int32))


def at_positions(kind, sizes, positions, contexts):
    cell = kind(sizes, LENGTH, FLOATS)
    positions = None if positions is None else int32(positions)
    lengths = None if positions is None else int32([len(positions)])
    with in_mode(1):
        found = cell(int32(contexts), lengths, int32([[0]]), int32([0]), positions)
    return [None if one is None else one.asnumpy() for one in found]


def turned(x, cos, sin, neighbours):
    """x [head_dim] as ApplyRotaryPosEmb turns it: neighbours together, or elements that are half a head apart."""
    if neighbours:
        partner = np.stack([-x[1::2], x[::2]], axis=1).reshape(-1)
    else:
        partner = np.concatenate([-x[HEAD_DIM // 2 :], x[: HEAD_DIM // 2]])
    return x * cos + partner * sin


@pytest.mark.parametrize("sizes", [SIZES, GLM4], ids=["qwen3", "glm4"])
def test_heads_are_turned_by_the_angles_of_their_positions(sizes):
    cos, sin, *_ = at_positions(AscendPositions, sizes, [0, 5, 11], [12])
    x = np.random.default_rng(0).normal(size=HEAD_DIM).astype(np.float32)
    count = sizes.rotary // 2
    for row, position in enumerate([0, 5, 11]):
        expected = x.copy()
        for pair in range(count):
            angle = position * 100.0 ** -(2 * pair / sizes.rotary)
            first, second = (2 * pair, 2 * pair + 1) if sizes.interleaved else (pair, pair + HEAD_DIM // 2)
            expected[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
            expected[second] = x[second] * np.cos(angle) + x[first] * np.sin(angle)
        np.testing.assert_allclose(turned(x, cos[row], sin[row], sizes.interleaved), expected, rtol=1e-5, atol=1e-5)


def test_a_mask_hides_what_comes_after_a_token():
    *_, slots, mask = at_positions(AscendPositions, SIZES, [3, 4, 0], [5, 1])
    assert slots.tolist() == [0]
    for row, position in zip(mask, [3, 4, 0]):
        assert row.tolist() == [0.0] * (position + 1) + [-10000.0] * (LENGTH - position - 1)


def test_where_each_request_has_one_token_it_is_the_last_one_and_no_mask_is_made():
    cos, sin, *_, mask = at_positions(AscendPositions, SIZES, None, [3, 8])
    expected_cos, expected_sin, *_ = at_positions(AscendPositions, SIZES, [2, 7], [8])
    assert mask is None
    np.testing.assert_array_equal(cos, expected_cos)
    np.testing.assert_array_equal(sin, expected_sin)


def test_without_partial_or_interleaved_rotation_both_devices_have_the_same_angles():
    ascend, cpu = (at_positions(kind, SIZES, [1, 9], [10]) for kind in (AscendPositions, CpuPositions))
    np.testing.assert_array_equal(ascend[0], cpu[0])
    np.testing.assert_array_equal(ascend[1], cpu[1])


def test_on_a_cpu_linear_weights_and_the_embedding_have_16_bits():
    dtypes = dtypes_of({"params_dtype": "bfloat16", "compute_dtype": "float32"})
    assert dtypes == FLOATS._replace(linear=ms.bfloat16, table=ms.bfloat16)


def served(target, **keys):
    yaml = {"use_legacy": False, "context": {"device_target": target}, "model": {"model_config": {**QWEN3, **keys}}}
    return [(one.key, one.found, one.advice) for one in check_served(YamlRun(yaml))]


@pytest.mark.parametrize("keys", [{}, {"compute_dtype": "bf16"}, {"compute_dtype": "float16"}, {"head_dim": 80}])
def test_on_ascend_it_computes_in_16_bits(keys):
    assert served("Ascend", **keys) == []


def test_what_an_npu_does_not_compute_is_refused():
    ((key, found, advice),) = served("Ascend", compute_dtype="float32")
    assert (key, found) == ("model.model_config", "This model cannot be served on Ascend.")
    assert advice == "Set: model.model_config.compute_dtype: bfloat16 (found float32)."
    ((key, found, advice),) = served("Ascend", head_dim=24)
    assert key == "model.model_config.head_dim"
    assert found.startswith("model.model_config.head_dim is 24: MindSpore's PagedAttention on Ascend takes multiples")
    assert served("CPU", head_dim=24) == []
    ((key, found, _),) = served("GPU")
    assert key == "context.device_target" and found.endswith("GPU, and mindlora serves Qwen3 on CPU, Ascend.")


def test_more_slots_than_the_adapters_operator_takes_are_refused():
    check_slots(67, 128)
    with pytest.raises(ConfigError, match="slots is 68 and each layer has 128 experts: .* up to 67 slots"):
        check_slots(68, 128)
