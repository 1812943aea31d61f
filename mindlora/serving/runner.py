"""ModelRunner: computes the scheduler's steps on MindFormers' network and its pools of adapters."""

import dataclasses
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import ServingError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.network.graph_cache import CompiledInAnyMode
from mindlora.network.repeated_layers import compile_layers_once
from mindlora.network.serving.multi_lora_dense import MultiLoRADense
from mindlora.network.tensors import to_array, to_tensor
from mindlora.ops.multi_lora_slot_write import MultiLoraSlotWrite
from mindlora.serving.adapter_tables import AdapterTables, BaseTables
from mindlora.serving.network import ServedHead, ServedStep, open_embedding, set_stage, takes_few
from mindlora.serving.packed_adapter import PackedAdapter
from mindlora.serving.request import Part, Request
from mindlora.serving.score_head import ScoreHead, misuse
from mindlora.serving.settings import EngineSettings

# StepInputs: the network's inputs for a step of the scheduler's plan.


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """B parts with T tokens in total, after R of which a next token is chosen. All arrays are int32.

    Attributes:
        tokens (array [T]): Token ids, part after part.
        positions (array [T]): Position of each token in its request.
        slots (array [T]): Adapter slot of each token, -1 for the base and before the first token on which an adapter
            acts.
        context_lengths (array [B]): Tokens of each request in the cache after the step.
        query_lengths (array [B]): Tokens of each request in the step.
        block_tables (array [B, max_blocks]): The blocks of each request, in order; -1 after the last.
        slot_mapping (array [T]): Place of the key and value of each token: block * block_size + place in the block.
        last (array [R]): Index in tokens of the last token of each part that samples, and of the drafts behind it.
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
        """Returns the arrays of a decode step for ``batch`` requests: the last token is computed several times.

        The same key and value are then written repeatedly to the same place of the cache.
        """
        index = np.minimum(np.arange(batch, dtype=np.int32), np.int32(len(self.tokens) - 1))
        fields = {field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)}
        return StepInputs(**{**fields, "last": np.arange(batch, dtype=np.int32)})


def step_inputs(parts: Sequence[Part], block_size: int, max_blocks: int) -> StepInputs:
    """Returns the arrays for a step of at least one part; ``max_blocks`` is the longest sequence's number of blocks."""
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
    """Returns, for each token of a part, whether the next token is chosen after it: the last one, and drafts."""
    sampled = np.zeros(part.count + len(part.drafts), bool)
    if part.samples:
        sampled[part.count - 1 :] = True
    return sampled


class SlotPools:
    """Writes adapters into the slots of a network's pools; used by one thread, between two steps.

    Attributes:
        gained (set of int): The slots whose adapter has gains (DoRA).
        tables (dict): Slot -> AdapterTables, of adapters with their own embedding or output head.
        scores (dict): Slot -> ScoreHead, of classifiers.
        dtype (dtype): The dtype of adapters in the pools.
    """

    def __init__(self, cells: Mapping[str, MultiLoRADense], dtype: np.dtype):
        self.dtype = dtype
        self._paths = list(cells)
        self._write = _WriteAll(list(cells.values()))
        gained = {path: cell for path, cell in cells.items() if isinstance(cell, MultiLoRADense)}
        self._write_gains = _WriteGains(list(gained.values()))
        self._widths = {path: cell.out_channels for path, cell in gained.items()}
        self.gained: Set[int] = set()
        self.tables: Dict[int, AdapterTables] = {}
        self.scores: Dict[int, ScoreHead] = {}
        # For cells that the adapter does not change: one row that adds nothing.
        self._nothing = [to_tensor(np.zeros((1, cell.lora_pool.shape[2]), dtype)) for cell in cells.values()]

    def write(self, slot: int, packed: PackedAdapter) -> None:
        """Writes an adapter to a slot, leaving nothing of the previous one."""
        blocks = [packed.blocks.get(path) for path in self._paths]
        rows = [to_tensor(block.rows) if block else nothing for block, nothing in zip(blocks, self._nothing)]
        scales = [block.scale if block else 0.0 for block in blocks]
        self._write(Tensor(np.array([slot], np.int32)), Tensor(np.array(scales, np.float32)), *rows)
        gains = {path: block.gain for path, block in packed.blocks.items() if block.gain is not None}
        if gains or slot in self.gained:
            rows = [gains.get(path, np.zeros(width, np.float32))[None] for path, width in self._widths.items()]
            self._write_gains(Tensor(np.array([slot], np.int32)), *map(Tensor, rows))
        self.gained = self.gained - {slot} | ({slot} if gains else set())
        self.tables.pop(slot, None)
        if packed.tables.nbytes:
            self.tables[slot] = packed.tables
        self.scores.pop(slot, None)
        if packed.score is not None:
            self.scores[slot] = packed.score

    def warm_up(self) -> None:
        """Compiles the graph, and leaves every slot empty."""
        nothing = Tensor(np.zeros(len(self._paths), np.float32))
        self._write(Tensor(np.zeros(1, np.int32)), nothing, *self._nothing)


