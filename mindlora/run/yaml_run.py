"""YamlRun: the run of a MindFormers YAML, with each fact that more than one module needs."""

import dataclasses
import functools
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.fields import COUNT
from mindlora.core.json_files import parse_object
from mindlora.core.yaml_file import PET, SEMI_AUTOMATIC, SHARDING_MODES, TRAINING_MODES, value_at
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture
from mindlora.models.architectures.classifiers import task_of
from mindlora.models.lora_config import AS_STORED
from mindlora.run.checks.finding import Finding
from mindlora.run.checks.pet_config import PetLoraConfig, read_pet_config
from mindlora.run.keys import KEYS, MODEL

WRAPPER = "LoraTrainOneStepCell"
DATA_PARALLEL = (0, "DATA_PARALLEL", "data_parallel")
# Alone and in data parallel, MindFormers sets gradient_accumulation_steps to 1; in the other modes it accumulates.
_ALONE = (*DATA_PARALLEL, "STAND_ALONE", "stand_alone")
# If one of these is above 1, no rank holds the whole adapter.
_SPLITS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
# If one of these is above 1, a weight is cut.
_CUTS = ("model_parallel", "pipeline_stage", "expert_parallel")
_NESTED = f"{MODEL}.llm_model.model_config"
# The place of routed experts in a YAML of a legacy model.
EXPERT_NODES = ("moe_config", f"{MODEL}.moe_config")

