"""MindFormers' network for serving: with its key-value cache, and pools of adapters on its linear cells."""

import logging
from typing import Any, Dict, Mapping, Optional, Tuple, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters

from mindlora.core.errors import ConfigError
from mindlora.network.cells.linear_base import LinearBase
from mindlora.network.graph_cache import CompiledInAnyMode, CompiledOnce
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.quantized.quantized_dense import IntegerDense, QuantizedDense
from mindlora.network.serving.multi_lora_dense import JoinsLinears, MultiLoRADense, MultiLoRAExperts
from mindlora.network.tensors import twin
from mindlora.network.tree import adapter_path, replace_children, weight_of
from mindlora.ops.backend import choose, multiplies_bfloat16, rounds_faster
from mindlora.serving.cpu_cells import CpuAttention, use_cpu_operators
from mindlora.serving.mcore_network import JoinedRows, McoreNetwork, build_mcore
from mindlora.serving.settings import EngineSettings
from mindlora.serving.stacked_experts import StackedExperts

logger = logging.getLogger("mindlora")

# Up to this many tokens, one pass over each weight beats MatMul and the adapters' operator on a CPU, threefold at 16.
FEW_TOKENS = 64


def build_network(model: Mapping[str, Any], settings: EngineSettings, in_training: bool = False) -> nn.Cell:
    """Builds a causal language model with a paged key-value cache, for single processes.

    It is MindFormers' own, except for mcore models (see mcore_network), which have no ``type`` in model_config.

    The model is in evaluation mode, and its parameters have no values until load_base fills them, or, for a network
    that is ``in_training``, share_base gives it the trained network's. pet_config in ``model``, the YAML's node, is
    ignored. Raises ConfigError if MindFormers cannot build the model, or its
    attention has no paged cache.
    """
    if not model["model_config"].get("type"):
        model_config = model["model_config"]
        return build_mcore(model_config, settings, JoinedRows.of(model_config) if in_training else None)
    from mindformers.models.build_model import build_network as build
    from mindformers.tools.register import MindFormerConfig

    node = MindFormerConfig(**model)
    config = node.model_config
    for key in ("pet_config", "checkpoint_name_or_path"):
        config.pop(key, None)
    config.update(
        use_past=True,
        is_dynamic=True,
        chunk_prefill=True,
        use_flash_attention=True,
        batch_size=1,
        seq_length=settings.seq_length,
        block_size=settings.block_size,
        num_blocks=settings.block_count,
    )
    try:
        with no_init_parameters():
            network = build(node)
    except ValueError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"model cannot be built by MindFormers: {reason} Correct the node model.") from error
    if not any(hasattr(cell, "paged_attention_mgr") for _, cell in network.cells_and_names()) or not hasattr(
        network, "lm_head"
    ):
        raise ConfigError(
            f"model.model_config.type is {config.get('type')}: its attention has no paged cache that mindlora can "
            "drive. Use one with MindFormers' LlamaConfig."
        )
    if ms.get_context("device_target") == "CPU":
        use_cpu_operators(network)
    return network.set_train(False)


def linear_cells(network: nn.Cell) -> Dict[str, nn.Cell]:
    """Returns adapter path -> cell for every linear cell, quantized or not, including the output head."""
    return {
        adapter_path(cell, path): cell
        for path, cell in network.cells_and_names()
        if isinstance(cell, MultiLoRADense.base_types())
    }


def stacked_experts(network: nn.Cell) -> Dict[str, StackedExperts]:
    """Returns path -> cell of each layer's experts; a weight's adapter path is its parameter's name."""
    return {path: cell for path, cell in network.cells_and_names() if isinstance(cell, StackedExperts)}


