"""Packed data in a MindFormers run: recognizes it, and keeps the examples of a row apart."""

from typing import Any, Dict, Optional, Tuple

import numpy as np
from mindformers.models.llama.llama import LlamaModel
from mindformers.tools.register import MindFormerConfig
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.core.fields import pad_token_id
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.data.mindrecord import first_rows
from mindlora.models.names import TRANSIENT
from mindlora.network.invocation import FIELD, pack_invocations, segment_numbers
from mindlora.run.checks.data_rows import BOUNDARY
from mindlora.run.yaml_run import WRAPPER, Data, YamlRun
from mindlora.training.log import logger
from mindlora.training.model.mcore_model import gpt_model_of
from mindlora.training.model.network import base_of, innermost, wrapped_in

# The attention mask of packed rows: no example of a row sees another.

_MASKED = -10000.0


class SegmentMask(nn.Cell):
    """Extends a causal mask so that tokens of different examples do not see each other.

    Every ``boundary`` token begins an example, so the number of an example within its row is the count of boundary
    tokens up to a position, ``segment[i] = sum_{k <= i} (tokens[k] == boundary)``, and position i sees position j only
    if the causal mask lets it and ``segment[i] == segment[j]``: a block-diagonal mask (Krell et al., 2021). Positions
    need not restart in each example if only their difference matters, as with rotary embeddings.

    ``causal_mask`` is MindFormers' LowerTriangularMaskWithDynamic, CausalMaskGenerate of an mcore model with flash
    attention, or any cell that makes a mask [batch, 1, N, N] from tokens, int32 [batch, N]. In uint8, 1 masks and 0
    does not (flash attention); in any other dtype, the mask is added to the scores, and -10000 masks. The result has
    the causal mask's shape and dtype.
    """

    def __init__(self, causal_mask: nn.Cell, boundary: int):
        super().__init__(auto_prefix=False)
        self.causal_mask = causal_mask
        self.boundary = boundary

    def construct(self, tokens: Tensor) -> Tensor:
        return _apart(self.causal_mask(tokens), segment_numbers(tokens, self.boundary))


def _apart(mask: Tensor, segment: Tensor) -> Tensor:
    """Returns a mask [batch, 1, N, N] that also hides tokens of other segments, int32 [batch, N]."""
    different = (segment.expand_dims(2) != segment.expand_dims(1)).expand_dims(1)
    # Not with where: in the semi-automatic parallel modes, MindSpore's Select does not broadcast.
    if mask.dtype == mstype.uint8:
        return ops.logical_or(mask.astype(mstype.bool_), different).astype(mask.dtype)
    return ops.minimum(mask, different.astype(mask.dtype) * _MASKED)


class SegmentEnds(nn.Cell):
    """Passes a PyNative model the ends of packed examples, which its flash attention takes instead of a mask.

    MindFormers calls them actual_seq_len. Examples begin as in SegmentMask, and at the start of each row: the ends
    count the tokens of all rows, one row after another. ``before`` is a forward pre-hook of MindFormers' GPTModel.
    """

    def __init__(self, boundary: int):
        super().__init__(auto_prefix=False)
        self.boundary = boundary

    def construct(self, tokens: Tensor) -> Tensor:
        begins = tokens.asnumpy() == self.boundary
        begins[:, 0] = True
        return Tensor(np.append(np.flatnonzero(begins)[1:], begins.size).astype(np.int32))

    def before(self, _: nn.Cell, arguments: Tuple, keywords: Dict[str, Any]) -> Tuple[Tuple, Dict[str, Any]]:
        """Adds the ends to the model's arguments, unless the data has a column of ends."""
        if keywords.get(ENDS) is not None:
            return arguments, keywords
        tokens = arguments[0] if arguments else keywords["input_ids"]
        return arguments, {**keywords, ENDS: self(tokens)}


# Rows that are packed anew in each step: each token's position in its sequence, not a boundary token, says where
# sequences begin. So a sequence may have any tokens, even padding, and its angles are the same as alone.


