"""A Jupyter kernel that is this very interpreter, whatever is installed elsewhere.

One idea: a kernelspec named ``python3`` in a user's home may point to another Python, and
notebooks would silently run there.  Here the specification is made on the spot from
``sys.executable``; no installed one is looked up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager


def kernel_manager(env: Mapping[str, str]) -> type[AsyncKernelManager]:
    """A kernel manager class for this interpreter with ``env`` added to the environment."""
    spec = KernelSpec(
        # The kernel's own notices (local sockets are not encrypted) are not the reader's concern.
        argv=[
            *(sys.executable, "-m", "ipykernel_launcher"),
            *("-f", "{connection_file}", "--log-level=ERROR"),
        ],
        display_name="Python 3",
        language="python",
        env=dict(env),
    )

    class ThisInterpreter(AsyncKernelManager):
        """Starts ``sys.executable``."""

        @property
        def kernel_spec(self) -> KernelSpec:
            """The specification made here, instead of one found by name."""
            return spec

    return ThisInterpreter
