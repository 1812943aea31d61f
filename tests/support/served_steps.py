"""A network for serving whose steps are given by hand, without a scheduler."""

import random

from mindlora.core.numerics.dtypes import named_dtype
from mindlora.network.adapter_matching import cell_shapes
from mindlora.network.load_base import load_base
from mindlora.network.quantize import quantize_base
from mindlora.serving.network import add_pools, build_network, linear_cells
from mindlora.serving.packed_adapter import ServedLayout, prepare
from mindlora.serving.request import Lease, Part, Request, Sampling
from mindlora.serving.runner import ModelRunner
from mindlora.serving.settings import EngineSettings
from tests.support.tiny_serving import BLOCK_SIZE, SEQ_LENGTH, model


class Steps:
    """A small Llama with pools, and requests that live in blocks of its cache here and there.

    Args:
        checkpoint (str): The base.
        quantize (bool): Whether it is in NF4. Default: False.
        adapter_dtype (str): What the pools hold. Default: None, what the network computes in.
        product_dtype (str): What linear cells multiply in. Default: "float32".
        fixed_batches (tuple of int): Numbers of requests whose decoding has a graph of fixed shapes. Default: none.
        keys: LlamaConfig's.
    """

    def __init__(
        self, checkpoint, quantize=False, adapter_dtype=None, product_dtype="float32", fixed_batches=(), **keys
    ):
        sizes = {"num_blocks": 100, "max_running": 8, "max_tokens_per_step": 40, "slots": 4, "max_rank": 16}
        dtypes = {"adapter_dtype": adapter_dtype, "product_dtype": product_dtype}
        settings = EngineSettings(SEQ_LENGTH, BLOCK_SIZE, fixed_batches=fixed_batches, **dtypes, **sizes)
        network = build_network(model(**keys), settings)
        if quantize:
            quantize_base(network)
        load_base(network, checkpoint)
        cells = linear_cells(network)
        dtype = named_dtype(adapter_dtype or keys.get("compute_dtype", "float32"))
        self.layout = ServedLayout(cell_shapes(network, cells), settings.max_rank, dtype)
        self.runner = ModelRunner(network, add_pools(network, cells, settings), dtype, settings)
        self._free = random.Random(0).sample(range(100), 100)

    def put(self, slot, path):
        """Writes an adapter's files into a slot."""
        self.runner.pools.write(slot, prepare(path, self.layout))

    def begin(self, tokens, slot=-1):
        """Returns a request, nothing of which is computed."""
        made = Request([int(token) for token in tokens], Sampling(max_tokens=1))
        made.lease = None if slot < 0 else Lease("", slot, 1)
        return made

    def step(self, *parts):
        """Computes (request, how many of its tokens) together; returns the logits of those that are at their end."""
        planned = []
        for request, count in parts:
            while len(request.blocks) * BLOCK_SIZE < request.computed + count:
                request.blocks.append(self._free.pop())
            planned.append(Part(request, request.computed, count))
        logits = self.runner.forward(planned)
        for request, count in parts:
            request.computed += count
        return logits

    def end(self, *requests):
        """Gives the blocks of requests back."""
        for request in requests:
            self._free += request.blocks
            request.blocks = []
