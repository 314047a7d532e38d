"""Profiles: the named sets of parameters that notebooks and experiments run with.

The one idea: every number that decides how much is measured stands here, in one frozen
dataclass, and nowhere else.  A notebook names a profile in its ``parameters`` cell and asks
``get`` for the rest; a name or a parameter that does not exist is an error, never ignored.

``tiny`` is the default everywhere and needs minutes on two CPU cores.  ``public`` measures the
same on the public test sets, ``gpu`` with more and longer prompts on a GPU; their records are
committed, so that a reader without those sets or a GPU sees them too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from repro.errors import unknown_name

#: The profile that every reader can run.  Its records are measured where they are shown and
#: are not committed; those of all other profiles are.
DEFAULT = "tiny"


@dataclass(frozen=True)
class Profile:
    """Parameters of one run; every field ends up in the records' ``config``."""

    name: str
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0
    #: Fixed, not "all cores": sums are split by thread, and records must not depend on the machine.
    n_threads: int = 2
    models: tuple[str, ...] = ("moe-fine", "moe-shared")
    #: Where workloads come from, in this order of preference: "embedded" needs nothing.
    sources: tuple[str, ...] = ("embedded",)
    n_prompts: int = 64
    prompt_tokens: int = 256
    prefill_lengths: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    decode_steps: int = 32
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    #: Batches drawn per batch size, from which means and intervals are taken.
    n_blocks: int = 32
    bootstrap_samples: int = 1000
    #: Precision experiments: windows per domain that losses are measured on, and their length.
    eval_prompts: int = 16
    eval_tokens: int = 256
    #: Windows per domain that formats and sensitivities are calibrated on, and their length.
    calibration_prompts: int = 16
    calibration_tokens: int = 512
    #: Figure 3: prompts per domain, tokens of a prompt, and tokens after it.
    demotion_prompts: int = 16
    demotion_context_tokens: int = 192
    demotion_scored_tokens: int = 64
    #: Single experts' blocks that are lowered, and prompts per domain that show the damage.
    damage_blocks: int = 24
    damage_prompts: int = 4
    damage_tokens: int = 128


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name=DEFAULT),
        Profile(
            name="public",
            sources=("folder",),
            n_prompts=64,
            prompt_tokens=512,
            decode_steps=32,
            n_blocks=64,
        ),
        Profile(
            name="gpu",
            device="cuda",
            # The embedded code needs a package that a GPU image may lack.
            sources=("folder",),
            n_prompts=64,
            prompt_tokens=512,
            decode_steps=64,
            n_blocks=128,
            eval_prompts=128,
            eval_tokens=1024,
            calibration_prompts=64,
            calibration_tokens=1024,
            demotion_prompts=128,
            demotion_context_tokens=2048,
            demotion_scored_tokens=256,
            damage_blocks=288,
            damage_prompts=24,
            damage_tokens=1024,
        ),
    )
}


def get(name: str, /, **overrides: Any) -> Profile:
    """The profile called ``name``, with single parameters replaced.

    Lists given for a tuple (as a notebook parameter arrives) become tuples.

    Raises:
        UnknownNameError: no such profile or no such parameter.
    """
    if name not in PROFILES:
        raise unknown_name("profile", name, PROFILES)
    known = [field.name for field in fields(Profile) if field.name != "name"]
    for parameter in overrides:
        if parameter not in known:
            raise unknown_name("profile parameter", parameter, known)
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in overrides.items()
    }
    return replace(PROFILES[name], **values)
