"""Every kernel compiles for every device it is meant for, with the memory it may take; and the page that says so is right.

Nothing runs here: the devices' own compilers work without a device. Without the compilers (`make aot-compilers`) the tests that
need them are skipped, or fail where CSA2_REQUIRE_AOT=1 asks for them.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from tests.aot import collect, compilers, report, targets
from tests.aot.cases import CASES, Case
from tests.aot.collect import RUNS, compile_family, faults
from tests.aot.compile_cases import Result, listed
from tests.aot.targets import CARDS, SINGLE, TARGETS, Target

# One device of each compiler always; the others differ in sizes of memory and units.
FIRST = ("v5e", "h100")
EXHAUSTIVE = pytest.mark.exhaustive


def need(target: Target) -> None:
    """Skip, or fail where compilers are required, if the target's compiler cannot be used."""
    reason = compilers.missing(target.platform)
    if reason is not None and compilers.required():
        pytest.fail(f"CSA2_REQUIRE_AOT is set, and {reason}")
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "target"),
    [
        pytest.param(*run, id=f"{run[1].name} {run[0]}", marks=() if run[1].name in FIRST else EXHAUSTIVE)
        for run in RUNS
    ],
)
def test_kernels_compile_within_their_memory(family, target):
    need(target)
    cases, results = listed(family, target), compile_family(family, target)
    assert faults(cases, results, lambda case: case.expected(target)) == []
    page = report.parse(report.PAGE.read_text(encoding="utf-8"))
    title = f"{family} on {target.name}" if target.mesh else family
    told = {case: verdicts[target.name] for (table, case), verdicts in page.items() if table == title}
    assert told == {result.case: result.verdict for result in results}, "run `make aot-report`"


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_one_attention_of_each_platform_compiles(name):
    """The whole list runs on one jax; this one, on the newest as well."""
    target = TARGETS[name]
    need(target)
    (result,) = compile_family("sparse_attention", target, "--only", "attend B=1 T=1 P=4,096 bf16")
    assert (result.verdict, result.reason) == ("compiles", "")


def test_page_lists_every_case_once_and_only_those():
    page = report.parse(report.PAGE.read_text(encoding="utf-8"))
    assert list(page) == [(title, case) for title, ids in report.tables().items() for case in ids]


def test_page_of_results_reads_back_as_their_verdicts():
    case = CASES[0]
    verdicts = ("compiles", "no room", "refused", "fails", "compiles", "compiles", "compiles")
    results = [
        Result(case.id, target.name, verdict, reason="odd | width" if verdict == "refused" else "", seconds=1.0, temp=5)
        for target, verdict in zip(SINGLE, verdicts, strict=True)
    ]
    page = report.render(results, {case.family: [case.id]})
    expected = dict(zip((target.name for target in SINGLE), verdicts, strict=True))
    assert report.parse(page) == {(case.family, case.id): expected}
    assert "[1] v6e: odd | width" in page


def test_case_ids_are_unique():
    ids = [(case.family, case.id) for case in CASES]
    assert len(set(ids)) == len(ids)


# ---- what would be found ----


def _made_up(of: Case, **changes: object) -> Result:
    return dataclasses.replace(Result(of.id, "v5e", "compiles", seconds=1.0), **changes)


SMALL = Case("sparse_attention", "attend", 1, 1, 1 << 12, "bf16")
LARGE = dataclasses.replace(SMALL, entries=1 << 16)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"temp": 1 << 30}, "temporary bytes"),
        ({"temp": SMALL.allowed_temp()}, "more than attend B=1 T=1 P=4,096"),  # within the bound, but growing with P
        ({"donated": 100, "aliased": 99}, "99 of 100 donated bytes"),
        ({"verdict": "refused", "reason": "not today"}, "not today"),
        ({"verdict": "no room"}, "no room where it should be 'compiles'"),
        ({"case": "another"}, "no result"),
    ],
)
def test_fault_of_a_result_is_named(change, fault):
    found = faults([SMALL, LARGE], [_made_up(SMALL), _made_up(LARGE, **change)], lambda case: "compiles")
    assert found == [] if fault is None else fault in found[0]


