"""Run: the checked facts about a MindFormers YAML that a plan needs."""

import dataclasses
import functools
import math
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from mindlora.core.errors import ConfigError
from mindlora.core.fields import dtype_name
from mindlora.core.formats.mindrecord_files import column_shapes, mindrecord_files, row_count
from mindlora.core.numerics.integers import IntegerForm
from mindlora.core.numerics.pair_shapes import EXPERTS, LINEAR
from mindlora.core.text import listed, suggestion
from mindlora.core.yaml_file import merged, value_at
from mindlora.files.base.held import held_forms
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture, Attention, ParameterSize
from mindlora.models.architectures.classifiers import task_of
from mindlora.models.description import AdaptableCell, Description
from mindlora.models.label_losses import (
    DIVIDED_DROPOUT,
    IN_GRAPH_MODE,
    OTHER_STEP,
    SEVERAL_ADAPTERS,
    Head,
    HeadDivision,
    adapter_obstacle,
    tokens_at_once,
)
from mindlora.models.lora_config import AS_STORED, LoraConfig
from mindlora.models.trainable import Selection, select
from mindlora.models.variants.variant import CUT, SHARDED
from mindlora.models.weights import Weight, weights_of
from mindlora.run.checks.batches import check_batches
from mindlora.run.checks.cpu import held_dtype
from mindlora.run.checks.examine import check_settings
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.key_ranges import check_names, check_shape
from mindlora.run.checks.model import network_of
from mindlora.run.plan.division import Division
from mindlora.run.yaml_run import WRAPPER, YamlRun
from mindlora.training.preference.settings import preference_settings
from mindlora.training.several.rules import TrainedAdapter, trained_adapters

Counted = Tuple[Optional[int], str]


