"""Runs of small mcore models through mindlora-run, and a plain network that judges what they trained.

The judge has no cell of an adapter: mindlora's merge of files, which PEFT judges elsewhere, writes its weights.
"""

import types

import mindspore as ms
import numpy as np
from mindspore import Tensor
from safetensors.numpy import load_file, save_file

from mindlora.core.numerics import nf4
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.training.report.history import read_history
from tests.conftest import in_mode
from tests.support import tiny_runs
from tests.support.mcore_networks import MAKE, SIZES, arrays, scaled, tiny_config
from tests.support.mcore_pynative import mcore_in_pynative

ROWS, EPOCHS = 32, 2
STEPS = ROWS // tiny_runs.BATCH_SIZE * EPOCHS


class JudgedRuns:
    """Runs of a model on one base, and the loss of this base, or of it with an adapter merged in.

    Args:
        model_type (str): A key of mcore_networks.MAKE.
        folder (Path): Where everything is written.
    """

    def __init__(self, model_type, folder):
        self.model_type, self.folder = model_type, folder
        self.base, self.data = folder / "base.safetensors", folder / "train.mindrecord"
        rows = tiny_runs.write_data(self.data, ROWS)
        self.first_batch = [column[: tiny_runs.BATCH_SIZE] for column in rows]
        self.held_out = tiny_runs.write_data(folder / "held_out.mindrecord", 8, seed=1)
        with in_mode(ms.GRAPH_MODE):
            self.network = scaled(MAKE[model_type](pad_token_id=tiny_runs.PAD), 0.4).set_train(False)
        save_file(arrays(self.network), str(self.base))

    def start(self, name, pet, base=None, holds_out=False, resume=False):
        """Trains an adapter; returns its output folder, adapter, history and standard output.

        Args:
            name (str): Of the output folder.
            pet (dict): pet_config, without pet_type.
            base (Path): Default: the base in float.
            holds_out (bool): Whether the loss of held-out rows, a graph of its own, and the adapter are watched.
            resume (bool or str): LoraCheckpoint's.
        """
        held_out = str(self.folder / "held_out.mindrecord")
        watching = [
            {"type": "HeldOutLoss", "dataset_dir": held_out, "every_steps": STEPS // 2, "batch_size": 8},
            {"type": "AdapterHealth", "every_steps": STEPS // 2},
        ]
        saving = {"type": "LoraCheckpoint", "save_steps": STEPS // 2, "keep_last": 2, "resume": resume}
        callbacks = [*watching, saving] if holds_out else [saving]
        base = str(base or self.base)
        config = tiny_config(str(self.data), EPOCHS, callbacks, pet, self.model_type, load_checkpoint=base)
        config["load_ckpt_format"] = "safetensors"
        config["lr_schedule"]["learning_rate"] = 2e-2
        # Else both epochs begin with the same rows.
        config["train_dataset"]["data_loader"]["shuffle"] = holds_out
        output = self.folder / name
        process = tiny_runs.launch(config, output)
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
        steps = output / "lora_checkpoint"
        history = read_history(str(output))
        return types.SimpleNamespace(
            output=output, steps=steps, adapter=steps / f"step_{STEPS}", history=history, stdout=process.stdout
        )

    def quantized(self, name, of_folder=False, **options):
        """Writes the base in NF4, and again in float as it decodes; returns both files.

        ``of_folder`` is whether to take it from a folder of Hugging Face's, ``options`` are quantize_checkpoint's.
        """
        files = self.folder / f"{name}.nf4.safetensors", self.folder / f"{name}.safetensors"
        source = self.base
        if of_folder:
            source, sizes = self.folder / "hf", SIZES[self.model_type]
            counts = {"heads": sizes["num_attention_heads"], "kv_heads": sizes["num_key_value_heads"]}
            config = {**sizes, "model_type": self.model_type}
            convert_base(str(self.base), str(source), "mcore", "hf", **counts, model_config=config)
        quantize_checkpoint(str(source), str(files[0]), **options)
        stored, decoded = load_file(files[0]), {}
        for path, array in load_file(self.base).items():
            fields = {field: nf4.tensor_name(path, field) for field in nf4.TENSOR_NAMES}
            if fields["absmax"] in stored:
                parts = {field: stored[key] for field, key in fields.items()}
                array = nf4.dequantize(nf4.Nf4Array(**parts, shape=array.shape))
            decoded[path] = array
        save_file(decoded, str(files[1]))
        return files

    def merged(self, adapter, base=None):
        """Writes a base with an adapter merged in, whichever base the adapter names; returns the file."""
        output = self.folder / "merged.safetensors"
        kv_heads = SIZES[self.model_type]["num_key_value_heads"]
        options = {"kv_heads": kv_heads, "overwrite": True, "on_base_mismatch": "ignore" if base else "error"}
        merge_checkpoint(str(base or self.base), str(adapter), str(output), **options)
        return output

    def loss(self, rows, weights=None):
        """Returns the mean cross entropy of the labels that count in rows, from the logits of a file of weights."""
        parameters = {parameter.name: parameter for parameter in self.network.get_parameters()}
        stored = load_file(weights or self.base)
        assert stored.keys() == parameters.keys()
        for name, array in stored.items():
            parameters[name].set_data(Tensor(array))
        ids, labels = rows
        with mcore_in_pynative():
            logits = self.network(Tensor(ids[:, :-1])).asnumpy().astype(np.float64)
        logits = logits.reshape(*ids[:, 1:].shape, -1)
        log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        counted = labels[:, 1:] != tiny_runs.IGNORED
        return -log_probabilities[counted, labels[:, 1:][counted]].mean()
