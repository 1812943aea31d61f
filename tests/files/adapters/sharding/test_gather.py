"""gather_adapter: bit-equal to the whole tensors and to what MindSpore's own tools make of the same files."""

import glob
import os

import mindspore as ms
import numpy as np
import pytest

from mindlora.files.adapters import files
from mindlora.files.adapters.sharding.gather import gather_adapter
from mindlora.files.adapters.sharding.run_settings import RunSettings
from mindlora.models.lora_config import LoraConfig
from tests.support import sharded_runs
from tests.support.sharded_runs import ALPHA, SCHEMES, Scheme

ALPHA_KNOWN = RunSettings(lora_alpha=ALPHA)


def by_name(adapter):
    """Returns the tensors of an adapter under the names of a network's parameters."""
    named = {f"{path}.mindpet_delta_lora_{part.lower()}": array for (path, part), array in adapter.tensors.items()}
    return {**named, **adapter.saved_modules}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_slices_of_all_ranks_become_what_mindspore_makes_of_them(scheme, tmp_path):
    ranks, strategy, whole = sharded_runs.write_run(tmp_path, scheme)
    gather_adapter(ranks, str(tmp_path / "out.ckpt"), "ckpt", strategy, ALPHA_KNOWN)
    found = by_name(files.read(str(tmp_path / "out.ckpt")))
    assert_equal(found, whole)
    assert_equal(found, by_mindspore(ranks, strategy, scheme, tmp_path))


def by_mindspore(ranks, strategy, scheme, folder):
    """Returns the whole tensors as transform_checkpoints joins them, from strategies that it merges itself."""
    merged, joined = str(folder / "merged.ckpt"), {}
    ms.merge_pipeline_strategys(strategy, merged)
    # Stage by stage where there is a pipeline, as MindSpore wants it.
    if scheme.pp == 1:
        ms.transform_checkpoints(ranks, str(folder / "judge"), "whole", merged, None)
        (written,) = glob.glob(str(folder / "judge" / "rank_0" / "*.ckpt"))
        return arrays(written)
    for stage in range(scheme.pp):
        own = range(stage * scheme.devices, (stage + 1) * scheme.devices)
        by_rank = {rank: glob.glob(os.path.join(ranks, f"rank_{rank}", "*.ckpt"))[0] for rank in own}
        written = str(folder / f"stage_{stage}.ckpt")
        source = os.path.join(strategy, f"ckpt_strategy_rank_{own[0]}.ckpt")
        ms.transform_checkpoint_by_rank(0, by_rank, written, source, None)
        joined.update(arrays(written))
    return joined


def arrays(path):
    return {name: parameter.asnumpy() for name, parameter in ms.load_checkpoint(path).items()}


@pytest.mark.parametrize("scheme", (Scheme(dp=2, mp=2, opt=2), Scheme(mp=2, pp=2)), ids=str)
def test_safetensors_become_what_unified_safetensors_makes_of_them(scheme, tmp_path):
    ranks, strategy, whole = sharded_runs.write_run(tmp_path, scheme, form="safetensors")
    gather_adapter(ranks, str(tmp_path / "out.safetensors"), "mindformers", None, ALPHA_KNOWN)
    found = by_name(files.read(str(tmp_path / "out.safetensors")))
    merged = str(tmp_path / "merged.ckpt")
    ms.merge_pipeline_strategys(strategy, merged)
    ms.unified_safetensors(ranks, merged, str(tmp_path / "judge"), max_process_num=1)
    judged = {}
    for path in glob.glob(str(tmp_path / "judge" / "*.safetensors")):
        judged.update({n: p.asnumpy() for n, p in ms.load_checkpoint(path, format="safetensors").items()})
    assert_equal(found, whole)
    assert_equal(found, judged)


def test_a_merged_strategy_and_json_say_the_same(tmp_path):
    scheme = Scheme(dp=2, mp=2, pp=2, opt=2)
    ranks, strategy, whole = sharded_runs.write_run(tmp_path, scheme)
    ms.merge_pipeline_strategys(strategy, str(tmp_path / "merged.ckpt"))
    gather_adapter(ranks, str(tmp_path / "out.ckpt"), "ckpt", str(tmp_path / "merged.ckpt"), ALPHA_KNOWN)
    assert_equal(by_name(files.read(str(tmp_path / "out.ckpt"))), whole)