@dataclasses.dataclass(frozen=True)
class Run:
    """The run of a YAML.

    Attributes:
        yaml (YamlRun): The YAML.
        lora (LoraConfig): The adapter for apply_lora, or None if the whole network is trained.
        rows_of_model (int): Rows of the model for a row of the data: 2 for an unpacked preference, and
            one for each adapter of a run with several.
        adapters (tuple of TrainedAdapter): The adapters of a run with several, of which ``lora`` is the first.
    """

    yaml: YamlRun
    architecture: Architecture
    network: Description
    lora: Optional[LoraConfig]
    division: Division
    rows_of_model: int = 1
    adapters: Tuple[TrainedAdapter, ...] = ()

    @functools.cached_property
    def alone(self) -> List["Run"]:
        """The runs with each of several adapters alone; with at most one adapter, the run itself."""
        if not self.adapters:
            return [self]
        configs = [adapter.config.for_network() for adapter in self.adapters]
        return [dataclasses.replace(self, lora=config, adapters=(), rows_of_model=1) for config in configs]

    @property
    def model(self) -> Mapping[str, Any]:
        """The keys of the model: model_config, and the config.json in pretrained_model_dir."""
        return self.yaml.model

    @property
    def seq_length(self) -> int:
        """Tokens in a row."""
        return self.number("seq_length", 2048)

    @functools.cached_property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(layer_of(name) or 0 for name in self.parameters)

    @property
    def parameters(self) -> Mapping[str, ParameterSize]:
        """Name -> ParameterSize of all parameters of the base."""
        return self.network.parameters

    @property
    def computes_reference(self) -> bool:
        """Whether each step of preference training computes the reference too."""
        if self.yaml.preference is None or not self.yaml.trains:
            return False
        settings = preference_settings(self.yaml.preference)
        return settings.kind.uses_reference and not settings.precomputed_reference

    @functools.cached_property
    def selection(self) -> Optional[Selection]:
        """The Selection of pet_config in the network, or None without one; raises as ``select`` does."""
        if self.lora is None:
            return None
        network = self.network
        if self.division.sharded:
            network = network.sharded(SHARDED, CUT) if self.division.model > 1 else network.sharded(SHARDED)
        selection = select(network, self.lora, warn=False)
        self.lora.variant.check_paths(list(selection.parts))
        return selection

    @functools.cached_property
    def weights(self) -> List[Weight]:
        """All parameters of the network, including the adapter's; raises as ``select`` does."""
        if self.adapters:
            return [*(weight for weight in self.alone[0].weights if not weight.adapter), *self._stacked_weights()]
        weights = weights_of(self.network, self.lora, self.selection, self.held)
        if not self.yaml.trains:
            return [dataclasses.replace(weight, trained=False) for weight in weights]
        if held_dtype(self.yaml) is None:
            return weights
        # Trained parameters of a base in 16 bits are widened.
        return [
            dataclasses.replace(weight, dtype="float32") if weight.trained and not weight.adapter else weight
            for weight in weights
        ]

    @functools.cached_property
    def held(self) -> Dict[str, IntegerForm]:
        """Name -> form of the weights that stay in the integers of load_checkpoint.

        Raises ConfigError if there is no such base, and CheckpointError if a weight cannot be held so.
        """
        if self.lora is None or self.lora.quantize_base != AS_STORED:
            return {}
        path = self.yaml.base[1]
        if not path or not os.path.exists(path):
            raise ConfigError(
                f"quantize_base is as_stored, and load_checkpoint is {path!r}, which gives the form of the weights. "
                "Name the quantized folder (--load_checkpoint)."
            )
        kv_heads = self.model.get("n_kv_heads") or self.model.get("num_heads")
        return held_forms(path, self.parameters, kv_heads)

    @property
    def adapted(self) -> Tuple[str, ...]:
        """The prefixes of the cells that get any adapter."""
        if self.adapters:
            return tuple(path for path in self._stackable if self.ranks(path))
        return tuple(self.selection.parts) if self.selection else ()

    def ranks(self, path: str) -> List[int]:
        """Returns the ranks of the adapters on a cell."""
        on_cell = [run.lora for run in self.alone if run.lora and run.selection and path in run.selection.parts]
        return [lora.for_cell(path).lora_rank for lora in on_cell]

    def _stacked_weights(self) -> Iterator[Weight]:
        """Yields A and B of each cell with any of several adapters, stacked and padded to the largest rank."""
        others = sorted({path for run in self.alone for path in run.adapted} - set(self.adapted))
        if others:
            raise ConfigError(
                f"{listed(others)} cannot carry several adapters: only linear cells and routed experts with plain LoRA "
                "train beside others. Add it to exclude_modules."
            )
        count, dtype = len(self.adapters), self.adapters[0].config.param_init_type
        for path in self.adapted:
            cell, ranks = self._stackable[path], self.ranks(path)
            for part, shape in cell.layout.pair_shapes(cell.shape, max(ranks)).items():
                own = math.prod(shape) // max(ranks) * sum(ranks)
                yield Weight(path, part, (count, *shape), dtype, own, self.yaml.trains, True)

    @functools.cached_property
    def _stackable(self) -> Dict[str, AdaptableCell]:
        """Path -> each cell that can carry several adapters."""
        return {cell.prefix: cell for cell in self.network.of_kind(LINEAR, EXPERTS).values()}

    @functools.cached_property
    def linear(self) -> Dict[str, Tuple[int, int]]:
        """Path -> (out, in) of the linear cells."""
        return {cell.prefix: (cell.shape[0], cell.shape[1]) for cell in self.network.of_kind(LINEAR).values()}

    @functools.cached_property
    def embedding(self) -> Tuple[str, Tuple[int, ...]]:
        """Path and shape [vocabulary, hidden] of the embedding."""
        shapes = {name.rpartition(".")[0]: size.shape for name, size in self.parameters.items()}
        return next((path, shape) for path, shape in shapes.items() if names.is_embedding(path))

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the embedding."""
        return self.embedding[1][0]

    @property
    def outputs(self) -> int:
        """The number of the model's outputs per position: of tokens, or of a classifier's labels."""
        return self.vocabulary if task_of(self.yaml.model_name) is None else self.number("num_labels", 1)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.embedding[1][1]

    @functools.cached_property
    def attention(self) -> Attention:
        """The widths of its attention."""
        # In the first layer, as later ones overwrite its sizes.
        cells = {names.role_of(path): size for path, size in reversed(self.linear.items())}
        return self.architecture.attention(self.model, cells)

    @functools.cached_property
    def experts(self) -> Dict[str, Tuple[int, ...]]:
        """Path -> (experts, out, in) of the stacked weights of routed experts."""
        return {cell.prefix: cell.shape for cell in self.network.of_kind(EXPERTS).values()}

    @property
    def chosen_experts(self) -> int:
        """The number of routed experts per token."""
        key = "num_experts_per_tok" if self.model.get("num_experts_per_tok") else "moe_router_topk"
        return self.number(key, 8)

    @property
    def cache_tokens(self) -> int:
        """The number of tokens in the network's KV cache."""
        if not self.architecture.caches_in_training and (self.yaml.trains or not self.model.get("use_past")):
            return 0
        return self.number("num_blocks", self.architecture.cache_blocks) * self.number("block_size", 16)

    @property
    def tokens(self) -> int:
        """The number of tokens that one device computes at a time."""
        return self.yaml.rows * self.rows_of_model * self.seq_length // self.division.context

    @functools.cached_property
    def head(self) -> Head:
        """The output head, and whether it and the loss go through the tokens in pieces."""
        heads = [weight for weight in self.weights if weight.role == "lm_head"]
        is_divided = self.yaml.train_step == WRAPPER and self.yaml.is_semi_automatic
        # There MindFormers builds its own train step for pipelines and micro-batches.
        is_divided = is_divided and self.division.pipeline == self.yaml.accumulation == 1
        cell = ""
        if self.yaml.is_classifier:
            cell = "gives scores of labels"
        elif any(weight.dtype == "uint8" for weight in heads):
            cell = "is in 4 bits"
        elif any(weight.adapter for weight in heads):
            cell = self._obstacle_of_adapter(is_divided)
        return Head(
            self.yaml.setting(IN_GRAPH_MODE),
            "" if self.steps_by_mindlora or self.adapters or is_divided else OTHER_STEP,
            str(self.yaml.model_name),
            self.yaml.is_mcore or self.yaml.is_classifier or self.yaml.model_class == "LlamaForCausalLM",
            cell,
        )

    def _obstacle_of_adapter(self, is_divided: bool) -> str:
        """Returns the property of an adapter on the head that keeps its logits whole."""
        if self.lora is None:
            return SEVERAL_ADAPTERS
        drops = is_divided and self.lora.lora_dropout > 0
        return adapter_obstacle(self.lora.variant, self.trains_head) or (DIVIDED_DROPOUT if drops else "")

    @property
    def predicts_further(self) -> bool:
        """Whether the model has layers that predict further tokens (num_nextn_predict_layers)."""
        return any(path.startswith("mtp.") for path in self.linear)

    @property
    def piece(self) -> Optional[int]:
        """The number of tokens that head and loss take at a time; None if they take all of them."""
        if self.head.why_whole:
            return None
        if self.head.setting is not True:
            return min(self.head.setting, self.tokens_of_head)
        return min(tokens_at_once(self.tokens_of_head, self.hidden, self.rows_of_head), self.tokens_of_head)

    @functools.cached_property
    def head_division(self) -> HeadDivision:
        """The division of head and loss among devices when they go through the tokens in pieces."""
        division = self.division
        whole = division.whole_vocabulary
        return HeadDivision.of_sizes(
            division.data, division.context, division.model, whole, self.outputs, self.seq_length
        )

    @property
    def tokens_of_head(self) -> int:
        """The total number of tokens in the head of one device, when they go through it in pieces."""
        return self.tokens // (self.division.model if self.head_division.by_tokens else 1)

    @property
    def rows_of_head(self) -> int:
        """The rows of the head on one device, when tokens go through it in pieces."""
        return self.outputs // (self.division.model if self.head_division.by_vocabulary else 1)

    @property
    def trains_head(self) -> bool:
        """Whether the weight of the output head trains, which may be the table of the embedding."""
        roles = {"lm_head", "tok_embeddings"} if self.model.get("tie_word_embeddings") else {"lm_head"}
        return any(weight.trained and not weight.adapter and weight.role in roles for weight in self.weights)

    @property
    def steps_by_mindlora(self) -> bool:
        """Whether mindlora's train step computes the gradients, rather than MindFormers'."""
        return self.yaml.train_step == WRAPPER and not self.division.sharded

    def with_rows(self, batch_size: int, seq_length: int) -> "Run":
        """Returns the run with other rows, on which the network and the adapter do not depend."""
        sizes = {"runner_config": {"batch_size": batch_size}, "model": {"model_config": {"seq_length": seq_length}}}
        changed = dataclasses.replace(self, yaml=YamlRun(merged(self.yaml.config, sizes)))
        # These are computed once, as they take longer than the parts that depend on the rows.
        vars(changed).update(selection=self.selection, weights=self.weights)
        return changed

    def number(self, key: str, default: int) -> int:
        """Returns a whole number above 0 of model_config."""
        return self.model.get(key) or default

    def dtype(self, key: str, default: str) -> str:
        """Returns a dtype of model_config."""
        return dtype_name(default if self.model.get(key) is None else self.model[key], f"model.model_config.{key}")

    @property
    def compute_dtype(self) -> str:
        """The dtype of activations."""
        return self.dtype("compute_dtype", "float16")


