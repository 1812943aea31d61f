"""Makes MindFormers build mindlora's LoRA where a YAML says ``pet_type: lora``."""

from typing import Optional, Tuple

from mindformers.models.modeling_utils import PreTrainedModel
from mindformers.parallel_core.utils.model_mixin import TrainModelMixin
from mindformers.pet import pet_model
from mindformers.pet.models.lora import LoraModel
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import BaseMismatchError, ConfigError
from mindlora.core.fields import ignore_token_id, pad_token_id
from mindlora.models.architectures.classifiers import with_score
from mindlora.models.lora_config import AS_STORED
from mindlora.network.apply import apply_lora, freeze_base, trainable_summary
from mindlora.network.base_fingerprint import weight_shape
from mindlora.network.cells.cell import InitialDraws
from mindlora.network.cells.embedding import add_embedding_noise
from mindlora.network.cells.score import score_of
from mindlora.network.load_base import hold_base
from mindlora.network.repeated_layers import compile_layers_once
from mindlora.network.save_load import check_base, load_lora
from mindlora.network.tree import lora_cells, saved_module_parameters
from mindlora.run.checks.parallel import is_scattered
from mindlora.run.checks.pet_config import PET_TYPE, PetLoraConfig, refuse_qlora
from mindlora.training.log import logger
from mindlora.training.model.cpu_cells import use_cpu_cells
from mindlora.training.model.held_weights import hold_weights
from mindlora.training.model.mcore_cpu_cells import use_mcore_cpu_cells
from mindlora.training.model.mcore_model import rows_of
from mindlora.training.run_configuration import run_configuration
from mindlora.training.several.rules import trained_adapters
from mindlora.training.several.stack import draw, stack_adapters

# The base of adapter_path is compared late: MindFormers loads load_checkpoint only after the adapter.


class LoadedBase:
    """A late comparison of the base that an adapter was trained on with the loaded base.

    The base of ``network`` has no values yet; on_base_mismatch is "error", "warn" or "ignore".
    """

    def __init__(self, network: nn.Cell, path: str, on_base_mismatch: str):
        self.network = network
        self.path = path
        self.on_base_mismatch = on_base_mismatch
        self.shapes = self._shapes()

    def check(self) -> None:
        """Compares the two bases; raises BaseMismatchError if they differ and on_base_mismatch is "error"."""
        if self._shapes() != self.shapes:
            logger.info("%s: each device has a part of the base, which was not compared.", self.path)
            return
        try:
            check_base(self.network, self.path, self.on_base_mismatch)
        except BaseMismatchError as error:
            stored = error.stored or {}
            loaded = error.found or {}
            checkpoint = run_configuration().get("load_checkpoint")
            differing = "shapes" if stored.get("shapes") != loaded.get("shapes") else "values"
            raise BaseMismatchError(
                f"adapter_path: {error} Its fingerprint of the base is {stored.get(differing)}, and that of "
                f"load_checkpoint: {checkpoint} is {loaded.get(differing)}. If this base is meant, "
                "set pet_config.on_base_mismatch: warn.",
                stored,
                loaded,
            ) from None

    def _shapes(self):
        return {path: weight_shape(cell) for path, cell in lora_cells(self.network)}


