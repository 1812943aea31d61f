"""The bytes that a run needs on a device, and of its host while the base is loaded."""

import dataclasses
import os
from typing import Any, Dict, List, Tuple

from mindlora.models.weights import Weight
from mindlora.run.checks.base_weights import loads_by_tensor
from mindlora.run.plan.activations import NOTHING_RECOMPUTED, Activations, Recomputation, read_recomputation
from mindlora.run.plan.fragments import StepTensors, fragments_of
from mindlora.run.plan.run import Run, layer_of
from mindlora.run.plan.units import bytes_of

EXACT = "exact"
MODEL = "model, 15 %"
ARITHMETIC = "arithmetic"
SIMULATED = "simulated"
# Optimizer -> (states of each trained parameter, whether they are float32 for any dtype of the parameter).
OPTIMIZERS: Dict[str, Tuple[int, bool]] = {
    "AdamW": (2, True),
    "PmaAdamW": (3, True),
    "FP32StateAdamWeightDecay": (2, True),
    "Adam": (2, False),
    "adam": (2, False),
    "AdamWeightDecay": (2, False),
    "Adagrad": (1, False),
    "adagrad": (1, False),
    "Momentum": (1, False),
    "SGD": (2, False),
    "sgd": (2, False),
}
# Bytes of a number in a checkpoint of unknown dtype: published bases are in bfloat16.
_STORED = 2


@dataclasses.dataclass(frozen=True)
class Line:
    """One part of a device's memory, in bytes; its basis is "exact", "model, 15 %", "simulated" or "arithmetic"."""

    name: str
    size: int
    basis: str


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The needs of a run on one device.

    Attributes:
        stage (int): The stage of the pipeline with the largest needs.
        lines (tuple of Line): The contents of memory at the peak of a step.
        kept_at_most (int): Bytes of the activations without recomputation.
        kept_at_least (int): Bytes of the activations if all layers are recomputed.
    """

    stage: int
    lines: Tuple[Line, ...]
    kept_at_most: int
    kept_at_least: int

    @property
    def total(self) -> int:
        """The sum of the lines."""
        return sum(line.size for line in self.lines)

    @property
    def used(self) -> int:
        """The sum of the lines without fragments."""
        return sum(line.size for line in self.lines if line.basis != SIMULATED)


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The parameters on one device, by purpose."""

    base: int
    gathered: int
    adapter: int
    gradients: int
    states: int


def memory_of(run: Run) -> DeviceMemory:
    """Returns the needs of a run on its most loaded device; raises LoraError if a setting of the YAML is wrong."""
    stages = [_stage(run, run.weights, stage) for stage in range(run.division.pipeline)]
    return max(stages, key=lambda memory: memory.total)


def optimizer_of(run: Run) -> Tuple[str, int, bool]:
    """Returns the optimizer's name, its states for each trained parameter, and whether those are float32."""
    kind = str(run.yaml.optimizer or "AdamW")
    return (kind, *OPTIMIZERS.get(kind, (2, True)))