_FOLDER = "pretrained_model_dir"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
# A MindRecord, several, or a folder of them.
Data = Union[str, Sequence[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class YamlRun:
    """The run of the content of a MindFormers YAML.

    A fact is computed at its first use, and kept. So a YamlRun describes the mapping at that time: code that
    changes the mapping, as mindlora-run does after its checks, builds a new YamlRun afterwards.

    ``at`` and ``setting`` take any mapping. The rest needs nodes of the right kind (check_shape), and
    arithmetic needs values in range (check_keys).

    Attributes:
        config (mapping): The content of the YAML.
    """

    config: Mapping[str, Any]

    def at(self, key: str) -> Any:
        """Returns the value at a dotted key, or None if there is none."""
        return value_at(self.config, key)

    def setting(self, key: str) -> Any:
        """Returns the value of a key in the table of keys, or MindFormers' default."""
        value = self.at(key)
        return KEYS[key].default if value is None else value

    @property
    def mode(self) -> Any:
        """run_mode: "train", "finetune", "eval" or "predict"."""
        return self.config.get("run_mode")

    @functools.cached_property
    def trains(self) -> bool:
        """Whether the run trains."""
        return self.mode in TRAINING_MODES

    @functools.cached_property
    def evaluates(self) -> bool:
        """Whether the run reads eval_dataset."""
        return self.mode == "eval" or self.trains and bool(self.at("do_eval"))

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether the YAML names a CPU."""
        return self.at("context.device_target") == "CPU"

    @functools.cached_property
    def in_graph_mode(self) -> bool:
        """Whether the network runs as a graph."""
        return self.setting("context.mode") in (0, "GRAPH_MODE")

    # The model.

    @functools.cached_property
    def language(self) -> "YamlRun":
        """The run with the language model as its model: for a multi-modal model, the one with pet_config inside it."""
        if self.at(PET) or not self.at(f"{_NESTED}.pet_config"):
            return self
        return YamlRun({**self.config, "model": self.at(f"{MODEL}.llm_model")})

    @property
    def language_key(self) -> str:
        """The key of the language model's configuration."""
        return MODEL if self.language is self else _NESTED

    @functools.cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The node model.model_config; empty if there is none."""
        return self.at(MODEL) or {}

    @functools.cached_property
    def model(self) -> Dict[str, Any]:
        """model.model_config; for an mcore model, over the config.json in pretrained_model_dir, if that is named."""
        return {**(self._folder_config if self.is_mcore else {}), **self.model_config}

    @functools.cached_property
    def _folder_config(self) -> Dict[str, Any]:
        """The content of the config.json in pretrained_model_dir; empty if there is none."""
        folder = self.at("pretrained_model_dir")
        path = os.path.join(folder, "config.json") if folder else ""
        if not os.path.isfile(path):
            return {}
        with open(path, "rb") as file:
            return parse_object(file.read(), path, ConfigError)

    @property
    def model_class(self) -> Optional[str]:
        """model.arch.type."""
        return self.at("model.arch.type")

    @functools.cached_property
    def is_classifier(self) -> bool:
        """Whether the model is a classifier or a reward model."""
        return task_of(self.head_class) is not None

    @property
    def head_class(self) -> Optional[str]:
        """The class of the model, which determines its head: model.arch.type, or the class of an mcore model."""
        return self.family if self.is_mcore else self.model_class

    @property
    def predicted_layers(self) -> int:
        """How many layers of the model predict tokens after the next one, as far as the YAML says."""
        return self.model.get("num_nextn_predict_layers") or self.model.get("mtp_num_layers") or 0

    @property
    def class_key(self) -> str:
        """The key that names ``head_class``."""
        return f"{MODEL}.architectures" if self.is_mcore else "model.arch.type"

    @functools.cached_property
    def is_mcore(self) -> bool:
        """Whether the model is one of MindFormers' mcore models."""
        return self.config.get("use_legacy", True) is False

    @functools.cached_property
    def family(self) -> Optional[str]:
        """The class of the mcore model, or None if the YAML and its config.json do not name it."""
        classes = registry.trained_mcore_classes()
        for source in (self.model_config, self._folder_config):
            named = first_class(source) or classes.get(str(source.get("model_type")))
            if named:
                return named
        return self.model_config.get("model_type")

    @functools.cached_property
    def model_name(self) -> Optional[str]:
        """The YAML's name of its model: the class that MindFormers builds, its configuration's, or model_type."""
        if self.is_mcore and self.family:
            return self.family
        model = self.model_config
        named = (self.model_class, model.get("type"), first_class(model), model.get("model_type"))
        return next((str(name) for name in named if name), None)

    @functools.cached_property
    def legacy_experts(self) -> int:
        """The number of routed experts in a layer of a legacy model; 1 in a dense model."""
        if self.is_mcore:
            return 1
        counts = [self.at(f"{node}.expert_num") for node in EXPERT_NODES]
        return max([1, *(count for count in counts if count in COUNT)])

    @functools.cached_property
    def architecture(self) -> Optional[Architecture]:
        """The record of the model's cells, or None if they are unknown."""
        name = self.model_name
        architecture = registry.by_model_type(name) or registry.by_hugging_face_type(str(name))
        unknown_experts = architecture is not None and self.legacy_experts > 1 and not architecture.experts
        return None if unknown_experts else architecture

    @property
    def takes_shifted_labels(self) -> bool:
        """Whether the model learns the labels unshifted: each belongs to the token before it."""
        return self.architecture is not None and self.architecture.takes_shifted_labels

    @property
    def base_name(self) -> str:
        """The default name of the base in requests to a server."""
        return self.at("trainer.model_name") or "base"

    @functools.cached_property
    def base(self) -> Tuple[str, Optional[str]]:
        """The key that names the base, and its path: the one from which MindFormers' Trainer takes the weights.

        MindFormers 1.9 prefers checkpoint.load_path, and takes pretrained_model_dir if nothing else is named and
        that folder has weights.
        """
        load_path, load_checkpoint, folder = map(self.at, ("checkpoint.load_path", "load_checkpoint", _FOLDER))
        if load_path:
            return "checkpoint.load_path", load_path
        if load_checkpoint or not folder:
            return "load_checkpoint", load_checkpoint
        has_weights = os.path.isdir(folder) and any(name.endswith(".safetensors") for name in os.listdir(folder))
        return (_FOLDER, folder) if has_weights or not os.path.isdir(folder) else ("load_checkpoint", None)

    @functools.cached_property
    def tokenizer(self) -> Optional[str]:
        """The path of the tokenizer: the file in processor.tokenizer, or the folder of the base if it has one."""
        node = self.at("processor.tokenizer") or {}
        named = node.get("tokenizer_file") or node.get("vocab_file")
        if named:
            return str(named)
        path = self.base[1] or ""
        folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
        found = any(os.path.exists(os.path.join(folder, name)) for name in _TOKENIZERS)
        return folder if found else None

    @functools.cached_property
    def base_is_safetensors(self) -> bool:
        """Whether the base, which must exist, is a file of safetensors, or a folder with one."""
        path = self.base[1] or ""
        return any(name.endswith(".safetensors") for name in (os.listdir(path) if os.path.isdir(path) else [path]))

    @functools.cached_property
    def base_holds_adapter(self) -> bool:
        """Whether the base has an adapter's tensors among its own, as MindFormers saves both in training."""
        try:
            with BaseCheckpoint(self.base[1] or "") as base:
                return any("lora" in name for name in base.tensors)
        except LoraError:
            # Damaged files, and those of other models, are refused when they are read.
            return False

    # The adapter.

    @functools.cached_property
    def pet_config(self) -> Mapping[str, Any]:
        """The node pet_config; empty if there is none."""
        return self.at(PET) or {}

    @functools.cached_property
    def _read_pet_config(self) -> Tuple[Optional[PetLoraConfig], List[Finding]]:
        return read_pet_config(self.pet_config, self.head_class)

    @property
    def lora(self) -> Optional[PetLoraConfig]:
        """The configuration of pet_config, or None if it is invalid."""
        return self._read_pet_config[0]

    @property
    def pet_findings(self) -> List[Finding]:
        """Faults in pet_config alone."""
        return self._read_pet_config[1]

    @functools.cached_property
    def quantizes_base(self) -> bool:
        """Whether pet_config requests a quantized base."""
        return bool(self.pet_config.get("quantize_base")) or self.pet_config.get("pet_type") == "qlora"

    @property
    def holds_as_stored(self) -> bool:
        """Whether pet_config keeps the bits in which the base is stored."""
        return self.pet_config.get("quantize_base") == AS_STORED

    # The train step and the callbacks.

    @functools.cached_property
    def train_step(self) -> str:
        """The class of the train step."""
        return self.at("runner_wrapper.type") or "MFTrainOneStepCell"

    @functools.cached_property
    def accumulates_here(self) -> bool:
        """Whether the run is on one device or data parallel, where mindlora's train step accumulates gradients."""
        return not self.in_parallel or self.parallel_mode in _ALONE

    @property
    def steps_by_mindlora(self) -> bool:
        """Whether mindlora's train step computes the gradients, rather than MindFormers'."""
        return self.train_step == WRAPPER and self.accumulates_here

    @functools.cached_property
    def optimizer(self) -> Optional[str]:
        """The class of the optimizer."""
        return self.at("optimizer.type")

    @functools.cached_property
    def preference(self) -> Any:
        """The node runner_wrapper.preference, or None if the run does not learn from preferences."""
        return self.at("runner_wrapper.preference")

    @functools.cached_property
    def rl(self) -> Any:
        """The node runner_wrapper.rl, or None if the run does not learn from rewards."""
        return self.at("runner_wrapper.rl")

    @functools.cached_property
    def rows(self) -> int:
        """Rows in a batch on each device; with gradient accumulation, in a micro-batch."""
        return self.setting("runner_config.batch_size") * self.setting("micro_batch_interleave_num")

    @functools.cached_property
    def accumulation(self) -> int:
        """Micro-batches in a step (gradient_accumulation_steps)."""
        return self.setting("runner_config.gradient_accumulation_steps")

    @functools.cached_property
    def callbacks(self) -> List[Tuple[str, Mapping[str, Any]]]:
        """(Key in the YAML, node) of each callback."""
        return [(f"callbacks.{name}", callback) for name, callback in named_items(self.at("callbacks"))]

    def callbacks_of(self, kind: str) -> List[Tuple[str, Mapping[str, Any]]]:
        """Returns (key in the YAML, node) of each callback of one type."""
        return [(where, callback) for where, callback in self.callbacks if callback.get("type") == kind]

    # The devices.

    @functools.cached_property
    def in_parallel(self) -> bool:
        """Whether several devices work on the run (use_parallel)."""
        return bool(self.at("use_parallel"))

    @functools.cached_property
    def parallel_mode(self) -> Any:
        """parallel.parallel_mode, a number or its name."""
        return self.setting("parallel.parallel_mode")

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether MindSpore can divide the cells of the run among devices."""
        return self.in_parallel and self.parallel_mode in SHARDING_MODES

    @property
    def is_semi_automatic(self) -> bool:
        """Whether the cells of the run declare how MindSpore divides them among devices."""
        return self.in_parallel and self.parallel_mode in SEMI_AUTOMATIC

    @property
    def reads_all(self) -> bool:
        """Whether each device of a run in semi-auto parallel reads all rows (parallel.full_batch)."""
        return self.at("parallel.full_batch") is not False

    @functools.cached_property
    def split_by(self) -> Optional[str]:
        """The setting that keeps each rank of a parallel run from holding the whole adapter, or None."""
        for key in _SPLITS:
            parts = self.setting(f"parallel_config.{key}")
            if parts > 1:
                return f"parallel_config.{key} is {parts}"
        if self.at("parallel.enable_parallel_optimizer"):
            return "parallel.enable_parallel_optimizer is True"
        return None if self.parallel_mode in DATA_PARALLEL else f"parallel.parallel_mode is {self.parallel_mode!r}"

    @functools.cached_property
    def cut_by(self) -> Optional[Tuple[str, Any, Any]]:
        """(Key, its value, the value that cuts nothing) of the first key that cuts weights; None if none does."""
        if not self.in_parallel:
            return None
        for name in _CUTS:
            parts = self.setting(f"parallel_config.{name}")
            if parts > 1:
                return f"parallel_config.{name}", parts, 1
        if self.is_sharded and self.at("parallel.enable_parallel_optimizer"):
            return "parallel.enable_parallel_optimizer", True, False
        return None

    @functools.cached_property
    def stage_offset(self) -> Tuple[int, ...]:
        """Additional layers of each stage of a pipeline; empty for none."""
        if self.setting("parallel_config.pipeline_stage") == 1:
            return ()
        offset = self.at(f"{MODEL}.offset")
        return tuple(offset) if isinstance(offset, list) and all(isinstance(part, int) for part in offset) else ()

    # The data.

    @functools.cached_property
    def columns(self) -> Optional[List[str]]:
        """The columns that train_dataset reads, or None if it does not name them."""
        columns = self.at("train_dataset.input_columns")
        return [columns] if isinstance(columns, str) else columns

    @functools.cached_property
    def train_data(self) -> Optional[Data]:
        """The MindRecords that train_dataset names, or None if they cannot be read yet."""
        return data_of(self.at("train_dataset"))

    @functools.cached_property
    def eval_data(self) -> Optional[Data]:
        """The MindRecords that eval_dataset names, or None if they cannot be read yet."""
        return data_of(self.at("eval_dataset"))

    @functools.cached_property
    def held_out_data(self) -> List[Tuple[str, str]]:
        """(Key in the YAML, path) of each HeldOutLoss' data that exists."""
        named = [(where, callback.get("dataset_dir")) for where, callback in self.callbacks_of("HeldOutLoss")]
        return [(where, path) for where, path in named if path and os.path.exists(path)]

    @functools.cached_property
    def adapters(self) -> Sequence[Any]:
        """The nodes of several adapters (pet_config.adapters); empty in a run with one."""
        return self.pet_config.get("adapters") or ()

    @functools.cached_property
    def data_of_adapters(self) -> List[Tuple[str, str]]:
        """(Key in the YAML, path) of the own data of each of several adapters, if it exists."""
        own = [adapter.get("data") if isinstance(adapter, Mapping) else None for adapter in self.adapters]
        named = [(f"{PET}.adapters[{number}].data", path) for number, path in enumerate(own)]
        return [(where, path) for where, path in named if isinstance(path, str) and os.path.exists(path)]


def data_of(dataset: Optional[Mapping[str, Any]]) -> Optional[Data]:
    """Returns the MindRecords that a dataset node names, or None if they cannot be read yet."""
    loader = (dataset or {}).get("data_loader") or {}
    data = loader.get("dataset_dir") or loader.get("dataset_files")
    if loader.get("type") != "MindDataset" or not data:
        return None
    return data if all(map(os.path.exists, [data] if isinstance(data, str) else data)) else None


def named_items(items: Optional[Sequence[Any]]) -> Iterator[Tuple[str, Any]]:
    """Yields (name for messages, item) for a list: the name is the item's type, or its number if it has none.

    Numbers of callbacks are not always those of the file, because MindFormers adds one before the others.
    """
    types = [item.get("type") if isinstance(item, Mapping) else None for item in items or []]
    for number, (kind, item) in enumerate(zip(types, items or [])):
        count = types.count(kind)
        which = f" ({types[: number + 1].count(kind)} of {count})" if count > 1 else ""
        yield f"{kind}{which}" if isinstance(kind, str) else str(number), item


def first_class(model_config: Mapping[str, Any]) -> Optional[str]:
    """Returns the first of ``architectures``, or None."""
    names = model_config.get("architectures")
    listed: List[str] = [names] if isinstance(names, str) else list(names or ())
    return listed[0] if listed else None
