"""How nbval runs the notebooks: stored outputs compare equal on every machine.

Kernels inherit the environment set here, in which outputs are stored too
(`make refresh`).
"""

import os
from typing import Any

from repro.pipeline.environment import kernel_env

os.environ.update(kernel_env())

#: Rich twins of a text output (fresh ids and addresses in each run) and the
#: kernel's notices.
NOT_COMPARED = (
    "text/html",
    "image/svg+xml",
    "application/javascript",
    "stderr",
)


def pytest_collectstart(collector: Any) -> None:
    """Compare only what a reader is taught: text printed on purpose."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += NOT_COMPARED
