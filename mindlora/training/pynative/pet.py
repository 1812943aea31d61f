"""Makes MindFormers' PyNative Trainer build, freeze, load and train mindlora's LoRA where a YAML has lora_config.

The Trainer looks up these functions by name in MindFormers' modules; training/replaced_names.py replaces them with the
functions here, which take the same arguments.
"""

import functools
import importlib
import importlib.metadata
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.core.errors import ConfigError
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.core.mindformers_version import release, require_mindformers
from mindlora.data.mindrecord import first_rows
from mindlora.models.architectures.classifiers import with_score
from mindlora.network.apply import apply_lora, freeze_base, trainable_summary
from mindlora.network.cells.cell import InitialDraws
from mindlora.network.cells.score import score_of
from mindlora.network.invocation import pack_invocations
from mindlora.network.tree import lora_cells
from mindlora.run.checks.batches import pynative_rows_left_out
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.checks.pynative import BRIDGE, check_pynative, check_weights
from mindlora.run.checks.pynative_adapter import loss_in_pieces
from mindlora.training.log import logger
from mindlora.training.preference.settings import PreferenceSettings, preference_settings
from mindlora.training.pynative import callbacks, configuration
from mindlora.training.pynative.checkpoints import check_loaded, check_quantization, quantize_loaded
from mindlora.training.pynative.initialization import configuration_of, mark_saved_modules, remember
from mindlora.training.pynative.loss_in_pieces import put_loss_in_pieces
from mindlora.training.pynative.train_step import refuse_missing_gradients
from mindlora.training.rl.pynative import check_processes, prepare_pynative_rl, with_steps_of_rl
from mindlora.training.several.pynative import put_adapters, several_of, with_data_of_adapters, with_stacked_optimizer
from mindlora.training.step.lora_plus_groups import fast_parameters
from mindlora.training.step.packing import SegmentEnds, SegmentMask, boundary_of
from mindlora.training.step.rate_factor import ScaledSchedule

require_mindformers("2.0")
from mindformers.pynative.base_models.common.embeddings.vocab_embedding import VocabEmbedding  # noqa: E402
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402

# Packed data under the PyNative Trainer: keeping the examples of a row apart.


def keep_examples_apart(model: nn.Cell, files: Sequence[str]) -> None:
    """Makes a model keep the examples of a row apart, in place, if the training data is packed.

    The model gets a SegmentMask, or SegmentEnds with use_eod_attn_mask_compression. Raises ConfigError if the mask is
    the same for all rows, several processes divide the model, or only some of the files are packed.
    """
    boundary = boundary_of(files) if files else None
    if boundary is None:
        return
    gpt = next(cell for _, cell in model.cells_and_names() if isinstance(cell, GPTModel))
    takes_ends = gpt.config.input_layout == "TND"
    obstacles = []
    if gpt.config.use_attn_mask_compression and not takes_ends:
        obstacles.append("model.use_attn_mask_compression is True, with which one mask is for all rows")
    divided = configuration.division_of_model()
    if divided > 1:
        obstacles.append(f"{divided} processes divide the model")
    if obstacles:
        raise ConfigError(
            f"train_dataset is packed, and {obstacles[0]}: mindlora then cannot keep the examples of a row apart under "
            "MindFormers' PyNative Trainer. Change that, or convert the data without --pack."
        )
    if takes_ends:
        gpt.segment_ends = SegmentEnds(boundary)
        gpt.register_forward_pre_hook(gpt.segment_ends.before, with_kwargs=True)
    else:
        gpt.casual_mask = SegmentMask(gpt.casual_mask, boundary)
    pack_invocations(model, boundary)
    logger.info("The training data is packed: token %d begins an example of a row.", boundary)


# LoRA+ under the PyNative Trainer: parameters are grouped by learning rate, in addition to weight decay.

UTILS = "mindformers.pynative.trainer.utils"


def with_lora_plus(build_optimizer: Callable, ratio_of: Callable) -> Callable:
    """Wraps MindFormers' function that builds the optimizer, so that B learns at ratio times the rate.

    ``ratio_of`` takes nothing, and returns pet_config.loraplus_lr_ratio, or None.
    """

    @functools.wraps(build_optimizer)
    def build(config: Any, model: Sequence[nn.Cell], learning_rate: LearningRateSchedule) -> nn.Optimizer:
        ratio = ratio_of()
        if ratio is None:
            return build_optimizer(config, model, learning_rate)
        if config.type != "AdamW":
            raise ConfigError(
                f"pet_config.loraplus_lr_ratio is {ratio} and optimizer.type is {config.type}: LoRA+ works with AdamW "
                "under MindFormers' PyNative Trainer. Set optimizer.type: AdamW, or remove loraplus_lr_ratio."
            )
        utils = importlib.import_module(UTILS)
        # The name is replaced while the optimizer is built.
        groups_of = utils.get_param_groups
        utils.get_param_groups = lambda model, **rules: _by_rate(groups_of(model=model, **rules), model, rates)
        rates = {False: learning_rate, True: ScaledSchedule(learning_rate, ratio)}
        try:
            optimizer = build_optimizer(config, model, learning_rate)
        finally:
            utils.get_param_groups = groups_of
        logger.info("LoRA+: B learns at %g times the rate of lr_scheduler.", ratio)
        return optimizer

    return build


