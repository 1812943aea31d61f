"""What a text-to-image pipeline in one cell is made of, and which parts of it an adapter never changes."""

from typing import Dict, List, Optional, Sequence

from mindlora.core.errors import TargetError
from mindlora.core.text import examples

# Names of a pipeline's parts, as in diffusers.
DENOISERS = ("unet", "transformer")
TEXT_ENCODER = "text_encoder"
# LoRA files have no place for these, and latents of a changed VAE are not those that the UNet was trained on.
NEVER_ADAPTED = ("vae", "image_encoder", "safety_checker")


def check_parts(paths: Sequence[str], all_paths: Sequence[str], patterns: object, field: str) -> None:
    """Checks that a configuration changes only those parts of a text-to-image pipeline that it should.

    A pipeline is a cell with a denoiser (``unet`` or ``transformer``) beside other parts of these names: ``vae``,
    ``image_encoder``, ``safety_checker``, which are never changed, and ``text_encoder`` (``text_encoder_2`` ...), which
    is changed only if ``patterns`` contains its name. Other networks are not concerned.

    Args:
        paths (sequence of str): Full paths of the cells or parameters that would be adapted or trained.
        all_paths (sequence of str): Full paths of all cells or parameters of the network.
        patterns (str or list of str): What selected ``paths``, in ``field``, such as target_modules.

    Raises TargetError if a part would be changed that must not be.
    """
    asked = TEXT_ENCODER in str(patterns)
    touched: Dict[str, List[str]] = {}
    for path in paths:
        part = _frozen_part(path, all_paths)
        if part is not None and not (asked and _name(part).startswith(TEXT_ENCODER)):
            touched.setdefault(part, []).append(path)
    if not touched:
        return
    part, touching = next(iter(touched.items()))
    denoiser = _denoiser_beside(part, all_paths)
    asking = f", or name {TEXT_ENCODER} in them to train it as well" if _name(part).startswith(TEXT_ENCODER) else ""
    raise TargetError(
        f"{field} {patterns!r} selects cells of {part}, which fine-tuning {denoiser} leaves as it is: "
        f"{examples(touching)}. Begin the patterns with the part that they are for, such as {denoiser}{asking}."
    )


def _frozen_part(path: str, all_paths: Sequence[str]) -> Optional[str]:
    """Returns the path of the part that must not be changed and that ``path`` is in, or None."""
    pieces = path.split(".")
    for end, piece in enumerate(pieces, 1):
        part = ".".join(pieces[:end])
        frozen = piece in NEVER_ADAPTED or piece.startswith(TEXT_ENCODER)
        if frozen and _denoiser_beside(part, all_paths) is not None:
            return part
    return None


def _denoiser_beside(part: str, all_paths: Sequence[str]) -> Optional[str]:
    """Returns the path of the denoiser that is in the same cell as ``part``, or None."""
    around = part[: -len(_name(part))]
    for denoiser in DENOISERS:
        start = f"{around}{denoiser}."
        if any(path.startswith(start) for path in all_paths):
            return around + denoiser
    return None


def _name(path: str) -> str:
    return path.rpartition(".")[2]
