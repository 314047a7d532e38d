"""Which model and which prompts a calibration speaks of.

The one idea: a fingerprint of what is in memory, not of where it came from.  Values are taken
in float32, so one checkpoint gives the same fingerprint in the types it is loaded in as long
as they hold its values exactly (a bf16 file in bf16 or float32).  A model whose weights are
not in memory (a streamed one) is known by its checkpoint, whose fingerprint the caller gives.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

from repro.errors import CheckpointError

_VALUES_PER_TENSOR = 4096


@torch.no_grad()
def model_fingerprint(model: nn.Module) -> str:
    """sha256 over names, shapes and evenly spread values of all parameters.

    Raises:
        CheckpointError: parameters are not in memory.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        if parameter.is_meta:
            raise CheckpointError(
                f"the weights of {name!r} are not in memory: "
                "pass the fingerprint of the checkpoint the model is streamed from"
            )
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _VALUES_PER_TENSOR)
        values = flat[::step].float().cpu().numpy()
        digest.update(values.astype("<f4").tobytes())
    return digest.hexdigest()


def prompts_fingerprint(input_ids: Tensor, mask: Tensor) -> str:
    """sha256 over the real tokens and where they lie."""
    digest = hashlib.sha256(str(tuple(input_ids.shape)).encode())
    real = mask.cpu().numpy().astype(np.uint8)
    digest.update(real.tobytes())
    ids = input_ids.cpu().numpy().astype("<i8")
    digest.update((ids * real).tobytes())
    return digest.hexdigest()
