"""What DynaExq claims, each with the tolerance under which we call it reproduced.

Before it stands what our own models must reach to be worth measuring on (codes M).

One idea: a claim is a question to the records with the answer fixed beforehand.  The
tolerances stand beside the checks, in the modules ``checks_*``, and are printed with the
verdict.

A claim that is ``required`` must hold on every model and workload that was measured, in
every set of records that is shown.  Others repeat the paper's literal numbers, which need
not carry over to other models; they are shown and do not decide.  What is not measured is
said to be so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from repro.reporting import checks_activation as act
from repro.reporting import checks_demotion as demotion
from repro.reporting import checks_formats as formats
from repro.reporting import checks_heavy_tail as heavy
from repro.reporting import checks_models as sizes
from repro.reporting import checks_quality as quality
from repro.reporting import checks_sensitivity as sens
from repro.reporting.checks import Case
from repro.reporting.claim import Claim
from repro.reporting.claims_serving import SERVING_CLAIMS
from repro.reporting.records import Record

Verdict = Literal["pass", "fail", "not measured"]


@dataclass(frozen=True)
class Result:
    """A claim with its verdict and what was found."""

    claim: Claim
    verdict: Verdict
    found: str
    n_cases: int
    n_holding: int

    @property
    def decides(self) -> bool:
        """Whether this result makes ``verify`` fail."""
        return self.claim.required and self.verdict == "fail"


def evaluate(claim: Claim, records: Sequence[Record]) -> Result:
    """Check one claim against the records."""
    cases = list(claim.check(records))
    holding = sum(case.holds for case in cases)
    if not cases:
        return Result(claim, "not measured", claim.needs or "no record yet", 0, 0)
    worst = min(cases, key=lambda case: (case.holds, case.margin))
    verdict: Verdict = "pass" if holding == len(cases) else "fail"
    which = "tightest" if verdict == "pass" else "worst"
    found = f"{holding} of {len(cases)} hold; {which}: {worst.name}: {worst.found}"
    return Result(claim, verdict, found, len(cases), holding)


def _nothing(records: Sequence[Record]) -> Iterator[Case]:
    """Not measured yet: no record can answer."""
    yield from ()


SENSITIVITY = "needs the sensitivity experiment"

FORMATS = "needs the nesting and format-curve experiments"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "M1",
        "target of ours",
        "The fine model reads the public test sets as well as a model of its size should.",
        "; ".join(
            f"{model}, bits per byte: "
            + ", ".join(
                f"{quality.TEST_SETS[name]} at most {bits}" for name, bits in targets.items()
            )
            for model, targets in quality.TARGET_BITS_PER_BYTE.items()
        ),
        quality.bits_per_byte,
    ),
    Claim(
        "M2",
        "target of ours",
        "Both models solve every generated task at its easiest level.",
        f"at least {100 * quality.TASK_ACCURACY:.0f} % exact answers",
        quality.easiest_tasks,
    ),
    Claim(
        "M3",
        "target of ours",
        "No expert is without traffic.",
        "none unused in any layer on mixed text",
        quality.every_expert_used,
    ),
    Claim(
        "M4",
        "target of ours",
        "Experts are neither collapsed nor used alike.",
        f"effective experts {quality.EFFECTIVE_LOW} to {quality.EFFECTIVE_HIGH} of E in every "
        "layer on mixed text",
        quality.effective_experts,
    ),
    Claim(
        "M5",
        "target of ours",
        "The stated quality was measured on the committed weights.",
        "equal checksums",
        quality.same_weights,
    ),
    Claim(
        "O1.1",
        "Table 1",
        "One decoded token activates exactly k of a layer's E experts.",
        "equal to k/E",
        act.one_token_is_exact,
    ),
    Claim(
        "O1.2",
        "Observation 1, Table 1",
        "Decode activates more experts as the batch grows.",
        f"no step down by more than {act.STEP_PP} points, batch {act.LARGE_BATCH} at least "
        f"{act.GROWTH:.0f} x batch 1",
        act.grows_with_batch,
    ),
    Claim(
        "O1.3",
        "Table 1",
        "Decode stays below what independent uniform routing would activate.",
        f"at most {act.ABOVE_BOUND_PP} points above the bound at every batch size",
        act.below_uniform,
    ),
    Claim(
        "O1.4",
        "Observation 1, Table 2",
        "Prefill is dense: at batch 32 nearly every expert is needed.",
        f"at least {act.DENSE_PERCENT:.0f} %",
        act.prefill_is_dense,
    ),
    Claim(
        "O1.5",
        "Observation 1, Tables 1 and 2",
        "Prefill activates more experts than decode at the same batch size.",
        f"nowhere less by more than {act.STEP_PP} points",
        act.prefill_above_decode,
    ),
    Claim(
        "O1.6",
        "Observation 1",
        "Prefill activates more experts as prompts grow longer.",
        f"no step down by more than {act.STEP_PP} points, and a rise from the shortest to the "
        "longest prompt unless all experts are reached at once",
        act.grows_with_prompt,
    ),
    Claim(
        "O1.7",
        "Observation 1, Figure 1",
        "Under offloading, dense activation makes the GPU wait for experts.",
        "to be fixed with the experiment",
        _nothing,
        needs="needs the offloading experiment (Figure 1)",
    ),
    Claim(
        "A4",
        "finding A4",
        "Which decode step is sampled changes the activation ratio.",
        "gap at batch 32 larger than both half intervals together",
        act.protocols_differ,
        required=False,
    ),
    Claim(
        "O2.1",
        "Observation 2, Figure 2",
        "In every layer the ten busiest experts carry more than their even share.",
        "lower end of the interval above 10/E",
        heavy.top_above_even,
    ),
    Claim(
        "O2.2",
        "Observation 2, Figure 2",
        "A small set of hot experts carries a disproportionate part of all selections.",
        f"the busiest fifth carries at least {100 * heavy.FIFTH_FACTOR * heavy.FIFTH:.0f} %, "
        "mean of layers",
        heavy.fifth_above_even,
    ),
    Claim(
        "O2.3",
        "Observation 2, Figure 2",
        "Which experts are hot depends on the workload.",
        "mean top-10 overlap of two workloads at most midway between chance and 10",
        heavy.hot_sets_shift,
    ),
    Claim(
        "O2.4",
        "Observation 2, literally",
        "A small set of hot experts takes most of all selections.",
        f"the busiest fifth carries more than {heavy.MANY_PERCENT:.0f} %",
        heavy.few_dominate,
        required=False,
    ),
    Claim(
        "O2.5",
        "Observation 2, literally",
        "Experts of one layer differ in use by orders of magnitude.",
        f"busiest at least {heavy.ORDERS:.0f} x least used, median layer",
        heavy.orders_of_magnitude,
        required=False,
    ),
    Claim(
        "O2.6",
        "Observation 2, literally",
        "In one layer the top-10 sets of text, mathematics and code are disjoint.",
        "no shared expert in some layer; needs at least 30 experts per layer",
        heavy.hot_sets_disjoint,
        required=False,
    ),
    *(Claim(*row) for row in demotion.ROWS),
    Claim(
        "S1",
        "target of ours",
        "Predicted damage orders single blocks as measured damage does, in every transition.",
        f"rank correlation with the divergence at least {sens.RANK}; asked of "
        f"{sens.ENOUGH_BLOCKS} blocks or more",
        sens.rank_agrees,
        needs=SENSITIVITY,
    ),
    Claim(
        "S2",
        "PagedWeight, sensitivity",
        "A block suffers more with every bit it loses.",
        "mean divergence over the measured blocks grows at every step down",
        sens.damage_grows,
        needs=SENSITIVITY,
    ),
    Claim(
        "S3",
        "PagedWeight, sensitivity",
        "What follows a block matters: Fisher information beats the error of the weights.",
        "higher rank correlation, mean of transitions",
        sens.inputs_matter,
        needs=SENSITIVITY,
    ),
    Claim(
        "S4",
        "PagedWeight, sensitivity",
        "Hot is not fragile: experts with much traffic are not those hurt most per token.",
        f"rank correlation of routing mass and damage per token below {sens.HOT}",
        sens.hot_is_not_fragile,
        needs=SENSITIVITY,
    ),
    Claim(
        "S5",
        "PagedWeight, prompt residual",
        "Prompt heads do no harm on prompts they have not seen.",
        f"held-out R2 at most {sens.HEAD_LOSS} below that of g x mass, in every head",
        sens.heads_do_no_harm,
        needs=SENSITIVITY,
    ),
    Claim(
        "S6",
        "target of ours",
        "Predicted damage orders single blocks as the increase of the loss does.",
        f"rank correlation at least {sens.RANK}; asked of {sens.ENOUGH_BLOCKS} blocks or more",
        sens.loss_rank_agrees,
        required=False,
        needs=SENSITIVITY,
    ),
    Claim(
        "F1",
        "target of ours",
        "Nested codes are nearly as good as exact ones: random rows, a table per row.",
        "squared error pooled over rows of 1,024 values: "
        + ", ".join(f"{bits} bits at most {most} x" for bits, most in formats.BOUNDS.items()),
        formats.nesting_of_rows,
        needs=FORMATS,
    ),
    Claim(
        "F2",
        "target of ours",
        "The same on the models' own blocks, joined to rows of 1,024 and weighted.",
        "as F1, weighted; a few rows with most of the importance decide a pooled ratio, so the "
        "mean of rows stands beside it",
        formats.nesting_of_blocks,
        required=False,
        needs=FORMATS,
    ),
    Claim(
        "F3",
        "target of ours",
        "At equal bytes any-precision loses no more than integers rounded to nearest.",
        "up to 4.5 bits per weight, every group and both symmetries: the interval of the paired "
        "difference does not lie above 0",
        formats.not_worse_at_equal_bytes,
        required=False,
        needs=FORMATS,
    ),
    Claim(
        "F4",
        "target of ours",
        "Every further bit lowers the error of every look-up table.",
        "no table with a width at which it does not, down to the rounding of float16",
        formats.error_falls,
        needs=FORMATS,
    ),
    Claim(
        "F5",
        "count of ours",
        "All tables of 3 to 8 bits, one per row, cost several bits per weight.",
        f"{formats.TABLE_BITS} bits per weight on {formats.TABLE_MODEL}",
        formats.tables_cost_as_published,
        needs=FORMATS,
    ),
    Claim(
        "F6",
        "target of ours",
        "Pages waste little.",
        f"a page size that leaves at most {100 * formats.UNUSED:.0f} % unused at every width, for "
        "every model",
        formats.pages_are_used,
        needs=FORMATS,
    ),
    Claim(
        "F7",
        "target of ours",
        "Encoding is fast.",
        f"on a GPU at least {formats.RATE_GB} GB of bfloat16 weights per second at published block "
        f"sizes; on two CPU cores both small models in {formats.ENCODE_S:.0f} s",
        formats.encoding_is_fast,
        required=False,
        needs=FORMATS,
    ),
    *SERVING_CLAIMS,
    Claim(
        "T3.1",
        "Table 3",
        "Bytes of one expert at FP16, INT4 and INT2.",
        "equal to the byte",
        sizes.expert_bytes,
    ),
    Claim(
        "T3.2",
        "Table 3",
        "Printed share of the weights that is in experts.",
        "within 0.5 points of the count",
        sizes.printed_fraction,
        required=False,
    ),
)


def evaluate_all(records: Sequence[Record]) -> list[Result]:
    """Every claim against the records."""
    return [evaluate(claim, records) for claim in CLAIMS]