class MindloraModel(LoraModel):
    """MindFormers' wrapper around a base model, with mindlora's adapters instead of MindFormers' own.

    The base may be any MindFormers model of Linear or nn.Dense cells.
    """

    def _check_config(self):
        """Does nothing: PetLoraConfig has been validated already."""

    def add_adapter(self, base_model: nn.Cell) -> nn.Cell:
        """Puts LoRA on ``base_model``, in place, freezes the rest, and loads adapter_path if there is one.

        Raises ConfigError if loraplus_lr_ratio is set, which only mindlora-run supports, or LoraError as in apply_lora,
        freeze_base and load_lora.
        """
        config = self.config.pet_config
        if score_of(base_model) is not None:
            config.modules_to_save = with_score(config.modules_to_save)
        self.unchecked = None
        # With load_checkpoint, MindFormers builds the network without values, and loads the base after the adapter.
        self._base_comes_later = any(parameter.has_init for parameter in base_model.get_parameters())
        if config.loraplus_lr_ratio is not None:
            raise ConfigError(
                "loraplus_lr_ratio is a key that only mindlora-run turns into learning rates. Under another "
                "launcher, write grouped_lr_schedule (docs/keys.md)."
            )
        if not config.variant.in_files and config.adapter_path:
            # AdaLoRA saves a plain LoRA whose ranks are only in the file.
            self._load(base_model, config)
        else:
            with InitialDraws(config.seed):
                apply_lora(base_model, config.for_network())
                if config.seed is not None:
                    draw(base_model)
        config.variant.check_paths([path for path, _ in lora_cells(base_model)])
        freeze_base(base_model, config)
        # MindFormers freezes again, by MindPet's names and by freeze_exclude, whose paths start at its own wrapper.
        # It leaves parameters with mindpet_delta_lora in their names alone, so LoRA-FA's A stays frozen.
        saved = [f"*.{parameter.name}" for parameter in saved_module_parameters(base_model)]
        config.freeze_exclude = [*(config.freeze_exclude or ()), *saved] or None
        self._leave_frozen(config)
        if is_scattered(config.adapter_path):
            logger.info("The slices of %s are loaded once MindSpore has cut the network.", config.adapter_path)
        elif config.adapter_path:
            if config.variant.in_files:
                self._load(base_model, config)
            logger.info("Adapter loaded from %s.", config.adapter_path)
        if config.neftune_alpha is not None:
            add_embedding_noise(base_model, config.neftune_alpha)
        self._make_lean(base_model)
        logger.info("LoRA by mindlora:\n%s", trainable_summary(base_model))
        return base_model

    def _load(self, base_model, config):
        """Loads adapter_path."""
        ignore = self._base_comes_later or config.on_base_mismatch == "ignore"
        load_lora(base_model, config.adapter_path, on_base_mismatch="ignore" if ignore else "warn")
        if self._base_comes_later:
            self.unchecked = LoadedBase(base_model, config.adapter_path, config.on_base_mismatch)

    def check_loaded_base(self) -> None:
        """Compares, once, the base that adapter_path was trained on with the base loaded since.

        Raises BaseMismatchError if they differ and on_base_mismatch is "error".
        """
        if self.unchecked is not None:
            self.unchecked.check()
            self.unchecked = None

    def update_model_kwargs_before_generate(self, input_ids: Tensor, model_kwargs: dict) -> None:
        """Compares the bases before the first answer, then does what MindFormers does."""
        self.check_loaded_base()
        super().update_model_kwargs_before_generate(input_ids, model_kwargs)

    def _make_lean(self, base_model):
        """Saves memory and compilation time on a CPU, where all layers of a legacy model share one graph."""
        use_cpu_cells(base_model)
        hold_weights(base_model, self.config.pet_config.product_dtype)
        compile_layers_once(base_model)

    def _leave_frozen(self, config):
        """Does nothing: MindFormers' second freezing of a legacy model agrees with freeze_base."""

    def save_pet_config(self, save_path: str) -> None:
        """Writes nothing: LoraCheckpoint writes adapter_config.json together with the weights it describes."""


class MindloraMcoreModel(MindloraModel):
    """MindloraModel around one of MindFormers' mcore models of the training graph.

    Inputs:
        - **input_ids** (Tensor) - int32 [batch, N], or [batch, N + 1] as ``mindlora data`` writes rows (see McoreRows).
        - **labels** (Tensor) - The same shape. Default: None.
        - **loss_mask**, **position_ids**, **attention_mask**, **actual_seq_len** (Tensor) - As the model takes them,
          with rows of N tokens. Default: None.

    Outputs:
        In training, the losses that the model returns. Otherwise, (logits float32 [batch, N, vocabulary], input_ids,
        mask float32 [batch, N] of the positions that count), as MindFormers' legacy models do.
    """

    def __init__(self, config: PetLoraConfig, base_model: PreTrainedModel):
        super().__init__(config, base_model)
        self.rows = rows_of(base_model)
        self.pad = pad_token_id(base_model.config)
        self.ignored = ignore_token_id(base_model.config)

    def _make_lean(self, base_model):
        """On a CPU, replaces cells without CPU kernels, and compiles identical layers once."""
        use_mcore_cpu_cells(base_model)
        hold_weights(base_model, self.config.pet_config.product_dtype)
        compile_layers_once(base_model)

    def _leave_frozen(self, config):
        # MindFormers refuses two empty lists; parameters that match both lists stay as freeze_base left them.
        config.freeze_include, config.freeze_exclude = ["*"], ["*"]

    def construct(
        self,
        input_ids: Tensor,
        labels: Optional[Tensor] = None,
        loss_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        actual_seq_len: Optional[Tensor] = None,
    ) -> Tuple[Tensor, ...]:
        if labels is not None:
            input_ids, labels = self.rows(input_ids, labels)
        outputs = self.network(
            input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            labels=labels,
            loss_mask=loss_mask,
            actual_seq_len=actual_seq_len,
        )
        if self.training:
            return outputs
        mask = (input_ids != self.pad).astype(mstype.float32)
        if labels is not None:
            mask = mask * (labels != self.ignored).astype(mstype.float32)
        return outputs.reshape(input_ids.shape + (-1,)), input_ids, mask


