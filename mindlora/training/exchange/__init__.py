"""Gradients exchanged between data-parallel processes: whole, in float16, or the largest of them alone."""

from mindlora.training.exchange.dense import DenseExchange
from mindlora.training.exchange.layout import FlatLayout
from mindlora.training.exchange.ranks import Ranks

__all__ = ["DenseExchange", "FlatLayout", "Ranks"]
