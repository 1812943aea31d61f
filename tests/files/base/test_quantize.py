"""quantize_checkpoint: the same bytes as quantize whatever the size of the pieces, as a stream; and what is refused."""

import os
import subprocess
import sys

import numpy as np
import pytest

from mindlora import Adapter
from mindlora.cli import main
from mindlora.core.errors import CheckpointError, LoraError, QuantizationError, TargetError, TruncatedAdapterError
from mindlora.core.formats.safetensors_file import TensorFile, write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, to_float32
from mindlora.core.numerics.nf4 import TENSOR_NAMES, quantize
from mindlora.files.adapters.files import write
from mindlora.files.base import quantize as module
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.quantize import check_quantized_base, quantize_checkpoint
from mindlora.models import names
from tests.conftest import ROOT
from tests.support.llama_checkpoints import CONFIG, assert_same, llama, load, save_base
from tests.support.refusals import part, refused_unwritten

FLOAT16, FLOAT32 = np.dtype("<f2"), np.dtype("<f4")


def expected(tensors, exclude=()):
    """Returns what is to be written for a Hugging Face Llama's parameters."""
    result = {}
    for name, array in tensors.items():
        name = names.parameter_to_mindformers(name)
        path = name[: -len(".weight")]
        leaf = path.rpartition(".")[2]
        if name.endswith(".weight") and leaf.startswith("w") and leaf not in exclude:
            packed = quantize(to_float32(array))
            result.update({f"{path}.{TENSOR_NAMES[field]}": getattr(packed, field) for field in TENSOR_NAMES})
        else:
            result[name] = array
    return result


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("form", ["hf folder", "hf file", "mindformers", "ckpt"])
def test_each_linear_weight_is_written_as_quantize_returns_it(tmp_path, dtype, form):
    tensors = llama(biases=True, dtype=dtype)
    source = save_base(tmp_path / "hf", tensors, 2, **CONFIG)
    if form == "hf file":
        source = str(tmp_path / "hf.safetensors")
        write_arrays(source, tensors)
    elif form != "hf folder":
        target = str(tmp_path / ("mf.ckpt" if form == "ckpt" else "mf"))
        convert_base(source, target, "hf", "mindformers")
        source = target
    output = str(tmp_path / "q.safetensors")
    report = quantize_checkpoint(source, output)
    assert_same(load(output), expected(tensors))
    assert len(report.quantized) == 14 and report.bytes == sum(a.nbytes for a in expected(tensors).values())
    assert report.bytes_before == sum(a.nbytes for a in tensors.values())
    with TensorFile(output) as file:
        assert file.metadata == {"format": "ms", "mindlora": '{"quantize_base": "nf4"}'}
    check_quantized_base(output, None)


@pytest.mark.parametrize("shape", [(48, 40), (300, 130), (7, 4097), (513, 64)], ids=str)
@pytest.mark.parametrize("at_once", [1, 5000, 1 << 20])
def test_pieces_of_any_size_give_the_same_bytes(tmp_path, monkeypatch, shape, at_once):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    weight = np.random.default_rng(0).standard_t(4, shape).astype(np.float32)
    source, output = str(tmp_path / "mf.safetensors"), str(tmp_path / "q.safetensors")
    write_arrays(source, {"model.layers.0.attention.w_qkv.weight": weight, "model.norm_out.weight": weight[0]})
    quantize_checkpoint(source, output)
    packed = quantize(weight)
    assert_same(
        load(output),
        {
            "model.norm_out.weight": weight[0],
            **{
                f"model.layers.0.attention.w_qkv.{TENSOR_NAMES[field]}": getattr(packed, field)
                for field in TENSOR_NAMES
            },
        },
    )


def test_excluded_weights_stay_and_the_run_must_exclude_the_same(tmp_path, capsys):
    tensors, output = llama(), str(tmp_path / "q.safetensors")
    source = save_base(tmp_path / "hf", tensors)
    assert main(["base", "quantize", source, output, "--exclude", "wq", "--exclude", "down_proj"]) == 0
    assert "weights in NF4: 10, " in capsys.readouterr().out
    assert_same(load(output), expected(tensors, ("wq", "w2")))
    check_quantized_base(output, ["wq", "w2"])
    for exclude in (None, ["wq"], ["wq", "w2", "w3"]):
        with pytest.raises(CheckpointError, match="was quantized with another quantize_exclude: the file and this run"):
            check_quantized_base(output, exclude)
    with pytest.raises(TargetError, match="quantize_exclude 'nothing' matches no linear cell"):
        check_quantized_base(output, "nothing")


def test_the_state_of_an_optimizer_is_left_out(tmp_path):
    convert_base(save_base(tmp_path / "hf", llama()), str(tmp_path / "mf"), "hf", "mindformers")
    tensors = load(str(tmp_path / "mf"))
    states = {f"adam_m.{name}": array for name, array in tensors.items()}
    write_arrays(str(tmp_path / "all.safetensors"), {**tensors, **states})
    report = quantize_checkpoint(str(tmp_path / "all.safetensors"), str(tmp_path / "q.safetensors"))
    assert_same(load(str(tmp_path / "q.safetensors")), expected(llama()))
    assert f"Left out, as training's and not the model's: {len(states)} tensors: adam_m." in str(report)