@pytest.mark.parametrize("to, name", [("peft", "out"), ("slora", "out"), ("mindformers", "out.safetensors")])
def test_every_form_is_written_with_the_settings_of_the_yaml(to, name, tmp_path):
    scheme = Scheme(mp=2)
    whole = {key: array for key, array in sharded_runs.tensors(scheme).items() if "lora" in key}
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, whole)
    ranks = sharded_runs.write_ranks(tmp_path / "checkpoint", scheme, whole)
    config = LoraConfig(
        lora_rank=8,
        lora_alpha=3.0,
        alpha_pattern=None if to == "slora" else {".*wo": 5.0},
        use_rslora=to == "peft",
        target_modules=".*wq|.*wo",
    )
    report = gather_adapter(ranks, str(tmp_path / name), to, strategy, RunSettings(config, source="run.yaml"))
    assert (report.ranks, report.stages, report.step, report.pairs) == (2, 1, "1_4", 4)
    adapter = files.read(str(tmp_path / name))
    assert_equal({key.replace(".b", "_b"): array for key, array in by_name(adapter).items()}, whole)
    assert adapter.use_rslora is (to == "peft")
    assert adapter.alphas["model.layers.0.attention.wo"] == (3.0 if to == "slora" else 5.0)


def test_base_and_optimizer_of_a_whole_checkpoint_are_left_out(tmp_path):
    scheme, more = Scheme(mp=2), {"model.norm_out.weight": np.ones(4, np.float32)}
    more[f"adam_m.{sharded_runs.cell(0, 'wq', 'a')}"] = np.ones((2, 2), np.float32)
    more["adam_m.lm_head.weight"] = np.ones((2, 2), np.float32)
    more["model.layers.0.attention.wq.weight_absmax"] = np.ones(3, np.float32)
    whole = sharded_runs.tensors(scheme)
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, [*whole, *more])
    ranks = sharded_runs.write_ranks(
        tmp_path / "checkpoint", scheme, whole, kind="", more=more, steps=[20, 20], form="safetensors"
    )
    config = LoraConfig(lora_rank=8, lora_alpha=3.0, modules_to_save=["lm_head"], target_modules=".*")
    gather_adapter(ranks, str(tmp_path / "out.ckpt"), "ckpt", strategy, RunSettings(config, source="run.yaml"))
    assert_equal(by_name(files.read(str(tmp_path / "out.ckpt"))), whole)
    gather_adapter(ranks, str(tmp_path / "pairs.ckpt"), "ckpt", strategy, ALPHA_KNOWN)
    assert not files.read(str(tmp_path / "pairs.ckpt")).saved_modules


def test_the_newest_step_is_taken_or_the_one_that_was_asked_for(tmp_path):
    scheme = Scheme(mp=2)
    ranks, strategy, whole = sharded_runs.write_run(tmp_path, scheme, at="1_9")
    later = sharded_runs.tensors(scheme, seed=1)
    sharded_runs.write_ranks(ranks, scheme, later, at="1_10")
    gather_adapter(ranks, str(tmp_path / "new.ckpt"), "ckpt", strategy, ALPHA_KNOWN)
    assert_equal(by_name(files.read(str(tmp_path / "new.ckpt"))), later)
    gather_adapter(ranks, str(tmp_path / "old.ckpt"), "ckpt", strategy, ALPHA_KNOWN, at="1_9")
    assert_equal(by_name(files.read(str(tmp_path / "old.ckpt"))), whole)


def test_replicas_that_were_left_out_are_not_missed(tmp_path):
    scheme = Scheme(dp=2)
    ranks, strategy, whole = sharded_runs.write_run(tmp_path, scheme)
    rank_1 = os.path.join(ranks, "rank_1", "llama_rank_1-trainable_params-1_4.ckpt")
    ms.save_checkpoint([{"name": "lm_head.weight", "data": ms.Tensor(whole["lm_head.weight"])}], rank_1)
    gather_adapter(ranks, str(tmp_path / "out.ckpt"), "ckpt", strategy, ALPHA_KNOWN)
    assert_equal(by_name(files.read(str(tmp_path / "out.ckpt"))), whole)