def kv_cache_per_token(run: Run) -> int:
    """Returns the bytes of the keys and values of one token in all layers of one device's stage."""
    layers = -(-run.layers // run.division.pipeline)
    parts = 1 if run.attention.latent else run.division.model
    return layers * run.attention.cached * bytes_of(run.compute_dtype) // parts


def _stage(run: Run, weights: List[Weight], stage: int) -> DeviceMemory:
    of_stage = _weights_of_stage(run, weights, stage)
    tensors = _tensors(run, of_stage)
    kind, states, is_float32 = optimizer_of(run)
    moments = f"{states} state{'s' * (states > 1)} of {kind}{' in float32' * is_float32}"
    # MindSpore's division of parameters was not compared with anything.
    exact = ARITHMETIC if run.division.divides_parameters else EXACT
    lines = [Line("base", tensors.base, exact)]
    if tensors.gathered:
        lines.append(Line("base gathered for use (optimizer parallelism)", tensors.gathered, ARITHMETIC))
    if run.lora is not None:
        lines.append(Line("adapter", tensors.adapter, exact))
    if run.cache_tokens:
        lines.append(
            Line(f"KV cache of {run.cache_tokens:,} tokens", run.cache_tokens * kv_cache_per_token(run), exact)
        )
    if not run.yaml.trains:
        logits = run.yaml.rows * (run.seq_length if run.yaml.mode == "eval" else 1) * run.vocabulary
        lines.append(Line("logits", logits * (4 + bytes_of(run.compute_dtype)), ARITHMETIC))
        return DeviceMemory(stage, tuple(lines), 0, 0)
    lines.append(Line("gradients", tensors.gradients, ARITHMETIC))
    if run.yaml.at("optimizer.swap"):
        lines.append(Line(f"optimizer: {moments}, on the host (swap)", 0, EXACT))
    else:
        lines.append(Line(f"optimizer: {moments}", tensors.states, exact))
    if run.adapters and run.yaml.on_cpu:
        lines.append(Line("copies of each adapter and its moments, which are saved", bytes_of_copies(run), exact))
    activations = Activations(run, weights)
    recomputation = read_recomputation(run.yaml, run.division, run.layers)
    lines += _step_lines(run, activations, recomputation, stage)
    if run.computes_reference:
        lines.append(_reference(run))
    if not run.yaml.on_cpu:
        holes = fragments_of(_sizes_on_device(run, of_stage), _step_tensors(run, activations, recomputation, stage))
        lines.append(Line("fragments of MindSpore's memory pool", holes, SIMULATED))
    return DeviceMemory(
        stage,
        tuple(lines),
        _kept(run, activations, NOTHING_RECOMPUTED, stage),
        _kept(run, activations, Recomputation(frozenset(range(run.layers)), {}), stage),
    )


def _step_lines(run: Run, activations: Activations, recomputation: Recomputation, stage: int) -> List[Line]:
    """Returns the lines for tensors kept for the backward, and for those held beside them at the peak of a step."""
    kept = _kept(run, activations, recomputation, stage)
    lines = [Line(f"activations, {_described(recomputation, run.layers)}", kept, basis_of(run))]
    recomputed = [layer for layer in run.division.layers(run.layers, stage) if layer in recomputation.layers]
    layer = max((activations.whole_layer(layer) for layer in recomputed), default=0)
    is_last = stage == run.division.pipeline - 1
    # When a layer's gradients are computed, the tensors behind the layers have been freed.
    layer += activations.decoded
    layer = max(layer + sum(activations.inside_of_layer) - (activations.head() if is_last else 0), 0)
    loss = activations.loss.widest(*activations.logits) + activations.beside_logits if is_last else 0
    name = "a layer that is recomputed" if recomputed else "gradients inside of a layer"
    name = "logits and loss" if loss >= layer else f"{name} (more than logits and loss)"
    lines.append(Line(name, max(loss, layer), basis_of(run) if loss >= layer else ARITHMETIC))
    return lines


def basis_of(run: Run) -> str:
    """Returns the basis of a run's activations: those of the legacy Llama were counted, and Qwen3's on an NPU."""
    division = run.division
    plain = division.model * division.pipeline * division.context == 1 and not division.optimizer
    plain = plain and not (run.lora and run.lora.variant.allocates_ranks)
    counted = "LlamaConfig" in run.architecture.model_types
    counted = counted or "Qwen3Config" in run.architecture.model_types and not run.experts and not run.yaml.on_cpu
    return MODEL if plain and counted else ARITHMETIC


def _weights_of_stage(run: Run, weights: List[Weight], stage: int) -> List[Weight]:
    """Returns the parameters of a stage: its layers', and those before the first and behind the last layer."""
    layers = run.division.layers(run.layers, stage)
    last = run.division.pipeline - 1

    def is_here(weight: Weight) -> bool:
        layer = layer_of(weight.path)
        if layer is not None:
            return layer in layers
        # VeRA's shared matrices have no path.
        return not weight.path or stage == (0 if weight.role == "tok_embeddings" else last)

    return [weight for weight in weights if is_here(weight)]


def _tensors(run: Run, weights: List[Weight]) -> Tensors:
    sizes: Dict[str, int] = dict.fromkeys(("base", "gathered", "adapter", "gradients", "states"), 0)
    layers: Dict[Any, int] = {}
    for weight in weights:
        whole, shards = _on_device(run, weight)
        sizes["adapter" if weight.adapter else "base"] += whole // shards
        if shards > 1:
            layer = weight.path.rpartition(".")[0].rpartition(".")[0]
            layers[layer] = layers.get(layer, 0) + whole
        if weight.trained and run.yaml.trains:
            elements = whole // shards // bytes_of(weight.dtype)
            sizes["gradients"] += elements * _gradient_bytes(run, bytes_of(weight.dtype))
            sizes["states"] += sum(_states(run, weight))
    if layers:
        # Without parallel_optimizer_comm_recompute, gathered parameters stay for the backward.
        sizes["gathered"] = max(layers.values()) if run.division.gathers_again else sum(layers.values())
    return Tensors(**sizes)


def _on_device(run: Run, weight: Weight) -> Tuple[int, int]:
    """Returns the bytes of a parameter on one device, and the number of parts by optimizer parallelism."""
    parts = run.division.part_of(weight.role, weight.part, weight.shape)
    whole = weight.size // parts
    return whole, run.division.shards_of(weight.role, whole, max(weight.shape[0] // parts, 1))


def _states(run: Run, weight: Weight) -> List[int]:
    """Returns the bytes of each optimizer state of a trained parameter on one device."""
    _, states, is_float32 = optimizer_of(run)
    whole, shards = _on_device(run, weight)
    elements = whole // shards // bytes_of(weight.dtype)
    return [elements * (4 if is_float32 else bytes_of(weight.dtype))] * states


def _sizes_on_device(run: Run, weights: List[Weight]) -> List[int]:
    """Returns the bytes of each parameter and of each optimizer state, in the order of the pool."""
    if run.division.sharded:
        # MindSpore's tracker shows embedding and head behind the layers there.
        weights = sorted(weights, key=lambda weight: layer_of(weight.path) is None)
    sizes = []
    for weight in weights:
        whole, shards = _on_device(run, weight)
        sizes.append(whole // shards)
    if not run.yaml.at("optimizer.swap"):
        for weight in weights:
            sizes += _states(run, weight) if weight.trained else []
    return sizes


def _step_tensors(run: Run, activations: Activations, recomputation: Recomputation, stage: int) -> StepTensors:
    """Returns the tensors of a step on the devices of a stage."""
    is_last = stage == run.division.pipeline - 1
    layers = run.division.layers(run.layers, stage)
    return StepTensors(
        (activations.masks(), activations.layer_input),
        [activations.layer_tensors(layer, recomputation) for layer in layers],
        run.division.in_flight(stage),
        activations.head() if is_last else 0,
        activations.loss if is_last else None,
        activations.logits,
        activations.inside_of_layer,
        -(-run.tokens_of_head // run.piece) if is_last and run.piece else 1,
        activations.of_hidden if is_last else 0,
    )


def _gradient_bytes(run: Run, element: int) -> int:
    """Returns the bytes of one element's gradient: mindlora's step scales it to float32; sums need a second one."""
    if run.steps_by_mindlora:
        return 4 + (element if run.yaml.accumulation > 1 else 0)
    return element * (2 if run.yaml.accumulation > 1 or run.division.pipeline > 1 else 1)


def _kept(run: Run, activations: Activations, recomputation: Recomputation, stage: int) -> int:
    layers = run.division.layers(run.layers, stage)
    kept = sum(activations.kept_by(layer, recomputation) for layer in layers)
    kept += activations.head() if stage == run.division.pipeline - 1 else 0
    return run.division.in_flight(stage) * kept + activations.masks()


def _reference(run: Run) -> Line:
    """Returns the addition of preference training's reference to the peak of a step."""
    # A new adapter adds nothing, so the reference omits it.
    is_new = not run.yaml.pet_config.get("adapter_path")
    copies = sum(weight.size for weight in run.weights if weight.trained and not (weight.adapter and is_new))
    if run.yaml.on_cpu:
        logits = 4 * (run.piece or run.tokens) * run.vocabulary
        return Line("reference: its logits, and copies of what was loaded to train", copies + logits, ARITHMETIC)
    # On Ascend its logits are freed before those of the trained network are computed, and it holds less than
    # the latter: three tensors of their shape at a time.
    return Line("reference: copies of what was loaded to train", copies, ARITHMETIC)


def bytes_of_copies(run: Run) -> int:
    """Returns the bytes of the copies from which each of several adapters is saved as if it were alone."""
    tensors = [_tensors(alone, alone.weights) for alone in run.alone]
    return sum(each.adapter + each.states for each in tensors)


def _described(recomputation: Recomputation, count: int) -> str:
    if len(recomputation.layers) == count:
        return "all layers recomputed"
    parts = [f"{len(recomputation.layers)} of {count} layers recomputed"] if recomputation.layers else []
    parts += ["select_recompute"] if recomputation.operators else []
    return " and ".join(parts) or "nothing recomputed"


def loading_of(run: Run) -> Line:
    """Returns the peak while the base is loaded: its parameters, and the memory beside them.

    Beside them is the largest tensor if BaseWeights loads the base, and the whole checkpoint if MindFormers does.
    """
    base = [weight for weight in run.weights if not weight.adapter]
    if loads_by_tensor(run.yaml):
        size = sum(weight.size for weight in base) + max(map(_converted, base))
        return Line("as the base is loaded by tensor", size, ARITHMETIC)
    device = memory_of(run)
    parameters = sum(line.size for line in device.lines if line.name == "base")
    return Line("as MindFormers loads the base", parameters + _stored(run, base), ARITHMETIC)


def needed_while_loading(run: Run) -> int:
    """Returns the peak of a run on a device: in a step, or on a CPU while the base is loaded."""
    needed = memory_of(run).total
    return max(needed, loading_of(run).size) if run.yaml.on_cpu else needed


def _converted(weight: Weight) -> int:
    """Returns the bytes of a tensor beside its parameter: in its stored form, and in float32 during conversion."""
    if weight.dtype == "uint8":
        return weight.size
    return weight.elements * (_STORED + (0 if weight.dtype == "float32" else bytes_of("float32")))


def _stored(run: Run, base: List[Weight]) -> int:
    """Returns the bytes of the checkpoint's tensors."""
    path = run.yaml.base[1]
    if not path or not os.path.exists(path):
        return sum(weight.size if weight.dtype == "uint8" else _STORED * weight.elements for weight in base)
    if os.path.isfile(path):
        return os.path.getsize(path)
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(os.path.getsize(file) for file in files if file.endswith((".safetensors", ".ckpt")))
