"""Formats by name, for the command line, experiments and records.

The one idea: a name says everything about a format, so a record that carries the name can be
repeated.  ``format_name`` is the inverse of ``make_format``.

======================  ==================================================================
``fp16 bf16 fp32``      dense
``int4-g128``           group-affine: width and group, symmetric, clipping searched
``...-asym``            with a stored zero
``...-noclip``          the largest weight of every group is covered
``...-gptq``            codes chosen under the Hessian of the inputs
``...-from4g128``       made from what int4 in groups of 128 decodes to
``any-precision``       nested codes, tables shared by the default number of rows
``any-precision-r1``    a table per row (the published format); ``r0``: one per matrix
======================  ==================================================================

Suffixes come in the order of the table.  ``FORMATS`` lists what is usually meant; every other
width, group and combination of suffixes is understood too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from repro.errors import unknown_name
from repro.formats.dense import Dense
from repro.formats.group_affine import WIDTHS, GroupAffine

_DENSE = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_GROUPS = (128, 64, 32)
_INTEGER = re.compile(
    r"int(?P<bits>\d+)-g(?P<group>[1-9]\d*)"
    r"(?P<asym>-asym)?(?P<noclip>-noclip)?(?P<gptq>-gptq)?"
    r"(?:-from(?P<from_bits>\d+)g(?P<from_group>[1-9]\d*))?"
)
_NESTED = re.compile(r"any-precision(?:-r(?P<rows>\d+))?")
_PATTERNS = (
    "any-precision-r<rows>",
    "int<bits>-g<group>[-asym][-noclip][-gptq][-from<bits>g<group>]",
)


def make_format(name: str) -> Any:
    """The format of that name; it has ``encode_stack`` and ``encode``.

    Raises:
        UnknownNameError: no such format; lists the usual ones and the patterns.
    """
    if name in _DENSE:
        return Dense(_DENSE[name])  # type: ignore[arg-type]
    if found := _NESTED.fullmatch(name):
        return _any_precision(found["rows"])
    found = _INTEGER.fullmatch(name)
    if found is None or not {int(found[b]) for b in ("bits", "from_bits") if found[b]} <= {*WIDTHS}:
        raise unknown_name("format", name, (*FORMATS, *_PATTERNS))
    origin = {}
    if found["from_bits"]:
        origin = {"from_bits": int(found["from_bits"]), "from_group_size": int(found["from_group"])}
    return GroupAffine(
        int(found["bits"]),
        int(found["group"]),
        symmetric=found["asym"] is None,
        clip="none" if found["noclip"] else "mse",
        encoder="gptq" if found["gptq"] else "rtn",
        **origin,
    )


def format_name(fmt: Any) -> str:
    """The name that :func:`make_format` makes this format from.

    Raises:
        UnknownNameError: a format, or options of one, that have no name.
    """
    name = type(fmt).__name__
    if isinstance(fmt, Dense):
        name = {dtype: short for short, dtype in _DENSE.items()}[fmt.dtype]
    elif isinstance(fmt, GroupAffine):
        name = f"int{fmt.n_bits}-g{fmt.group_size}"
        name += "" if fmt.symmetric else "-asym"
        name += "-noclip" if fmt.clip == "none" else ""
        name += "-gptq" if fmt.encoder == "gptq" else ""
        if fmt.from_bits is not None:
            name += f"-from{fmt.from_bits}g{fmt.from_group_size}"
    elif hasattr(fmt, "rows_per_lut"):
        default = make_format("any-precision")
        same = fmt.rows_per_lut == default.rows_per_lut
        name = "any-precision" if same else f"any-precision-r{fmt.rows_per_lut}"
    if make_format(name) != fmt:
        raise unknown_name("format", repr(fmt), FORMATS)
    return name


def _any_precision(rows: str | None) -> Any:
    from repro.formats.any_precision import AnyPrecision

    return AnyPrecision() if rows is None else AnyPrecision(rows_per_lut=int(rows))


def _maker(name: str) -> Callable[[], Any]:
    return lambda: make_format(name)


FORMATS: dict[str, Callable[[], Any]] = {
    name: _maker(name)
    for name in (
        "any-precision",
        *_DENSE,
        *(f"int{n_bits}-g{group}" for n_bits in WIDTHS for group in _GROUPS),
    )
}
