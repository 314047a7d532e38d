"""Verdicts: each claim made to hold and made to fail on records of known routers."""

import dataclasses

import pytest
from test_reporting_samples import add_activation, add_all, add_heavy_tail, project

from repro.reporting.claims import CLAIMS, evaluate, evaluate_all
from repro.reporting.record_sets import RecordSet
from repro.reporting.records import Record, RecordStore
from repro.reporting.verify import exit_status, verdict_word, verdicts, verify


def by_code(records: list[Record]) -> dict[str, str]:
    return {result.claim.code: result.verdict for result in evaluate_all(records)}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory) -> list[Record]:
    return add_all(RecordStore("tiny", root=tmp_path_factory.mktemp("skewed")))


@pytest.fixture(scope="module")
def uniform(tmp_path_factory) -> list[Record]:
    """Routers without preference and one hot set for all workloads."""
    store = RecordStore("tiny", root=tmp_path_factory.mktemp("uniform"))
    add_heavy_tail(store, skew=0.0, shift=False)
    return store.read()


def status(own: list[Record], *others: list[Record]) -> int:
    """Exit status with these records as the profile's own and those as other sets."""
    sets = [RecordSet("tiny", tuple(own))]
    sets += [RecordSet(f"other{i}", tuple(records)) for i, records in enumerate(others)]
    return exit_status(verdicts(sets), "tiny")


def changed(records: list[Record], change, **where: object) -> list[Record]:
    """Records with ``value`` (and interval) changed where claim and configuration match."""
    result = []
    for record in records:
        facts = {"claim": record.claim, "metric": record.metric, **record.config}
        if all(facts.get(name) == value for name, value in where.items()):
            value = change(record.value)
            record = dataclasses.replace(record, value=value, ci_low=value, ci_high=value)
        result.append(record)
    return result


def test_skewed_shifting_routers_pass_every_required_claim(skewed):
    results = evaluate_all(skewed)
    required = {r.claim.code: r.verdict for r in results if r.claim.required}
    unmeasured = {code for code, verdict in required.items() if verdict == "not measured"}
    precision = {"O3.1", "O3.2", "O3.3", "O3.4", "O3.6", "F1", "F4", "F5", "F6"}
    precision |= {"S1", "S2", "S3", "S4", "S5"}
    serving = {"C1", "C2", "C2.1", "C3", "K1", "K2", "K3"}
    assert unmeasured == {"O1.7", "M1", "M2", "M3", "M4", "M5", *precision, *serving}
    assert {required[code] for code in set(required) - unmeasured} == {"pass"}
    assert status(skewed) == 0


def test_a_router_without_preference_fails_observation_2(uniform):
    verdicts = by_code(uniform)
    assert verdicts["O2.1"] == verdicts["O2.2"] == verdicts["O2.3"] == "fail"
    assert status(uniform) == 1


DECODE = {"claim": "DynaExq Table 1", "metric": "activation_ratio", "protocol": "decode_mean"}
PREFILL = {"claim": "DynaExq Table 2", "metric": "activation_ratio"}
LENGTH = {"claim": "DynaExq Table 2 (length)", "metric": "activation_ratio", "batch_size": 1}


@pytest.mark.parametrize(
    ("code", "change", "where"),
    [
        ("O1.1", lambda v: v * 1.0001, {**DECODE, "batch_size": 1, "workload": "prose"}),
        ("O1.2", lambda v: 12.0, {**DECODE, "batch_size": 8, "model": "moe-shared"}),
        ("O1.2", lambda v: v / 5, {**DECODE, "batch_size": 32}),
        ("O1.3", lambda v: v + 30, {**DECODE, "batch_size": 4, "workload": "python"}),
        ("O1.4", lambda v: 89.0, {**PREFILL, "batch_size": 32, "workload": "prose"}),
        ("O1.5", lambda v: 1.0, {**PREFILL, "batch_size": 2}),
        ("O1.6", lambda v: v - 60, {**LENGTH, "prompt_tokens": 64}),
        ("T3.1", lambda v: v + 1, {"metric": "expert_bytes_int4_g128", "model": "OLMoE-1B-7B"}),
    ],
)
def test_one_wrong_number_fails_one_claim(skewed, code, change, where):
    wrong = changed(skewed, change, **where)
    assert wrong != skewed
    assert by_code(skewed)[code] == "pass"
    assert by_code(wrong)[code] == "fail"
    (result,) = [result for result in evaluate_all(wrong) if result.claim.code == code]
    assert result.decides
    assert result.n_holding < result.n_cases


