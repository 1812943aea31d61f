"""A corpus of damaged adapters, which try_damaged_adapters.py tries.

Each case is a function that makes an adapter in a folder of its own and returns its path, with the error that reading
it must raise and words that the message must hold. test_damaged_adapters.py says what else must be true.
"""

import json
import os
import struct
import zipfile

import numpy as np

from tests.support import torch_zip as tz
from tests.support.adapter_samples import (
    CONFIG,
    WEIGHTS,
    K,
    Q,
    ckpt_records,
    entry,
    folder,
    header_of,
    key,
    make,
    peft_tensors,
    record,
    safetensors,
)

CASES = {}  # name -> (function, error, words, whether adapter_file.read itself must refuse it)
QA, QB, KA, KB = key(Q, "A"), key(Q, "B"), key(K, "A"), key(K, "B")
FORMAT, TRUNCATED, SHAPE, MISSING = (
    "AdapterFormatError",
    "TruncatedAdapterError",
    "ShapeMismatchError",
    "MissingTensorsError",
)


def add(name, make_it, error, *words, read=True):
    assert name not in CASES
    CASES[name] = make_it, error, words, read


def sound():
    return header_of(peft_tensors(make()))


# Safetensors: cuts and the header -------------------------------------------------------------------------------


def cut(where):
    def make_it(path):
        whole = safetensors(*sound())
        header = 8 + int.from_bytes(whole[:8], "little")
        return folder(path, weights=whole[: {"header": header, "half": header // 2}.get(where, where)])

    return make_it


for where in (0, 1, 7, 8, 20, "half", "header", -1, -40):
    add(f"cut at {where}", cut(where), TRUNCATED, WEIGHTS, "is truncated or damaged", "Copy or save it again")


def with_weights(content):
    return lambda path: folder(path, weights=content() if callable(content) else content)


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
    ("an entry that is a text", b'{"a": "F32"}'),
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
    """A file in whose header the entry of a tensor was changed."""

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
    ("whole numbers", {"dtype": "I32"}, f"{QB} is int32, and LoRA's tensors are float32, float16 or bfloat16"),
    ("truth values", {"dtype": "BOOL", "shape": [48]}, f"{QB} is bool, and LoRA's tensors are"),
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
        "a shape that no array can have",
    )
add("shape of 40 axes", edited({"shape": [1] * 38 + [6, 2]}), FORMAT, WEIGHTS, "a shape that no array can have")
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


def with_tensors(change, **fields):
    def make_it(path):
        tensors = peft_tensors(make())
        change(tensors)
        return folder(path, tensors, **fields)

    return make_it


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
        "names a tensor ",
        "which is not a path of a cell",
    )
add(
    "a foreign tensor with a control character",
    with_tensors(renamed("x\x1b[31m")),
    "UnexpectedTensorsError",
    "holds tensors that are not LoRA's: 'x\\x1b[31m'.",
)

# Configurations -------------------------------------------------------------------------------------------------

for field, values in (
    ("lora_alpha", (0, -1, float("nan"), float("inf"), "3", None, True, [3], 10**400)),
    ("r", (0, -2, "2", None, True, 2.5, float("nan"), {"a": 2})),
):
    for value in values:
        add(
            f"{field} {str(value)[:9]!r}",
            with_tensors(lambda _: None, **{field: value}),
            FORMAT,
            CONFIG,
            f"{field} is {value!r}"[:200],
            "it must be a ",
        )
for field, value in (
    ("use_dora", "false"),
    ("lora_bias", True),
    ("fan_in_fan_out", True),
    ("bias", "all"),
    ("peft_type", "IA3"),
    ("init_lora_weights", "pissa"),
    ("use_rslora", "false"),
    ("lora_dropout", 2),
    ("target_modules", 5),
    ("layers_to_transform", "0"),
    ("modules_to_save", "x"),
    ("rank_pattern", [1]),
    ("alpha_pattern", {"(": 1}),
    ("base_model_name_or_path", 5),
):
    add(f"{field} {value!r}", with_tensors(lambda _: None, **{field: value}), FORMAT, CONFIG, f": {field} ")
for name, content, words in (
    ("a list", b"[2, 3]", "holds a list and not a JSON object"),
    ("empty", b"", "is not JSON"),
    ("not UTF-8", b'{"r": 2, "lora_alpha": 3, "x": "\xe9"}', "is not JSON: 'utf-8' codec"),
    ("cut", b'{"r": 2, "lora_al', "is not JSON"),
    ("keys twice", b'{"r": 2, "r": 3}', "has r twice"),
    ("deep nesting", b'{"r":' + b"[" * 50_000, "is not JSON"),
    ("zeros", bytes(100), "is not JSON"),
    ("5000 digits", b'{"r": ' + b"1" * 5000 + b"}", "is not JSON: Exceeds the limit"),
):

    def write_config(path, content=content):
        folder(path, peft_tensors(make()))
        (path / CONFIG).write_bytes(content)
        return str(path)

    add(f"config: {name}", write_config, FORMAT, CONFIG, words)

# Files and folders ----------------------------------------------------------------------------------------------


def changed(change):
    def make_it(path):
        folder(path, peft_tensors(make()))
        return str(change(path) or path)

    return make_it


def replaced(name, how):
    """In place of a file, what ``how`` makes."""

    def change(path):
        (path / name).unlink()
        how(path / name)

    return changed(change)


def two_candidates(path):
    for name in ("a.safetensors", "b.safetensors"):
        (path / name).write_bytes(safetensors(*sound()))
    (path / WEIGHTS).unlink()
    (path / "mindformers_adapter_config.json").write_text("{}")


NO_FILE = "is not a file but a folder, a device, or a broken link"
add("config is missing", changed(lambda path: (path / CONFIG).unlink()), FORMAT, f"{CONFIG} is missing")
add("config is a folder", replaced(CONFIG, os.mkdir), FORMAT, CONFIG, NO_FILE)
add("config is a loop of links", replaced(CONFIG, lambda name: name.symlink_to(name)), FORMAT, CONFIG, NO_FILE)
add("weights are a folder", replaced(WEIGHTS, os.mkdir), FORMAT, WEIGHTS, NO_FILE)
add("weights are a loop of links", replaced(WEIGHTS, lambda name: name.symlink_to(name)), FORMAT, WEIGHTS, NO_FILE)
add(
    "weights are a link that leads nowhere",
    replaced(WEIGHTS, lambda name: name.symlink_to("x")),
    FORMAT,
    WEIGHTS,
    NO_FILE,
)
add("weights are a pipe", replaced(WEIGHTS, os.mkfifo), FORMAT, WEIGHTS, NO_FILE)
add("an empty folder", lambda path: str(path), FORMAT, f"holds no {WEIGHTS}. It holds: nothing.")
add(
    "a folder of something else",
    changed(lambda path: (path / WEIGHTS).rename(path / "model.safetensors") and None),
    FORMAT,
    f"holds no {WEIGHTS}. It holds: {CONFIG}, model.safetensors.",
)
add("a folder with two candidates", changed(two_candidates), FORMAT, "with 2 .safetensors files: a.safetensors, b.")
add("nothing there", lambda path: str(path / "absent"), FORMAT, "absent does not exist.")
add("a file in a path of folders", changed(lambda path: path / CONFIG / "adapter"), FORMAT, "adapter does not exist.")
add("another kind of file", changed(lambda path: path / CONFIG), FORMAT, CONFIG, "is neither an adapter folder nor a")

# .ckpt ----------------------------------------------------------------------------------------------------------


def ckpt(content):
    def make_it(path):
        (path / "a.ckpt").write_bytes(content() if callable(content) else content)
        return str(path / "a.ckpt")

    return make_it


def lying(dims, dtype="Float32"):
    return ckpt(
        lambda: record(
            *[
                (name, dtype, dims, content)
                if name.startswith(f"{K}.") and name.endswith("_b")
                else (name, "Float32", shape, content)
                for name, _, shape, content in ckpt_records(make())
            ]
        )
    )


add("ckpt: empty", ckpt(b""), TRUNCATED, "a.ckpt is truncated: it is empty")
add("ckpt: garbage", ckpt(bytes(range(256)) * 4), TRUNCATED, "a.ckpt is truncated or no MindSpore checkpoint")
add("ckpt: cut", ckpt(lambda: record(*ckpt_records(make()))[:-5]), TRUNCATED, "is truncated or no MindSpore checkpoint")
add(
    "ckpt: its last record is missing",
    ckpt(lambda: record(("mindlora_begin", "Int32", (1,), bytes(4)), *ckpt_records(make()))),
    TRUNCATED,
    "its last record is",
)
add("ckpt: a zip", ckpt(b"PK\x03\x04" + bytes(40)), TRUNCATED, "a.ckpt is truncated or no MindSpore checkpoint")
# What MindSpore would write past the end of its memory for, and what it would make up.
add("ckpt: more bytes than its shape takes", lying((2, 1)), TRUNCATED, f"{K}.mindpet_delta_lora_b is Float32 [2, 1]")
add("ckpt: fewer bytes than its shape takes", lying((40, 2)), TRUNCATED, f"{K}.mindpet_delta_lora_b is Float32 [40, 2]")
add("ckpt: a huge shape", lying((2**40,)), TRUNCATED, "is Float32 [1099511627776] in 32 bytes")
add("ckpt: a negative shape", lying((-4, -2)), TRUNCATED, "is Float32 [-4, -2] in 32 bytes")
add("ckpt: 40 axes", lying((1,) * 38 + (4, 2)), TRUNCATED, "in 32 bytes")
add("ckpt: an unknown dtype", lying((4, 2), "Float33"), FORMAT, "is stored as Float33, which is not supported")
add("ckpt: whole numbers", lying((4, 2), "Int32"), FORMAT, f"{K}.mindpet_delta_lora_b is int32, and LoRA's tensors are")
add(
    "ckpt: a tensor twice",
    ckpt(lambda: record(*ckpt_records(make()) * 2)),
    FORMAT,
    f"has {Q}.mindpet_delta_lora_a twice",
)
add("ckpt: half a pair", ckpt(lambda: record(*ckpt_records(make())[1:])), MISSING, "lacks half of 1 pairs", f"{Q} B")
add(
    "ckpt: a record that is no text",
    ckpt(lambda: record(*ckpt_records(make()), ("mindlora", "str", (1,), b"\xff" * 8))),
    TRUNCATED,
    "its last record is not a text",
)

# The record -----------------------------------------------------------------------------------------------------


def facts(value):
    """A .safetensors under MindFormers' names with a record of mindlora's, a text or what becomes one."""

    def make_it(path):
        header, content = header_of(
            {f"{place}.mindpet_delta_lora_{half.lower()}": array for (place, half), array in make().tensors.items()}
        )
        header["__metadata__"] = {"mindlora": value if isinstance(value, str) else json.dumps(value)}
        (path / "a.safetensors").write_bytes(safetensors(header, content))
        return str(path / "a.safetensors")

    return make_it


RECORD = "mindlora's metadata in "
for value, words in (
    ("{", "is not JSON"),
    ("[]", "holds a list and not a JSON object"),
    ("5", "holds a int"),
    ("[" * 50_000, "is not JSON"),
    ('{"dropout": ' + "1" * 5000 + "}", "is not JSON"),
):
    add(f"record {value[:12]}", facts(value), FORMAT, RECORD, words)
for field, values in (
    (
        "alphas",
        (
            [3],
            "3",
            3,
            {Q: "3", K: 3},
            {Q: 0, K: 3},
            {Q: float("nan"), K: 3},
            {Q: True, K: 3},
            {Q: float("inf"), K: 3},
            {Q: 10**400, K: 3},
        ),
    ),
    ("dropout", ("0.1", 1, -0.1, [0], True, float("nan"))),
    ("selection", (5, "q_proj", [1])),
    ("base_fingerprint", ([1], "x", {"shapes": 5}, {"values": [1]})),
    ("base_model", (5, ["x"])),
    ("whole", ("lm_head.weight", {"a": 1}, [5], 3)),
    ("use_rslora", ("yes", 1, [], "")),
):
    for number, value in enumerate(values):
        add(
            f"record: {field} {number}",
            facts({field: value}),
            FORMAT,
            RECORD,
            f"is damaged: {field} is ",
            "it must be ",
        )
add(
    "record: a selection of numbers",
    facts({"selection": {"target_modules": [1]}}),
    FORMAT,
    RECORD,
    "target_modules is [1]",
)
add("record: a pair that is not there", facts({"alphas": {Q: 3, K: 3, "lm_head": 3}}), MISSING, "'lm_head'")
add("record: a module that is not there", facts({"whole": ["lm_head.weight"]}), MISSING, "'lm_head.weight'")
add("record: a pair without alpha", facts({"alphas": {Q: 3}}), FORMAT, RECORD, "it has no lora_alpha for " + K)

# .bin -----------------------------------------------------------------------------------------------------------


def pickled(write):
    def make_it(path):
        folder(path, {})
        (path / WEIGHTS).unlink()
        write(path / "adapter_model.bin")
        return str(path)

    return make_it


def cut_bin(path):
    tz.save(path, peft_tensors(make()))
    path.write_bytes(path.read_bytes()[:-30])


def bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(300_000_000))


BIN = "adapter_model.bin"
COMMAND = tz.call(tz.named("os", "system"), tz.text("touch marker"))
add(
    "bin: runs a command",
    pickled(lambda path: tz.write(path, COMMAND)),
    FORMAT,
    BIN,
    "asks for os.system, which no dict of tensors needs",
    "Nothing of it was run",
)
add("bin: cut", pickled(cut_bin), TRUNCATED, BIN, "is truncated or damaged: File is not a zip file")
add("bin: garbage", pickled(lambda path: path.write_bytes(b"\x80\x02}.")), FORMAT, BIN, "is not what torch.save writes")
add("bin: a zip bomb", pickled(bomb), FORMAT, BIN, "a/data.pkl is compressed")
add(
    "bin: 2 ** 40 elements",
    pickled(
        lambda path: tz.write(
            path,
            tz.items([(QA, tz.rebuilt(tz.storage("FloatStorage", "0", 1), (2**40,), (0,)))]),
            {"0": struct.pack("<f", 1)},
        )
    ),
    FORMAT,
    BIN,
    "does not fit into 1 elements",
)
