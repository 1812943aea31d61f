"""EngineSettings: the sizes that are fixed when a network is built for serving."""

import dataclasses
from typing import Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import check_number, check_product_dtype, dtype_name, whole_numbers

# The adapters' operators take no larger rank.
MAX_RANK = 256


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The sizes of the cache, of the adapters' pools and of a step.

    Attributes:
        seq_length (int): Maximum number of tokens of a prompt and its answer together.
        block_size (int): Tokens in one block of the key-value cache.
        num_blocks (int): Blocks of the cache, for all requests together. 0 for the number that max_running requests of
            seq_length tokens need.
        max_running (int): Maximum number of requests in a step.
        max_tokens_per_step (int): Maximum number of tokens in a step: one for each request that is being answered, the
            others from prompts, in chunks.
        max_waiting (int): Maximum number of waiting requests.
        slots (int): Number of adapters on the device at once.
        max_rank (int): The largest rank of an adapter, 1 to 256.
        adapter_memory (int): Bytes of host memory for adapters that are ready to be copied into a slot.
        adapter_dtype (str or None): float32, float16 or bfloat16, the dtype of adapters in the pools. An adapter with
            numbers that it cannot hold exactly is refused. None for the network's compute dtype.
        product_dtype (str or None): float32 or bfloat16, the dtype to which linear cells round their factors on a CPU:
            see RoundedLinear. All sums, and the values between cells, are float32. None for bfloat16 where that is
            faster, with weights in bfloat16 or NF4 on a processor with AVX512_BF16 and without AMX, else for float32.
        prompt_lookup (int): Maximum number of tokens of an answer that are guessed at a time: see PromptLookup. 0 for
            none.
        fixed_batches (tuple of int): Numbers of requests, up to max_running; steps that decode so many get their own
            graph with fixed shapes: see ModelRunner.

    Raises:
        ConfigError: A size is out of range, or a dtype is unknown.
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
        """The number of blocks that a request of seq_length tokens needs."""
        return -(-self.seq_length // self.block_size)

    @property
    def block_count(self) -> int:
        """The number of blocks of the cache."""
        return self.num_blocks or self.max_running * self.blocks_per_request
