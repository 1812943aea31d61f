"""Cells around routed experts. They need no MindFormers, and in graph mode their source must be in a file."""

from mindspore import Tensor, nn


class _Holder(nn.Cell):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def construct(self, tokens: Tensor, probs: Tensor, routing_map: Tensor):
        return self.experts(tokens, probs, routing_map)


class _Layer(nn.Cell):
    def __init__(self, experts):
        super().__init__()
        self.mlp = _Holder(experts)

    def construct(self, tokens: Tensor, probs: Tensor, routing_map: Tensor):
        return self.mlp(tokens, probs, routing_map)


class _Layers(nn.Cell):
    def __init__(self, experts):
        super().__init__()
        self.layers = nn.CellList([_Layer(experts)])

    def construct(self, tokens: Tensor, probs: Tensor, routing_map: Tensor):
        return self.layers[0](tokens, probs, routing_map)


class Decoder(nn.Cell):
    """A network whose only layer has only experts, under the paths of an mcore model."""

    def __init__(self, experts: nn.Cell):
        super().__init__()
        self.decoder = _Layers(experts)

    def construct(self, tokens: Tensor, probs: Tensor, routing_map: Tensor):
        return self.decoder(tokens, probs, routing_map)


class WeightedOutput(nn.Cell):
    """sum(network(tokens, probs, routing_map) * weights)."""

    def __init__(self, network: nn.Cell):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, tokens: Tensor, probs: Tensor, routing_map: Tensor, weights: Tensor):
        return (self.network(tokens, probs, routing_map) * weights).sum()


class Grouped(nn.Cell):
    """One stacked weight as a cell of x alone, for groups of tokens with these ends."""

    def __init__(self, cell: nn.Cell, ends: Tensor):
        super().__init__(auto_prefix=False)
        self.cell, self.ends = cell, ends
        self.lora_parameters = cell.lora_parameters

    def construct(self, x: Tensor):
        weight, a, b = self.cell.operands(x)
        return self.cell(x, weight, a, b, self.ends)


class LanguageModelLoss(nn.Cell):
    """The first loss of an mcore model."""

    def __init__(self, network: nn.Cell):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, ids: Tensor, labels: Tensor):
        return self.network(ids, None, None, None, labels)[0].sum()
