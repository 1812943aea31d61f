"""LoftQ for a checkpoint: while it is quantized, an adapter is made that compensates for the error, cell by cell."""

import os
from typing import Dict, List

import numpy as np

from mindlora.core.errors import CheckpointError, ConfigError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.nf4 import Nf4Array, dequantize, quantize
from mindlora.core.text import listed
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.fingerprint import fingerprint_from, sampled_elements, sampled_paths
from mindlora.files.base.writer import OutputTensor, check_checkpoint_output
from mindlora.models import names
from mindlora.models.lora_config import LoraConfig
from mindlora.models.target_modules import select_targets


class LoftqInitializer:
    """Makes an adapter while a checkpoint is quantized, with one float weight in memory at a time.

    ``weights`` is path -> weight of each linear cell, under MindFormers' names, ``quantized`` the paths whose weights
    become 4-bit, of which LoftQ initializes those that target_modules selects (``paths``). Other cells that it selects
    get a plain initial pair: A is He-uniform, B is zero.

    Raises LoraError if ``config`` is not one of LoftQ's, or selects nothing, a joined cell or too small a weight.

    Source: Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models, 2023.
    """

    def __init__(self, weights: Dict[str, OutputTensor], quantized: List[str], config: LoraConfig):
        if not initializers.is_loftq(config.lora_init):
            raise ConfigError(
                f"lora_init is {config.lora_init!r}, which quantize_checkpoint does not support. "
                "Set lora_init to 'loftq' or 'loftq_iter_N'."
            )
        self._weights = weights
        self._config = config
        self._selected = select_targets(
            list(weights), config.target_modules, config.exclude_modules, layers=config.layers_to_transform
        )
        self.paths = [path for path in self._selected if path in quantized]
        joined = sorted(path for path in self._selected if names.joined_parts(path))
        if joined:
            advice = (
                "An mcore model has them always: leave them out of target_modules, or quantize without LoftQ."
                if any(map(names.is_mcore, joined))
                else "Split them with mindlora base convert --to hf, quantize the result, and set qkv_concat: False."
            )
            raise CheckpointError(f"{listed(joined)} are joined cells, for which PEFT's form has no adapter. {advice}")
        for path in self.paths:
            initializers.check_rank(config.for_cell(path).lora_rank, weights[path], "loftq")
        self._sampled = sampled_paths(self._selected)
        self._pairs: Dict[str, Dict[str, np.ndarray]] = {}
        self._samples: Dict[str, np.ndarray] = {}

    def quantize(self, path: str, name: str) -> Nf4Array:
        """Returns the 4-bit weight of the cell at ``path`` and stores its A and B; errors call the weight ``name``."""
        config = self._config.for_cell(path)
        weight = _in_float(self._weights[path])
        array, a, b = initializers.loftq(
            weight,
            config.lora_rank,
            lambda rest: quantize(rest, name),
            dequantize,
            initializers.loftq_iterations(str(config.lora_init)),
            config.scale,
        )
        self._keep(path, a, b, array.codes)
        return array

    def adapter(self) -> Adapter:
        """Returns the adapter, once ``quantize`` has been called for all paths."""
        rng = np.random.default_rng(0)
        for path in self._selected:
            if path not in self.paths:
                rank = self._config.for_cell(path).lora_rank
                rows, columns = self._weights[path].shape
                a = rng.uniform(-1, 1, (rank, columns)).astype(np.float32) / np.float32(np.sqrt(columns))
                weight = _in_float(self._weights[path]) if path in self._sampled else None
                self._keep(path, a, np.zeros((rows, rank), np.float32), weight)
        fingerprint = fingerprint_from({path: self._weights[path].shape for path in self._selected}, self._samples)
        return Adapter(
            {(path, part): array for path in self._selected for part, array in self._pairs[path].items()},
            {path: float(self._config.for_cell(path).lora_alpha) for path in self._selected},
            self._config.use_rslora,
            self._config.lora_dropout,
            fingerprint={**fingerprint, "quantization": "loftq"},
            dialect="loftq",
        )

    def _keep(self, path, a, b, weight):
        self._pairs[path] = {"A": np.ascontiguousarray(a), "B": np.ascontiguousarray(b)}
        if path in self._sampled:
            self._samples[path] = sampled_elements(weight)


def check_loftq_output(folder: str, source: str, output: str, overwrite: bool) -> None:
    """Raises CheckpointError, AdapterError or LoraError if the adapter cannot be written to ``folder``."""
    adapter_files.check_adapter_output(folder, "peft")
    check_checkpoint_output(folder, [source], overwrite)
    paths = [os.path.realpath(path) for path in (folder, output)]
    if os.path.commonpath(paths) in paths:
        raise CheckpointError(
            f"The adapter's folder {folder} and the quantized base {output} are one inside the other, so writing "
            "one would remove the other. Write one of them elsewhere."
        )


def _in_float(tensor: OutputTensor) -> np.ndarray:
    return to_float32(tensor.rows(0, tensor.row_count))
