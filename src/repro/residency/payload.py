"""What is stored of one block of a layer, at all its widths: planes, or one version per width.

The one idea: a payload says which tensors a width needs, whatever they are.  Bit-planes of one
any-precision stack are shared by their widths (PagedWeight); DynaExq's two versions are two
stacks that share nothing.  Everything above works on tensors, parts and pages alone.

Letters: E experts, N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from repro.contract import FormatId, Part
from repro.errors import unknown_name
from repro.formats.encoded import EncodedStack, TensorSpec
from repro.residency.errors import BudgetError


@dataclass(frozen=True)
class BlockPayload:
    """One block (``gate_up`` or ``down``) of all experts of a layer.

    Args:
        schemes: the scheme that each width is read with; ascending widths.
        n_experts: E.
        nested: whether widths share tensors (planes) or are versions of their own.
        stacks: the bytes, by width; empty once they have gone to the host store.
    """

    schemes: Mapping[int, Any]
    n_experts: int
    nested: bool
    stacks: Mapping[int, EncodedStack] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_stack(cls, stack: EncodedStack) -> BlockPayload:
        """A stack as it is: nested planes, or a format of one width (the ``dense`` policy).

        Raises:
            BudgetError: several widths that are not nested; give them as versions.
        """
        scheme = stack.scheme
        if not scheme.nested and len(scheme.widths) > 1:
            raise BudgetError(
                f"the {scheme.name} format has {len(scheme.widths)} widths that share no planes: "
                "pass one stack per width to BlockPayload.of_versions"
            )
        schemes = dict.fromkeys(scheme.widths, scheme)
        stacks = dict.fromkeys(scheme.widths, stack)
        return cls(schemes, stack.n_matrices, bool(scheme.nested), stacks)

    @classmethod
    def of_versions(cls, stacks: Mapping[int, EncodedStack]) -> BlockPayload:
        """DynaExq's complete versions: one stack of a single width each, one or two of them.

        Raises:
            BudgetError: no stack, more than two, or stacks of different shapes.
        """
        if not 1 <= len(stacks) <= 2:
            raise BudgetError(f"{len(stacks)} versions of an expert: there can be one or two")
        ordered = dict(sorted(stacks.items()))
        for n_bits, stack in ordered.items():
            if tuple(stack.widths) != (n_bits,):
                raise BudgetError(
                    f"the version of {n_bits} bits is a stack of widths {tuple(stack.widths)}: "
                    "a version has exactly the width it is named by"
                )
        facts = {(tuple(s.scheme.shape), s.n_matrices) for s in ordered.values()}
        if len(facts) > 1:
            raise BudgetError(f"versions of one block differ in shape and experts: {sorted(facts)}")
        schemes = {n_bits: stack.scheme for n_bits, stack in ordered.items()}
        return cls(schemes, next(iter(ordered.values())).n_matrices, False, ordered)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        rows, columns = next(iter(self.schemes.values())).shape
        return int(rows), int(columns)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits per weight it can be read at, ascending."""
        return tuple(self.schemes)

    def scheme(self, n_bits: int) -> Any:
        """The scheme that decodes a width.

        Raises:
            UnknownNameError: a width that was not stored.
        """
        if n_bits not in self.schemes:
            raise unknown_name("width", str(n_bits), [str(w) for w in self.schemes])
        return self.schemes[n_bits]

    def format_id(self, n_bits: int) -> FormatId:
        """How a kernel must read this width."""
        return FormatId(self.scheme(n_bits).format_id)

    def tensors(self, n_bits: int) -> tuple[TensorSpec, ...]:
        """The tensors of a width in the order of its pages: planes first."""
        return tuple(self.scheme(n_bits).tensors(n_bits))

    def parts(self, n_bits: int) -> tuple[Part, ...]:
        """The same as parts of the contract."""
        return tuple(spec.part for spec in self.tensors(n_bits))

    def tensor(self, n_bits: int, spec: TensorSpec) -> Tensor:
        """The bytes of one tensor of a width, all experts: ``[E, *spec.shape]``.

        Raises:
            BudgetError: the bytes are no longer here.
        """
        if n_bits not in self.stacks:
            raise BudgetError(
                f"the tensors of width {n_bits} have gone to the host store: encode them again"
            )
        return self.stacks[n_bits].tensors[spec.name]

    def without_tensors(self) -> BlockPayload:
        """Schemes only: what remains after the bytes went to the host store."""
        return BlockPayload(self.schemes, self.n_experts, self.nested)