def test_hidden_copy_of_a_pool_is_found():
    """XLA lays a whole packed stack in units out anew before it gathers from it: the very thing to be caught."""
    target = TARGETS["v5e"]
    need(target)
    id_ = "attend B=1 T=1 P=1,048,576 packed"
    results = compile_family("sparse_attention", target, "--implementation", "xla", "--only", id_)
    (found,) = faults([case for case in CASES if case.id == id_], results, lambda case: "compiles")
    assert "temporary bytes" in found


@pytest.mark.parametrize(
    ("crime", "reason"),
    [
        ("os.abort()", "died with -6"),
        ("time.sleep(60)", "took too long"),
        ("sys.exit(3)", "died with 3"),
    ],
)
def test_case_that_kills_its_process_is_named_and_the_others_go_on(crime, reason):
    program = f"""
import json, os, signal, sys, time
for name in "abc":
    if name in sys.argv: continue
    print(json.dumps({{"begins": name}}), flush=True)
    signal.alarm(1)
    if name == "b": {crime}
    print(json.dumps({{"case": name, "target": "v5e", "verdict": "compiles"}}), flush=True)
"""
    results = collect.collect(lambda skip: [sys.executable, "-c", program, *skip], TARGETS["v5e"])
    assert [(result.case, result.verdict) for result in results] == [
        ("a", "compiles"),
        ("b", "fails"),
        ("c", "compiles"),
    ]
    assert reason in results[1].reason


def test_process_that_dies_between_cases_is_an_error():
    with pytest.raises(RuntimeError, match="ended with 7 between cases"):
        collect.collect(lambda skip: [sys.executable, "-c", "import sys; sys.exit(7)"], TARGETS["v5e"])


def test_missing_compilers_skip_or_fail(monkeypatch, tmp_path):
    monkeypatch.setenv("CSA2_AOT", str(tmp_path))
    monkeypatch.setenv("CSA2_REQUIRE_AOT", "0")
    with pytest.raises(pytest.skip.Exception, match=r"make aot-compilers|only for linux"):
        need(TARGETS["v5e"])
    monkeypatch.setenv("CSA2_REQUIRE_AOT", "1")
    with pytest.raises(pytest.fail.Exception, match="CSA2_REQUIRE_AOT"):
        need(TARGETS["h100"])


def test_compiler_of_another_version_is_missing(monkeypatch, tmp_path):
    """A folder that was filled for another jax is not used."""
    monkeypatch.setenv("CSA2_AOT", str(tmp_path))
    monkeypatch.setattr(compilers.sys, "platform", "linux")
    monkeypatch.setattr(compilers.platform, "machine", lambda: "x86_64")
    name = "libtpu"
    (specifier,) = compilers.wanted("tpu").values()
    right = str(specifier).removeprefix("==").replace("*", "7")
    for version in ("0.0.1", right):
        info = tmp_path / "tpu" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        assert (compilers.missing("tpu") is None) == (version == right)
        (info / "METADATA").unlink()
        info.rmdir()


def test_cards_are_described_field_by_field():
    text = targets.text_proto(CARDS["h200"])
    assert "device_memory_size: 141000000000" in text
    assert text.count("{") == text.count("}")


def test_process_tells_every_case_as_json(capsys, monkeypatch):
    from tests.aot import compile_cases

    monkeypatch.setattr(compile_cases.cases, "CASES", (SMALL, LARGE))
    monkeypatch.setattr(compile_cases, "compile_case", lambda case, *_: _made_up(case))
    monkeypatch.setattr(sys, "argv", ["compile_cases", "sparse_attention", "v5e", "--skip", SMALL.id])
    compile_cases.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("begins", line.get("case")) for line in lines] == [LARGE.id, LARGE.id]
