"""The wire format against google.protobuf, and what is refused."""

import mindspore  # noqa: F401, I001 (before google.protobuf, whose implementation it chooses)
import pytest
from google.protobuf import wrappers_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from mindlora.core.formats import protobuf

NUMBERS = st.integers(0, 2**64 - 1)


def read(message):
    return [(f.field, f.wire_type, f.value, bytes(f.content)) for f in protobuf.fields(memoryview(message))]


@given(NUMBERS)
@example(0)
@example(127)
@example(128)
@example(2**64 - 1)
def test_a_number_is_protobufs(value):
    # The default value is not written.
    expected = wrappers_pb2.UInt64Value(value=value).SerializeToString()
    assert (protobuf.number(1, value) if value else b"") == expected
    assert read(expected) == ([(1, protobuf.NUMBER, value, b"")] if value else [])


@given(st.binary(max_size=300))
@example(b"x" * 127)
@example(b"x" * 128)
def test_a_content_is_protobufs(value):
    expected = wrappers_pb2.BytesValue(value=value).SerializeToString()
    assert (protobuf.content(1, value) if value else b"") == expected
    assert read(expected) == ([(1, protobuf.CONTENT, 0, value)] if value else [])


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), NUMBERS | st.binary(max_size=40))))
def test_fields_come_in_their_order(values):
    message = b"".join(
        protobuf.number(field, value) if isinstance(value, int) else protobuf.content(field, value)
        for field, value in values
    )
    assert read(message) == [
        (field, protobuf.NUMBER, value, b"") if isinstance(value, int) else (field, protobuf.CONTENT, 0, value)
        for field, value in values
    ]


def test_fields_of_a_fixed_size_are_skipped():
    double = wrappers_pb2.DoubleValue(value=2.5).SerializeToString()
    single = wrappers_pb2.FloatValue(value=2.5).SerializeToString()
    assert read(double + single + protobuf.number(3, 7)) == [(3, protobuf.NUMBER, 7, b"")]


@pytest.mark.parametrize(
    "message, problem",
    [
        (b"\x08", "it ends inside a number, at byte 1"),
        (b"\x08\x80", "it ends inside a number, at byte 2"),
        (b"\x08" + b"\x80" * 10, "the number before byte 11 is longer than 64 bits"),
        (b"\x0a\x05abc", "a field of 5 bytes begins at byte 2 of 5"),
        (b"\x09abc", "a field of 8 bytes begins at byte 1 of 4"),
        (b"\x0d", "a field of 4 bytes begins at byte 1 of 1"),
        (b"\x0b", "no field of a protobuf message begins at byte 1"),
        (b"\x02\x00", "no field of a protobuf message begins at byte 2"),
    ],
)
def test_what_is_no_message(message, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        read(message)


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_an_error(message):
    try:
        found = read(message)
    except ValueError:
        return
    assert sum(len(content) for *_, content in found) <= len(message)
