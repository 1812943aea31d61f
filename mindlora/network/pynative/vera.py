"""VeRAPyNativeLinear: VeRA on the linear cells of the models that MindFormers' PyNative Trainer runs."""

from typing import Sequence, Tuple

from mindspore import Parameter, Tensor, nn

from mindlora.models.lora_config import LoraConfig
from mindlora.network.pynative.linear import WholePyNativeLinear, names_of
from mindlora.network.variants.vera import VeRADense


class VeRAPyNativeLinear(WholePyNativeLinear, VeRADense):
    """VeRADense for MindFormers' Linear.

    Weights:
        weight [out_channels, in_channels], bias [out_channels], lambda_d_lora_b [r], lambda_b_lora_b [out_channels];
        shared by all cells, mindpet_delta_lora_vera_a [r, widest in_channels] and mindpet_delta_lora_vera_b
        [widest out_channels, r].

    Inputs and outputs are those of LoRAPyNativeLinear.

    Source: Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation, 2024.
    """

    parameter_names = names_of("lambda_d", "lambda_b")

    @classmethod
    def shared_parameters(cls, cells: Sequence[nn.Cell], config: LoraConfig) -> Tuple[Parameter, ...]:
        shared = super().shared_parameters(cells, config)
        for parameter in shared:
            # Making room for the values of a model empties these parameters too.
            parameter.initial = parameter.asnumpy()
        return shared

    def _add_adapter(self, config, shared):
        self.mindpet_delta_lora_vera_a, self.mindpet_delta_lora_vera_b = shared
        super()._add_adapter(config, shared)

    def reset_parameter(self) -> None:
        """Sets all parameters to their initial values; the first cell of a model sets those that all share."""
        super().reset_parameter()
        for parameter in self.shared_parts().values():
            initial = vars(parameter).pop("initial", None)
            if initial is not None:
                parameter.copy_(Tensor(initial))
