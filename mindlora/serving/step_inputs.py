"""StepInputs: what a step of the scheduler's plan gives the network."""

import dataclasses
from typing import List, Sequence

import numpy as np

from mindlora.serving.request import Part


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """B parts with T tokens together, after R of which a next token is chosen. All arrays are int32.

    Attributes:
        tokens (array [T]): Token ids, part after part.
        positions (array [T]): Position of each in its request.
        slots (array [T]): Slot of the adapter of each, -1 for the base and before the first token that it acts on.
        context_lengths (array [B]): Tokens of each request in the cache after the step.
        query_lengths (array [B]): Tokens of each request in the step.
        block_tables (array [B, max_blocks]): The blocks of each request, in order; -1 after the last.
        slot_mapping (array [T]): Where the key and value of each token go: block * block_size + place in the block.
        last (array [R]): Index in tokens of the last one of each part that samples, and of its drafts behind it.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    context_lengths: np.ndarray
    query_lengths: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    last: np.ndarray

    @property
    def decodes(self) -> bool:
        """Whether each request has one token, after which the next one is chosen."""
        return len(self.last) == len(self.query_lengths) == len(self.tokens)

    def filled_up(self, batch: int) -> "StepInputs":
        """Returns the same for ``batch`` requests, of a step that decodes: its last token is computed several times.

        Each time the same key and value are written to the same place of the cache.
        """
        index = np.minimum(np.arange(batch, dtype=np.int32), np.int32(len(self.tokens) - 1))
        fields = {field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)}
        return StepInputs(**{**fields, "last": np.arange(batch, dtype=np.int32)})


def step_inputs(parts: Sequence[Part], block_size: int, max_blocks: int) -> StepInputs:
    """Returns the arrays for a step of at least one part; ``max_blocks`` is those of the longest sequence."""
    starts = np.array([part.start for part in parts], np.int32)
    counts = np.array([part.count + len(part.drafts) for part in parts], np.int32)
    slots = np.array([part.request.slot for part in parts], np.int32)
    adapted_from = np.array([part.request.adapted_from for part in parts], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    tokens: List[int] = []
    tables = np.full((len(parts), max_blocks), -1, np.int32)
    for row, part in zip(tables, parts):
        tokens += part.tokens
        row[: len(part.request.blocks)] = part.request.blocks
    rows = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    positions = np.arange(len(tokens), dtype=np.int32) + (starts - ends + counts)[rows]
    return StepInputs(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        slots=np.where(positions < adapted_from[rows], np.int32(-1), slots[rows]),
        context_lengths=starts + counts,
        query_lengths=counts,
        block_tables=tables,
        slot_mapping=tables[rows, positions // block_size] * block_size + positions % block_size,
        last=np.flatnonzero(np.concatenate([_sampled(part) for part in parts])).astype(np.int32),
    )


def _sampled(part: Part) -> np.ndarray:
    """Tells of each token of a part whether the next one is chosen after it: the last one, and drafts."""
    sampled = np.zeros(part.count + len(part.drafts), bool)
    if part.samples:
        sampled[part.count - 1 :] = True
    return sampled
