"""LoftQ while a checkpoint is quantized: the adapter that makes up for what its weights lose, cell by cell."""

import os
from typing import Dict, List

import numpy as np

from mindlora.adapters import files as adapter_files
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.fingerprint import mark_of, picked, sampled
from mindlora.base.writer import OutputTensor, check_checkpoint_output
from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.errors import CheckpointError, ConfigError
from mindlora.models import names
from mindlora.models.targets import select_targets
from mindlora.numerics import initializers
from mindlora.numerics.dtypes import to_float32
from mindlora.numerics.nf4 import Nf4Array, dequantize, quantize


class LoftqInitializer:
    """Makes an adapter out of a checkpoint that is being quantized; one weight is in float at a time.

    Args:
        weights (dict): Path -> weight of each linear cell, under MindFormers' names.
        quantized (list of str): The paths whose weights become 4-bit; others that target_modules selects start plainly,
            A uniform as of He and B zero.
        config (LoraConfig): With lora_init "loftq" or "loftq_iter_N", and target_modules.

    Attributes:
        paths (list of str): The cells that get LoftQ's start.

    Raises:
        ConfigError: Another lora_init, or lora_rank is larger than a side of a weight.
        TargetError: target_modules or exclude_modules selects nothing.
        CheckpointError: A selected cell stands for several modules.

    Source: Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models, 2023.
    """

    def __init__(self, weights: Dict[str, OutputTensor], quantized: List[str], config: LoraConfig):
        if not initializers.is_loftq(config.lora_init):
            raise ConfigError(
                f"lora_init is {config.lora_init!r}, which a quantized checkpoint cannot be made with. "
                "Set lora_init to 'loftq' or 'loftq_iter_N'."
            )
        self._weights, self._config = weights, config
        self._selected = select_targets(
            list(weights), config.target_modules, config.exclude_modules, layers=config.layers_to_transform
        )
        self.paths = [path for path in self._selected if path in quantized]
        joined = sorted(path for path in self._selected if names.joined_parts(path))
        if joined:
            raise CheckpointError(
                f"{listed(joined)} hold several modules in one, for which PEFT's form has no "
                "adapter. Split them with mindlora convert-base --to hf, quantize that, and set "
                "qkv_concat: False."
            )
        for path in self.paths:
            initializers.check_rank(config.for_cell(path).lora_rank, weights[path], "loftq")
        self._sampled = sampled(self._selected)
        self._pairs, self._samples = {}, {}

    def quantize(self, path: str, name: str) -> Nf4Array:
        """Returns what stands for the weight at ``path``, which errors call ``name``, and keeps its A and B."""
        own, weight = self._config.for_cell(path), _in_float(self._weights[path])
        array, a, b = initializers.loftq(
            weight,
            own.lora_rank,
            lambda rest: quantize(rest, name),
            dequantize,
            initializers.loftq_iterations(own.lora_init),
            own.scale,
        )
        self._keep(path, a, b, array.codes)
        return array

    def adapter(self) -> Adapter:
        """Returns the adapter, once ``quantize`` was called for all paths."""
        rng = np.random.default_rng(0)
        for path in self._selected:
            if path not in self.paths:
                rank, (rows, columns) = self._config.for_cell(path).lora_rank, self._weights[path].shape
                a = rng.uniform(-1, 1, (rank, columns)).astype(np.float32) / np.float32(np.sqrt(columns))
                weight = _in_float(self._weights[path]) if path in self._sampled else None
                self._keep(path, a, np.zeros((rows, rank), np.float32), weight)
        mark = mark_of({path: self._weights[path].shape for path in self._selected}, self._samples)
        return Adapter(
            {(path, part): array for path in self._selected for part, array in self._pairs[path].items()},
            {path: float(self._config.for_cell(path).lora_alpha) for path in self._selected},
            self._config.use_rslora,
            self._config.lora_dropout,
            fingerprint={**mark, "quantization": "loftq"},
            dialect="loftq",
        )

    def _keep(self, path, a, b, weight):
        self._pairs[path] = {"A": np.ascontiguousarray(a), "B": np.ascontiguousarray(b)}
        if path in self._sampled:
            self._samples[path] = picked(weight)


def check_loftq_output(folder: str, source: str, output: str, overwrite: bool) -> None:
    """Raises CheckpointError, AdapterError or LoraError where the adapter cannot be written to ``folder``."""
    adapter_files.check_adapter_output(folder, "peft")
    check_checkpoint_output(folder, [source], overwrite)
    places = [os.path.realpath(path) for path in (folder, output)]
    if os.path.commonpath(places) in places:
        raise CheckpointError(
            f"The adapter's folder {folder} and the quantized base {output} lie in each other, and "
            "each replaces what stands at its place. Write one of them elsewhere."
        )


def _in_float(tensor) -> np.ndarray:
    return to_float32(tensor.rows(0, tensor.count))
