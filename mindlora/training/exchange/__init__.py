"""Gradients exchanged between data-parallel processes: whole, or in fewer bits."""

from mindlora.config.exchange import ExchangeSettings, exchange_settings
from mindlora.training.exchange.exchange import DenseExchange, Exchange, FlatLayout, Float16Exchange
from mindlora.training.exchange.making import make_exchange
from mindlora.training.exchange.quantized import QuantizedExchange
from mindlora.training.exchange.ranks import CPU_RECEIPTS, Ranks, check_agreement
from mindlora.training.exchange.two_level import TwoLevelExchange

__all__ = [
    "CPU_RECEIPTS",
    "DenseExchange",
    "Exchange",
    "ExchangeSettings",
    "FlatLayout",
    "Float16Exchange",
    "QuantizedExchange",
    "Ranks",
    "TwoLevelExchange",
    "check_agreement",
    "exchange_settings",
    "make_exchange",
]
