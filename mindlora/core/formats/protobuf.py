"""The part of protobuf's wire format that a MindSpore checkpoint uses: fields that are numbers, strings or messages.

google.protobuf is not used: MindSpore works with its pure-Python implementation only, and a process chooses the
implementation at the first import. Reading a file before MindSpore is imported would break MindSpore.
"""

from typing import Iterator, NamedTuple, Tuple

# The two wire types that the messages use; fields of the other types are skipped.
NUMBER, CONTENT = 0, 2
_FIXED_SIZES = {1: 8, 5: 4}


class Field(NamedTuple):
    """One field of a message: a NUMBER, whose ``content`` is empty, or a CONTENT, whose ``value`` is 0."""

    field: int
    wire_type: int
    value: int
    content: memoryview


def fields(message: memoryview) -> Iterator[Field]:
    """Yields the NUMBER and CONTENT fields in order; a damaged message ends in ValueError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field = key >> 3
        wire_type = key & 7
        if wire_type == NUMBER:
            value, at = _varint(message, at)
            yield Field(field, wire_type, value, message[at:at])
            continue
        size = _FIXED_SIZES.get(wire_type)
        if wire_type == CONTENT:
            size, at = _varint(message, at)
        if not field or size is None:
            raise ValueError(f"no field of a protobuf message begins at byte {at}")
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes begins at byte {at} of {len(message)}")
        if wire_type == CONTENT:
            yield Field(field, wire_type, 0, message[at : at + size])
        at += size


def number(field: int, value: int) -> bytes:
    """Returns the bytes of a field that is a whole number from 0 to 2^64 - 1."""
    return _encoded(field << 3 | NUMBER) + _encoded(value)


def content(field: int, value: bytes) -> bytes:
    """Returns the bytes of a field that is a string, bytes or a message."""
    return head(field, len(value)) + value


def head(field: int, size: int) -> bytes:
    """Returns the bytes that come before the ``size`` bytes of a string, bytes or a message."""
    return _encoded(field << 3 | CONTENT) + _encoded(size)


def _varint(message: memoryview, at: int) -> Tuple[int, int]:
    """Returns the number at byte ``at``, stored seven bits to a byte, and the offset of the byte after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(message):
            raise ValueError(f"it ends inside a number, at byte {at}")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise ValueError(f"the number before byte {at} is longer than 64 bits")


def _encoded(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
