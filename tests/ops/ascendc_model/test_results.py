"""Results of kernels in the simulator, against NumPy and against oracles written here; and exact counters."""

import struct

import numpy as np
import pytest

RNG = np.random.default_rng(7)

CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD = range(7)


@pytest.fixture
def run(libraries):
    return libraries["results"].run


def bf16_to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(values):
    """Round to nearest, ties to even, on the bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def same_floats(found, expected):
    return bool(
        np.all((found == expected) & (np.signbit(found) == np.signbit(expected)) | np.isnan(found) & np.isnan(expected))
    )


def hard_floats():
    """All exponents and signs, with mantissas around every rounding point of half and bfloat16_t."""
    mantissas = np.concatenate(
        [
            (np.arange(8)[:, None] << shift | low).ravel()
            for shift in (12, 13, 15, 16)
            for low in [
                np.array([0, 1, (1 << shift) // 2 - 1, (1 << shift) // 2, (1 << shift) // 2 + 1, (1 << shift) - 1])
            ]
        ]
    )
    mantissas = np.unique(np.concatenate([mantissas, 0x7FFFFF - mantissas])).astype(np.uint32)
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    bits = (exponents | mantissas).ravel()
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


def cast(run, kernel, values, dtype, mode):
    """Casts an array in pieces that fit the unified buffer."""
    out = []
    for at in range(0, values.size, 16384):
        piece = np.ascontiguousarray(values[at : at + 16384])
        result = np.zeros(piece.size, dtype)
        run(kernel, [("x", piece, "in"), ("y", result, "out")], struct.pack("<ii", piece.size, mode))
        out.append(result)
    return np.concatenate(out)


# --- casts ---------------------------------------------------------------------------------------------------------


def test_every_half_and_bfloat16_widens_exactly(run):
    bits = np.arange(65536, dtype=np.uint16)
    assert same_floats(cast(run, "cast_half_float", bits, np.float32, CAST_NONE), bits.view(np.float16).astype("f4"))
    assert same_floats(cast(run, "cast_bf16_float", bits, np.float32, CAST_NONE), bf16_to_float(bits))


def test_every_half_and_bfloat16_survives_a_round_trip(run):
    bits = np.arange(65536, dtype=np.uint16)
    halves = bits[~np.isnan(bits.view(np.float16))]
    assert np.array_equal(
        cast(run, "cast_float_half", halves.view(np.float16).astype("f4"), np.uint16, CAST_RINT), halves
    )
    brains = bits[~np.isnan(bf16_to_float(bits))]
    assert np.array_equal(cast(run, "cast_float_bf16", bf16_to_float(brains), np.uint16, CAST_RINT), brains)


@pytest.mark.parametrize("mode", [CAST_NONE, CAST_RINT])
def test_float_to_half_rounds_to_even_and_overflows_to_infinity(run, mode):
    values = np.concatenate([hard_floats(), np.float32([65504, 65519.996, 65520, 1e9, -65520, 2**-24, 2**-25])])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    assert same_floats(cast(run, "cast_float_half", values, np.float16, mode), expected)


def test_float_to_bfloat16_rounds_to_even_and_overflows_to_infinity(run):
    values = hard_floats()
    found = cast(run, "cast_float_bf16", values, np.uint16, CAST_RINT)
    assert same_floats(bf16_to_float(found), bf16_to_float(float_to_bf16(values)))


@pytest.mark.parametrize(
    "kernel, widen",
    [
        ("cast_float_half", lambda b: b.view(np.float16).astype(np.float64)),
        ("cast_float_bf16", lambda b: bf16_to_float(b).astype(np.float64)),
    ],
)
def test_directed_casts_bracket_the_value(run, kernel, widen):
    values = np.float32(RNG.normal(size=4096) * 10.0 ** RNG.integers(-6, 4, 4096))
    down, up, zero, away = (
        widen(cast(run, kernel, values, np.uint16, mode)) for mode in (CAST_FLOOR, CAST_CEIL, CAST_TRUNC, CAST_ROUND)
    )
    nearest = widen(cast(run, kernel, values, np.uint16, CAST_RINT))
    assert np.all(down <= values) and np.all(values <= up)
    assert np.all((down == up) == (down == values))
    assert np.array_equal(zero, np.where(values < 0, up, down))
    assert np.array_equal(np.abs(nearest - values), np.minimum(values - down, up - values))
    assert np.array_equal(np.abs(away - values), np.minimum(values - down, up - values))


def test_documented_examples_of_rounding(run):
    # The page on precision conversion: 0.5 + 2^-12 to half, 0.5 + 2^-9 + 2^-11 to bfloat16_t.
    x = np.float32([0.5 + 2**-12] * 16)
    expected = {
        CAST_RINT: 0.5,
        CAST_FLOOR: 0.5,
        CAST_CEIL: 0.5 + 2**-11,
        CAST_ROUND: 0.5 + 2**-11,
        CAST_TRUNC: 0.5,
        CAST_ODD: 0.5 + 2**-11,
    }
    for mode, value in expected.items():
        assert cast(run, "cast_float_half", x, np.float16, mode)[0] == value
    x = np.float32([0.5 + 2**-9 + 2**-11] * 16)
    expected = {CAST_RINT: 0.5 + 2**-8, CAST_FLOOR: 0.5, CAST_CEIL: 0.5 + 2**-8, CAST_ROUND: 0.5 + 2**-8}
    for mode, value in expected.items():
        assert bf16_to_float(cast(run, "cast_float_bf16", x, np.uint16, mode))[0] == value


def test_float_to_integer_and_back(run):
    values = np.float32([1.4, 1.5, 1.6, 2.5, -1.5, -2.5, -2.6, 3e9, -3e9, 0, 7, -7, 0.5, -0.5, 1e-9, -1e-9])
    clipped = np.clip(values.astype(np.float64), -(2.0**31), 2.0**31 - 1)
    for mode, function in (
        (CAST_RINT, np.rint),
        (CAST_FLOOR, np.floor),
        (CAST_CEIL, np.ceil),
        (CAST_TRUNC, np.trunc),
        (CAST_ROUND, lambda v: np.sign(v) * np.floor(np.abs(v) + 0.5)),
    ):
        assert np.array_equal(cast(run, "cast_float_int", values, np.int32, mode), function(clipped).astype(np.int64))
    integers = np.int32([0, 1, -1, 2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**31 - 1, -(2**31)])
    assert np.array_equal(cast(run, "cast_int_float", integers, np.float32, CAST_RINT), integers.astype(np.float32))
    for mode, sign in ((CAST_FLOOR, 1), (CAST_CEIL, -1)):
        assert np.all(sign * (integers - cast(run, "cast_int_float", integers, np.float32, mode).astype("f8")) >= 0)


# --- vector --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, blocks", [(1, 1), (1000, 3), (4099, 5), (64, 4)])
def test_add_with_ragged_tails(run, length, blocks):
    x, y = (RNG.normal(size=length).astype(np.float16) for _ in range(2))
    z = np.zeros(length, np.float16)
    per_core = -(-length // blocks)
    report = run(
        "add", [("x", x, "in"), ("y", y, "in"), ("z", z, "out")], struct.pack("<III", length, per_core, 256), blocks
    )
    assert np.array_equal(z, x + y)
    tiles = sum(-(-max(0, min(per_core, length - core * per_core)) // 256) for core in range(blocks))
    assert report["gm"] == {
        "x": {"read": 2 * length, "written": 0},
        "y": {"read": 2 * length, "written": 0},
        "z": {"read": 0, "written": 2 * length},
    }
    assert report["instructions"] == {"FIX": 0, "M": 0, "MTE1": 0, "MTE2": 2 * tiles, "MTE3": tiles, "S": 0, "V": tiles}
    # 128 numbers in a repeat; a tile of 256 has no unfinished one but at a core's end.
    assert [core["repeats"] for core in report["cores"]] == [
        -(-max(0, min(per_core, length - core * per_core)) // 128) for core in range(blocks)
    ]
    assert report["peak"] == {"UB": 6 * 512}
    assert report["unwritten"] == {"z": 0}
    assert report["cores_that_worked"] == -(-length // per_core)
    assert len(report["cores"]) == blocks


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_elementwise_rounds_once_for_each_instruction(run, dtype):
    n = 192
    x = (RNG.normal(size=2 * n) * 30).astype(dtype)
    a, b = x[:n], x[n:]
    wide = np.longdouble if dtype == np.float32 else np.float32
    scalar = {value: dtype(np.float32(value)) for value in (1.5, 0.1, 0.3)}
    expected = [
        a + b,
        a - b,
        a * b,
        a + scalar[1.5],
        a * scalar[0.1],
        (wide(a) + wide(b) * wide(scalar[0.3])).astype(dtype),
        (wide(a) + wide(a) * wide(b)).astype(dtype),
        np.full(n, 2, dtype),
    ]
    name = "elementwise_half" if dtype == np.float16 else "elementwise_float"
    for op, values in enumerate(expected):
        y = np.zeros(n, dtype)
        run(name, [("x", x, "in"), ("y", y, "out")], struct.pack("<ii", n, op))
        assert np.array_equal(y, values), op


def test_half_arithmetic_overflows_to_infinity(run):
    x = np.full(32, 60000, np.float16)
    y = np.zeros(16, np.float16)
    run("elementwise_half", [("x", x, "in"), ("y", y, "out")], struct.pack("<ii", 16, 0))
    assert np.all(np.isposinf(y))


def test_half_sources_add_up_in_float(run):
    x = RNG.normal(size=256).astype(np.float16)
    y = np.zeros(128, np.float32)
    run("mixed", [("x", x, "in"), ("y", y, "out")])
    wide = x.astype(np.float64)
    expected = np.concatenate([1 + 0.5 * wide[:64], 1 + wide[64:128] * wide[128:192]]).astype(np.float32)
    assert np.array_equal(y, expected)


def test_masks_and_strides(run):
    x = RNG.integers(-50, 50, 512).astype(np.float32)
    y = np.zeros(8, np.float32)
    run("masked_rows", [("x", x, "in"), ("y", y, "out")])
    sums = x.reshape(8, 64)[::2, :40].sum(axis=1)
    assert np.array_equal(y, np.stack([sums, np.zeros(4)], axis=1).ravel())
    x, y = RNG.normal(size=128).astype(np.float32), np.zeros(128, np.float32)
    run("bit_mask", [("x", x, "in"), ("y", y, "out")])
    lanes = np.arange(128)
    expected = np.where(lanes % 8 >= 4, 2 * x, 0) + (lanes < 70)
    assert np.array_equal(y, expected.astype(np.float32))
    run("register_mask", [("x", x, "in"), ("y", y, "out")])
    assert np.array_equal(y, np.where(lanes % 64 < 32, 2 * x, 0) + (lanes == 0).astype(np.float32))


def tree(values, dtype):
    values = list(values)
    while len(values) > 1:
        values = [dtype(a + b) for a, b in zip(values[::2], values[1::2])]
    return values[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_reductions_follow_the_documented_tree(run, dtype):
    lanes = 256 // np.dtype(dtype).itemsize
    n = 4 * lanes
    x = (RNG.normal(size=n) * 3).astype(dtype)
    repeats = [tree(row, dtype) for row in x.reshape(4, lanes)]
    in_turn = repeats[0]
    for value in repeats[1:]:
        in_turn = dtype(in_turn + value)
    block = lanes // 8
    expected = [
        [in_turn],
        [tree(repeats, dtype)],
        repeats,
        [tree(row, dtype) for row in x.reshape(-1, block)],
        x[::2] + x[1::2],
    ]
    name = "reduce_half" if dtype == np.float16 else "reduce_float"
    for op, values in enumerate(expected):
        y = np.zeros(len(values), dtype)
        run(name, [("x", x, "in"), ("y", y, "out")], struct.pack("<ii", n, op))
        assert np.array_equal(y, np.array(values, dtype)), op


def test_broadcast_and_copy(run):
    x = RNG.normal(size=16).astype(np.float32)
    y = np.zeros(64, np.float32)
    run("broadcast", [("x", x, "in"), ("y", y, "out")])
    assert np.array_equal(y, np.repeat(x[::2], 8))


def test_every_byte_is_looked_up(run):
    table = RNG.normal(size=264).astype(np.float16)
    for x in np.arange(256, dtype=np.uint8).reshape(4, 64):
        y = np.zeros(128, np.float16)
        run("look_up", [("x", x, "in"), ("table", table, "in"), ("y", y, "out")])
        assert np.array_equal(y[:64], x) and np.array_equal(y[64:], table[8:][x])


def test_padding_left_and_right(run):
    x = np.arange(21, dtype=np.float32)
    y = np.zeros(24, np.float32)
    report = run("padded", [("x", x, "in"), ("y", y, "out")])
    assert np.array_equal(y.reshape(3, 8), np.pad(x.reshape(3, 7)[:, :5], ((0, 0), (1, 2)), constant_values=-1))
    assert report["gm"] == {"x": {"read": 60, "written": 0}, "y": {"read": 0, "written": 96}}
    y = np.zeros(16, np.float32)
    run("tails", [("x", x[:6].copy(), "in"), ("y", y, "out")])
    assert np.array_equal(y, [0, 1, 2, 0, 0, 0, 0, 0, 3, 4, 5, 3, 3, 3, 3, 3])


# --- cube ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("m, n, k, step", [(1, 33, 40, 48), (17, 16, 16, 16), (33, 17, 70, 32), (16, 48, 128, 64)])
@pytest.mark.parametrize("kind", ["half", "bf16"])
def test_products_of_odd_sizes(run, kind, m, n, k, step, transposed):
    a, b = RNG.normal(size=(m, k)).astype(np.float32), RNG.normal(size=(k, n)).astype(np.float32)
    if kind == "half":
        a, b = a.astype(np.float16), b.astype(np.float16)
        product = a.astype(np.float64) @ b.astype(np.float64)
    else:
        a, b = float_to_bf16(a), float_to_bf16(b)
        product = bf16_to_float(a).astype(np.float64) @ bf16_to_float(b).astype(np.float64)
    b_given = np.ascontiguousarray(b.T if transposed else b)
    tiling = struct.pack("<IIIII", m, n, k, step, transposed)
    c = np.zeros((m, n), np.float32)
    gm = [("a", a, "in"), ("b", b_given, "in"), ("c", c, "out")]
    report = run(f"product_{kind}", gm, tiling, kernel_type="AIC_ONLY")
    assert np.allclose(c, product, rtol=1e-5, atol=1e-5)
    steps = -(-k // step)
    assert report["gm"] == {
        "a": {"read": 2 * m * k, "written": 0},
        "b": {"read": 2 * k * n, "written": 0},
        "c": {"read": 0, "written": 4 * m * n},
    }
    assert report["instructions"]["M"] == steps and report["instructions"]["FIX"] == 1
    assert report["instructions"]["MTE2"] == 2 * steps
    narrow = np.zeros((m, n), np.uint16)
    run(f"product_{kind}_{kind}", gm[:2] + [("c", narrow, "out")], tiling, kernel_type="AIC_ONLY")
    expected = c.astype(np.float16).view(np.uint16) if kind == "half" else float_to_bf16(c)
    assert np.array_equal(narrow, expected)


# --- several cores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, name", [(np.float16, "half"), (np.float32, "float")])
def test_atomic_addition_over_cores(run, dtype, name):
    x, y = RNG.normal(size=64).astype(dtype), RNG.normal(size=64).astype(dtype)
    expected = y.copy()
    for core in range(7):
        expected = expected + x * dtype(core + 1)
    report = run(f"accumulate_{name}", [("x", x, "in"), ("y", y, "inout")], blocks=7)
    assert np.array_equal(y, expected)
    assert report["gm"]["y"] == {"read": 0, "written": 7 * y.nbytes} and report["cores_that_worked"] == 7


def test_mix_exchanges_through_gm(run):
    x = RNG.normal(size=(3, 32, 16)).astype(np.float16)
    work, y = np.zeros((3, 32, 32), np.float32), np.zeros((3, 32, 32), np.float32)
    report = run("mix", [("x", x, "in"), ("work", work, "out"), ("y", y, "out")], blocks=3, kernel_type="MIX_AIC_1_2")
    wide = x.astype(np.float64)
    assert np.allclose(y, 2 * wide @ wide.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)
    assert [core["name"] for core in report["cores"][:3]] == [
        "AIC 0 (block 0)",
        "AIV 0 (block 0, sub-block 0)",
        "AIV 1 (block 0, sub-block 1)",
    ]
    assert report["cores_that_worked"] == 9
    # 2 x 2 x 1 products of two fractals; 512 numbers in repeats of 64.
    assert [core["repeats"] for core in report["cores"][:3]] == [4, 8, 8]
    assert report["peak"] == {"L1": 1024, "L0A": 1024, "L0B": 1024, "L0C": 4096, "UB": 2048}


def test_all_cores_synchronize(run):
    work, y = np.zeros(8 * 6, np.int32), np.zeros(8 * 6, np.int32)
    report = run("neighbours", [("work", work, "out"), ("y", y, "out")], blocks=6, kernel_type="MIX_AIV_1_0")
    expected = np.repeat((np.arange(6) + 1) % 6, 8)
    expected[::8] **= 2
    assert np.array_equal(y, expected)
    assert report["instructions"]["S"] == 6 * 3


def test_unwritten_outputs_stay_poisoned_and_are_counted(run):
    x = np.ones(64, np.float16)
    y, z = np.ones(64, np.float16), np.zeros(100, np.float16)
    report = run("add", [("x", x, "in"), ("y", y, "in"), ("z", z, "out")], struct.pack("<III", 64, 64, 64))
    assert report["unwritten"] == {"z": 72}
    assert np.all(z[:64] == 2) and np.all(np.isnan(z[64:]))


def test_the_host_sees_the_same_platform_as_the_simulator(libraries):
    sizes = np.zeros(8, np.uint64)
    libraries["order_rules"].run("platform_sizes", [("sizes", sizes, "out")])
    assert list(sizes[:5]) == [196352, 524032, 64 << 10, 64 << 10, 128 << 10]