def _by_rate(groups: List[Dict], model: nn.Cell, rates: Dict[bool, LearningRateSchedule]) -> List[Dict]:
    """Splits an optimizer's groups into parameters that learn faster and the others."""
    faster = fast_parameters(model)
    split = []
    for group in groups:
        for is_faster, rate in rates.items():
            chosen = [parameter for parameter in group["params"] if (id(parameter) in faster) == is_faster]
            if chosen:
                split.append({**group, "params": chosen, "lr": rate})
    return split


# NEFTune under the PyNative Trainer: a hook, because MindFormers needs its embedding's own weight and sharding.


def add_embedding_noise(model: nn.Cell, alpha: float) -> None:
    """Adds NoisyEmbedding's noise, whose equation is there, to the output of a model's embedding in training."""
    uniform = ops.UniformReal(ms.get_seed() or 0, 1)

    def noisy(cell: nn.Cell, inputs: Any, output: Tensor) -> Tensor:
        if not cell.training:
            return output
        bound = alpha / math.sqrt(inputs[0].shape[-1] * output.shape[-1])
        return output + ((2 * uniform(output.shape) - 1) * bound).astype(output.dtype)

    for _, cell in model.cells_and_names():
        if isinstance(cell, VocabEmbedding):
            cell.register_forward_hook(noisy)


def build_lora_model(model: nn.Cell, config: Any, strict: bool = True) -> nn.Cell:
    """Puts mindlora's adapters on a model that has no values yet, in place, according to lora_config and pet_config.

    Args:
        model (nn.Cell): The model, or one of its pipeline stages.
        config (LoraConfig): MindFormers' node lora_config.
        strict (bool): Whether a model without a cell to adapt is an error; for a stage, it is not. Default: True.

    Returns:
        nn.Cell, the model.

    Raises:
        ConfigMistakes: The errors that mindlora doctor finds in the YAML.
        LoraError: As in adapter_configuration, check_same_cells and apply_lora.
    """
    trainer = configuration.current_trainer()
    settings = trainer.config
    version = release(importlib.metadata.version("mindformers"))
    check_processes(settings, trainer.world_size)
    _check_yaml(settings.to_dict(), version)
    prepare_pynative_rl(settings)
    # MindFormers 2.0 reads all rows of a step at once.
    read_at_once = trainer.num_accumulation_steps if version == (2, 0) else 1
    for sentence in pynative_rows_left_out(settings.to_dict(), read_at_once):
        logger.info(sentence)
    parts = trainer.num_accumulation_steps * settings.parallelism.data_parallel
    for finding in check_weights(configuration.division_of_model(), parts):
        logger.warning(str(finding))
    # MindFormers rebuilds the stages of a pipeline, and then reads lora_config under this name.
    model.config._mf_lora_config = config
    theirs = configuration.selected_paths(model, config)
    configuration.check_experts_are_whole(theirs, version, trainer.world_size)
    if theirs or strict:
        pet_config = getattr(settings, "pet_config", None)
        given = pet_config.to_dict() if pet_config is not None else {}
        adapters = configuration.adapter_configuration(model, config, given)
        if score_of(model) is not None:
            configuration.refuse_division(f"model.architectures is {type(model).__name__}")
            adapters.modules_to_save = with_score(adapters.modules_to_save)
        check_quantization(adapters.quantize_base, settings.checkpoint)
        files = _training_files(settings, adapters)
        if adapters.adapters:
            # Set before, so that each adapter's copy of the cells has it too.
            keep_examples_apart(model, files)
            replaced = put_adapters(model, settings, config, _preference(settings))
        else:
            replaced = apply_lora(model, adapters).replaced
            draws = InitialDraws(adapters.seed)
            for _, cell in lora_cells(model):
                cell.draws = draws
            remember(model, adapters, _preference(settings))
            adapters.variant.check_paths([path for path, _ in lora_cells(model)])
            if adapters.neftune_alpha is not None:
                add_embedding_noise(model, adapters.neftune_alpha)
            keep_examples_apart(model, files)
        configuration.check_same_cells(replaced, theirs)
    model.to_empty = on_current_device(model.to_empty)
    return model


def _training_files(settings: Any, pet_config: PetLoraConfig) -> List[str]:
    """Returns the MindRecords on which a run trains; none if it trains on other data."""
    shared = settings.train_dataset.dataloader.to_dict().get("dataset_files")
    data = [node.get("data") or shared for node in pet_config.adapters or [{}]]
    return [file for path in filter(None, data) for file in mindrecord_files(path)]


def _preference(settings: Any) -> Optional[PreferenceSettings]:
    """Returns the run's preference settings; raises ConfigError if it has any and its model is divided."""
    node = getattr(settings, "preference", None)
    if node is None:
        return None
    configuration.refuse_division("The YAML has preference")
    return preference_settings(node.to_dict() if hasattr(node, "to_dict") else node)


def with_adapters_of_mindlora(_: Callable) -> Callable:
    """Returns build_lora_model, in place of MindFormers' function."""
    return build_lora_model


