"""The arrays that a network is given for one step."""

import dataclasses
from typing import List, Sequence

import numpy as np

from mindlora.serving.request import Part


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """B parts with T tokens together, of which R choose a next token. All arrays are int32.

    Attributes:
        tokens (array [T]): Token ids, part after part.
        positions (array [T]): Position of each in its request.
        slots (array [T]): Slot of the adapter of each, -1 for the base.
        context_lengths (array [B]): Tokens of each request in the cache after the step.
        query_lengths (array [B]): Tokens of each request in the step.
        block_tables (array [B, max_blocks]): The blocks of each request, in order; -1 after the last.
        slot_mapping (array [T]): Where the key and value of each token go: block * block_size + place in the block.
        last (array [R]): Index in tokens of the last one of each part that samples.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    context_lengths: np.ndarray
    query_lengths: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    last: np.ndarray


def step_inputs(parts: Sequence[Part], block_size: int, max_blocks: int) -> StepInputs:
    """Returns the arrays for one step.

    Args:
        parts (sequence of Part): What the step computes, at least one.
        block_size (int): Tokens of a block.
        max_blocks (int): Blocks of the longest sequence.

    Returns:
        StepInputs: The arrays.
    """
    starts = np.array([part.start for part in parts], np.int32)
    counts = np.array([part.count for part in parts], np.int32)
    slots = np.array([part.request.slot for part in parts], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    tokens: List[int] = []
    tables = np.full((len(parts), max_blocks), -1, np.int32)
    for row, part in zip(tables, parts):
        tokens += part.request.tokens[part.start : part.start + part.count]
        row[: len(part.request.blocks)] = part.request.blocks
    rows = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    positions = np.arange(len(tokens), dtype=np.int32) + (starts - ends + counts)[rows]
    return StepInputs(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        slots=slots[rows],
        context_lengths=starts + counts,
        query_lengths=counts,
        block_tables=tables,
        slot_mapping=tables[rows, positions // block_size] * block_size + positions % block_size,
        last=ends[[part.samples for part in parts]] - 1,
    )
