"""Amounts of memory as people write them."""

import pytest

from mindlora.run.plan.units import gib, parse_memory, size_text


@pytest.mark.parametrize(
    "text, size", [("32GB", 32 * 10**9), ("29.8GiB", int(29.8 * 2**30)), ("64 gb", 64 * 10**9), ("1.5TiB", 3 * 2**39)]
)
def test_a_size_has_a_number_and_a_unit(text, size):
    assert parse_memory(text) == size


def test_sizes_are_written_with_two_decimals():
    assert (gib(2**30), gib(10**9), gib(5 * 2**40)) == ("1.00", "0.93", "5,120.00")
    assert [size_text(size) for size in (12, 3 * 2**19, 2**30)] == ["12 bytes", "1.50 MiB", "1.00 GiB"]
