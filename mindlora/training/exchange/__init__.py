"""Gradients exchanged between data-parallel processes: whole, in float16, or the largest of them alone."""

from mindlora.training.exchange.dense import DenseExchange
from mindlora.training.exchange.exchange import Exchange
from mindlora.training.exchange.float16 import Float16Exchange
from mindlora.training.exchange.layout import FlatLayout
from mindlora.training.exchange.ranks import Ranks
from mindlora.training.exchange.settings import ExchangeSettings, exchange_settings
from mindlora.training.exchange.top_k import TopKExchange
from mindlora.training.exchange.two_level import TwoLevelExchange

__all__ = [
    "DenseExchange",
    "Exchange",
    "ExchangeSettings",
    "FlatLayout",
    "Float16Exchange",
    "Ranks",
    "TopKExchange",
    "TwoLevelExchange",
    "exchange_settings",
]
