"""The needs of a run of MindFormers' PyNative Trainer: parameters, files, steps, and memory without activations."""

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import dtype_name
from mindlora.core.overrides import keys_and_texts, read_value, set_key
from mindlora.core.text import listed, wrapped
from mindlora.core.yaml_file import value_at
from mindlora.models.architectures.classifiers import task_of, with_score
from mindlora.models.label_losses import IN_PYNATIVE, Head
from mindlora.models.weights import Weight
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.checks.pynative import NODES, architecture_of, check_pynative, network_of, selected_paths
from mindlora.run.checks.pynative_adapter import loss_in_pieces, merged
from mindlora.run.plan.adapter_file import adapter_file_size
from mindlora.run.plan.division import Division
from mindlora.run.plan.memory import ARITHMETIC, EXACT, Line, bytes_of_copies
from mindlora.run.plan.run import Run, count_files, longest_data
from mindlora.run.plan.units import gib, size_text
from mindlora.run.yaml_run import YamlRun, data_of
from mindlora.training.several.rules import trained_adapters

_OPTIMIZER = "AdamW"
_FLOAT32 = 4
# A plan needs no file that the run loads.
_OF_FILES = ("checkpoint", "train_dataset", "pet_config.adapter_path")
_WIDTH = 100
_NOTES = (
    "exact: the same bytes as in the run, which tests compare. arithmetic: follows from the sizes.",
    "Not planned: activations, which the PyNative Trainer keeps tensor by tensor, and the work space of kernels.",
)


@dataclasses.dataclass(frozen=True)
class PynativePlan:
    """The needs of a run of the PyNative Trainer on one device.

    Attributes:
        parameters (int): Elements of all parameters; a 4-bit weight counts as W [out, in].
        trained (int): Elements of the trained parameters.
        adapted (tuple of str): Paths of the cells with an adapter.
        adapter_file (int): Bytes of LoraCheckpoint's adapter_model.safetensors, of several adapters
            together, or None if training decides.
        steps (int): Steps of the optimizer, from training.steps, or None.
        rows_per_step (int): Rows in a step, or None.
        rows (int): Rows in the data, or None if they could not be counted; ``data`` names it, or says why not.
        lines (tuple of Line): The permanent contents of memory.
        memory (int): Bytes of a device, or None if not given.
        notes (tuple of str): The plan's assumptions.
    """

    yaml: str
    model: str
    parameters: int
    trained: int
    adapted: Tuple[str, ...]
    adapter: str
    adapter_file: Optional[int]
    dtype: str
    steps: Optional[int]
    rows_per_step: Optional[int]
    seq_length: int
    rows: Optional[int]
    data: str
    lines: Tuple[Line, ...]
    memory: Optional[int]
    notes: Tuple[str, ...]

    @property
    def needed(self) -> int:
        """Bytes of all lines."""
        return sum(line.size for line in self.lines)

    @property
    def exit_code(self) -> int:
        """1 if the lines alone do not fit the given memory, else 0."""
        return int(self.memory is not None and self.needed > self.memory)

    def __str__(self) -> str:
        share = f"{100 * self.trained / self.parameters:.4f} %"
        facts = [
            ("run", f"{self.yaml}: PyNative Trainer, {self.model}"),
            ("parameters", f"{self.parameters:,}, of which {self.trained:,} are trained ({share})"),
            ("adapter", f"{self.adapter}: {listed(self.adapted)}"),
        ]
        if self.adapter_file is not None:
            size = f"{size_text(self.adapter_file)} ({self.adapter_file:,} bytes)"
            facts.append(("adapter file", f"adapter_model.safetensors: {size}, exact"))
        facts.append(("steps", self._steps()))
        text = [wrapped(f"{name:<14}", value, _WIDTH) for name, value in facts]
        rows = [(line.name, gib(line.size), line.basis) for line in self.lines]
        rows.append(("in all, without activations", gib(self.needed), ""))
        widest = max(len(name) for name, _, _ in rows)
        text += ["", f"{'one device':<{widest}}  {'GiB':>8}  basis"]
        text += [f"{name:<{widest}}  {size:>8}  {basis}".rstrip() for name, size, basis in rows]
        if self.memory is not None:
            verdict = "do not fit" if self.exit_code else "fit; activations come on top of that"
            text += ["", f"These {verdict}: a device has {gib(self.memory)} GiB."]
        text.append("")
        return "\n".join([*text, *(wrapped("", note, _WIDTH) for note in (*self.notes, *_NOTES))])

    def _steps(self):
        if self.steps is None or self.rows_per_step is None:
            return "not known: training.steps and global_batch_size say it"
        tokens = self.steps * self.rows_per_step * self.seq_length
        text = f"{self.steps:,} of {self.rows_per_step:,} rows, {tokens:,} tokens with padding"
        if not self.rows:
            return f"{text}; {self.data}"
        return f"{text}: {self.steps * self.rows_per_step / self.rows:.2f} times {self.rows:,} rows ({self.data})"


