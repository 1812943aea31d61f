"""EngineSettings: the sizes that are fixed when a network is made for serving."""

import dataclasses
from typing import Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import check_number, check_product_dtype, dtype_name, whole_numbers

# The operators that adapters go through take no larger one.
MAX_RANK = 256


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The sizes of the cache, of the adapters' pools and of a step.

    Attributes:
        seq_length (int): Tokens of a prompt and its answer together, at most.
        block_size (int): Tokens in one block of the key-value cache.
        num_blocks (int): Blocks of the cache, for all requests together. 0 for as many as max_running requests of
            seq_length tokens need.
        max_running (int): Requests that a step serves together, at most.
        max_tokens_per_step (int): Tokens that a step computes, at most: one for each request that is answering, the
            others from prompts, in chunks.
        max_waiting (int): Requests that wait, at most.
        slots (int): Adapters on the device at once.
        max_rank (int): The largest rank of an adapter, 1 to 256.
        adapter_memory (int): Bytes of host memory for adapters that are ready to be copied into a slot.
        adapter_dtype (str or None): float32, float16 or bfloat16: what the pools hold adapters in. An adapter with
            numbers that it cannot hold exactly is refused. None for the dtype in which the network computes.
        product_dtype (str or None): float32 or bfloat16: what linear cells round what they multiply to, on a CPU: see
            RoundedLinear. All sums, and what lies between the cells, are float32. None for bfloat16 where that is
            faster, with weights in bfloat16 or NF4 on a processor with AVX512_BF16 and without AMX, else for float32.
        prompt_lookup (int): Tokens of an answer that are guessed at a time, at most: see PromptLookup. 0 for none.
        fixed_batches (tuple of int): Numbers of requests, up to max_running; steps that decode so many get a graph
            each, of fixed shapes: see ModelRunner.

    Raises:
        ConfigError: A size is out of range, or there is no such dtype.
    """

    seq_length: int
    block_size: int = 16
    num_blocks: int = 0
    max_running: int = 32
    max_tokens_per_step: int = 512
    max_waiting: int = 1024
    slots: int = 8
    max_rank: int = 64
    adapter_memory: int = 2 << 30
    adapter_dtype: Optional[str] = None
    product_dtype: Optional[str] = None
    prompt_lookup: int = 0
    fixed_batches: Tuple[int, ...] = ()

    def __post_init__(self):
        if self.adapter_dtype is not None:
            object.__setattr__(self, "adapter_dtype", dtype_name(self.adapter_dtype, "adapter_dtype"))
        if self.product_dtype is not None:
            check_product_dtype(self.product_dtype)
        for field in dataclasses.fields(self):
            if field.name in ("adapter_dtype", "product_dtype", "fixed_batches"):
                continue
            least = 0 if field.name in ("num_blocks", "prompt_lookup") else 1
            flag = field.name.replace("_", "-")
            check_number(getattr(self, field.name), f"{field.name} (--{flag})", whole_numbers(least))
        if self.max_rank > MAX_RANK:
            raise ConfigError(f"max_rank (--max-rank) is {self.max_rank}: it must be 1 to {MAX_RANK}.")
        if self.max_tokens_per_step < self.max_running:
            raise ConfigError(
                f"max_tokens_per_step is {self.max_tokens_per_step} and max_running {self.max_running}: a step must be "
                "able to give each running request its next token. Raise the first (--max-tokens-per-step), or lower "
                "the second (--max-running)."
            )
        for batch in self.fixed_batches:
            check_number(batch, "fixed_batches", whole_numbers(1))
            if batch > self.max_running:
                raise ConfigError(
                    f"fixed_batches has {batch} and max_running is {self.max_running}: no step decodes so many "
                    f"requests. Raise max_running (--max-running), or leave {batch} out (--fixed-batches)."
                )

    @property
    def blocks_per_request(self) -> int:
        """Blocks that a request of seq_length tokens needs."""
        return -(-self.seq_length // self.block_size)

    @property
    def block_count(self) -> int:
        """Blocks of the cache."""
        return self.num_blocks or self.max_running * self.blocks_per_request