class _OfPositions(nn.Cell):
    """A cell that replaces one of MindFormers' cells in training, and calls it unchanged in evaluation.

    Args:
        plain (Cell): MindFormers' cell.
        positions (Parameter): int32 [rows, N], rising by one from 0 in each sequence.
    """

    def __init__(self, plain: nn.Cell, positions: Parameter):
        super().__init__(auto_prefix=False)
        self.plain = plain
        # Bypasses nn.Cell, which would register the parameter as the network's.
        self.__dict__["positions"] = positions

    def at_positions(self, table: Tensor) -> Tensor:
        """Returns the rows of a table, [N, size], at the positions: [rows, N, size]."""
        rows = ops.gather(table, self.positions.reshape((-1,)), 0)
        return rows.reshape((*self.positions.shape, table.shape[1]))


class PositionMask(_OfPositions):
    """A causal mask in which tokens of different sequences do not see each other.

    Args:
        visible (int): A token that ``plain`` does not treat as padding.
    """

    def __init__(self, plain: nn.Cell, positions: Parameter, visible: int):
        super().__init__(plain, positions)
        self.visible = visible

    def construct(self, tokens: Tensor) -> Tensor:
        if not self.training:
            return self.plain(tokens)
        return _apart(self.plain(ops.zeros_like(tokens) + self.visible), segment_numbers(self.positions, 0))


class LlamaPositions(_OfPositions):
    """The cosines and sines of a legacy Llama's FreqsMgr at the positions, [rows, 1, N, size of a head]."""

    def construct(self, seq_length: int, seq_chunk: Any = None) -> Tuple[Tensor, Tensor, Tensor]:
        cosines, sines, swap_mask = self.plain(seq_length)
        if not self.training:
            return cosines, sines, swap_mask
        shape = cosines.shape[2:]
        cosines, sines = self.at_positions(cosines.reshape(shape)), self.at_positions(sines.reshape(shape))
        return cosines.expand_dims(1), sines.expand_dims(1), swap_mask


class McorePositions(_OfPositions):
    """The angles of an mcore model's rotary embedding at the positions, [N, rows, 1, head size], and their scale."""

    def construct(self, seq_length: int, position_ids: Any = None) -> Tuple[Tensor, float]:
        angles, scale = self.plain(seq_length)
        if not self.training:
            return angles, scale
        angles = self.at_positions(angles.reshape((angles.shape[0], angles.shape[3])))
        return angles.transpose((1, 0, 2)).expand_dims(2), scale


def install_positions(network: nn.Cell, rows: int) -> Parameter:
    """Makes a model in training keep the sequences of its rows apart, in place, each with positions from 0.

    Returns the positions, to be written before the model runs: int32 [rows, seq_length]; initially, each row is one
    sequence. In evaluation, the model is unchanged.

    Raises ConfigError as install_segment_mask does, or if an mcore model makes no mask of its tokens.
    """
    obstacle, advice = _obstacle(network)
    mcore = gpt_model_of(network)
    if not obstacle and mcore is not None and not mcore.config.use_flash_attention:
        obstacle, advice = "the model sets use_flash_attention: False, without which it makes no mask", "Remove it."
    if obstacle:
        raise ConfigError(f"Rows cannot hold several sequences: {obstacle}. {advice}")
    masks = _maker_of_masks(network)
    positions = mask_positions(masks, rows, network.config.seq_length, pad_token_id(network.config))
    if mcore is not None:
        mcore.rotary_pos_emb = McorePositions(mcore.rotary_pos_emb, positions)
    else:
        masks.freqs_mgr = LlamaPositions(masks.freqs_mgr, positions)
    return positions


def mask_positions(masks: nn.Cell, rows: int, length: int, pad: int) -> Parameter:
    """Makes a cell that has a causal mask hide, in training, what is of another sequence, by positions.

    Args:
        masks (Cell): What has ``casual_mask``, which is replaced in place.
        rows, length (int): Rows, and tokens of a row.
        pad (int): The token that the mask takes for padding.

    Returns the positions: see install_positions.
    """
    start = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    positions = Parameter(start, name=f"{TRANSIENT}positions", requires_grad=False)
    masks.casual_mask = PositionMask(masks.casual_mask, positions, pad + 1)
    return positions


