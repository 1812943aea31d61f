"""scatter_adapter: what each rank gets is what MindSpore cuts for it, and gathers back bit for bit."""

import glob
import os

import mindspore as ms
import numpy as np
import pytest

from mindlora.core.errors import LoraError, MissingTensorsError, ShapeMismatchError, UnexpectedTensorsError
from mindlora.core.formats import ckpt_file
from mindlora.core.numerics.dtypes import from_float32
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads
from mindlora.files.adapters.sharding.gather import gather_adapter
from mindlora.files.adapters.sharding.run_settings import RunSettings
from mindlora.files.adapters.sharding.scatter import scatter_adapter
from tests.support import sharded_runs
from tests.support.refusals import part, refused
from tests.support.sharded_runs import ALPHA, SCHEMES, Scheme


def write_adapter(path, whole, to="mindformers"):
    """Writes the whole tensors as one adapter file of lora_alpha 12."""
    pairs = {
        (name.partition(".mindpet")[0], name[-1].upper()): array for name, array in whole.items() if "lora" in name
    }
    modules = {name: array for name, array in whole.items() if "lora" not in name}
    adapter = Adapter(pairs, {path: ALPHA for path, _ in pairs}, saved_modules=modules)
    files.write(adapter, str(path), to)
    return str(path)


def slices(folder, rank):
    (path,) = glob.glob(os.path.join(folder, f"rank_{rank}", "*"))
    return ckpt_file.read(path, lambda name: True)[0]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_rank_gets_what_mindspore_cuts_for_it(scheme, tmp_path):
    whole = sharded_runs.tensors(scheme)
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, whole)
    adapter = write_adapter(tmp_path / "adapter.safetensors", whole)
    scatter_adapter(adapter, str(tmp_path / "ranks"), strategy, "ckpt")
    os.makedirs(tmp_path / "whole" / "rank_0")
    ms.save_checkpoint(
        [{"name": name, "data": ms.Tensor(array)} for name, array in whole.items()],
        str(tmp_path / "whole" / "rank_0" / "whole.ckpt"),
    )
    merged = str(tmp_path / "merged.ckpt")
    ms.merge_pipeline_strategys(strategy, merged)
    ms.transform_checkpoints(str(tmp_path / "whole"), str(tmp_path / "judge"), "judge", None, merged)
    for rank in range(scheme.ranks):
        judged = slices(str(tmp_path / "judge"), rank)
        found = slices(str(tmp_path / "ranks"), rank)
        assert found.keys() == judged.keys() & whole.keys() and found
        for name, array in found.items():
            assert array.shape == judged[name].shape and array.tobytes() == judged[name].tobytes(), name


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("form", ("ckpt", "safetensors"))
def test_what_was_scattered_gathers_bit_for_bit(form, dtype, tmp_path):
    scheme = Scheme(dp=2, mp=2, pp=2, opt=2)
    whole = sharded_runs.tensors(scheme)
    whole[sharded_runs.cell(0, "wq", "a")][0, 0] = -0.0
    if dtype == "float16":
        whole = {name: array.astype(np.float16) for name, array in whole.items()}
    if dtype == "bfloat16":
        from mindlora.core.numerics.dtypes import BFLOAT16

        whole = {name: from_float32(array, BFLOAT16) for name, array in whole.items()}
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, whole)
    source = write_adapter(tmp_path / "adapter.safetensors", whole)
    report = scatter_adapter(source, str(tmp_path / "ranks"), strategy, form)
    assert report.ranks == 8 and report.parameters == len(whole)
    # lora_alpha comes from the files themselves.
    gather_adapter(str(tmp_path / "ranks"), str(tmp_path / "back.safetensors"), "mindformers", strategy)
    with open(source, "rb") as one, open(tmp_path / "back.safetensors", "rb") as other:
        assert one.read() == other.read()