PEAK = """
import sys
import mindspore
from mindlora.files.base.quantize import quantize_checkpoint

def kib(field):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(field)).split()[1])

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the highest so far is forgotten
before = kib("VmRSS")
quantize_checkpoint(sys.argv[1], sys.argv[2])
print(1024 * (kib("VmHWM") - before))
"""


def test_only_a_part_of_a_weight_is_in_memory(tmp_path):
    weight = np.random.default_rng(0).normal(size=(4096, 4096)).astype(np.float16)
    source = str(tmp_path / "mf.safetensors")
    write_arrays(source, {f"model.layers.{i}.attention.wq.weight": weight for i in range(3)})
    run = subprocess.run(
        [sys.executable, "-c", PEAK, source, str(tmp_path / "q.safetensors")],
        text=True,
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    peak = int(run.stdout.split()[-1])
    print(f"peak {peak / 2**20:.1f} MiB above the imports; the largest tensor {weight.nbytes / 2**20:.1f} MiB")
    assert peak < 1.3 * weight.nbytes


# What is refused ------------------------------------------------------------------------------------------------


def refused(source, output, error, message, **arguments):
    """Asserts class and message of an error of quantize_checkpoint, and that nothing was written."""
    refused_unwritten(os.path.dirname(output), error, part(message), quantize_checkpoint, source, output, **arguments)


def test_sources_and_outputs_that_are_refused(tmp_path):
    tensors, output = llama(dtype=FLOAT32), str(tmp_path / "q.safetensors")
    source = save_base(tmp_path / "hf", tensors)
    refused(source, str(tmp_path / "q.ckpt"), CheckpointError, "q.ckpt does not end in .safetensors")
    refused(source, str(tmp_path / "folder"), CheckpointError, "folder does not end in .safetensors")
    refused(str(tmp_path / "absent"), output, CheckpointError, "absent does not exist.")
    refused(source, output, TargetError, "quantize_exclude ['nothing'] matches no linear cell", exclude=["nothing"])
    unknown = save_base(tmp_path / "unknown", {**tensors, "model.layers.0.self_attn.sinks": np.ones(4, np.float32)})
    refused(unknown, output, CheckpointError, "self_attn.sinks")
    name = "model.layers.1.mlp.down_proj.weight"
    integers = save_base(tmp_path / "integers", {**tensors, name: np.ones((32, 48), np.int8)})
    refused(integers, output, CheckpointError, "model.layers.1.feed_forward.w2.weight is int8 [32, 48], which is")
    for value in (np.nan, np.inf):
        bad = tensors[name].copy()
        bad[3, 4] = value
        broken = save_base(tmp_path / str(value), {**tensors, name: bad})
        refused(broken, output, QuantizationError, "1.feed_forward.w2.weight, from row 0 on, holds infinity")
    truncated = tmp_path / "truncated.safetensors"
    write_arrays(str(truncated), tensors)
    truncated.write_bytes(truncated.read_bytes()[:-100])
    refused(str(truncated), output, TruncatedAdapterError, "is truncated or damaged")
    quantize_checkpoint(source, output)
    refused(output, str(tmp_path / "again.safetensors"), CheckpointError, "is quantized already, at model.layers.")
    written = (tmp_path / "q.safetensors").read_bytes()
    refused(source, output, CheckpointError, "exists. Give another output, or --overwrite to replace it.")
    refused(output, output, CheckpointError, "is, contains or is inside", overwrite=True)
    quantize_checkpoint(source, output, overwrite=True)
    assert (tmp_path / "q.safetensors").read_bytes() == written


def test_a_base_in_float_is_refused(tmp_path):
    source = str(tmp_path / "mf.safetensors")
    convert_base(save_base(tmp_path / "hf", llama()), source, "hf", "mindformers")
    with pytest.raises(CheckpointError) as caught:
        check_quantized_base(source, None)
    assert str(caught.value) == (
        f"{source} is not quantized, but quantize_base is nf4. Quantize it once: "
        f"mindlora base quantize {source} base-nf4.safetensors"
    )


def test_other_verbs_refuse_a_quantized_base(tmp_path):
    source, output = save_base(tmp_path / "hf", llama()), str(tmp_path / "q.safetensors")
    quantize_checkpoint(source, output)
    with pytest.raises(CheckpointError, match="for which Hugging Face's name is not known"):
        convert_base(output, str(tmp_path / "back"), None, "hf")
    path = "model.layers.0.attention.wq"
    write(
        Adapter({(path, "A"): np.ones((2, 32), np.float32), (path, "B"): np.ones((32, 2), np.float32)}, {path: 2.0}),
        str(tmp_path / "adapter"),
    )
    with pytest.raises(LoraError) as caught:
        merge_checkpoint(output, str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert "an adapter cannot be added to quantized weights" in str(caught.value)
