"""The whole adapter cache over real adapter folders: replaced, damaged and healed while requests run."""

import os
import threading

import numpy as np
import pytest

from mindlora.core.errors import TruncatedAdapterError, UnexpectedTensorsError
from mindlora.files.adapters import files
from mindlora.files.adapters.matching import CellShape
from mindlora.serving.adapter_memory import AdapterMemory
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.adapter_slots import AdapterSlots
from mindlora.serving.packed_adapter import ServedLayout, prepare
from tests.support.adapter_samples import WEIGHTS, K, Q, make
from tests.support.refusals import part, refused
from tests.support.served_adapters import lease, settled

LAYOUT = ServedLayout({Q: CellShape(6, 6), K: CellShape(6, 4)}, 8)


class Pools:
    """multi_lora_delta's pools in NumPy: path -> slot -> what it adds to the weight."""

    def __init__(self, slots):
        self.deltas = {path: [np.zeros((cell.out_channels, 6))] * slots for path, cell in LAYOUT.cells.items()}

    def write(self, slot, packed):
        for path, cell in LAYOUT.cells.items():
            self.deltas[path][slot] = np.zeros((cell.out_channels, 6))
            if path in packed.blocks:
                rows, scale, _ = packed.blocks[path]
                self.deltas[path][slot] = scale * rows[:, 6:].T @ rows[:, :6]

    def hold(self, slot, adapter):
        """Returns whether a slot adds what the adapter does, and nothing of what was there before."""
        expected = {path: adapter.delta(path) if path in adapter.paths else 0 for path in LAYOUT.cells}
        return all(np.allclose(self.deltas[path][slot], delta, atol=1e-5) for path, delta in expected.items())


@pytest.fixture
def served(tmp_path):
    """A cache of two slots over the adapters both (q and k) and one (k alone), and its pools."""
    files.write(make(seed=1), str(tmp_path / "both"))
    files.write(make({K: 3}, seed=2), str(tmp_path / "one"))
    pools = Pools(2)
    memory = AdapterMemory(AdapterRegistry(str(tmp_path)), lambda path: prepare(path, LAYOUT), 10_000)
    yield AdapterSlots(memory, 2, pools.write), pools
    memory.close()


def test_each_slot_adds_what_its_adapter_does(served, tmp_path):
    slots, pools = served
    both, one = lease(slots, "both"), lease(slots, "one")
    assert pools.hold(both.slot, make(seed=1)) and pools.hold(one.slot, make({K: 3}, seed=2))
    slots.release(both)
    files.write(make({K: 2}, seed=3), str(tmp_path / "third"))
    slots.register("new", "third")
    # It has no pair for q, and comes after one that has.
    new = lease(slots, "new")
    assert new.slot == both.slot and pools.hold(new.slot, make({K: 2}, seed=3))
    size = sum((shape.in_channels + shape.out_channels) * 2 * 4 for shape in LAYOUT.cells.values())
    assert slots.memory.stats().nbytes == size + 10 * 3 * 4 + 10 * 2 * 4


def test_an_adapter_saved_anew_is_served_to_new_requests_and_the_old_one_to_those_that_run(served, tmp_path):
    slots, pools = served
    old = lease(slots, "both")
    files.write(make(seed=4), str(tmp_path / "both"))
    new = lease(slots, "both")
    assert pools.hold(old.slot, make(seed=1)) and pools.hold(new.slot, make(seed=4)) and new.version > old.version
    assert slots.registry.names() == ["both", "one"]


def test_a_damaged_adapter_says_what_load_lora_says_until_it_is_copied_again(served, tmp_path):
    slots, pools = served
    weights = tmp_path / "both" / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-9])
    slots.prefetch("both")
    settled(slots.memory)
    for _ in range(2):
        refused(TruncatedAdapterError, part(f"{weights} is truncated or damaged"), slots.acquire, "both")
    assert pools.hold(lease(slots, "one").slot, make({K: 3}, seed=2))
    weights.write_bytes(content)
    assert pools.hold(lease(slots, "both").slot, make(seed=1))


def test_a_pickle_is_never_read(served, tmp_path):
    slots, _ = served
    os.makedirs(tmp_path / "old")
    (tmp_path / "old" / "adapter_model.bin").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "old" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 3}')
    refused(files.AdapterFormatError, part("is a pickle, which can run programs"), slots.register, "p", "old")


def test_what_cannot_be_served_is_refused_when_it_is_registered(served, tmp_path):
    slots, _ = served
    adapter = make(seed=5, saved_modules={"lm_head.weight": np.ones((3, 6), np.float32)})
    files.write(adapter, str(tmp_path / "head"))
    refused(UnexpectedTensorsError, part("cannot be served beside other adapters"), slots.register, "h", "head")


def test_saving_over_an_adapter_again_and_again_never_shows_half_of_one(served, tmp_path):
    slots, pools = served
    made = {seed: make(seed=seed) for seed in range(10, 16)}
    saver = threading.Thread(target=lambda: [files.write(made[seed], str(tmp_path / "both")) for seed in made])
    saver.start()
    while saver.is_alive():
        held = lease(slots, "both")
        assert any(pools.hold(held.slot, adapter) for adapter in (make(seed=1), *made.values()))
        slots.release(held)
    assert pools.hold(lease(slots, "both").slot, made[15])
    assert slots.memory.stats().counts.failures == 0
