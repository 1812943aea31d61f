"""Adapters damaged at random: we read what another reader reads, or raise one of our errors, and never any other."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from mindlora.core.errors import AdapterFormatError, LoraError
from mindlora.core.formats import ckpt_file
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.numerics.dtypes import dtype_name
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.dialects import peft_config
from mindlora.files.adapters.dialects.peft_config import selects
from mindlora.models import names
from tests.support import torch_zip
from tests.support.adapter_samples import (
    CONFIG,
    WEIGHTS,
    K,
    Q,
    assert_same,
    ckpt_records,
    folder,
    header_of,
    make,
    peft_tensors,
    record,
    safetensors,
    text,
)

# The same examples in each run; a hang would be an example that takes longer than the deadline.
settings.register_profile(
    "fuzz",
    derandomize=True,
    deadline=2000,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FUZZ = settings.get_profile("fuzz")

# (where, as a fraction of the length; what is done there; the byte or bytes).
DAMAGES = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(["set", "flip", "insert", "delete", "cut", "double"]),
        st.binary(min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def damaged(content, damages):
    """Returns the content after each damage."""
    for share, kind, new in damages:
        at = min(int(share * len(content)), max(len(content) - 1, 0))
        if kind == "set":
            content = content[:at] + new + content[at + len(new) :]
        elif kind == "flip" and content:
            content = content[:at] + bytes([content[at] ^ (1 << new[0] % 8)]) + content[at + 1 :]
        elif kind == "insert":
            content = content[:at] + new + content[at:]
        elif kind == "delete":
            content = content[:at] + content[at + len(new) :]
        elif kind == "cut":
            content = content[:at]
        elif kind == "double":
            content = content[:at] + content[at : at + 8] + content[at:]
    return content


def read(path, **arguments):
    """Returns the adapter, or None if one of our errors is raised; any other error comes through and fails the test."""
    try:
        return adapter_files.read(str(path), **arguments)
    except LoraError as error:
        # An error never comes without a message, or with only that of another library.
        assert len(str(error)) > 20 and len(str(error)) < 5000
        return None


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory):
    """An adapter folder that is rewritten for each example."""
    return tmp_path_factory.mktemp("fuzz") / "adapter"


SOUND = safetensors(*header_of(peft_tensors(make())))
HEADER = 8 + int.from_bytes(SOUND[:8], "little")


def check_safetensors(adapter_folder, content):
    """Asserts that the library accepts whatever TensorFile accepts, and that both read the same bytes."""
    path = adapter_folder / WEIGHTS
    path.write_bytes(content)
    try:
        with safe_open(path, "np"):
            theirs = {
                name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in deserialize(content)
            }
    except SafetensorError:
        theirs = None
    try:
        with TensorFile(path) as file:
            mine = {name: file.read(name) for name in file.tensors}
    except LoraError:
        mine = None
    if mine is not None:
        assert theirs is not None and mine.keys() == theirs.keys()
        for name, array in mine.items():
            dtype, shape, data = theirs[name]
            assert (array.shape, array.tobytes()) == (shape, data)
            assert (
                dtype.lower().lstrip("bf").lstrip("ui") == "".join(filter(str.isdigit, dtype_name(array.dtype)))
                or dtype == "BOOL"
            )
    adapter = read(adapter_folder)
    if adapter is not None:
        # Each pair is, bit for bit, what the library reads.
        stored = {data for _, _, data in theirs.values()}
        assert mine is not None and {array.tobytes() for array in adapter.tensors.values()} <= stored
        assert all(adapter.rank(path) == 2 for path in adapter.paths)
    return adapter


@settings(FUZZ, max_examples=200)
@given(DAMAGES)
@example([(0.0, "flip", b"\0")])
def test_safetensors(adapter_folder, damages):
    folder(adapter_folder, weights=SOUND)
    check_safetensors(adapter_folder, damaged(SOUND, damages))


@settings(FUZZ, max_examples=200)
@given(DAMAGES)
def test_the_header_of_safetensors(adapter_folder, damages):
    """Damages only its text and keeps the length right, so that the text is read."""
    folder(adapter_folder, weights=SOUND)
    check_safetensors(adapter_folder, safetensors(damaged(SOUND[8:HEADER], damages), SOUND[HEADER:]))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([2**31, 2**63, 2**64, 10**400, "F32", "q_proj", "(", "a{9999999999}", "(?i)x", "²"]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from([Q, K, "q_proj"]), values, max_size=3)
    ),
    max_leaves=6,
)


@settings(FUZZ, max_examples=120)
@given(
    st.sampled_from(sorted(peft_tensors(make()))),
    st.sampled_from(["dtype", "shape", "data_offsets", "more", None]),
    JSON,
)
def test_values_in_the_header_of_safetensors(adapter_folder, name, field, value):
    header, content = header_of(peft_tensors(make()))
    if field:
        header[name][field] = value
    else:
        header[name] = value
    folder(adapter_folder, weights=SOUND)
    # JSON may hold lone surrogates, which are not valid UTF-8: json.dumps escapes them.
    adapter = check_safetensors(adapter_folder, safetensors(header, content))
    if adapter is not None and field in ("dtype", None):
        assert_same(adapter, adapter_files.read(folder(adapter_folder, weights=SOUND)))


@settings(FUZZ, max_examples=120)
@given(DAMAGES)
def test_bytes_of_the_config(adapter_folder, damages):
    folder(adapter_folder, weights=SOUND)
    before = (adapter_folder / CONFIG).read_bytes()
    (adapter_folder / CONFIG).write_bytes(damaged(before, damages))
    adapter = read(adapter_folder)
    if adapter is not None:
        content = json.loads((adapter_folder / CONFIG).read_bytes())
        # Damage may leave another valid configuration; then the adapter must agree with that one.
        assert all(adapter.alphas[path] > 0 and adapter.rank(path) == 2 for path in adapter.paths)
        assert adapter.use_rslora is bool(content.get("use_rslora"))
        # PEFT's default is 8.
        assert content["r"] == 2 and adapter.alphas[Q] == content.get("lora_alpha", 8)


FIELDS = sorted(
    {*peft_config._USED, *peft_config._SELECTING, *peft_config._NEUTRAL, *peft_config._UNSUPPORTED, "unknown"}
)


@settings(FUZZ, max_examples=280)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=2))
def test_values_in_the_config(adapter_folder, fields):
    folder(adapter_folder, weights=SOUND, **fields)
    adapter = read(adapter_folder)
    if adapter is None:
        return
    with TensorFile(adapter_folder / WEIGHTS) as file:
        assert {array.tobytes() for array in adapter.tensors.values()} == {
            file.read(name).tobytes() for name in file.tensors
        }
    # What was accepted makes sense: it can be written, and reads back the same.
    assert all(0 < adapter.scale(path) < float("inf") for path in adapter.paths) and 0 <= adapter.dropout < 1
    assert isinstance(adapter.use_rslora, bool)
    again = adapter_folder.parent / "again"
    adapter_files.write(adapter, str(again))
    # If the configuration names no modules, or others, those of the tensors are written.
    modules = sorted(names.to_hugging_face(path) for path in adapter.paths)
    if not selects(adapter.selection, modules, []):
        adapter.selection = {"target_modules": modules}
    assert_same(adapter_files.read(str(again)), adapter)


@settings(FUZZ, max_examples=120)
@given(
    st.sampled_from(
        ["alphas", "use_rslora", "dropout", "selection", "base_model", "whole", "base_fingerprint", "more"]
    ),
    JSON,
)
def test_values_in_mindlora_s_metadata(adapter_folder, field, value):
    tensors = {f"{path}.mindpet_delta_lora_{half.lower()}": array for (path, half), array in make().tensors.items()}
    header, content = header_of(tensors)
    header["__metadata__"] = {"mindlora": json.dumps({"alphas": {Q: 3, K: 3}, field: value})}
    path = adapter_folder.parent / "a.safetensors"
    path.write_bytes(safetensors(header, content))
    adapter = read(path)
    if adapter is not None and adapter.alphas:
        adapter_files.write(adapter, str(adapter_folder.parent / "b.safetensors"), "mindformers")
        assert_same(adapter_files.read(str(adapter_folder.parent / "b.safetensors")), adapter)
        adapter_files.write(adapter, str(adapter_folder.parent / "b"))
        adapter_files.read(str(adapter_folder.parent / "b"))


# .ckpt ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound_ckpt():
    # Imports MindSpore, which takes as long as an example may take.
    return record(
        ("mindlora_begin", "Int32", (1,), b"\1\0\0\0"),
        *ckpt_records(make()),
        ("mindlora", *text(json.dumps({"alphas": {Q: 3, K: 3}}))),
    )


@settings(FUZZ, max_examples=160)
@given(DAMAGES)
def test_ckpt(adapter_folder, sound_ckpt, damages):
    path = adapter_folder.parent / "a.ckpt"
    path.write_bytes(damaged(sound_ckpt, damages))
    adapter = read(path)
    if adapter is not None:
        assert all(array.size < 1000 for array in adapter.tensors.values())
        assert all(adapter.rank(path) > 0 for path in adapter.paths)


@settings(FUZZ, max_examples=120)
@given(
    st.lists(st.integers(-3, 9) | st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.sampled_from([*ckpt_file._DTYPES, "str", "", "Float33"]),
    st.binary(max_size=60),
)
def test_records_of_a_ckpt(adapter_folder, dims, dtype, content):
    """A record is read if and only if it has as many bytes as its shape and dtype take."""
    path = adapter_folder.parent / "a.ckpt"
    path.write_bytes(record(("x", dtype, dims, content)))
    shape = [] if dims == [0] else dims
    sizes = {
        "Float64": 8,
        "Float32": 4,
        "Float16": 2,
        "BFloat16": 2,
        "Bool": 1,
        "Int8": 1,
        "UInt8": 1,
        "Int16": 2,
        "UInt16": 2,
        "Int32": 4,
        "UInt32": 4,
        "Int64": 8,
        "UInt64": 8,
    }
    count = 1
    for size in shape:
        count *= size
    is_valid = dtype in sizes and all(size > 0 for size in shape) and count * sizes[dtype] == len(content)
    try:
        found = ckpt_file.read(str(path), lambda key: True)[0]["x"]
        assert is_valid and found.shape == tuple(shape) and found.tobytes() == content
    except LoraError:
        assert not is_valid


# .bin -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound_bin(tmp_path_factory):
    path = tmp_path_factory.mktemp("bin") / "a.bin"
    torch_zip.save(path, peft_tensors(make()))
    return path.read_bytes()


@settings(FUZZ, max_examples=160)
@given(DAMAGES)
def test_bin(adapter_folder, sound_bin, damages):
    shutil.rmtree(adapter_folder, ignore_errors=True)
    folder(adapter_folder, {})
    os.unlink(adapter_folder / WEIGHTS)
    (adapter_folder / "adapter_model.bin").write_bytes(damaged(sound_bin, damages))
    adapter = read(adapter_folder, allow_pickle=True)
    if adapter is not None:
        # The archive has a checksum for each storage and for the program: what is read is what was written.
        for array in adapter.tensors.values():
            assert array.tobytes() in {each.tobytes() for each in make().tensors.values()}


@settings(FUZZ, max_examples=240)
@given(DAMAGES)
def test_programs_of_a_bin(adapter_folder, damages):
    """Damages only the program and keeps the checksum right, so that the program is run."""
    tensors = peft_tensors(make())
    value = torch_zip.items((key, torch_zip.tensor(array, str(i))) for i, (key, array) in enumerate(tensors.items()))
    path = adapter_folder.parent / "b.bin"
    # Without its header and its end, which torch_zip adds.
    torch_zip.write(
        path, damaged(value, damages), {str(i): array.tobytes() for i, array in enumerate(tensors.values())}
    )
    adapter = read(path, allow_pickle=True)
    if adapter is not None:
        total = sum(array.nbytes for array in adapter.tensors.values())
        assert total <= 10 * os.path.getsize(path)


def test_the_damage_changes_something():
    """Otherwise the properties above could hold just because nothing was damaged."""
    assert damaged(b"abcdef", [(0.5, "set", b"XY")]) == b"abcXYf" and damaged(b"ab", [(1.0, "cut", b"x")]) == b"a"
    assert damaged(b"abc", [(0.0, "insert", b"X")]) == b"Xabc" and damaged(b"abc", [(0.4, "delete", b"xx")]) == b"a"
    assert damaged(b"abc", [(0.0, "flip", b"\0")]) == b"`bc" and damaged(b"abc", [(0.0, "double", b"x")]) == b"abcabc"
    assert damaged(b"", [(0.5, "flip", b"x"), (0.5, "cut", b"x")]) == b""


def test_the_undamaged_are_read(adapter_folder, sound_bin, sound_ckpt):
    folder(adapter_folder, weights=SOUND)
    assert check_safetensors(adapter_folder, SOUND) is not None
    (adapter_folder.parent / "a.ckpt").write_bytes(sound_ckpt)
    (adapter_folder / "adapter_model.bin").write_bytes(sound_bin)
    os.unlink(adapter_folder / WEIGHTS)
    for path in (adapter_folder, adapter_folder.parent / "a.ckpt"):
        adapter = adapter_files.read(str(path), allow_pickle=True)
        for key, array in make().tensors.items():
            np.testing.assert_array_equal(adapter.tensors[key], array)
    with pytest.raises(AdapterFormatError, match="is a pickle, which can run programs"):
        adapter_files.read(str(adapter_folder))
