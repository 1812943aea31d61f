"""The callbacks that a YAML can name, one file each; importing this package registers them all in MindFormers."""

from mindlora.plugin.callbacks.adapter_health import AdapterHealth
from mindlora.plugin.callbacks.adapter_slices import AdapterSlices
from mindlora.plugin.callbacks.base_check import BaseCheck
from mindlora.plugin.callbacks.base_weights import BaseWeights
from mindlora.plugin.callbacks.each_adapter import EachAdapter
from mindlora.plugin.callbacks.early_stopping import EarlyStopping
from mindlora.plugin.callbacks.empty_steps import EmptySteps
from mindlora.plugin.callbacks.exchange_check import ExchangeCheck
from mindlora.plugin.callbacks.forgetting import Forgetting
from mindlora.plugin.callbacks.forgetting_budget import ForgettingBudget
from mindlora.plugin.callbacks.graceful_stop import GracefulStop
from mindlora.plugin.callbacks.gradient_norm_rate import GradientNormRate
from mindlora.plugin.callbacks.held_out_loss import HeldOutLoss
from mindlora.plugin.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.plugin.callbacks.lora_initialization import LoraInitialization
from mindlora.plugin.callbacks.loss_curve import LossCurve
from mindlora.plugin.callbacks.progress_bar import ProgressBar
from mindlora.plugin.callbacks.rank_budget import RankBudget
from mindlora.plugin.callbacks.reduce_on_plateau import ReduceOnPlateau
from mindlora.plugin.callbacks.reference_check import ReferenceCheck
from mindlora.plugin.callbacks.run_report import RunReport
from mindlora.plugin.callbacks.sample_answers import SampleAnswers
from mindlora.plugin.callbacks.training_guard import TrainingGuard
from mindlora.plugin.callbacks.warm_up import WarmUp

__all__ = [
    "AdapterHealth",
    "AdapterSlices",
    "BaseCheck",
    "BaseWeights",
    "EachAdapter",
    "EarlyStopping",
    "EmptySteps",
    "ExchangeCheck",
    "Forgetting",
    "ForgettingBudget",
    "GracefulStop",
    "GradientNormRate",
    "HeldOutLoss",
    "LoraCheckpoint",
    "LoraInitialization",
    "LossCurve",
    "ProgressBar",
    "RankBudget",
    "ReduceOnPlateau",
    "ReferenceCheck",
    "RunReport",
    "SampleAnswers",
    "TrainingGuard",
    "WarmUp",
]
