"""Adapter files as NumPy arrays: reading and writing without a network."""
import dataclasses
import json
import os
from typing import Dict, Optional, Tuple

import mindspore as ms
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mindlora import atomic
from mindlora.dialects import mindformers, peft
from mindlora.errors import AdapterFormatError, TruncatedAdapterError, UnexpectedTensorsError

_METADATA_KEY = "mindlora"


@dataclasses.dataclass
class Adapter:
    """LoRA tensors and what is known of them.

    Attributes:
        tensors (dict): (path under MindFormers' names, "A" or "B") -> array, A [r, in] and B [out, r].
        rank (int): Rank of all adapters, or None where the file does not say.
        alpha (float): lora_alpha, or None where the file does not say.
        fingerprint (dict): Mark of the base it was trained on, or None where the file does not say.
    """
    tensors: Dict[Tuple[str, str], np.ndarray]
    rank: Optional[int] = None
    alpha: Optional[float] = None
    fingerprint: Optional[dict] = None


def write_folder(adapter: Adapter, path: str, config: dict) -> None:
    """Writes PEFT's folder form: ``config`` as adapter_config.json and the tensors as adapter_model.safetensors."""
    tensors = {peft.tensor_key(*key): np.ascontiguousarray(array) for key, array in adapter.tensors.items()}
    # PEFT and safetensors' readers pass over metadata, so it is where what only mindlora knows can stand.
    metadata = {"format": "pt", _METADATA_KEY: json.dumps({"base_fingerprint": adapter.fingerprint})}
    with atomic.replace_folder(path) as folder:
        save_file(tensors, os.path.join(folder, peft.WEIGHTS_FILE), metadata)
        with open(os.path.join(folder, peft.CONFIG_FILE), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2, sort_keys=True)


def write_ckpt(adapter: Adapter, path: str) -> None:
    """Writes one MindSpore .ckpt under MindFormers' names."""
    # Facts at both ends, so that a file that was cut between two of its records is known by it; the scale in 64 bits,
    # as the 32 of append_dict would change it.
    facts = {"lora_rank": ms.Tensor(adapter.rank, ms.int64), "lora_alpha": ms.Tensor(adapter.alpha, ms.float64)}
    tensors = {mindformers.tensor_key(*key): ms.Tensor(array) for key, array in adapter.tensors.items()}
    content = [{"name": key, "data": tensor} for key, tensor in {**facts, **tensors}.items()]
    with atomic.replace_file(path) as written:
        ms.save_checkpoint(content, written, append_dict={"base_fingerprint": json.dumps(adapter.fingerprint)})


def read(path: str) -> Adapter:
    """Reads an adapter folder, a .safetensors or a .ckpt file; other tensors in a file of MindFormers' are skipped.

    Raises:
        AdapterFormatError: Nothing readable stands at ``path``, or it holds no LoRA tensor.
        TruncatedAdapterError: The file ends before its content does.
        UnexpectedTensorsError: A PEFT file holds tensors that are not LoRA's.
    """
    atomic.finish_interrupted_swap(path)
    if os.path.isdir(path):
        return _read_folder(path)
    if not os.path.exists(path):
        raise AdapterFormatError(f"{path} does not exist.")
    if path.endswith(".ckpt"):
        return _read_ckpt(path)
    if path.endswith(".safetensors"):
        return _read_safetensors(path)
    raise AdapterFormatError(f"{path} is neither an adapter folder nor a .safetensors or .ckpt file.")


def _read_folder(path) -> Adapter:
    weights = os.path.join(path, peft.WEIGHTS_FILE)
    if not os.path.exists(weights):
        raise AdapterFormatError(f"{path} holds no {peft.WEIGHTS_FILE}. It holds: "
                                 f"{', '.join(sorted(os.listdir(path))) or 'nothing'}.")
    adapter = _read_safetensors(weights)
    adapter.rank, adapter.alpha = peft.read_rank_and_alpha(os.path.join(path, peft.CONFIG_FILE))
    return adapter


def _read_safetensors(path) -> Adapter:
    try:
        with safe_open(path, framework="np") as file:
            keys, metadata = list(file.keys()), file.metadata() or {}
            parsed = _parse_keys(keys, path)
            tensors = {place: _tensor(file, path, key) for key, place in parsed.items()}
    except SafetensorError as error:
        if any(sign in str(error) for sign in ("too small", "invalid header length", "not fully covered")):
            raise TruncatedAdapterError(
                f"{path} is truncated or damaged: its {os.path.getsize(path)} bytes are not what its header "
                f"declares ({error}). Copy or save it again.") from error
        raise AdapterFormatError(f"{path} is not a safetensors file: {error}.") from error
    known = json.loads(metadata.get(_METADATA_KEY, "{}"))
    return Adapter(tensors, fingerprint=known.get("base_fingerprint"))


def _read_ckpt(path) -> Adapter:
    facts = ("lora_rank", "lora_alpha", "base_fingerprint")
    if os.path.getsize(path) == 0:
        raise TruncatedAdapterError(f"{path} is truncated: it is empty. Copy or save it again.")
    try:
        content = ms.load_checkpoint(path, choice_func=lambda key: key in facts or mindformers.parse_key(key))
    except ValueError as error:
        if "empty after filter" in str(error):
            raise AdapterFormatError(f"{path} holds no LoRA tensor (no name ends in mindpet_delta_lora_a or _b).") \
                from error
        raise TruncatedAdapterError(f"{path} is truncated or no MindSpore checkpoint: {error}") from error
    known = {key: content.pop(key) for key in facts if key in content}
    if "lora_rank" in known and "base_fingerprint" not in known:
        raise TruncatedAdapterError(f"{path} is truncated: its last record is missing. Copy or save it again.")
    tensors = {place: content[key].asnumpy() for key, place in _parse_keys(list(content), path).items()}
    return Adapter(tensors,
                   rank=int(known["lora_rank"].asnumpy()) if "lora_rank" in known else None,
                   alpha=float(known["lora_alpha"].asnumpy()) if "lora_alpha" in known else None,
                   fingerprint=json.loads(str(known["base_fingerprint"])) if "base_fingerprint" in known else None)


def _parse_keys(keys, path) -> Dict[str, Tuple[str, str]]:
    """Returns key -> place for the LoRA tensors, whichever of the two dialects the keys are in."""
    from_peft = {key: place for key in keys if (place := peft.parse_key(key))}
    if from_peft:
        strange = sorted(set(keys) - set(from_peft))
        if strange:
            raise UnexpectedTensorsError(f"{path} holds tensors that are not LoRA's: {', '.join(strange)}.")
        return from_peft
    from_mindformers = {key: place for key in keys if (place := mindformers.parse_key(key))}
    if not from_mindformers:
        shown = ", ".join(sorted(keys)[:5]) or "nothing"
        raise AdapterFormatError(f"{path} holds no LoRA tensor. It holds: {shown}{', ...' if len(keys) > 5 else ''}.")
    return from_mindformers


def _tensor(file, path, key) -> np.ndarray:
    """Reads one tensor; NumPy has no bfloat16 of its own, so that comes widened to float32, which is exact."""
    if file.get_slice(key).get_dtype() != "BF16":
        return file.get_tensor(key)
    with open(path, "rb") as raw:
        header_size = int.from_bytes(raw.read(8), "little")
        entry = json.loads(raw.read(header_size))[key]
        begin, end = entry["data_offsets"]
        raw.seek(8 + header_size + begin)
        halves = np.frombuffer(raw.read(end - begin), np.uint16).reshape(entry["shape"])
    return (halves.astype(np.uint32) << 16).view(np.float32)
