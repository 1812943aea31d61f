"""AdapterParts: the adapter of a cell as named parameters, for saving, loading, merging and training."""

from typing import Any, Dict, Mapping, Tuple

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindlora.core.errors import MergeError
from mindlora.core.numerics import initializers
from mindlora.models.variants.registry import LORA, PARAMETERS
from mindlora.models.variants.variant import Variant
from mindlora.network.tensors import fill, to_array


class AdapterParts(nn.Cell):
    """The interface of a cell with an adapter (LoRACell) to files, merges and training; it computes nothing.

    Everything follows from the parameters' names and the variant, so that a new variant overrides none of it if
    files hold the parameters unchanged and its pair is A and B. Otherwise it overrides what differs: ``pair``,
    ``saved_parts`` and ``load_part``, ``shared_parts``, or ``prepare`` for a part that needs the base.

    Attributes:
        variant (Variant): The variant of LoRA.
        parameter_names (mapping): Part -> name of its parameter.
        initial_pair (InitialPair or None): The initial A and B whose product was subtracted from the base (see
            initialize_adapters); None if nothing was subtracted.
        before_merge (tuple or None): While the adapter is merged (see merge_lora), the values of merge_parameters()
            before the merge, as arrays.
    """

    variant: Variant = LORA
    parameter_names: Mapping[str, str] = PARAMETERS
    initial_pair = None
    before_merge = None

    # Its parameters

    def parts(self) -> Dict[str, Parameter]:
        """Returns this cell's own parameters of the adapter, by part (see PARAMETERS)."""
        return {part: getattr(self, name) for part, name in self.parameter_names.items() if hasattr(self, name)}

    def shared_parts(self) -> Dict[str, Parameter]:
        """Returns the parameters of the adapter that all cells of the network share, by part."""
        return {}

    def lora_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters of parts()."""
        return tuple(self.parts().values())

    def trained_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the lora_parameters() that train."""
        trained = self.variant.trained_parts(self)
        return tuple(parameter for part, parameter in self.parts().items() if part in trained)

    def pair(self) -> Tuple[np.ndarray, np.ndarray]:
        """Returns copies of A and B in NumPy. The adapter adds scale B A to W."""
        return self.mindpet_delta_lora_a.asnumpy().copy(), self.mindpet_delta_lora_b.asnumpy().copy()

    # In a network

    def name_parts(self, path: str) -> None:
        """Names the parts for a network in which ``path`` is the prefix of the cell's parameters."""
        for part, parameter in self.parts().items():
            parameter.name = f"{path}.{self.parameter_names[part]}"

    @property
    def adapter_path(self) -> str:
        """The prefix of the adapter's parameters, without the last dot; empty for a cell outside a network."""
        return self.parts()[self.variant.zero_part].name.rpartition(".")[0]

    @property
    def compile_phase(self) -> str:
        """The compiled graph that the cell belongs to, as MindSpore names it."""
        return self._compile_phase

    @compile_phase.setter
    def compile_phase(self, value: str) -> None:
        # MindSpore sets it at every call of a network in graph mode, two microseconds for each cell, and there are
        # several below this one. They need it only when it changes.
        if value != self._compile_phase:
            nn.Cell.compile_phase.fset(self, value)

    # In files

    def saved_parts(self, keep_zeros: bool = False) -> Dict[str, np.ndarray]:
        """Returns the parts as a file holds them, in their stored dtypes; empty if the adapter has no rank left.

        With ``keep_zeros``, parts that add nothing are kept where a cell would leave them out.
        """
        return {part: to_array(parameter) for part, parameter in self.parts().items()}

    def load_part(self, part: str, array: np.ndarray) -> None:
        """Sets one of PARAMETERS to values from a file, of the shape that part_shapes gives, cast to its dtype."""
        parameter = self.parts()[part]
        parameter.set_data(Tensor(np.ascontiguousarray(array), parameter.dtype))

    # In training

    @property
    def will_change_base(self) -> bool:
        """Whether initialize_adapters has yet to subtract the product of A and B from the base's weight."""
        return initializers.changes_base(self.lora_init) and self.initial_pair is None

    @property
    def awaits_initialization(self) -> bool:
        """Whether initialize_adapters has yet to compute A and B from the base's weight."""
        if not initializers.freezes_b(self.lora_init) or self.merged:
            return self.will_change_base
        # MiCA's B is zero until then.
        b = self.parts()["B"]
        return bool(b.has_init) or not to_array(b).any()

    def prepare(self) -> None:
        """Called before the adapter is trained, saved or merged."""

    def add_flags(self, **flags: Any) -> nn.Cell:
        """Sets flags as nn.Cell does. A network's set_train calls this on its cells, instead of their set_train.

        Raises:
            MergeError: Training is switched on while the adapter is merged.
        """
        if flags.get("training") and self.merged:
            raise MergeError(
                f"{self.adapter_path or 'The cell'} is merged into its base and cannot train: call unmerge_lora first, "
                "or set_train(False) to go on without training."
            )
        return super().add_flags(**flags)

    # Merged into the base

    @property
    def merged(self) -> bool:
        """Whether the adapter is merged into W (see merge_lora), and the zero_part is zero."""
        return self.before_merge is not None

    def merge_parameters(self) -> Tuple[Parameter, ...]:
        """Returns the parameters that merging changes: W, the zero_part, and the norms of W's rows if they train."""
        return self.weight, *(self.parts()[part] for part in self._silent_values())

    def silence(self) -> None:
        """Switches the adapter off: from then on, the cell computes the same as the plain cell."""
        for part, value in self._silent_values().items():
            fill(self.parts()[part], value)

    def _silent_values(self):
        """Returns part -> the value with which the adapter adds nothing; norms are NaN until they are taken from W."""
        norms = {self.variant.row_norms: np.nan} if self.variant.row_norms else {}
        return {self.variant.zero_part: 0, **norms}
