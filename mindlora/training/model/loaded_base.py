"""An adapter of adapter_path and its base: MindFormers loads load_checkpoint only after the adapter."""

from mindspore import nn

from mindlora.core.errors import BaseMismatchError
from mindlora.network.base_fingerprint import weight_shape
from mindlora.network.save_load import check_base
from mindlora.network.tree import lora_cells
from mindlora.training.log import logger
from mindlora.training.run_configuration import run_configuration


class LoadedBase:
    """Compares, once the base is loaded, the base that an adapter was trained on with it.

    The base of ``network`` has no values yet; on_base_mismatch is "error", "warn" or "ignore".
    """

    def __init__(self, network: nn.Cell, path: str, on_base_mismatch: str):
        self.network = network
        self.path = path
        self.on_base_mismatch = on_base_mismatch
        self.shapes = self._shapes()

    def check(self) -> None:
        """Compares the two; raises BaseMismatchError if they differ, with on_base_mismatch "error"."""
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
