"""The callbacks that a YAML can name; importing this module registers all of them in MindFormers."""

from mindformers.tools.register import MindFormerConfig

from mindlora.training.adalora.callback import RankBudget
from mindlora.training.callbacks.empty_steps import EmptySteps
from mindlora.training.callbacks.initial_weights import AdapterSlices, BaseCheck, BaseWeights, LoraInitialization
from mindlora.training.callbacks.learning_rate import GradientNormRate, ReduceOnPlateau, WarmUp
from mindlora.training.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.training.callbacks.progress_bar import ProgressBar
from mindlora.training.callbacks.sample_answers import SampleAnswers
from mindlora.training.callbacks.stopping import EarlyStopping, GracefulStop
from mindlora.training.exchange.exchange_check import ExchangeCheck
from mindlora.training.forgetting import Forgetting, ForgettingBudget
from mindlora.training.health.adapter_health import AdapterHealth
from mindlora.training.health.training_guard import TrainingGuard
from mindlora.training.held_out.held_out_loss import HeldOutLoss
from mindlora.training.preference.reference_check import ReferenceCheck
from mindlora.training.report.run_report import LossCurve, RunReport
from mindlora.training.rl.callback import RlReport
from mindlora.training.several.each_adapter import EachAdapter
from mindlora.training.trackers.trackers import Trackers

# The order in which callbacks run, regardless of the YAML: those that measure come before those that decide and save.

# First to last. MindFormers' and other callbacks come before all of these, in the order of the YAML.
ORDER = (
    "BaseWeights",
    "BaseCheck",
    "ReferenceCheck",
    "LoraInitialization",
    "AdapterSlices",
    "ExchangeCheck",
    "EmptySteps",
    "HeldOutLoss",
    "RlReport",
    "Forgetting",
    "AdapterHealth",
    "RankBudget",
    "ForgettingBudget",
    "TrainingGuard",
    "WarmUp",
    "ReduceOnPlateau",
    "GradientNormRate",
    "EarlyStopping",
    "GracefulStop",
    "LoraCheckpoint",
    "EachAdapter",
    "SampleAnswers",
    "LossCurve",
    "ProgressBar",
    "RunReport",
    "Trackers",
)
# The callbacks that every training run gets.
ADDED = ("EmptySteps", "GracefulStop", "RunReport")


def arrange_callbacks(config: MindFormerConfig) -> None:
    """Sorts the callbacks in the YAML of a training run, and adds those that every run gets."""
    callbacks = list(config.callbacks or [])
    listed = {callback.get("type") for callback in callbacks}
    callbacks += [MindFormerConfig(type=name) for name in ADDED if name not in listed]
    position = {name: number for number, name in enumerate(ORDER)}
    config.callbacks = sorted(callbacks, key=lambda callback: position.get(callback.get("type"), -1))


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
    "RlReport",
    "RunReport",
    "SampleAnswers",
    "Trackers",
    "TrainingGuard",
    "WarmUp",
]
