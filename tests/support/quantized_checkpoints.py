"""Checkpoints in quantized forms, packed number by number, and what they decode to."""

import json
import math

import numpy as np

from mindlora.core.numerics.dtypes import FLOAT8_E4M3
from mindlora.core.numerics.nf4 import TABLE
from tests.support.llama_checkpoints import HUGGING_FACE, VOCAB, llama, save_base

GROUP = 16
BLOCK = [16, 24]
FP4 = np.array([0, 0.0052, 0.6667, 1, 0.3333, 0.5, 0.1667, 0.25] * 2, np.float32) * np.repeat([1, -1], 8).astype("f4")


def packed(codes, bits):
    """Returns int32 words [rows, words]: the codes of each row as one number, the first in its lowest bits."""
    words = -(-codes.shape[1] * bits // 32)
    rows = []
    for row in codes:
        number = sum(int(code) << bits * index for index, code in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(4 * words, "little"), "<i4"))
    return np.stack(rows)


def float8(code):
    """Returns the value of a code of E4M3: sign, four bits of exponent, three of fraction."""
    sign, exponent, fraction = -1 if code >> 7 else 1, int(code >> 3 & 15), int(code & 7)
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9))


def fp8(path, shape, rng, kind="blocks"):
    """Returns the tensors of a weight in FP8 and the weight."""
    codes = rng.integers(0, 256, shape)
    codes[codes & 127 == 127] = 0
    values = np.vectorize(float8)(codes).astype(np.float32)
    rows, columns = np.indices(shape)
    grid = {"blocks": (-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1])), "rows": (shape[0], 1), "tensor": (1,)}
    scales = rng.uniform(0.1, 2, grid[kind]).astype(np.float32)
    of_numbers = {"blocks": lambda: scales[rows // BLOCK[0], columns // BLOCK[1]], "rows": lambda: scales[rows, 0]}
    scale = of_numbers.get(kind, lambda: scales[0])()
    end = "scale_inv" if kind == "blocks" else "scale"
    tensors = {f"{path}.weight": codes.astype("u1").view(FLOAT8_E4M3), f"{path}.weight_{end}": scales}
    return {**tensors, f"{path}.input_scale": np.ones(1, "f4")}, values * scale


def four_bits(path, shape, rng, kind="nf4", nested=True, block=64):
    """Returns the tensors of a weight in bitsandbytes' 4 bits, whose blocks may cross rows, and the weight."""
    numbers = math.prod(shape)
    table = TABLE if kind == "nf4" else FP4
    codes = rng.integers(0, 16, numbers)
    blocks = -(-numbers // block)
    # As bitsandbytes has it, the largest number of a block is 1 or -1 of the table.
    codes[np.arange(blocks) * block] = np.where(rng.random(blocks) < 0.5, 15, 0) if kind == "nf4" else 3
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    absmax = rng.uniform(0.01, 2, blocks).astype("f4")
    tensors = {f"{path}.weight.absmax": absmax}
    if nested:
        of_absmax, offset = rng.integers(0, 256, blocks).astype("u1"), np.float32(1.5)
        maps, outer = rng.uniform(-1, 1, 256).astype("f4"), rng.uniform(0.5, 1, -(-blocks // 4)).astype("f4")
        absmax = maps[of_absmax] * outer[np.arange(blocks) // 4] + offset
        state.update(nested_blocksize=4, nested_dtype="float32", nested_offset=float(offset))
        tensors = {f"{path}.weight.absmax": of_absmax, f"{path}.weight.nested_absmax": outer}
        tensors[f"{path}.weight.nested_quant_map"] = maps
    pairs = np.pad(codes, (0, numbers % 2)).reshape(-1, 2)
    tensors[f"{path}.weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).astype("u1")[:, None]
    tensors[f"{path}.weight.quant_map"] = table
    described = np.frombuffer(json.dumps(state).encode(), "u1")
    tensors[f"{path}.weight.quant_state.bitsandbytes__{kind}"] = described
    return tensors, (table[codes] * absmax[np.arange(numbers) // block]).reshape(shape)


def eight_bits(path, shape, rng):
    """Returns the tensors of a weight in bitsandbytes' 8 bits, and the weight."""
    codes, scb = rng.integers(-127, 128, shape).astype("i1"), rng.uniform(0.1, 2, shape[0]).astype("f4")
    tensors = {f"{path}.weight": codes, f"{path}.SCB": scb, f"{path}.weight_format": np.zeros((), "u1")}
    return tensors, codes.astype("f4") * scb[:, None] * np.float32(7.874015718698502e-3)


def integers(shape, rng, bits, groups):
    """Returns codes [out, in], zeros and scales [groups, out], all positive."""
    scales = rng.uniform(0.01, 0.1, (groups, shape[0])).astype("f2")
    return rng.integers(0, 1 << bits, shape), rng.integers(0, 1 << bits, (groups, shape[0])), scales


def times_scales(codes, zeros, scales, group_of):
    """W[n, k] = (codes[n, k] - zeros[group of k, n]) * scales[group of k, n]."""
    return ((codes - zeros[group_of].T).astype("f4") * scales[group_of].T.astype("f4")).astype("f4")


def gptq(path, shape, rng, bits=4, in_turn=True, offset=1, group=GROUP):
    """Returns the tensors of a weight in GPTQ, of which version 1 stores zeros less ``offset``, and the weight."""
    codes, zeros, scales = integers(shape, rng, bits, shape[1] // group)
    group_of = np.arange(shape[1]) // group
    group_of = group_of if in_turn else rng.permutation(group_of)
    tensors = {
        f"{path}.qweight": packed(codes, bits).T,
        f"{path}.qzeros": packed((zeros - offset) % (1 << bits), bits),
        f"{path}.scales": scales,
        f"{path}.g_idx": group_of.astype("<i4"),
    }
    return tensors, times_scales(codes, zeros, scales, group_of)


def awq(path, shape, rng, group=GROUP):
    """Returns the tensors of a weight in AWQ, and the weight."""
    codes, zeros, scales = integers(shape, rng, 4, shape[1] // group)
    in_words = np.arange(shape[0]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    tensors = {
        f"{path}.qweight": packed(codes.T[:, in_words], 4),
        f"{path}.qzeros": packed(zeros[:, in_words], 4),
        f"{path}.scales": scales,
    }
    return tensors, times_scales(codes, zeros, scales, np.arange(shape[1]) // group)


def compressed(path, shape, rng, bits=4, zeros=True, in_turn=True, groups=None):
    """Returns the tensors of a weight in compressed-tensors' pack-quantized, and the weight."""
    groups = groups or shape[1] // GROUP
    codes, stored, scales = integers(shape, rng, bits, groups)
    group_of = np.arange(shape[1]) // (shape[1] // groups)
    group_of = group_of if in_turn else rng.permutation(group_of)
    tensors = {
        f"{path}.weight_packed": packed(codes, bits),
        f"{path}.weight_scale": scales.T.copy(),
        f"{path}.weight_shape": np.array(shape, "<i8"),
    }
    if not in_turn:
        tensors[f"{path}.weight_g_idx"] = group_of.astype("<i4")
    if zeros:
        tensors[f"{path}.weight_zero_point"] = packed(stored, bits).T.copy()
    else:
        stored = np.full_like(stored, 1 << (bits - 1))
    return tensors, times_scales(codes, stored, scales, group_of)


def in_int8(path, shape, rng, zeros=True, groups=1):
    """Returns the tensors of a weight in compressed-tensors' int-quantized, and the weight."""
    codes, stored, scales = integers(shape, rng, 8, groups)
    stored = stored if zeros else np.full_like(stored, 128)
    tensors = {f"{path}.weight": (codes - 128).astype("i1"), f"{path}.weight_scale": scales.T.copy()}
    if zeros:
        tensors[f"{path}.weight_zero_point"] = (stored.T - 128).astype("i1")
    tensors[f"{path}.input_scale"] = np.ones(1, "f4")
    return tensors, times_scales(codes, stored, scales, np.arange(shape[1]) // (shape[1] // groups))


def modelslim(path, shape, rng, groups=1):
    """Returns the tensors of a weight in msModelSlim's W8A8 or W8A16, and the weight."""
    codes, _, scales = integers(shape, rng, 8, groups)
    scales = scales.T.astype("f4")
    offsets = rng.integers(-3, 4, (shape[0], groups)).astype("f4")
    tensors = {
        f"{path}.weight": (codes - 128).astype("i1"),
        f"{path}.weight_scale": scales.copy(),
        f"{path}.weight_offset": offsets,
        f"{path}.quant_bias": np.zeros(shape[0], "<i4"),
        f"{path}.deq_scale": np.zeros(shape[0], "<i8"),
        f"{path}.input_scale": np.ones(1, "f4"),
        f"{path}.input_offset": np.zeros(1, "i1"),
    }
    columns = shape[1] // groups
    return tensors, (codes - 128 - offsets.repeat(columns, 1)).astype("f4") * scales.repeat(columns, 1)


def modelslim_through_inputs(path, shape, rng, as_bits=True):
    """Returns the tensors of a weight in msModelSlim's W8A8 without scales of its own, and the weight."""
    tensors, _ = modelslim(path, shape, rng)
    del tensors[f"{path}.weight_offset"]
    of_inputs = rng.random(1, np.float32)
    products = (tensors.pop(f"{path}.weight_scale") * of_inputs)[:, 0]
    tensors[f"{path}.input_scale"] = of_inputs
    tensors[f"{path}.deq_scale"] = products.view("<i4").astype("<i8") if as_bits else products
    return tensors, tensors[f"{path}.weight"].astype("f4") * (products / of_inputs)[:, None]


def modelslim_fp8(path, shape, rng):
    """Returns the tensors of a weight in msModelSlim's WFP8AFP8_DYNAMIC, and the weight."""
    made, weight = fp8(path, shape, rng, kind="rows")
    scales = next(array for name, array in made.items() if "scale" in name)
    zeros = np.zeros((shape[0], 1), "f4")
    tensors = {f"{path}.weight": made[f"{path}.weight"], f"{path}.weight_scale": scales.reshape(-1, 1)}
    return {**tensors, f"{path}.weight_offset": zeros}, weight


def _compressed_settings(format_, **of_weights):
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weights}},
    }


_BITSANDBYTES = {"quant_method": "bitsandbytes"}
_GROUPS = {"num_bits": 4, "group_size": GROUP, "strategy": "group"}


def _gptq_settings(bits=4, **others):
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **others}


# name -> (the function that makes a weight, what it takes, quantization_config). msModelSlim's has a file of its own.
FORMS = {
    "fp8-blocks": (fp8, {}, {"quant_method": "fp8", "weight_block_size": BLOCK}),
    "fp8-rows": (fp8, {"kind": "rows"}, {"quant_method": "fp8"}),
    "fp8-tensor": (fp8, {"kind": "tensor"}, {"quant_method": "fp8"}),
    "nf4": (four_bits, {}, _BITSANDBYTES),
    "nf4-single": (four_bits, {"nested": False, "block": 128}, _BITSANDBYTES),
    "fp4": (four_bits, {"kind": "fp4"}, _BITSANDBYTES),
    "int8": (eight_bits, {}, _BITSANDBYTES),
    "gptq": (gptq, {}, _gptq_settings()),
    "gptq-2": (gptq, {"bits": 2}, _gptq_settings(2)),
    "gptq-8": (gptq, {"bits": 8}, _gptq_settings(8)),
    "gptq-order": (gptq, {"in_turn": False}, _gptq_settings(desc_act=True)),
    "gptq-v2": (gptq, {"offset": 0}, _gptq_settings(checkpoint_format="gptq_v2")),
    "awq": (awq, {}, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "packed": (compressed, {"zeros": False}, _compressed_settings("pack-quantized", **_GROUPS)),
    "packed-zeros": (compressed, {}, _compressed_settings("pack-quantized", **_GROUPS, symmetric=False)),
    "packed-order": (
        compressed,
        {"in_turn": False},
        _compressed_settings("pack-quantized", **_GROUPS, symmetric=False, actorder="group"),
    ),
    "packed-3": (compressed, {"bits": 3, "groups": 1}, _compressed_settings("pack-quantized", num_bits=3)),
    "w8a8": (in_int8, {"zeros": False}, _compressed_settings("int-quantized", num_bits=8)),
    "w8a8-zeros": (in_int8, {}, _compressed_settings("int-quantized", num_bits=8, symmetric=False)),
    "w8-groups": (in_int8, {"groups": 2}, _compressed_settings("int-quantized", num_bits=8)),
    "float-rows": (fp8, {"kind": "rows"}, _compressed_settings("float-quantized", num_bits=8)),
    "modelslim": (modelslim, {}, None),
    "modelslim-groups": (modelslim, {"groups": 2}, None),
    "modelslim-static": (modelslim_through_inputs, {}, None),
    "modelslim-static-bfloat16": (modelslim_through_inputs, {"as_bits": False}, None),
    "modelslim-fp8": (modelslim_fp8, {}, None),
}
# Form -> what msModelSlim calls it.
MODELSLIMS_KINDS = {"modelslim-groups": "W8A16", "modelslim-fp8": "WFP8AFP8_DYNAMIC"}


def quantized_llama(form, seed=0):
    """Returns the tensors of a small Llama with its linear cells in a form, and what they decode to, in float32."""
    make, options, _ = FORMS[form]
    rng = np.random.default_rng(seed)
    stored, decoded = {}, {}
    for name, array in llama().items():
        stored[name] = decoded[name] = array
        if "_proj" in name:
            del stored[name]
            tensors, decoded[name] = make(name.removesuffix(".weight"), array.shape, rng, **options)
            stored.update(tensors)
    return stored, decoded


def save_quantized(folder, form, tensors, shards=1, settings=None, **config):
    """Writes a folder as Hugging Face has it, of bfloat16 but for the linear cells; returns its path."""
    settings = FORMS[form][2] if settings is None and form in FORMS else settings
    described = {} if settings is None else {"quantization_config": settings}
    content = {**HUGGING_FACE, "vocab_size": VOCAB, "torch_dtype": "bfloat16", **described, **config}
    path = save_base(folder, tensors, shards, **content)
    if form.startswith("modelslim"):
        kind = MODELSLIMS_KINDS.get(form, "W8A8")
        kinds = {name: kind if tensors[name].dtype.itemsize == 1 else "FLOAT" for name in tensors}
        with open(f"{path}/quant_model_description.json", "w", encoding="utf-8") as file:
            json.dump({**kinds, "model_quant_type": kind}, file)
    return path