class _WriteAll(CompiledInAnyMode):
    """Writes to all cells' pools in one graph; blocks may have any number of rows."""

    def __init__(self, cells):
        super().__init__(auto_prefix=False)
        self.layers = nn.CellList([_Write(cell) for cell in cells], auto_prefix=False)
        compile_layers_once(self)
        self.split = ops.Split(0, len(cells))
        # As in ServedStep: always the same graph.
        self.phase = "prefill"
        self.set_inputs(
            Tensor(shape=[1], dtype=mstype.int32),
            Tensor(shape=[len(cells)], dtype=mstype.float32),
            *(Tensor(shape=[None, cell.lora_pool.shape[2]], dtype=cell.lora_pool.dtype) for cell in cells),
        )

    def construct(self, slot: Tensor, scales: Tensor, *blocks: Tensor) -> Tensor:
        scales = self.split(scales)
        for index, write in enumerate(self.layers):
            write(slot, scales[index], blocks[index])
        return slot


class _Write(nn.Cell):
    """Writes to one cell's pool."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.pool, self.ranks, self.scales = cell.lora_pool, cell.lora_ranks, cell.lora_scales
        self.write = MultiLoraSlotWrite()

    def construct(self, slot: Tensor, scale: Tensor, block: Tensor) -> Tensor:
        return self.write(self.pool, self.ranks, self.scales, slot, block, scale)


class _WriteGains(CompiledInAnyMode):
    """Writes all cells' gains of one slot, [1, out_channels] each, in one graph."""

    def __init__(self, cells):
        super().__init__(auto_prefix=False)
        self.cells_with_pools = nn.CellList(cells, auto_prefix=False)
        self.update = ops.ScatterUpdate()
        # As in ServedStep: always the same graph.
        self.phase = "prefill"

    def construct(self, slot: Tensor, *gains: Tensor) -> Tensor:
        for index, cell in enumerate(self.cells_with_pools):
            self.update(cell.lora_gains, slot, gains[index])
        return slot


class StepGraph(NamedTuple):
    """The choice of the graph that computes a step.

    Attributes:
        few (bool): Whether it is the graph for few tokens: see takes_few.
        beyond_pairs (bool): Whether adapters may have gains or their own embeddings.
        batch (int or None): Number of requests that it decodes, if its shapes are fixed.
    """

    few: bool
    beyond_pairs: bool = False
    batch: Optional[int] = None