def on_current_device(to_empty: Callable) -> Callable:
    """Wraps a cell's method that allocates its parameters, to use the current device if none is given.

    MindFormers gives none, and MindSpore 2.10 then leaves a model without values where it is.
    """

    @functools.wraps(to_empty)
    def make_room(*, device: Optional[str] = None, recurse: bool = True) -> nn.Cell:
        return to_empty(device=device or ms.get_context("device_target"), recurse=recurse)

    return make_room


def freeze_base_params(model: nn.Cell) -> Tuple[int, int]:
    """Freezes all parameters except those that pet_config trains; returns the numbers of trainable and frozen ones."""
    several = several_of(model)
    if several is not None:
        several.stack.share_base(model)
        # The code that made the model's values may have made trainable parameters.
        trained = {id(p) for cell in several.stack.cells.values() for p in cell.lora_parameters()}
        for parameter in model.get_parameters():
            parameter.requires_grad = id(parameter) in trained
        _put_loss_in_pieces(model)
        for run, network in zip(several.runs, several.stack.networks):
            logger.info("LoRA by mindlora, adapter %s:\n%s", run["name"], trainable_summary(network))
    elif any(lora_cells(model)):
        mark_saved_modules(model)
        freeze_base(model, configuration_of(model))
        _put_loss_in_pieces(model)
        logger.info("LoRA by mindlora:\n%s", trainable_summary(model))
    else:
        # A stage of a pipeline.
        for parameter in model.get_parameters():
            parameter.requires_grad = False
    trains = [parameter.requires_grad for parameter in model.get_parameters()]
    return sum(trains), len(trains) - sum(trains)


def _put_loss_in_pieces(model: nn.Cell) -> None:
    """Applies pet_config.loss_in_pieces to a model whose trainable parameters are set."""
    trainer = configuration.current_trainer()
    setting = loss_in_pieces(trainer.config.to_dict())
    put_loss_in_pieces(model, setting, trainer.world_size, configuration.division_of_model())


def with_freezing_of_mindlora(_: Callable) -> Callable:
    """Returns freeze_base_params, in place of MindFormers' function."""
    return freeze_base_params


def with_all_gradients(gradient_norm: Callable) -> Callable:
    """Wraps MindFormers' function that collects the gradients for the optimizer, to refuse missing ones.

    MindFormers skips such a parameter, and its optimizer would apply each later gradient to the wrong parameter. If
    several processes divide the model, tokens are not counted, and it raises NoGradient if all gradients are 0: the
    optimizer would change the weights only by its moments.
    """

    @functools.wraps(gradient_norm)
    def collect(parameters: Sequence[Parameter], *arguments: Any, **keywords: Any) -> Any:
        refuse_missing_gradients(parameters)
        norm, gradients = gradient_norm(parameters, *arguments, **keywords)
        if gradients and configuration.division_of_model() > 1 and float(norm) == 0:
            raise callbacks.NoGradient
        return norm, gradients

    return collect


def strictly(load_param_into_net: Callable) -> Callable:
    """Wraps MindSpore's function that loads a checkpoint, as called by MindFormers, to check the checkpoint first.

    Weights that the network holds in 4 bits are quantized before.
    """

    @functools.wraps(load_param_into_net)
    def load(net: nn.Cell, parameter_dict: Dict[str, Parameter], *arguments: Any, **keywords: Any) -> Any:
        quantize_loaded(net, parameter_dict)
        check_loaded(net, parameter_dict)
        return load_param_into_net(net, parameter_dict, *arguments, **keywords)

    return load


def with_pet_config(build_optimizer: Callable) -> Callable:
    """Wraps MindFormers' function that builds the optimizer, to apply loraplus_lr_ratio or adapters."""
    return with_lora_plus(with_stacked_optimizer(build_optimizer), _lora_plus_ratio)


def with_data_of_each(build_dataset: Callable) -> Callable:
    """Wraps MindFormers' function that builds a dataset, to give each adapter its own data."""
    return with_steps_of_rl(with_data_of_adapters(build_dataset, _data_of_adapters), configuration.current_trainer)


def _data_of_adapters(dataset_config: Any) -> Optional[Sequence[Optional[str]]]:
    """Returns each adapter's own data, or None; None if no adapters are trained on a dataset."""
    trainer = configuration.current_trainer()
    several = several_of(trainer.model[0])
    return several.data if several is not None and dataset_config is trainer.config.train_dataset else None


def _lora_plus_ratio() -> Optional[float]:
    return getattr(getattr(configuration.current_trainer().config, "pet_config", None), "loraplus_lr_ratio", None)


def _check_yaml(config: Dict[str, Any], version: Tuple[int, int]) -> None:
    """Raises ConfigMistakes if the YAML, or a file that it loads, is wrong; logs warnings and notes."""
    # mindlora-run needs no such line, by which the checks recognize that mindlora is loaded.
    config["model"]["auto_register"] = BRIDGE
    findings = check_pynative(config, version, first_rows)
    for finding in findings:
        if finding.severity == "warning":
            logger.warning(str(finding))
    refuse(findings)