def layer_of(path: str) -> Optional[int]:
    """Returns the layer of a path, or None, also for the layers behind the last one that predict further tokens."""
    return None if path.startswith("mtp.") else names.layer_of(path)


def read_run(config: Dict[str, Any]) -> Run:
    """Returns the run of a YAML.

    Raises ConfigError if the model or a setting is unknown, or sizes are wrong or cannot be divided as configured.
    """
    if not isinstance(value_at(config, "model.model_config"), dict):
        raise ConfigError(
            "The YAML, with the values of the command line, has no keys below model.model_config: give a complete "
            "MindFormers YAML."
        )
    yaml = YamlRun(config)
    refuse(check_shape(yaml))
    refuse([*check_names(yaml), *check_settings(yaml)])
    refuse(check_batches(yaml))
    architecture = _architecture(yaml)
    if yaml.trains and not architecture.trains:
        raise ConfigError(
            f"run_mode is {yaml.mode!r}, and MindFormers has {architecture.title} for prediction alone. Plan it with "
            "run_mode: predict."
        )
    lora, adapters = _adapters(yaml)
    rows_of_model = len(adapters) or (_rows_of_model(yaml) if yaml.trains else 1)
    network = network_of(architecture, dict(yaml.model))
    return Run(yaml, architecture, network, lora, Division.of_yaml(yaml), rows_of_model, adapters)