def add_pools(
    network: nn.Cell, cells: Mapping[str, nn.Cell], settings: EngineSettings
) -> Dict[str, Union[MultiLoRADense, MultiLoRAExperts]]:
    """Puts a pool of adapters on the cells from linear_cells and on the experts, in place.

    The network's weights must have been loaded. Returns adapter path -> pool, linear cells first. Raises ConfigError if
    they cannot have settings.adapter_dtype, or products settings.product_dtype.
    """
    rounds = _rounds(settings.product_dtype, cells, bool(stacked_experts(network)))
    dtype = None if settings.adapter_dtype is None else getattr(mstype, settings.adapter_dtype)
    slots_of_tokens = Parameter(
        initializer(-1, [settings.max_tokens_per_step], mstype.int32), name="slots_of_tokens", requires_grad=False
    )
    pooled = {
        path: MultiLoRADense.from_cell(cell, path, settings.slots, settings.max_rank, slots_of_tokens, dtype, rounds)
        for path, cell in cells.items()
    }
    replace_children(network, {id(cell): pooled[path] for path, cell in cells.items()})
    _separate_tied_head(network)
    for _, cell in network.cells_and_names():
        if isinstance(cell, JoinsLinears):
            cell.join_linears()
        elif isinstance(cell, CpuAttention):
            cell.initialize_cache()
    pools: Dict[str, Union[MultiLoRADense, MultiLoRAExperts]] = dict(pooled)
    for experts in stacked_experts(network).values():
        of_experts = experts.add_pools(settings.slots, settings.max_rank, slots_of_tokens)
        pools.update({getattr(experts, name).name: pool for name, pool in of_experts.items()})
    if dtype is not None:
        _check_pools(pools)
    return pools


def _separate_tied_head(network: nn.Cell) -> None:
    """Gives a tied head a parameter of its own in the memory of the embedding's table, on a CPU.

    MindSpore copies a parameter that two operators read, in each step, and on a CPU it cannot copy bfloat16.
    """
    table = embedding_of(network)[1]
    if network.lm_head.weight is table and ms.get_context("device_target") == "CPU":
        network.lm_head.weight = twin(table, "lm_head.weight")


def _rounds(product_dtype: Optional[str], cells: Mapping[str, nn.Cell], has_experts: bool) -> bool:
    """Returns whether linear cells multiply in bfloat16: if that is requested, or no dtype is and it is faster.

    Raises ConfigError if it is requested and not possible for some cell; warns if it saves no time.
    """
    if product_dtype == "float32":
        return False
    obstacle = _obstacle_to_rounding(cells, has_experts)
    if product_dtype is None:
        return not obstacle and rounds_faster()
    if obstacle:
        raise ConfigError(obstacle)
    if not multiplies_bfloat16():
        logger.warning(
            "product_dtype is bfloat16, but this processor has no instructions that multiply bfloat16 (AVX512_BF16): "
            "products are rounded, and take as long as without it, with weights in NF4 up to twice as long. Leave it "
            "out."
        )
    return True


def _obstacle_to_rounding(cells: Mapping[str, nn.Cell], has_experts: bool) -> str:
    """Returns the obstacle to linear cells multiplying in bfloat16, and what to do, or ""."""
    if has_experts:
        # The last bits of their router's product also depend on the batch, and rounding would amplify that.
        return "product_dtype is bfloat16 and the model has routed experts, which multiply in float32. Leave it out."
    path = choose("rounded_linear")
    if path.path != "cpu":
        return (
            f"product_dtype is bfloat16, which is for a CPU with mindlora's library: {path.reason}. Leave it out; on "
            "an NPU set model.model_config.compute_dtype."
        )
    bases = {LinearBase.operators(cell)[2] for cell in cells.values() if not isinstance(cell, QuantizedDense)}
    if bases - {mstype.float32}:
        return (
            f"product_dtype is bfloat16 and the network computes in {(bases - {mstype.float32}).pop()}: set "
            "model.model_config.compute_dtype: float32, or leave product_dtype out."
        )
    if any(isinstance(cell, IntegerDense) for cell in cells.values()):
        return (
            "product_dtype is bfloat16 and the base is held as it is stored, in integers, which multiply float32. "
            "Leave it out."
        )
    held = {weight_of(cell).dtype for cell in cells.values() if not isinstance(cell, NF4Dense)}
    if mstype.bfloat16 not in held and not any(isinstance(cell, NF4Dense) for cell in cells.values()):
        return (
            f"product_dtype is bfloat16 and the linear cells hold their weights in {held.pop()}: hold them in bfloat16 "
            "(model.model_config.param_init_type: bfloat16; params_dtype of an mcore model) or in NF4, or leave "
            "product_dtype out."
        )
    return ""


def _check_pools(pools: Mapping[str, Union[MultiLoRADense, MultiLoRAExperts]]) -> None:
    """Raises ConfigError if pools of the settings' adapter_dtype do not suit the network's compute dtype."""
    held = {pool.lora_pool.dtype for pool in pools.values()}
    computed = next(iter(pools.values())).dtype
    if len(held) > 1:
        raise ConfigError(
            "adapter_dtype is set and the model has routed experts, whose pools are always in Float32. Leave it out."
        )
    if held != {computed} and (ms.get_context("device_target") != "CPU" or computed != mstype.float32):
        raise ConfigError(
            f"adapter_dtype is {held.pop()} and the network computes in {computed}: adapters are widened on a CPU "
            "alone, and to Float32. Leave it out."
        )


