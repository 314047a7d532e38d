"""What the figures of serving show in words, computed from the same records."""

from __future__ import annotations

from collections.abc import Sequence

from repro.reporting.grouping import select
from repro.reporting.records import Record
from repro.reporting.sentences import NOTHING, span
from repro.reporting.serving_records import (
    ENGINE,
    GIVES,
    KEEPS,
    LAYOUTS,
    pressures,
    promotions,
    series,
    servings,
    value,
)


def promotion(records: Sequence[Record]) -> str:
    """How many steps one copy spanned, and their pace."""
    parts = []
    for _, layout, point in promotions(records):
        before, during = (point[f"step_s_{when}"].p50 or 0.0 for when in ("before", "during"))
        parts.append(
            f"with {LAYOUTS[layout]} {value(point, 'steps_on_old_version'):.0f} steps finish on "
            f"the old version, at a median of {1000 * during:.0f} ms against {1000 * before:.0f} "
            "ms before"
        )
    if not parts:
        return NOTHING
    return (
        f"While one expert crosses a throttled link, {'; '.join(parts)}. No step waits; the new "
        "version is read from the first step after its copy is complete."
    )


def engine(records: Sequence[Record]) -> str:
    """Handles and states in the picture."""
    found = select(records, claim=ENGINE, metric="engine_state")
    if not found:
        return NOTHING
    state = found[0].config["snapshot"]
    changing = {name: n for name, n in state["states"].items() if n and name != "resident"}
    words = ", ".join(f"{n} {name}" for name, n in changing.items())
    return (
        f"Drawn from the snapshot of a running engine: {sum(state['states'].values())} handles, of "
        f"which {words or 'none'} at that instant; pools are filled to scale. It is a state, not "
        "a measurement."
    )


def engine_paper() -> str:
    """What is known of Figure 4."""
    return "The paper's Figure 4 shows the architecture; it holds no numbers."


def pressure(records: Sequence[Record]) -> str:
    """What was lent, what it cost, and what static weights do instead."""
    parts = []
    found = list(pressures(records))
    for _, policy, point in found:
        if policy == GIVES:
            cost = max(series(point, "bits_per_byte")) - series(point, "bits_per_byte")[0]
            parts.append(
                f"With weights that give way {value(point, 'requests_finished'):.0f} requests grow "
                f"from {value(point, 'kv_blocks_at_start'):.0f} to "
                f"{value(point, 'peak_kv_blocks'):.0f} KV blocks without a preemption: "
                f"{100 * value(point, 'lent_share_at_peak'):.0f} % of the experts' bytes are lent, "
                f"mean width falls from {value(point, 'first_mean_bits'):.1f} to "
                f"{value(point, 'lowest_mean_bits'):.1f} bits, fixed texts cost at most "
                f"{cost:.3f} bits per byte more, and afterwards all bits are back."
            )
    for _, policy, point in found:
        if policy == KEEPS:
            parts.append(
                "With static weights in the same arena the same requests take "
                f"{value(point, 'steps'):.0f} steps and "
                f"{value(point, 'preemptions'):.0f} preemptions."
            )
    return " ".join(parts) or NOTHING


def serving(records: Sequence[Record]) -> str:
    """The cost of changing experts at every step."""
    found = list(servings(records))
    if not found:
        return NOTHING
    percents = [100 * (value(point, "step_ratio_on_off") - 1) for *_, point in found]
    moved = sum(value(point, "changes_published") for *_, point in found)
    waited = sum(value(point, "weight_wait_s") for *_, point in found)
    return (
        f"Changing two experts at every step makes the median decode step longer by "
        f"{span(percents)} over models and layouts ({moved:,.0f} changes published, {waited:g} s "
        "waited for weights). Kernels are plain PyTorch, so only ratios mean anything."
    )