ENDS = "actual_seq_len"
# Settings with which a Llama does not request the complete mask of its tokens from casual_mask.
_WITHOUT_A_MASK = ("use_attn_mask_compression", "use_eod_attn_mask_compression", "use_ring_attention", "use_past")


def boundary_of(data: Data) -> Optional[int]:
    """Returns the token at which the examples of packed rows begin, or None if the data is not packed.

    The data is one or several MindRecords, or a folder of them. Raises ConfigError if a file cannot be read, or files
    are packed differently.
    """
    first, *others = mindrecord_files(data) or [None]
    boundary = _boundary_of_file(first) if first else None
    for path in others:
        other = _boundary_of_file(path)
        if other != boundary:
            raise ConfigError(
                f"{first} {_packed(boundary)}, but {path} {_packed(other)}: files that are used together must be "
                "packed alike. Convert them again, all with --pack or none."
            )
    return boundary


def install_segment_mask(network: nn.Cell, boundary: int) -> None:
    """Makes a model keep packed examples, each beginning with ``boundary``, apart (see SegmentMask), in place.

    Raises ConfigError if the model is neither a legacy Llama nor an mcore model, or a setting keeps it from using a
    mask made from its tokens.
    """
    obstacle, advice = _obstacle(network)
    if obstacle:
        raise ConfigError(f"The data is packed, and {obstacle}. {advice} Or convert the data without --pack.")
    masks = _maker_of_masks(network)
    masks.casual_mask = SegmentMask(masks.casual_mask, boundary)
    pack_invocations(network, boundary)


def _obstacle(network: nn.Cell) -> Tuple[str, str]:
    """Returns why a model cannot keep a row's examples apart, and the remedy; two empty texts if it can."""
    masks = _maker_of_masks(network)
    if masks is None:
        reason = (
            f"the model is a {_name(network)}: only MindFormers' LlamaForCausalLM and its mcore models can keep the"
        )
        return f"{reason} examples of a row apart", "Use one of these."
    settings = [key for key in _WITHOUT_A_MASK if getattr(network.config, key, False)]
    if getattr(masks, "seq_split_num", 1) > 1:
        settings.append("parallel_config.seq_split_num")
    if settings:
        reason = f"the model sets {', '.join(settings)}: then no mask can keep the examples of a row apart"
        return reason, "Switch it off."
    return "", ""


def installed_boundary(network: nn.Cell) -> Optional[int]:
    """Returns the token with which a network expects examples to begin, or None if it does not keep them apart."""
    parts = (cell for _, cell in network.cells_and_names() if isinstance(cell, (SegmentMask, SegmentEnds)))
    return next((cell.boundary for cell in parts), None)


def check_held_out(train_network: nn.Cell, dataset_dir: str) -> None:
    """Raises ConfigError if evaluation data is packed and the network does not keep its examples apart."""
    boundary = boundary_of(dataset_dir)
    if boundary is not None and boundary != installed_boundary(base_of(train_network)):
        raise ConfigError(
            f"{dataset_dir} {_packed(boundary)}, but the training data is not packed so. Convert both in one go, with "
            "--holdout, or this file without --pack."
        )


def set_boundary(config: MindFormerConfig) -> None:
    """Sets runner_wrapper.packed_boundary in the YAML if the training data is packed.

    Raises ConfigError if packed data meets another train step than mindlora's, or a setting that does not go with it.
    """
    data = YamlRun(config).train_data
    wrapper = config.runner_wrapper
    boundary = boundary_of(data) if data else None
    if boundary is None:
        return
    _check_mcore(YamlRun(config))
    if config.model.model_config.use_eod_attn_mask_compression:
        _check_ends(config)
        return
    if not wrapper or wrapper.type != WRAPPER:
        raise ConfigError(
            f"train_dataset {_packed(boundary)}, but runner_wrapper.type is {wrapper.type if wrapper else None}, which "
            f"does not keep the examples of a row apart. Set runner_wrapper.type: {WRAPPER}."
        )
    if wrapper.get("packed_boundary") not in (None, boundary):
        raise ConfigError(
            f"runner_wrapper.packed_boundary is {wrapper.packed_boundary}, but train_dataset {_packed(boundary)}. "
            "Remove the key: mindlora-run sets it."
        )
    pad = pad_token_id(config.model.model_config)
    if boundary != pad and boundary != _first_row(mindrecord_files(data)[0])["input_ids"][0]:
        raise ConfigError(
            f"model.model_config.pad_token_id is {pad}, but the padding in train_dataset is {boundary}. Set it to that."
        )
    wrapper.packed_boundary = boundary
    logger.info("The training data is packed: token %d begins an example of a row.", boundary)


