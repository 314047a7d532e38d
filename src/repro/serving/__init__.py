"""Serving: requests in, completions out, under a memory budget that holds at every step.

:class:`Engine` is the door.  Behind it, each module has one idea: ``scheduler`` (who takes part
in a step), ``runner`` (running it), ``paged_cache`` (keys and values on pages), ``control``
(policy and mechanism), ``pressure`` (who gives memory back), ``build`` (putting it together).
"""

from repro.serving.conversation import Conversation
from repro.serving.engine import Engine, EngineError
from repro.serving.payloads import EncodedExperts, encode_experts
from repro.serving.request import (
    Completion,
    Request,
    RequestError,
    SamplingParams,
    Score,
)

__all__ = [
    "Completion",
    "Conversation",
    "EncodedExperts",
    "Engine",
    "EngineError",
    "Request",
    "RequestError",
    "SamplingParams",
    "Score",
    "encode_experts",
]