def _rows_of_model(yaml: YamlRun) -> int:
    """Returns the model's rows for a row of the training data; without data, preferences count as unpacked."""
    if yaml.preference is None:
        return 1
    data = yaml.train_data
    shapes = column_shapes(next(iter(mindrecord_files(data)), "")) if data else None
    shape = (shapes or {}).get("input_ids", (2, 0))
    return shape[0] if len(shape) > 1 else 1


def _architecture(yaml: YamlRun) -> Architecture:
    if yaml.architecture is not None:
        return yaml.architecture
    name = yaml.model_name
    if yaml.legacy_experts > 1:
        raise ConfigError(
            f"moe_config.expert_num is {yaml.legacy_experts}: the sizes of the experts of {name} are not known, so its "
            "run cannot be planned. Use a model without experts, or an mcore model with them."
        )
    types = sorted({kind for record in registry.ARCHITECTURES for kind in record.model_types})
    raise ConfigError(f"The model is {name!r}, whose sizes are not known.{suggestion(str(name), types)}")


def _adapters(yaml: YamlRun) -> Tuple[Optional[LoraConfig], Tuple[TrainedAdapter, ...]]:
    """Returns the adapter of a run, and, if there are several, all of them."""
    lora = yaml.lora
    if lora is None and yaml.pet_config:
        pet_type = yaml.pet_config.get("pet_type")
        raise ConfigError(f"pet_type is {pet_type!r}, which is MindFormers' own: set pet_type: lora to plan the run.")
    if lora is not None and lora.adapters:
        adapters = tuple(trained_adapters(lora))
        return adapters[0].config.for_network(), adapters
    return None if lora is None else lora.for_network(), ()


def count_files(source: Union[str, Sequence[str]]) -> Counted:
    """Returns the number of rows of the MindRecords at a path, or None, and their path or the reason."""
    files = list(filter(os.path.isfile, mindrecord_files(source)))
    if not files:
        return None, f"{source} holds no MindRecord"
    total = 0
    for path in files:
        rows = row_count(path)
        if rows is None:
            return None, f"{path} has no readable index (.db) beside it, so its rows cannot be counted"
        total += rows
    return total, f"{len(files)} MindRecord{'s' * (len(files) > 1)}"


def longest_data(counted: Sequence[Counted]) -> Counted:
    """Returns the result of count_files for the longest of several datasets, or for one that could not be counted."""
    unknown = [each for each in counted if each[0] is None]
    return unknown[0] if unknown else max(counted, key=lambda each: each[0] or 0)