def test_the_worst_case_is_named(skewed):
    wrong = changed(skewed, lambda v: 70.0, **PREFILL, batch_size=32, workload="python")
    (claim,) = [claim for claim in CLAIMS if claim.code == "O1.4"]
    found = evaluate(claim, wrong).found
    assert found.startswith("4 of 6 hold; worst:")
    assert "python" in found
    assert "70.0 %" in found


def test_an_interval_that_reaches_even_use_is_no_heavy_tail(skewed):
    wide = [
        dataclasses.replace(record, ci_low=0.1) if record.metric == "top10_share" else record
        for record in skewed
    ]
    assert by_code(wide)["O2.1"] == "fail"


def test_protocols_that_agree_do_not_decide(skewed):
    means = {
        (r.config["model"], r.config["workload"], r.config["batch_size"]): r.value
        for r in skewed
        if r.claim == "DynaExq Table 1"
        and r.metric == "activation_ratio"
        and r.config["protocol"] == "decode_mean"
    }
    alike = []
    for record in skewed:
        if record.config.get("protocol") == "next_token" and record.metric == "activation_ratio":
            place = tuple(record.config[n] for n in ("model", "workload", "batch_size"))
            record = dataclasses.replace(record, value=means[place])
        alike.append(record)
    (result,) = [r for r in evaluate_all(alike) if r.claim.code == "A4"]
    assert result.verdict == "fail"
    assert verdict_word(result) == "does not hold here"
    assert not result.decides


def test_disjoint_sets_are_asked_only_where_they_can_exist(tmp_path):
    store = RecordStore("tiny", root=tmp_path)
    add_heavy_tail(store)
    small = [record for record in store.read() if record.config["model"] == "moe-shared"]
    assert by_code(small)["O2.6"] == "not measured"  # 30 different experts of 16
    large = [record for record in store.read() if record.config["model"] == "moe-fine"]
    disjoint = changed(large, lambda v: 0, metric="top10_overlap", layer=3)
    assert by_code(disjoint)["O2.6"] == "pass"


def test_verify_prints_and_returns(tmp_path, monkeypatch, capsys):
    project(tmp_path, monkeypatch)
    assert verify("tiny") == 1
    assert "run `make reproduce` first" in capsys.readouterr().out
    add_activation(RecordStore("tiny"))
    assert verify("tiny") == 0
    text = capsys.readouterr().out
    assert "\npass      O1.1  One decoded token" in text
    assert "needs: equal to k/E" in text
    assert "tiny: 12 of 12 hold; tightest: moe-fine prose decode_mean" in " ".join(text.split())
    add_heavy_tail(RecordStore("tiny"), skew=0.0, shift=False)
    assert verify("tiny", brief=True) == 1
    text = capsys.readouterr().out
    assert "\nfail      O2.1  In every layer" in text
    assert "tiny: 0 of 30 hold; worst:" in text.split("O2.1")[1].split("O2.2")[0]
    assert "needs" not in text.split("O1.1")[1].split("\n")[1]


def test_a_claim_must_hold_in_every_set(skewed, uniform, tmp_path, monkeypatch, capsys):
    assert status(skewed, skewed) == 0
    assert status(skewed, uniform) == 1
    assert status([], skewed) == 1  # nothing of the profile's own
    project(tmp_path, monkeypatch)
    add_all(RecordStore("tiny"))
    add_heavy_tail(RecordStore("public"), skew=0.0, shift=False)
    assert verify("tiny") == 1
    text = capsys.readouterr().out
    assert "tiny      public    claim" in text
    assert "tiny      measured here: " in text
    assert "public    recorded on " in text
    assert "\npass      fail      O2.1" in text
    assert "\npass      -         O1.1" in text
    answers = " ".join(text.split("O2.1")[1].split("O2.2")[0].split())
    assert "tiny: 30 of 30 hold; tightest:" in answers
    assert "public: 0 of 30 hold; worst:" in answers
    # The page of another profile is about that profile alone.
    assert verify("public") == 1
    assert "tiny" not in capsys.readouterr().out.split("claim\n")[0]


def test_every_claim_has_its_words():
    assert len({claim.code for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.sentence.endswith(".")
        assert claim.tolerance
        assert claim.source