class ModelRunner:
    """Computes steps of a network with a paged cache and pools of adapters, of ``dtype``. It is used by one thread.

    Three graphs are compiled by warm_up, or else by the first step that needs one: one for steps of few tokens, such as
    decoding, one for many, such as chunks of prompts together with decoding, and one for the logits of tokens that
    are not the last ones; other numbers of requests or tokens do not compile. Each has a twin for steps in which an
    adapter has more than pairs of linear cells, gains (DoRA) or its own embedding, which the first such step
    compiles. Each of the settings' fixed_batches also has a graph for steps that decode so many requests, adapters with
    pairs alone, whose shapes MindSpore does not infer at each step. Steps of fewer requests, down to more than half,
    are padded for it.

    ``cells`` is the result of add_pools for the network, whose weights must have been loaded; ``tables`` are the
    base's, None if adapters have no own tables.
    """

    def __init__(
        self,
        network: nn.Cell,
        cells: Dict[str, MultiLoRADense],
        dtype: np.dtype,
        settings: EngineSettings,
        tables: Optional[BaseTables] = None,
    ):
        self.network = network
        self.settings = settings
        self.pools = SlotPools(cells, dtype)
        # Whether linear cells multiply in bfloat16.
        self.rounds = any(isinstance(cell, MultiLoRADense) and cell.rounds for cell in cells.values())
        self._tables = tables
        self._embedding = open_embedding(network, settings)
        compile_layers_once(network)
        shared = next(iter(cells.values())).slots_of_tokens
        self._shared_slots = shared
        self._steps: Dict[StepGraph, ServedStep] = {}
        # Beyond pairs -> graph.
        self._heads: Dict[bool, ServedHead] = {}
        # The head's input in the last step, the slots of its tokens, and whether these have more than pairs.
        self._last: Optional[Tuple[Tensor, Tensor, bool]] = None
        self.vocab_size: int = network.config.vocab_size
        self.hidden_size: int = self._embedding.hidden

    def warm_up(self, many_tokens: bool = True, scores: bool = True, adapters: bool = True) -> None:
        """Compiles graphs before the first request; pools are unchanged.

        Args:
            many_tokens (bool): Whether to compile the graph for steps of many tokens.
            scores (bool): Whether to compile the graph for the logits of tokens that are not the last ones.
            adapters (bool): Whether to compile the graph that writes adapters into slots.
        """
        if adapters:
            self.pools.warm_up()
        one = np.ones(1, np.int32)
        table = np.zeros((1, self.settings.blocks_per_request), np.int32)
        # A token whose key and value no request reads: on a CPU they go to the first block, elsewhere nowhere.
        inputs = StepInputs(0 * one, 0 * one, -one, one, one, table, -one, 0 * one)
        for few in (False, True) if many_tokens else (True,):
            self._run(inputs, StepGraph(few))
        for batch in self.settings.fixed_batches:
            self._run(inputs, StepGraph(takes_few(batch, True), batch=batch))
        if scores:
            self.logits_after([0])

    def forward(self, parts: Sequence[Part]) -> np.ndarray:
        """Computes one step: writes the keys and values of its tokens to the cache.

        Returns float32 [rows, vocabulary], the logits after the last token of each part that samples and after each of
        its drafts, in order.
        """
        inputs = step_inputs(parts, self.settings.block_size, self.settings.blocks_per_request)
        return self._run(inputs, self._graph_for(inputs, self._put_embeddings(inputs)))

    def logits_after(self, rows: Sequence[int]) -> np.ndarray:
        """Returns float32 [rows, vocabulary], the logits after tokens of the last step of forward.

        ``rows`` counts the step's tokens, part after part; FEW_TOKENS of them at most.
        """
        hidden, slots, beyond_pairs = self._last
        if beyond_pairs not in self._heads:
            head = self._heads[beyond_pairs] = ServedHead(self.network)
            head.set_inputs(
                Tensor(shape=[None, hidden.shape[1]], dtype=hidden.dtype),
                Tensor(shape=list(slots.shape), dtype=mstype.int32),
                Tensor(shape=[None], dtype=mstype.int32),
            )
            # Read at the first call.
            set_stage(self.network, True, beyond_pairs)
        logits = self._heads[beyond_pairs](hidden, slots, Tensor(np.array(rows, np.int32))).asnumpy()
        return self._with_own_heads(logits, rows)

    def hidden_at(self, rows: Sequence[int]) -> np.ndarray:
        """Returns float32 [rows, hidden], the head's input for tokens of the last step of forward."""
        hidden, _, _ = self._last
        return to_float32(to_array(hidden)[list(rows)])

    def score_head(self, slot: int) -> Optional[ScoreHead]:
        """Returns the head of the classifier in a slot; None for a generating adapter, and for the base, -1."""
        return self.pools.scores.get(slot)

    def _graph_for(self, inputs: StepInputs, beyond_pairs: bool) -> StepGraph:
        count = len(inputs.tokens)
        few = takes_few(count, inputs.decodes)
        if not inputs.decodes or beyond_pairs:
            return StepGraph(few, beyond_pairs)
        # Computing twice the number of requests would cost more than fixed shapes save; and with other linear
        # kernels the last bits would differ.
        batches = [batch for batch in self.settings.fixed_batches if takes_few(batch, True) == few]
        return StepGraph(few, batch=min((batch for batch in batches if count <= batch < 2 * count), default=None))

    def _step_of(self, graph: StepGraph) -> ServedStep:
        if graph not in self._steps:
            blocks = self.settings.blocks_per_request
            self._steps[graph] = ServedStep(self.network, self._shared_slots, graph.few, blocks, graph.batch)
            set_stage(self.network, graph.few, graph.beyond_pairs)
        return self._steps[graph]

    def _put_embeddings(self, inputs: StepInputs) -> bool:
        """Sets the rows of adapters' own embeddings for tokens; returns whether an adapter has more than pairs."""
        owners = {slot for slot, tables in self.pools.tables.items() if tables.has_embedding}
        present = set(inputs.slots.tolist())
        if not present & (owners | self.pools.gained):
            return False
        rows = np.zeros((len(inputs.tokens), self._embedding.hidden), np.float32)
        for slot in present & owners:
            places = np.flatnonzero(inputs.slots == slot)
            rows[places] = self.pools.tables[slot].embed(inputs.tokens[places], self._tables)
        places = np.flatnonzero(np.isin(inputs.slots, list(owners)))
        self._embedding.put_rows(places, rows[places])
        return True

    def _with_own_heads(self, logits: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        """Returns logits [len(rows), vocabulary] after tokens of the last step, by the heads of their adapters."""
        owners = {slot: tables for slot, tables in self.pools.tables.items() if tables.head is not None}
        if not owners:
            return logits
        hidden, slots, _ = self._last
        hidden = to_float32(to_array(hidden))
        slots = slots.asnumpy().tolist()
        logits = logits.copy()
        for index, row in enumerate(rows):
            # One token at a time, so that its logits do not depend on the rest of the step.
            if slots[row] in owners:
                logits[index] = owners[slots[row]].logits(hidden[row])
        return logits

    def _run(self, inputs: StepInputs, graph: StepGraph) -> np.ndarray:
        rows = inputs.last.tolist()
        if graph.batch:
            inputs = inputs.filled_up(graph.batch)
        slots = np.full(self.settings.max_tokens_per_step, -1, np.int32)
        slots[: len(inputs.slots)] = inputs.slots
        slots = Tensor(slots)
        step = self._step_of(graph)
        places = [] if step.on_cpu else [Tensor(inputs.slot_mapping)]
        logits, hidden = step(
            Tensor(inputs.tokens.reshape((-1, 1) if step.decodes else (1, -1))),
            Tensor(inputs.positions),
            slots,
            Tensor(inputs.context_lengths),
            Tensor(inputs.query_lengths),
            Tensor(inputs.block_tables),
            # A graph cannot take zero rows, which occur when a step computes the middle of prompts.
            Tensor(inputs.last if rows else np.zeros(1, np.int32)),
            *places,
        )
        self._last = hidden, slots, graph.beyond_pairs
        return self._with_own_heads(logits.asnumpy()[: len(rows)], rows)


# Readings of given texts: hidden states and the scores of heads, for requests that ask for them


def read_texts(runner: ModelRunner, parts: Sequence[Part]) -> Dict[Request, ServingError]:
    """Fills vectors of requests from the last step of ``runner``, which had these parts.

    Returns the requests that fail, with the reason: their adapter has another purpose, or numbers are not finite.
    """
    failed: Dict[Request, ServingError] = {}
    first = 0
    for part in parts:
        request = part.request
        reading = request.sampling.reading
        head = runner.score_head(request.slot)
        problem = misuse(request.adapter, head, reading is not None and reading.scores)
        if problem is None and part.reads:
            hidden = runner.hidden_at([first + index - part.start for index in part.reads])
            vectors = head.scores(hidden) if head is not None else hidden
            request.vectors.update(zip(part.reads, vectors))
            if not np.isfinite(vectors).all():
                problem = ServingError(
                    f"The text gives numbers that are not finite, with {request.adapter or 'the base'}."
                )
        if problem is not None:
            failed[request] = problem
        first += len(part.tokens)
    return failed


def vectors_of(request: Request) -> Optional[np.ndarray]:
    """Returns float32 [tokens, width], in the order of the tokens; None unless requested."""
    if request.sampling.reading is None:
        return None
    return np.stack([request.vectors[index] for index in sorted(request.vectors)])
