"""Damaged .safetensors files: cuts, headers, shapes and dtypes, and tensors that are not pairs."""

import json

import numpy as np

from tests.support.adapter_samples import WEIGHTS, K, Q, entry, folder, safetensors
from tests.support.damaged_cases import (
    FORMAT,
    KA,
    KB,
    MISSING,
    QA,
    QB,
    SHAPE,
    TRUNCATED,
    add,
    sound,
    with_tensors,
    with_weights,
)

# Safetensors: cuts and the header -------------------------------------------------------------------------------


def cut(where):
    def make_it(path):
        whole = safetensors(*sound())
        header = 8 + int.from_bytes(whole[:8], "little")
        return folder(path, weights=whole[: {"header": header, "half": header // 2}.get(where, where)])

    return make_it


for where in (0, 1, 7, 8, 20, "half", "header", -1, -40):
    add(f"cut at {where}", cut(where), TRUNCATED, WEIGHTS, "is truncated or damaged", "Copy or save it again")


for size, words in (
    (0, "is not a safetensors file"),
    (2**63, "is not a safetensors file"),
    (2**64 - 1, "is not a safetensors file"),
    (2**26, "is truncated or damaged"),
    (10, "is not a safetensors file"),
):
    add(
        f"header of {size} bytes",
        with_weights(lambda size=size: safetensors(*sound(), length=size)),
        TRUNCATED if "truncated" in words else FORMAT,
        WEIGHTS,
        words,
    )
for name, header in (
    ("no JSON", b"{'a': 1}"),
    ("a list", b"[1, 2]"),
    ("null", b"null"),
    ("latin-1", b'{"\xe9": 1}'),
    ("UTF-16", '{"a": 1}'.encode("utf-16")),
    ("an entry that is a string", b'{"a": "F32"}'),
    ("an entry without shape", b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}'),
    ("deep nesting", b'{"a":' * 100_000),
    ("NaN", b'{"a": NaN}'),
    ("a lone surrogate", b'{"\\ud800": 1}'),
    ("5000 digits", b'{"a": ' + b"9" * 5000 + b"}"),
    ("metadata of numbers", b'{"__metadata__": {"a": 1}}'),
    ("metadata twice", b'{"__metadata__": {}, "__metadata__": {}}'),
):
    add(f"header: {name}", with_weights(safetensors(header, bytes(4))), FORMAT, WEIGHTS, "is not a safetensors file")
add(
    "header: an entry that is a list",
    with_weights(safetensors(b'{"a": ["F32", [1], [0, 4]]}', bytes(4))),
    FORMAT,
    WEIGHTS,
    "the entry of a in its header is not an object",
)
add("header: nothing in it", with_weights(safetensors(b"{}")), FORMAT, "holds no LoRA tensor. It holds: nothing.")


def edited(change, at=QB):
    """A file with a tensor's entry in its header changed."""

    def content():
        header, rest = sound()
        header[at].update(change)
        return safetensors(header, rest)

    return with_weights(content)


for name, change, error, words in (
    ("overlap", {"data_offsets": [0, 48]}, FORMAT, "is not a safetensors file"),
    ("a hole", {"shape": [5, 2], "data_offsets": [56, 96]}, FORMAT, "is not a safetensors file"),
    ("past the end", {"data_offsets": [2**40, 2**40 + 48]}, FORMAT, "is not a safetensors file"),
    ("negative", {"data_offsets": [-48, 0]}, FORMAT, "is not a safetensors file"),
    ("reversed", {"data_offsets": [96, 48]}, FORMAT, "is not a safetensors file"),
    ("too large for 64 bits", {"data_offsets": [0, 2**64]}, FORMAT, "is not a safetensors file"),
    ("three", {"data_offsets": [48, 96, 96]}, FORMAT, "is not a safetensors file"),
):
    add(f"offsets: {name}", edited(change), error, WEIGHTS, words)
for name, change, words in (
    ("F32 of float16's bytes", {"dtype": "F32", "shape": [6, 4]}, "is not a safetensors file"),
    ("F64 of float32's bytes", {"dtype": "F64"}, "is not a safetensors file"),
    ("one that nobody knows", {"dtype": "F33"}, "is not a safetensors file"),
    ("one without a NumPy dtype", {"dtype": "F8_E4M3", "shape": [48]}, "is stored as F8_E4M3, which is not"),
    ("whole numbers", {"dtype": "I32"}, f"{QB} is int32; it must be float32, float16 or bfloat16"),
    ("truth values", {"dtype": "BOOL", "shape": [48]}, f"{QB} is bool; it must be"),
):
    add(f"dtype: {name}", edited(change), FORMAT, WEIGHTS, words)
for shape in ([2**40], [2**20, 2**20], [2**32, 2**32], [2**64], [-6, 2]):
    add(f"shape {shape}", edited({"shape": shape}), FORMAT, WEIGHTS, "is not a safetensors file")
for shape in ([0, 2**62], [2**40, 0, 2**40]):
    add(
        f"empty shape {shape}",
        with_weights(
            lambda shape=shape: safetensors(
                {**sound()[0], QB.replace("q_proj", "o_proj"): entry(shape=shape, offsets=(176, 176))}, sound()[1]
            )
        ),
        FORMAT,
        WEIGHTS,
        "which is not a valid array shape",
    )
add("shape of 40 axes", edited({"shape": [1] * 38 + [6, 2]}), FORMAT, WEIGHTS, "which is not a valid array shape")
add(
    "a key twice",
    with_weights(
        lambda: safetensors(
            (json.dumps(sound()[0])[:-1] + f', "{QB}": {json.dumps(sound()[0][QB])}}}').encode(), sound()[1]
        )
    ),
    FORMAT,
    WEIGHTS,
    f"has {QB} twice, so it is unclear which one counts",
)

# Tensors --------------------------------------------------------------------------------------------------------


def swapped(tensors):
    tensors[QA], tensors[QB] = tensors[QB], tensors[QA]


def transposed(name):
    return lambda tensors: tensors.update({name: tensors[name].T.copy()})


def filled(name, value):
    def change(tensors):
        tensors[name][1, 1] = value

    return change


def renamed(name):
    return lambda tensors: tensors.update({name: tensors.pop(KA)})


add("A and B swapped", with_tensors(swapped), SHAPE, "A and B are swapped", Q)
add("A transposed", with_tensors(transposed(QA)), SHAPE, "A is transposed: it must be [r, in]", Q)
add("B transposed", with_tensors(transposed(KB)), SHAPE, "B is transposed: it must be [out, r]", K)
add(
    "another rank than declared",
    with_tensors(lambda _: None, r=4),
    "RankMismatchError",
    "the configuration declares rank 4 and the tensors have 2",
)
add(
    "another rank than rank_pattern's",
    with_tensors(lambda _: None, rank_pattern={"k_proj": 3}),
    "RankMismatchError",
    "declares rank 3 and the tensors have 2",
    K,
)
add("half a pair", with_tensors(lambda tensors: tensors.pop(KB)), MISSING, "lacks half of 1 pairs", f"{K} A")
add(
    "a whole pair is missing",
    with_tensors(lambda tensors: (tensors.pop(KA), tensors.pop(KB))),
    MISSING,
    "lacks 2 LoRA tensors of the network",
    f"{K} A, {K} B",
    read=False,
)
add(
    "a pair too many",
    with_tensors(
        lambda tensors: tensors.update({QA.replace("q_", "v_"): tensors[KA], QB.replace("q_", "v_"): tensors[KB]})
    ),
    "UnexpectedTensorsError",
    "holds 2 LoRA tensors that the network has no place for",
    "wv",
    read=False,
)
add(
    "another size",
    with_tensors(lambda tensors: tensors.update({KB: np.ones((5, 2), np.float32)})),
    SHAPE,
    f"{K} B is [5, 2], the network's is [4, 2]",
    read=False,
)
for name, value in (("NaN", np.nan), ("infinity", np.inf), ("minus infinity", -np.inf)):
    add(f"{name} in a tensor", with_tensors(filled(KA, value)), "NotFiniteError", f"NaN or infinity: {K} A", read=False)
for name, part in (
    ("parent folders", "../../etc"),
    ("an absolute path", "/etc/passwd"),
    ("empty parts", "a..b"),
    ("an empty last part", "a."),
    ("a newline", "a\nb"),
    ("a control character", "a\x1b[31m"),
    ("a zero", "a\x00b"),
    ("a space", "a b"),
    ("a superscript digit", "layers.²"),
    ("10000 letters", "a" * 10_000),
):
    add(
        f"name with {name}",
        with_tensors(renamed(f"base_model.model.{part}.lora_A.weight")),
        FORMAT,
        WEIGHTS,
        "holds a tensor named ",
        "which is not the path of a cell",
    )
add(
    "a foreign tensor with a control character",
    with_tensors(renamed("x\x1b[31m")),
    "UnexpectedTensorsError",
    "holds tensors that are not LoRA's: 'x\\x1b[31m'.",
)