class ServedStep(CompiledInAnyMode):
    """One step of a MindFormers model over its cache: chunks of prompts with decode tokens beside them, or only these.

    The network comes from build_network and add_pools; ``slots_of_tokens`` is the Parameter that all pools share, or
    None without pools. ``few`` selects the graph for few tokens: see takes_few. Tables of blocks are
    ``blocks_per_request`` wide. With ``batch`` all shapes are fixed to a step that decodes so many requests.

    Inputs:
        - The arrays of StepInputs, except **tokens** of shape [1, T], or [T, 1] if ``decodes``, and **slots** of
          shape [max_tokens_per_step], the rest -1. **slot_mapping** is left out if ``on_cpu``. context_lengths and
          query_lengths are **batch_valid_length** and **q_seq_lens**: on Ascend, MindSpore gives the lengths to
          PagedAttention from the graph's inputs of these names.

    Outputs:
        Tuple of the logits after the tokens ``last``, [R, vocabulary] float32, and of the head's input for every
        token, [T, hidden_size].

    Attributes:
        decodes (bool): Whether it takes MindFormers' form of decoding, in which each request has one token.
        on_cpu (bool): Whether block_tables says where keys and values go, and the lengths what is causal:
            neither slots nor a mask are read. With an unread input, MindSpore would prepare all parameters
            anew before each step.
    """

    def __init__(
        self,
        network: nn.Cell,
        slots_of_tokens: Parameter,
        few: bool,
        blocks_per_request: int,
        batch: Optional[int] = None,
    ):
        super().__init__(auto_prefix=False)
        self.network = network
        self.slots_of_tokens = slots_of_tokens
        self.decodes = decodes_alone(few)
        self.head = ServedHead(network)
        self.on_cpu = ms.get_context("device_target") == "CPU"
        self.reshape = ops.Reshape()
        self.assign = ops.Assign()
        # Its values are not read on a CPU; only its shape must be a mask's.
        self.no_mask = Tensor([[0.0]], mstype.float32)
        self.set_train(False)
        # These names tell MindSpore that a step is always the same graph, so that it does not check all cells again.
        self.phase = "increment" if few else "prefill"
        tokens = [batch, 1] if self.decodes else [1, batch]
        each, tables = [batch], [batch, blocks_per_request]
        places = [] if self.on_cpu else [each]
        shapes = [tokens, each, slots_of_tokens.shape, each, each, tables, each, *places]
        self.set_inputs(*(Tensor(shape=list(shape), dtype=mstype.int32) for shape in shapes))

    def construct(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch_valid_length: Tensor,
        q_seq_lens: Tensor,
        block_tables: Tensor,
        last: Tensor,
        slot_mapping: Optional[Tensor] = None,
    ) -> Tuple[Tensor, Tensor]:
        self.assign(self.slots_of_tokens, slots)
        if self.decodes:
            hidden = self.network.model(
                tokens, batch_valid_length=batch_valid_length, block_tables=block_tables, slot_mapping=slot_mapping
            )
        else:
            mask = self.no_mask if self.on_cpu else None
            hidden = self.network.model(
                tokens,
                batch_valid_length=batch_valid_length,
                block_tables=block_tables,
                slot_mapping=slot_mapping,
                attention_mask=mask,
                q_seq_lens=q_seq_lens,
                seq_range=positions,
            )
        hidden = self.reshape(hidden, (-1, hidden.shape[-1]))
        return self.head(hidden, slots, last), hidden