def plan_of_pynative(
    config: Dict[str, Any], name: str, overrides: Sequence[str], memory: Optional[int]
) -> PynativePlan:
    """Returns the plan of a YAML of the PyNative Trainer; raises LoraError if a setting in it is wrong.

    The arguments are as in make_plan, and the YAML's content.
    """
    for key, text in keys_and_texts(list(overrides)):
        set_key(config, key, read_value(text), f"--{key}", create=True, nodes=NODES)
    findings = check_pynative(config)
    refuse([finding for finding in findings if not finding.key.startswith(_OF_FILES)])
    run = _run(config)
    weights = run.weights
    sizes = [adapter_file_size(alone) for alone in run.alone]
    data = data_of({"data_loader": value_at(config, "train_dataset.dataloader")})
    files = [adapter.data or data for adapter in run.adapters] or [data]
    rows, counted = longest_data([count_files(path) if path else (None, "the YAML names no data") for path in files])
    training = config.get("training") or {}
    return PynativePlan(
        name,
        run.architecture.title,
        sum(weight.count for weight in weights),
        sum(weight.count for weight in weights if weight.trained),
        run.adapted,
        _described(run),
        None if None in sizes else sum(size or 0 for size in sizes),
        _dtype(config),
        training.get("steps"),
        training.get("global_batch_size") or training.get("local_batch_size"),
        run.seq_length,
        rows,
        counted,
        tuple(_lines(run, config, weights)),
        memory,
        (str(head_of_pynative(config)), *_notes(config)),
    )


def head_of_pynative(config: Mapping[str, Any]) -> Head:
    """Returns the output head of a YAML of the PyNative Trainer, and whether it and the loss go through the tokens in
    pieces; raises LoraError if the model is unknown, or a setting is wrong.
    """
    divided = [f"parallelism.{key} is {value}" for key, value in _sizes_above_one(config)]
    reason = divided[0] if divided else ""
    run = _run(config)
    return run.head._replace(
        setting=loss_in_pieces(config), run=reason, predicts_several=run.predicts_further, key=IN_PYNATIVE
    )


def _run(config: Mapping[str, Any]) -> Run:
    """Returns the run in the form of graph mode's plan, on one device."""
    model = dict(config.get("model") or {})
    architecture, network = architecture_of(model), network_of(model)
    if architecture is None or network is None:
        raise ConfigError(
            f"model.model_type is {model.get('model_type')!r}, a model whose sizes are not known. Set it to qwen3 or "
            "deepseek_v3."
        )
    lora_config = config.get("lora_config")
    if not isinstance(lora_config, Mapping):
        raise ConfigError(
            "The YAML has no lora_config: MindFormers would train the whole model, which is not planned. Add it "
            "(docs/pynative.md)."
        )
    paths = selected_paths(network, lora_config)
    lora = PetLoraConfig.from_pet_config(merged(config.get("pet_config") or {}, lora_config, paths, _dtype(config)))
    yaml = YamlRun({"run_mode": "train", "use_legacy": False, "model": {"model_config": model}})
    if task_of(yaml.model_name) is not None:
        lora.modules_to_save = with_score(lora.modules_to_save)
    division = Division.of_yaml(yaml)
    if lora.adapters:
        adapters = tuple(trained_adapters(lora))
        first = adapters[0].config.for_network()
        return Run(yaml, architecture, network, first, division, len(adapters), adapters)
    return Run(yaml, architecture, network, lora.for_network(), division)


def _dtype(config):
    """Returns the dtype of the base's linear cells."""
    return dtype_name(value_at(config, "model.params_dtype") or "float32", "model.params_dtype")


def _described(run):
    if run.adapters:
        ranks = sorted({rank for path in run.adapted for rank in run.ranks(path)})
        return f"{len(run.adapters)} adapters, each {run.lora.variant.name} of rank {', '.join(map(str, ranks))}"
    return f"{run.lora.variant.name}, rank {run.lora.lora_rank}, alpha {run.lora.lora_alpha:g}"


def _lines(run: Run, config: Mapping[str, Any], weights: Sequence[Weight]) -> List[Line]:
    """Returns the permanent contents of memory."""
    base = sum(weight.size for weight in weights if not weight.adapter)
    adapter = sum(weight.size for weight in weights if weight.adapter)
    trained = [weight for weight in weights if weight.trained]
    elements = sum(weight.elements for weight in trained)
    # MindFormers adds gradients up in float32.
    lines = [Line("base", base, EXACT), Line("adapter", adapter, EXACT)]
    lines.append(Line("gradients", _FLOAT32 * elements, ARITHMETIC))
    if (value_at(config, "optimizer.type") or _OPTIMIZER) == _OPTIMIZER:
        copies = sum(_FLOAT32 * weight.elements for weight in trained if weight.dtype != "float32")
        name = f"optimizer: 2 states of {_OPTIMIZER} in float32" + (", and a float32 copy" if copies else "")
        lines.append(Line(name, 2 * _FLOAT32 * elements + copies, EXACT))
    if run.adapters:
        lines.append(Line("copies of each adapter and its moments, which are saved", bytes_of_copies(run), ARITHMETIC))
    if run.lora is not None and run.lora.variant.allocates_ranks:
        of_adapter = sum(weight.elements for weight in trained if weight.adapter)
        lines.append(Line("importance of ranks, 2 states in float32", 2 * _FLOAT32 * of_adapter, EXACT))
    return lines


def _notes(config):
    kind = value_at(config, "optimizer.type") or _OPTIMIZER
    if kind != _OPTIMIZER:
        yield f"Note: optimizer.type is {kind}, whose states are not counted."
    divided = [f"{key} {value}" for key, value in _sizes_above_one(config)]
    if divided:
        yield f"Note: parallelism has {', '.join(divided)}, and the table is that of the whole model on one device."


def _sizes_above_one(config):
    """Returns (key, size) of the parallel sizes above 1."""
    sizes = config.get("parallelism") or {}
    return [(key, value) for key, value in sizes.items() if isinstance(value, int) and value > 1]
