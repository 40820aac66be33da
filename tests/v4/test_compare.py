"""`csa2 compare`: the numbers of the line, from formulas and from arrays, and its pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from csa2_jax.cli import main
from csa2_jax.cli.compare import compare
from csa2_jax.counts import flops, pool_reads, prefill_flops
from csa2_jax.lineage import released_config

BYTES = {
    "DeepSeek 67B": 389_120,
    "DeepSeek-V3.2": 48_068,
    "DeepSeek-V4-Flash": 3_514.25,
    "DeepSeek-V4.1-Flash": 890,
}


def test_bytes_by_formula_are_those_of_arrays() -> None:
    rows = {row["model"]: row for row in compare([4096])["cache"]}
    assert {name: rows[name]["bytes_per_token"] for name in BYTES} == BYTES
    for row in rows.values():
        assert row["measured"] == row["bytes_per_token"], row["model"]
        terms = row["formula"].replace("x", "*").replace("(", " (").strip()
        assert eval(terms) == pytest.approx(row["bytes_per_token"]), row["model"]  # the formula is what it says


def test_decode_grows_as_the_reports_say() -> None:
    """From 4k to 1M: V4.1 by 27 %, V4-Flash to 3.8 times; without candidates V4.1 by 70 %."""
    report = compare([4096, 1 << 20])
    growth = {name: values[1] / values[0] for name, values in report["decode"].items()}
    assert growth["DeepSeek-V4.1-Flash"] == pytest.approx(1.27, abs=0.005)
    assert growth["DeepSeek-V4-Flash"] == pytest.approx(3.8, abs=0.05)
    assert growth["DeepSeek-V4.1-Flash, searching all"] == pytest.approx(1.70, abs=0.01)
    whole, skipped = (report["prefill"][f"DeepSeek-V4.1-Flash, {what}"][1] for what in ("whole", "decoder skipped"))
    assert whole / skipped == pytest.approx(1.94, abs=0.01)


def test_reads_of_the_pools_are_counted_layer_by_layer() -> None:
    """At position 1,000: 250 entries of CSA, all scored and read; 7 of HCA, all read."""
    config = released_config("v4_flash")
    scored, read = pool_reads(config, 1, 999)
    assert set(scored) == set(range(2, 43, 2))
    assert set(scored.values()) == {250}
    assert (read[2], read[3]) == (250, 7)
    assert pool_reads(config, 1, 4095)[1][2] == 512
    # Scores of 64 x 128, and attention of 64 x 512 to a window of 128 and what is read, twice.
    counted = flops(config, 1, 999)
    assert counted["index scores"] == 2 * 21 * 250 * 64 * 128
    assert counted["attention"] == 2 * 2 * 64 * 512 * (43 * 128 + 21 * 250 + 20 * 7)


def test_a_skipped_decoder_is_counted_where_it_runs() -> None:
    config = released_config("v41_flash")
    short = prefill_flops(config, 128, "exact")
    assert short == flops(config, 128) | {"compressor": short["compressor"]}
    assert short["compressor"] == flops(config, 128)["compressor"]
    tokens, tail = 8192, 20 * 128
    encoder, decoder = (
        flops(config, tokens, layers=range(20), head=False),
        flops(config, tokens, layers=range(20, 40)),
    )
    found = prefill_flops(config, tokens, "exact")
    assert found["experts"] == encoder["experts"] + decoder["experts"] * tail // tokens
    assert found["compressor"] == flops(config, tokens)["compressor"]
    assert prefill_flops(released_config("v4_flash"), 4096, "exact") == flops(released_config("v4_flash"), 4096)


def test_command_prints_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compare", "--plot", str(tmp_path / "made" / "line.png")]) == 0
    text = capsys.readouterr().out
    for number in ("389,120", "48,068", "3,514", "890", "3.79", "1.27"):
        assert number in text
    assert (tmp_path / "made" / "line.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "made" / "line.svg").read_bytes()[:1000]
    assert main(["compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["contexts"][-1] == 1 << 20
