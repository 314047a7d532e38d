"""Claims on residency and serving: DynaExq's constraints (codes C), targets of ours (codes K).

One idea: what is exact (counts, bytes, bits) is required; times of one machine are shown with
their tolerance and decide nothing.
"""

from __future__ import annotations

from repro.reporting import checks_serving as serving
from repro.reporting.claim import Claim

SERVING = "needs the transitions, kv-pressure and serving experiments"

SERVING_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "C1",
        "DynaExq C1",
        "The memory budget is never exceeded.",
        "peak bytes of the arena at most the budget; on a GPU the allocator's peak at most arena, "
        f"dense weights and workspace, and {100 * serving.DEVICE_SHARE:.0f} % of the arena "
        "(activations and the library's own workspace)",
        serving.within_budget,
        needs=SERVING,
    ),
    Claim(
        "C2",
        "DynaExq C2",
        "The forward pass never waits for a transition.",
        "0 s booked as waiting for weights; on a throttled link no step holds more than "
        f"{100 * serving.STOOD_STILL:.0f} % of the copy, where one that waits holds nearly all",
        serving.never_waits,
        needs=SERVING,
    ),
    Claim(
        "C2.1",
        "DynaExq C2",
        "Steps go on with the old version while a copy is under way.",
        f"at least {serving.STEPS_ON_OLD} steps during one copy on a throttled link",
        serving.steps_on_old_version,
        needs=SERVING,
    ),
    Claim(
        "C2.2",
        "DynaExq C2",
        "Steps keep their pace during a copy.",
        "median step within the 90th percentile of the steps before or after; a machine that does "
        "something else at that moment can break it, so it does not decide",
        serving.steps_keep_pace,
        required=False,
        needs=SERVING,
    ),
    Claim(
        "C3",
        "DynaExq C3",
        "Transitions stay bounded while demand fluctuates.",
        "no change is published that was not accepted, with changes forced at every step; in one "
        "swing of KV demand the mean width turns once, in no more changes than all experts need "
        "to pass every width once each way (a trace that alternates is a test of the policies)",
        serving.changes_are_bounded,
        needs=SERVING,
    ),
    Claim(
        "C3.1",
        "DynaExq C3",
        "Changing experts at every step hardly slows decoding.",
        f"median step at most {serving.SLOWER} times that without changes, on kernels in plain "
        "PyTorch; times of one machine, so it does not decide",
        serving.pace_while_changing,
        required=False,
        needs=SERVING,
    ),
    Claim(
        "K1",
        "target of ours",
        "Weights that give way carry four times the KV cache.",
        f"all requests run together throughout, grow to {serving.GROWTH} times the KV blocks of "
        "the start, and finish without a preemption",
        serving.pressure_is_met,
        needs=SERVING,
    ),
    Claim(
        "K2",
        "target of ours",
        "A large part of the experts' bytes is lent, and all bits come back.",
        f"at least {100 * serving.LENT:.0f} % at the peak; the same mean width afterwards",
        serving.weights_are_lent,
        needs=SERVING,
    ),
    Claim(
        "K3",
        "target of ours",
        "After all changes fresh texts score as before.",
        "every token's likelihood equal to the last bit, in the same batches",
        serving.comes_back,
        needs=SERVING,
    ),
    Claim(
        "K4",
        "target of ours",
        "Static weights in the same arena must send requests back.",
        "at least one preemption, with the same requests and bytes",
        serving.others_cannot,
        required=False,
        needs=SERVING,
    ),
)
