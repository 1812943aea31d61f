"""Damaged .ckpt and .bin files, and damaged mindlora metadata."""

import json
import struct
import zipfile

from tests.support import torch_zip as tz
from tests.support.adapter_samples import (
    WEIGHTS,
    K,
    Q,
    ckpt_records,
    folder,
    header_of,
    make,
    peft_tensors,
    record,
    safetensors,
)
from tests.support.damaged_cases import FORMAT, MISSING, QA, TRUNCATED, add

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
add("ckpt: garbage", ckpt(bytes(range(256)) * 4), TRUNCATED, "a.ckpt is truncated or not a MindSpore checkpoint")
add(
    "ckpt: cut",
    ckpt(lambda: record(*ckpt_records(make()))[:-5]),
    TRUNCATED,
    "is truncated or not a MindSpore checkpoint",
)
add(
    "ckpt: its last record is missing",
    ckpt(lambda: record(("mindlora_begin", "Int32", (1,), bytes(4)), *ckpt_records(make()))),
    TRUNCATED,
    "its last record is",
)
add("ckpt: a zip", ckpt(b"PK\x03\x04" + bytes(40)), TRUNCATED, "a.ckpt is truncated or not a MindSpore checkpoint")
# On these, MindSpore would write past the end of its memory, or make up values.
add("ckpt: more bytes than its shape takes", lying((2, 1)), TRUNCATED, f"{K}.mindpet_delta_lora_b is Float32 [2, 1]")
add("ckpt: fewer bytes than its shape takes", lying((40, 2)), TRUNCATED, f"{K}.mindpet_delta_lora_b is Float32 [40, 2]")
add("ckpt: a huge shape", lying((2**40,)), TRUNCATED, "is Float32 [1099511627776] in 32 bytes")
add("ckpt: a negative shape", lying((-4, -2)), TRUNCATED, "is Float32 [-4, -2] in 32 bytes")
add("ckpt: 40 axes", lying((1,) * 38 + (4, 2)), TRUNCATED, "in 32 bytes")
add("ckpt: an unknown dtype", lying((4, 2), "Float33"), FORMAT, "is stored as Float33, which is not supported")
add("ckpt: whole numbers", lying((4, 2), "Int32"), FORMAT, f"{K}.mindpet_delta_lora_b is int32; it must be float32")
add(
    "ckpt: a tensor twice",
    ckpt(lambda: record(*ckpt_records(make()) * 2)),
    FORMAT,
    f"has {Q}.mindpet_delta_lora_a twice",
)
add("ckpt: half a pair", ckpt(lambda: record(*ckpt_records(make())[1:])), MISSING, "lacks half of 1 pairs", f"{Q} B")
add(
    "ckpt: a record that is not text",
    ckpt(lambda: record(*ckpt_records(make()), ("mindlora", "str", (1,), b"\xff" * 8))),
    TRUNCATED,
    "its last record is not text",
)

# Metadata -----------------------------------------------------------------------------------------------------


def damaged_metadata(value):
    """A .safetensors under MindFormers' names with ``value`` as mindlora's metadata, as JSON unless it is a string."""

    def make_it(path):
        header, content = header_of(
            {f"{place}.mindpet_delta_lora_{half.lower()}": array for (place, half), array in make().tensors.items()}
        )
        header["__metadata__"] = {"mindlora": value if isinstance(value, str) else json.dumps(value)}
        (path / "a.safetensors").write_bytes(safetensors(header, content))
        return str(path / "a.safetensors")

    return make_it


METADATA = "mindlora's metadata in "
for value, words in (
    ("{", "is not JSON"),
    ("[]", "holds a list instead of a JSON object"),
    ("5", "holds a int"),
    ("[" * 50_000, "is not JSON"),
    ('{"dropout": ' + "1" * 5000 + "}", "is not JSON"),
):
    add(f"metadata {value[:12]}", damaged_metadata(value), FORMAT, METADATA, words)
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
            f"metadata: {field} {number}",
            damaged_metadata({field: value}),
            FORMAT,
            METADATA,
            f"is damaged: {field} is ",
            "it must be ",
        )
add(
    "metadata: a selection of numbers",
    damaged_metadata({"selection": {"target_modules": [1]}}),
    FORMAT,
    METADATA,
    "target_modules is [1]",
)
add(
    "metadata: a pair that is not there", damaged_metadata({"alphas": {Q: 3, K: 3, "lm_head": 3}}), MISSING, "'lm_head'"
)
add(
    "metadata: a module that is not there", damaged_metadata({"whole": ["lm_head.weight"]}), MISSING, "'lm_head.weight'"
)
add(
    "metadata: a pair without alpha",
    damaged_metadata({"alphas": {Q: 3}}),
    FORMAT,
    METADATA,
    "it has no lora_alpha for " + K,
)

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
    "Nothing in it was run",
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
