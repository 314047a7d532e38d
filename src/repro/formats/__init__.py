"""How a weight matrix is stored: ``AnyPrecision``, ``GroupAffine``, ``Dense``.

Each encodes ``weight[N, K]`` (or all experts of a layer at once, ``encode_stack``) into
parts that are placed, moved and dropped on their own; :mod:`repro.formats.layout` says what
their bytes mean.  ``decode`` is the reference of every kernel.

How to add a format
    One file with a scheme (which tensors a width needs, and how they become the matrix) and
    an encoder, as in :mod:`repro.formats.dense`; a name for it in
    :mod:`repro.formats.registry`.
"""

from repro.formats.any_precision import AnyPrecision
from repro.formats.dense import Dense
from repro.formats.encoded import EncodedMatrix, EncodedStack
from repro.formats.group_affine import GroupAffine
from repro.formats.layout import LAYOUT_VERSION
from repro.formats.registry import FORMATS, format_name, make_format

__all__ = [
    "FORMATS",
    "LAYOUT_VERSION",
    "AnyPrecision",
    "Dense",
    "EncodedMatrix",
    "EncodedStack",
    "GroupAffine",
    "format_name",
    "make_format",
]