class ServedHead(CompiledInAnyMode):
    """The logits after some tokens of a step, a few at a time: all tokens' logits could be larger than the model.

    Inputs:
        - **hidden** (Tensor) - [T, hidden_size], as ServedStep returns it.
        - **slots** (Tensor) - int32 [max_tokens_per_step]: the slot of each token.
        - **rows** (Tensor) - int32 [R]: the tokens, FEW_TOKENS at most.

    Outputs:
        Tensor [R, vocabulary], float32.
    """

    def __init__(self, network: nn.Cell):
        super().__init__(auto_prefix=False)
        self.lm_head = network.lm_head
        self.has_pool = isinstance(network.lm_head, MultiLoRADense)
        self.gather = ops.Gather()
        self.cast = ops.Cast()
        self.set_train(False)
        # As in ServedStep: always the same graph.
        self.phase = "prefill"

    def construct(self, hidden: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        hidden = self.gather(hidden, rows, 0)
        if self.has_pool:
            logits = self.lm_head.with_slots(hidden, self.gather(slots, rows, 0), True)
        else:
            logits = self.lm_head(hidden)
        return self.cast(logits, mstype.float32)


class ServedEmbedding(CompiledOnce):
    """The base's embedding, with the adapter's own rows for the tokens of some adapters.

    Inputs:
        - **tokens** (Tensor) - int32, T tokens together.

    Outputs:
        Tensor: the output of the base's cell, or the rows of ``rows`` where ``owned`` is not 0.

    Attributes:
        rows, owned (Parameter): float32 [max_tokens_per_step, hidden] and [max_tokens_per_step, 1], of the step's
            tokens in order. See put_rows.
        replaced (bool): Whether any token may have its own row; read when a graph is compiled.
    """

    def __init__(self, embedding: nn.Cell, table: Parameter, max_tokens: int):
        super().__init__(auto_prefix=False)
        self.embedding = embedding
        self.hidden = table.shape[1]
        zeros = initializer("zeros", [max_tokens, self.hidden], mstype.float32)
        self.rows = Parameter(zeros, name="own_embedding_rows", requires_grad=False)
        self.owned = Parameter(initializer("zeros", [max_tokens, 1], mstype.float32), name="has_own_embedding_row")
        self.owned.requires_grad = False
        self.replaced = False

    def put_rows(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Gives the tokens at ``places`` of the next step the rows [len(places), hidden], and all others the base's."""
        owned = np.zeros(self.owned.shape, np.float32)
        owned[places] = 1
        whole = np.zeros(self.rows.shape, np.float32)
        whole[places] = rows
        self.owned.set_data(Tensor(owned))
        self.rows.set_data(Tensor(whole))

    def construct(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        if not self.replaced:
            return embedded
        flat = ops.reshape(embedded, (-1, self.hidden))
        count = flat.shape[0]
        rows = ops.cast(ops.slice(self.rows, (0, 0), (count, self.hidden)), flat.dtype)
        owned = ops.broadcast_to(ops.slice(self.owned, (0, 0), (count, 1)) > 0, rows.shape)
        return ops.reshape(ops.select(owned, rows, flat), embedded.shape)


def embedding_of(network: nn.Cell) -> Tuple[nn.Cell, Parameter]:
    """Returns the cell that embeds tokens, and its table [vocabulary, hidden]."""
    model = network.model
    if isinstance(network, McoreNetwork):
        return model.embed_tokens, model.embed_tokens.weight
    return model.tok_embeddings, model.tok_embeddings.embedding_weight


def open_embedding(network: nn.Cell, settings: EngineSettings) -> ServedEmbedding:
    """Enables adapters of a network to have their own embeddings, in place; its weights must have been loaded."""
    cell, table = embedding_of(network)
    served = ServedEmbedding(cell, table, settings.max_tokens_per_step)
    replace_children(network, {id(cell): served})
    return served


def takes_few(tokens: int, decodes: bool) -> bool:
    """Returns whether a step of so many tokens uses the graph for few; ``decodes`` is as in StepInputs.

    On a CPU these are all steps of few tokens: there the linear cells read each weight once (figures:
    ops/multi_lora_linear/README.md). On Ascend they are decode steps, for which MindFormers has its own form.
    """
    return decodes if decodes_alone(True) else tokens <= FEW_TOKENS


def decodes_alone(few: bool) -> bool:
    """Returns whether the graph for few, or for many, tokens has MindFormers' form of decoding."""
    return few and ms.get_context("device_target") != "CPU"


def set_stage(network: nn.Cell, few: bool, beyond_pairs: bool) -> None:
    """Sets the flags by which cells distinguish the graphs; they are read when a graph is compiled.

    ``beyond_pairs`` says whether adapters of the step may have gains or their own embeddings.
    """
    decodes = decodes_alone(few)
    network.add_flags_custom(is_first_iteration=not decodes)
    for _, cell in network.cells_and_names():
        if hasattr(cell, "chunk_prefill"):
            cell.add_flags(chunk_prefill=not decodes)
        elif isinstance(cell, MultiLoRADense):
            cell.add_flags(few=few, gained=beyond_pairs)
        elif isinstance(cell, ServedEmbedding):
            cell.add_flags(replaced=beyond_pairs)
