"""The order in which callbacks run, whatever it is in the YAML: what measures comes before what decides and saves."""

from mindformers.tools.register import MindFormerConfig

# First to last. Callbacks of MindFormers and of others come before all of these, in the order of the YAML.
ORDER = (
    "BaseWeights",
    "BaseCheck",
    "ReferenceCheck",
    "LoraInitialization",
    "AdapterSlices",
    "ExchangeCheck",
    "EmptySteps",
    "HeldOutLoss",
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
)
# What every training run gets.
ADDED = ("EmptySteps", "GracefulStop", "RunReport")


def arrange_callbacks(config: MindFormerConfig) -> None:
    """Puts the callbacks of a training run in order in its YAML, and adds those that every run gets."""
    callbacks = list(config.callbacks or [])
    listed = {callback.get("type") for callback in callbacks}
    callbacks += [MindFormerConfig(type=name) for name in ADDED if name not in listed]
    position = {name: number for number, name in enumerate(ORDER)}
    config.callbacks = sorted(callbacks, key=lambda callback: position.get(callback.get("type"), -1))