class _WithAdapters(MindloraModel):
    """MindloraModel with several adapters, which mindlora-run trains side by side.

    Attributes:
        stack (AdapterStack): The adapters, by number in the order of pet_config.adapters.
    """

    # What it holds are settings of adapters and cells, and the cells are in the network.
    UNREAD_BY_GRAPHS = ("stack",)

    def add_adapter(self, base_model: nn.Cell) -> nn.Cell:
        """Puts the adapters on ``base_model``, in place, and freezes the rest.

        Raises ConfigError if pet_config.adapters is wrong or mindlora-run did not start the run, or LoraError as in
        apply_lora.
        """
        if not run_configuration():
            raise ConfigError(
                "adapters is a key that only mindlora-run supports, with a train step, optimizer and callbacks for it. "
                "Start the run with mindlora-run."
            )
        adapters = trained_adapters(self.config.pet_config)
        self.unchecked = None
        configs = [adapter.config for adapter in adapters]
        self.stack = stack_adapters(base_model, configs, [config.seed for config in configs])
        self._leave_frozen(self.config.pet_config)
        self._make_lean(base_model)
        for adapter, network in zip(adapters, self.stack.networks):
            logger.info("LoRA by mindlora, adapter %s:\n%s", adapter.name, trainable_summary(network))
        return base_model


class MindloraStackModel(_WithAdapters):
    """MindloraModel with several adapters."""


class MindloraMcoreStackModel(_WithAdapters, MindloraMcoreModel):
    """MindloraMcoreModel with several adapters."""


def lora_model(config: PetLoraConfig, base_model: PreTrainedModel) -> MindloraModel:
    """Returns mindlora's wrapper around a model built by MindFormers."""
    is_mcore = isinstance(base_model, TrainModelMixin)
    if config.quantize_base == AS_STORED:
        _hold(base_model)
    if config.adapters:
        return (MindloraMcoreStackModel if is_mcore else MindloraStackModel)(config, base_model)
    return (MindloraMcoreModel if is_mcore else MindloraModel)(config, base_model)


def _hold(base_model: nn.Cell) -> None:
    """Makes a model hold load_checkpoint's weights in their stored bits; raises ConfigError if it is unset."""
    checkpoint = run_configuration().get("load_checkpoint")
    if not checkpoint:
        raise ConfigError(
            "pet_config.quantize_base is as_stored, but no base is known whose bits could be held. Start the run with "
            "mindlora-run, and name the quantized folder: --load_checkpoint FOLDER."
        )
    hold_base(base_model, checkpoint)


def register() -> None:
    """Registers mindlora's classes for ``pet_type: lora`` in MindFormers' two maps, and makes ``qlora`` an error."""
    pet_model.PET_TYPE_TO_MODEL_MAPPING[PET_TYPE] = lora_model
    pet_model.PET_TYPE_TO_CONFIG_MAPPING[PET_TYPE] = lambda **keys: PetLoraConfig.from_pet_config(keys)
    # For a pet_type in neither map, MindFormers would train the whole network.
    pet_model.PET_TYPE_TO_MODEL_MAPPING["qlora"] = lora_model
    pet_model.PET_TYPE_TO_CONFIG_MAPPING["qlora"] = refuse_qlora
