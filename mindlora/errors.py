"""Every error that mindlora raises on purpose, so that callers can catch one kind or all of them."""


class LoraError(ValueError):
    """Base of all errors that mindlora raises on purpose."""


class ConfigError(LoraError):
    """A field of a LoRA configuration or of a YAML is wrong."""


class TargetError(LoraError):
    """target_modules or exclude_modules does not select what it should."""


class UnsupportedCellError(LoraError):
    """A cell was selected that LoRA cannot be put on."""


class CheckpointError(LoraError):
    """A base model's checkpoint cannot be read, converted, merged into or written."""


class MergeError(LoraError):
    """An adapter cannot be merged or unmerged, or what was asked for cannot be done while it is merged."""


class BackendError(LoraError):
    """An operator cannot be run in the way that was asked for, or on what it was given."""


class QuantizationError(LoraError):
    """A weight cannot be quantized."""


class AdapterError(LoraError):
    """An adapter file cannot be used. The subclasses say in which way."""


class AdapterFormatError(AdapterError):
    """The path holds no adapter, or one in a form that is not readable."""


class TruncatedAdapterError(AdapterError):
    """The adapter file ends before its content does."""


class MissingTensorsError(AdapterError):
    """The network needs LoRA tensors that the adapter does not hold."""


class UnexpectedTensorsError(AdapterError):
    """The adapter holds tensors that the network has no place for."""


class ShapeMismatchError(AdapterError):
    """A tensor of the adapter has another shape than the network's parameter."""


class RankMismatchError(AdapterError):
    """The adapter and the network have different LoRA ranks."""


class ScaleMismatchError(AdapterError):
    """The adapter and the network have different lora_alpha, so another scale."""


class NotFiniteError(AdapterError):
    """A LoRA tensor holds NaN or infinity."""


class BaseMismatchError(AdapterError):
    """The adapter was trained on another base model."""


class DataError(LoraError):
    """A data file, a prompt template or a setting of a data conversion is wrong."""


class TokenizerError(LoraError):
    """A tokenizer cannot be read, trained, saved or used for training data."""