def test_pairs_of_peft_are_joined_as_the_run_has_them_and_split_again(tmp_path):
    scheme, rng = Scheme(mp=2), np.random.default_rng(0)
    rows = {"wq": 16, "wk": 8, "wv": 8}
    pairs = {}
    for name, count in rows.items():
        path = f"model.layers.0.attention.{name}"
        pairs[path, "A"], pairs[path, "B"] = (rng.normal(size=s).astype(np.float32) for s in ((4, 16), (count, 4)))
    files.write(Adapter(pairs, {path: 8.0 for path, _ in pairs}), str(tmp_path / "peft"))
    names = [sharded_runs.cell(0, "w_qkv", part) for part in "ab"]
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, names)
    settings = RunSettings(heads=Heads(4, 2, 4))
    scatter_adapter(str(tmp_path / "peft"), str(tmp_path / "ranks"), strategy, "ckpt", settings)
    assert set(slices(str(tmp_path / "ranks"), 0)) == set(names)
    gather_adapter(str(tmp_path / "ranks"), str(tmp_path / "back"), "peft", strategy, settings)
    back = files.read(str(tmp_path / "back"))
    for key, array in pairs.items():
        assert back.tensors[key].tobytes() == array.tobytes()
    assert set(back.alphas.values()) == {8.0}


def test_what_does_not_belong_together_is_refused_and_nothing_is_written(tmp_path):
    scheme = Scheme(mp=2)
    whole = sharded_runs.tensors(scheme)
    source = write_adapter(tmp_path / "adapter.safetensors", whole)
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, whole)

    def case(kind, message, source=source, strategy=strategy, **keys):
        refused(kind, part(message), scatter_adapter, source, str(tmp_path / "out"), strategy, **keys)
        assert not os.path.exists(tmp_path / "out")

    def strategy_of(name, scheme, names):
        return sharded_runs.write_strategy(tmp_path / name, scheme, names)

    fewer = [name for name in whole if ".1." not in name]
    case(UnexpectedTensorsError, "has no such adapter", strategy=strategy_of("fewer", scheme, fewer))
    more = [*whole, sharded_runs.cell(2, "wq", "a"), sharded_runs.cell(2, "wq", "b")]
    case(MissingTensorsError, "lacks model.layers.2.attention.wq, which", strategy=strategy_of("more", scheme, more))
    pairs = [name for name in whole if "lora" in name]
    case(UnexpectedTensorsError, "lm_head.weight of modules_to_save", strategy=strategy_of("pairs", scheme, pairs))
    case(ShapeMismatchError, "parts do not divide", strategy=strategy_of("fine", Scheme(mp=5), whole))
    case(MissingTensorsError, "has no adapter", strategy=strategy_of("plain", scheme, ["lm_head.weight"]))
    case(LoraError, "format is 'bin'", form="bin")


@pytest.mark.parametrize("ending", ("mindpet_delta_lora_", "lora_"))
def test_an_mcore_network_goes_to_peft_and_back(ending, tmp_path):
    # Three groups of two query heads, a key head and a value head, of size 4; trained as one pair.
    path, rng = "decoder.layers.0.self_attention.linear_qkv", np.random.default_rng(0)
    halves = ("a", "b") if ending.startswith("mindpet") else ("A.weight", "B.weight")
    shapes = dict(zip(halves, ((4, 24), (48, 4))))
    whole = {f"{path}.{ending}{half}": rng.normal(size=shapes[half]).astype(np.float32) for half in halves}
    scheme, settings = Scheme(mp=2, dp=2), RunSettings(lora_alpha=ALPHA, heads=Heads(6, 3, 4))
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, whole)
    ranks = sharded_runs.write_ranks(tmp_path / "ranks", scheme, whole)
    gather_adapter(ranks, str(tmp_path / "peft"), "peft", strategy, settings)
    assert len(files.read(str(tmp_path / "peft")).paths) == 3
    scatter_adapter(str(tmp_path / "peft"), str(tmp_path / "back"), strategy, "ckpt", RunSettings(heads=Heads(6, 3, 4)))
    for rank in range(scheme.ranks):
        expected = slices(ranks, rank)
        found = slices(str(tmp_path / "back"), rank)
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())
