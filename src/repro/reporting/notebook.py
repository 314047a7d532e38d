"""What notebooks print: facts that are the same on every machine, and checks of the rest.

One idea: a stored output is compared letter by letter, so only what cannot vary is
printed.  :func:`show` prints counts, names and yes or no; :func:`check` compares a measured
number with an expectation and prints a fixed sentence while it holds, and the number when
it does not.  :func:`picture` shows a figure as exactly the PNG that is written to disk, and
:func:`table` a table as in the report; pictures and HTML are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.display import HTML, Image
    from matplotlib.figure import Figure

    from repro.reporting.tables import Table


def show(**facts: Any) -> None:
    """Print facts by name, sorted: integers, yes/no, strings, ``None``, and lists of these.

    Raises:
        TypeError: a value that can differ between machines, such as a float.
    """
    width = max((len(name) for name in facts), default=0)
    for name in sorted(facts):
        print(f"{name:<{width}}  {_text(name, facts[name])}")


def _text(name: str, value: Any) -> str:
    # Scalars of NumPy and torch print their type in some versions: unwrap them.
    if hasattr(value, "tolist") and not isinstance(value, (str, bytes)):
        value = value.tolist()
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return ", ".join(_text(name, item) for item in value)
    raise TypeError(
        f"show({name}=...) got a {type(value).__name__}, which may print differently elsewhere: "
        "use check() for measured numbers"
    )


def check(name: str, value: float, expected: float, rtol: float, *, atol: float = 0.0) -> None:
    """Compare ``value`` with ``expected``; print a sentence that is fixed while it holds.

    Holds when ``|value - expected| <= rtol * |expected| + atol``.  Returns nothing, or a cell
    that ends with it would show the word ``True`` as well.
    """
    value, expected = float(value), float(expected)
    holds = math.isfinite(value) and abs(value - expected) <= rtol * abs(expected) + atol
    tolerance = " and ".join(
        text for text, used in ((f"{100 * rtol:g} %", rtol), (f"{atol:g}", atol)) if used
    )
    within = f"within {tolerance}" if tolerance else "exactly"
    if holds:
        print(f"{name}: as expected, {within}")
    else:
        print(f"{name}: NOT as expected: {value:.6g}, expected {expected:.6g} {within}")


def picture(figure: Figure) -> Image:
    """A figure as the PNG that :func:`repro.reporting.figures.save_figure` writes."""
    from IPython.display import Image

    from repro.reporting.style import png_bytes

    return Image(data=png_bytes(figure), format="png")


def table(content: Table) -> HTML:
    """A table as in the report, with its title and the notes of its rows."""
    import html

    from IPython.display import HTML

    return HTML(f"<p><b>{html.escape(content.title)}</b></p>{content.to_html()}")
