"""Every error that mindlora raises on purpose, so that callers can catch one kind or all of them."""

from typing import Optional, Sequence


class LoraError(ValueError):
    """Base of all errors that mindlora raises on purpose."""


class ConfigError(LoraError):
    """A field of a LoRA configuration or of a YAML is wrong."""


class ConfigMistakes(ConfigError):
    """One or more settings are wrong.

    Args:
        mistakes (list of str): One sentence for each mistake, which says what to change.
    """

    def __init__(self, mistakes: Sequence[str]):
        lines = "".join(f"\n  - {mistake}" for mistake in mistakes)
        super().__init__(f"{len(mistakes)} settings are wrong:{lines}" if len(mistakes) > 1 else mistakes[0])
        self.mistakes = tuple(mistakes)


class InstallationError(LoraError):
    """A required package is missing, too old, or cannot be imported."""


class TargetError(LoraError):
    """target_modules or exclude_modules does not select what it should."""


class UnsupportedCellError(LoraError):
    """A selected cell is of a kind that LoRA cannot adapt."""


class CheckpointError(LoraError):
    """A base model's checkpoint cannot be read, converted, merged into or written."""


class MergeError(LoraError):
    """An adapter cannot be merged or unmerged, or an operation is not possible while it is merged."""


class BackendError(LoraError):
    """An operator cannot run in the requested way, or on the inputs that it was given."""


class QuantizationError(LoraError):
    """A weight cannot be quantized."""


class AdapterError(LoraError):
    """An adapter file cannot be used. The subclasses say why."""


class AdapterFormatError(AdapterError):
    """There is no adapter at the path, or its format cannot be read."""


class TruncatedAdapterError(AdapterError):
    """The adapter file ends before its content does."""


class MissingTensorsError(AdapterError):
    """The network needs LoRA tensors that the adapter does not hold."""


class UnexpectedTensorsError(AdapterError):
    """The adapter holds tensors that the network has no place for."""


class ShapeMismatchError(AdapterError):
    """A tensor of the adapter and the network's parameter differ in shape."""


class RankMismatchError(AdapterError):
    """The adapter and the network have different LoRA ranks."""


class ScaleMismatchError(AdapterError):
    """The adapter's lora_alpha, and so its scale, is not known or differs from the network's."""


class NotFiniteError(AdapterError):
    """A LoRA tensor holds NaN or infinity."""


class BaseMismatchError(AdapterError):
    """The adapter was trained on a different base model.

    Args:
        message (str): What differs.
        stored (dict): Fingerprint of the base that the adapter names. Default: None, not compared.
        found (dict): Fingerprint of the loaded base. Default: None.
    """

    def __init__(self, message: str, stored: Optional[dict] = None, found: Optional[dict] = None):
        super().__init__(message)
        self.stored, self.found = stored, found


class DataError(LoraError):
    """A data file, a prompt template or a setting of a data conversion is wrong."""


class TokenizerError(LoraError):
    """A tokenizer cannot be read, trained, saved or used for training data."""


class DivergenceError(LoraError):
    """A training run went wrong again and again, and TrainingGuard has ended it."""


class RewardError(LoraError):
    """A reward function failed, did not return in time, or returned something other than rewards."""


class TeacherError(LoraError):
    """A teacher behind a server did not answer, refused, was too slow, or has another tokenizer than its student."""


class RunStopped(LoraError):
    """A training run was asked to stop before its end, and has saved its state.

    Args:
        message (str): Where the state is, and how to go on.
        exit_code (int): Exit code of mindlora-run: 128 + the number of the signal.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class ServingError(LoraError):
    """A request cannot be served. The subclasses say why."""


class RequestError(ServingError):
    """A request asks for something that this server or model cannot do."""


class AdapterNotFoundError(ServingError):
    """A request names an adapter that is not registered."""


class QueueFullError(ServingError):
    """The queue is full: the request was not taken."""