def check_eval_data(config: MindFormerConfig) -> None:
    """Raises ConfigError if MindFormers would evaluate packed data with a network that mixes a row's examples.

    In a training run, call set_boundary first.
    """
    if config.run_mode != "eval" and not config.do_eval:
        return
    data = YamlRun(config).eval_data
    boundary = boundary_of(data) if data else None
    trained = (config.runner_wrapper or {}).get("packed_boundary") if config.run_mode != "eval" else None
    if boundary not in (None, trained):
        raise ConfigError(
            f"eval_dataset {_packed(boundary)}, but MindFormers' evaluation would let the examples of a row see each "
            "other. Convert it without --pack."
        )


def _check_mcore(run: YamlRun) -> None:
    """Refuses packed data of ``mindlora data`` if an mcore model makes no mask of its tokens, or is sharded."""
    if not run.is_mcore:
        return
    settings = [key for key in _WITHOUT_A_MASK if run.model.get(key)]
    if run.model.get("use_flash_attention") is False:
        settings.append("use_flash_attention: False")
    if settings:
        raise ConfigError(
            f"The data is packed, and the model sets {', '.join(settings)}: an mcore model keeps the examples of a row "
            "apart by a mask that it makes of its tokens for flash attention. Remove this, or convert the data without "
            "--pack."
        )
    if not run.accumulates_here:
        raise ConfigError(
            f"The data is packed, and parallel.parallel_mode is {run.parallel_mode}: the mask of packed rows is made "
            "for mcore models alone or in data parallel. Set parallel.parallel_mode: 0, or convert the data without "
            "--pack."
        )


def _check_ends(config):
    """Checks packed data with the ends of examples in actual_seq_len, for flash attention."""
    if (config.model.model_config.pet_config or {}).get(FIELD):
        raise ConfigError(
            f"use_eod_attn_mask_compression is True, the data is packed and pet_config has {FIELD}, which finds the "
            "examples of a row by the token with which they begin. Set use_eod_attn_mask_compression: False, or "
            "convert the data without --pack."
        )
    if ENDS not in (config.train_dataset.input_columns or []):
        raise ConfigError(
            "use_eod_attn_mask_compression is True, but train_dataset.input_columns lacks actual_seq_len, without "
            "which the examples of a packed row see each other. Add it; mindlora data writes it with --actual-seq-len."
        )
    rows = config.runner_config.batch_size
    if rows != 1:
        raise ConfigError(
            f"use_eod_attn_mask_compression is True, but runner_config.batch_size is {rows}: ends in actual_seq_len "
            "count within one row. Set it to 1, and raise gradient_accumulation_steps instead."
        )


def _maker_of_masks(network):
    """Returns the cell that holds the causal mask, a LlamaModel or a part of a GPTModel, or None."""
    mcore = gpt_model_of(network)
    if mcore is not None:
        return mcore.preprocess_labels_and_masks
    return next((cell for _, cell in network.cells_and_names() if isinstance(cell, LlamaModel)), None)


def _name(network):
    """Returns the name of a model's class, ignoring adapter wrappers."""
    return type(innermost(network, lambda cell: wrapped_in(cell) is None)).__name__


def _packed(boundary):
    return "is not packed" if boundary is None else f"is packed (token {boundary} begins an example)"


def _boundary_of_file(path):
    column = _first_row(path).get(BOUNDARY)
    return None if column is None else int(column[0])


def _first_row(path):
    """Returns the columns of the first row of a MindRecord."""
    row = next(first_rows(path, 1), None)
    if row is None:
        raise ConfigError(f"{path} is a MindRecord without rows. Convert the data again.")
    return row
