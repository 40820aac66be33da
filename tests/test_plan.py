"""The plan: the released 40 layers pinned one by one, the segments a scan walks, and every refusal with its values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from csa2_jax.config import ModelConfig
from csa2_jax.plan import Mode, build_plan

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

# layer: mode, ratio, pool source, selection source, candidate source, makes candidates, pool slot, index slot, Engram
# slot, draft slot. Written out, so that no rule of the code under test can agree with itself.
RELEASED = """
 0 SWA     0  -  -  -  no -1 -1 -1 -1
 1 SWA     0  -  -  -  no -1 -1  0 -1
 2 FULL    2  2  2  -  no  0  0 -1 -1
 3 REUSE   2  2  2  -  no -1 -1 -1 -1
 4 REUSE   2  2  2  -  no -1 -1 -1 -1
 5 REUSE   2  2  2  -  no -1 -1 -1 -1
 6 REUSE   2  2  2  -  no -1 -1 -1 -1
 7 REUSE   2  2  2  -  no -1 -1 -1 -1
 8 FULL    2  8  8  -  no  1  1 -1 -1
 9 REUSE   2  8  8  -  no -1 -1 -1 -1
10 REUSE   2  8  8  -  no -1 -1 -1 -1
11 REUSE   2  8  8  -  no -1 -1 -1 -1
12 REUSE   2  8  8  -  no -1 -1 -1 -1
13 REUSE   2  8  8  -  no -1 -1 -1 -1
14 FULL    2 14 14  -  no  2  2  1 -1
15 REUSE   2 14 14  -  no -1 -1 -1 -1
16 REUSE   2 14 14  -  no -1 -1 -1 -1
17 REUSE   2 14 14  -  no -1 -1 -1 -1
18 REUSE   2 14 14  -  no -1 -1 -1 -1
19 REUSE   2 14 14  -  no -1 -1 -1 -1
20 FULL    1 20 20  - yes  0  3 -1 -1
21 REUSE   1 20 20  -  no -1 -1 -1 -1
22 REUSE   1 20 20  -  no -1 -1 -1 -1
23 REUSE   1 20 20  -  no -1 -1 -1 -1
24 REINDEX 1 20 24 20  no -1  4 -1 -1
25 REUSE   1 20 24  -  no -1 -1 -1 -1
26 REUSE   1 20 24  -  no -1 -1 -1 -1
27 REUSE   1 20 24  -  no -1 -1 -1 -1
28 REINDEX 1 20 28 20  no -1  5 -1 -1
29 REUSE   1 20 28  -  no -1 -1 -1 -1
30 REUSE   1 20 28  -  no -1 -1 -1 -1
31 REUSE   1 20 28  -  no -1 -1 -1 -1
32 REINDEX 1 20 32 20  no -1  6 -1 -1
33 REUSE   1 20 32  -  no -1 -1 -1 -1
34 REUSE   1 20 32  -  no -1 -1 -1 -1
35 REUSE   1 20 32  -  no -1 -1 -1 -1
36 REINDEX 1 20 36 20  no -1  7 -1 -1
37 REUSE   1 20 36  -  no -1 -1 -1  0
38 REUSE   1 20 36  -  no -1 -1 -1  1
39 REUSE   1 20 36  -  no -1 -1 -1  2
"""


def released() -> ModelConfig:
    return ModelConfig.from_hf(CONFIGS / "v41_flash.json")


@pytest.mark.smoke
def test_plan_of_the_released_model_is_pinned_layer_by_layer() -> None:
    def number(value: int | None) -> str:
        return "-" if value is None else str(value)

    found = [
        [
            str(s.layer),
            s.mode.value,
            str(s.ratio),
            *(number(i) for i in (s.pool_source, s.selection_source, s.candidate_source)),
            "yes" if s.makes_candidates else "no",
            *(str(i) for i in (s.pool_slot, s.index_slot, s.engram_slot, s.draft_slot)),
        ]
        for s in released().plan.layers
    ]
    assert found == [line.split() for line in RELEASED.strip().splitlines()]


def test_plan_of_the_released_model_scans_five_segments() -> None:
    plan = released().plan
    assert plan.decoder_start == 20
    shapes = [(s.mode, s.ratio, s.heads, s.tail_length, s.in_decoder) for s in plan.segments]
    assert shapes == [
        (Mode.SWA, 0, (0, 1), 0, False),
        (Mode.FULL, 2, (2, 8, 14), 5, False),
        (Mode.FULL, 1, (20,), 3, True),
        (Mode.REINDEX, 1, (24, 28, 32, 36), 3, True),
    ]
    assert plan.segments[1].tails == ((3, 4, 5, 6, 7), (9, 10, 11, 12, 13), (15, 16, 17, 18, 19))
    assert [i for s in plan.segments for i in s.layers] == list(range(40))
    assert [s.makes_candidates for s in plan.segments] == [False, False, True, False]
    assert [s.reads_candidates for s in plan.segments] == [False, False, False, True]
    assert plan.encoder_segments + plan.decoder_segments == plan.segments
    assert plan.ratios == (2, 1)
    assert (plan.pool_layers(2), plan.pool_layers(1)) == ((2, 8, 14), (20,))
    assert plan.index_layers == (2, 8, 14, 20, 24, 28, 32, 36)


def test_plan_words_say_what_is_made_and_read() -> None:
    layers = released().plan.layers
    assert layers[0].makes == layers[0].reads == ()
    assert (layers[2].makes, layers[2].reads) == (("pool", "index keys", "selection"), ())
    assert layers[20].makes == ("pool", "index keys", "selection", "candidates")
    assert (layers[24].makes, layers[24].reads) == (("selection",), ("pool of 20", "candidates of 20"))
    assert (layers[39].makes, layers[39].reads) == ((), ("pool of 20", "selection of 36"))


@pytest.mark.parametrize("name", ["v41_flash", "v41_tiny", "v41_twin"])
def test_plan_covers_every_layer_once_in_every_shipped_config(name: str) -> None:
    config = ModelConfig.from_hf(CONFIGS / f"{name}.json")
    assert [i for s in config.plan.segments for i in s.layers] == list(range(config.num_hidden_layers))
    for segment in config.plan.segments:
        assert all(len(tail) == segment.tail_length for tail in segment.tails)


def test_plan_of_twin_is_the_plan_of_the_released_model() -> None:
    assert ModelConfig.from_hf(CONFIGS / "v41_twin.json").plan == released().plan


def lists(**changes: Any) -> dict[str, Any]:
    """A valid plan of 8 layers: SWA SWA FULL(2) REUSE REUSE FULL(1) REUSE REINDEX."""
    valid: dict[str, Any] = {
        "num_hidden_layers": 8,
        "compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1),
        "kv_source_layer_ids": (2, 5),
        "index_source_layer_ids": (2, 5, 7),
        "candidate_source_layer_id": 5,
        "engram_layer_ids": (1, 5),
        "dspark_target_layer_ids": (6, 7),
    }
    return valid | changes


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        pytest.param({"compress_ratios": (0, 0, 2)}, ["3 entries", "num_hidden_layers=8"], id="too_few_ratios"),
        pytest.param({"compress_ratios": (0, 0, -2, 2, 2, 1, 1, 1)}, ["compress_ratios[2]=-2"], id="negative_ratio"),
        pytest.param({"kv_source_layer_ids": (5, 2)}, ["kv_source_layer_ids=[5, 2]"], id="unsorted"),
        pytest.param({"index_source_layer_ids": (2, 5, 5, 7)}, ["index_source_layer_ids=[2, 5, 5, 7]"], id="twice"),
        pytest.param(
            {"engram_layer_ids": (8,)}, ["engram_layer_ids=[8]", "layer 8", "num_hidden_layers=8"], id="past_end"
        ),
        pytest.param(
            {"dspark_target_layer_ids": (-1, 3)}, ["dspark_target_layer_ids=[-1, 3]", "layer -1"], id="negative_id"
        ),
        pytest.param(
            {"index_source_layer_ids": (2, 7)},
            ["[5]", "kv_source_layer_ids=[2, 5]", "index_source_layer_ids=[2, 7]"],
            id="pool_without_selection",
        ),
        pytest.param(
            {"candidate_source_layer_id": 7},
            ["candidate_source_layer_id=7", "kv_source_layer_ids=[2, 5]"],
            id="candidates",
        ),
        pytest.param(
            {"candidate_source_layer_id": 2},
            ["layer 7", "pool of layer 5", "candidate_source_layer_id=2"],
            id="candidates_of_another_pool",
        ),
        pytest.param(
            {"compress_ratios": (0, 0, 0, 2, 2, 1, 1, 1)}, ["layer 2", "compress_ratios[2]=0"], id="window_only_source"
        ),
        pytest.param(
            {"compress_ratios": (0, 2, 2, 2, 2, 1, 1, 1)},
            ["layer 1", "compress_ratios[1]=2", "kv_source_layer_ids=[2, 5]"],
            id="no_pool_yet",
        ),
        pytest.param(
            {"compress_ratios": (0, 0, 2, 2, 4, 1, 1, 1)},
            ["compress_ratios[4]=4", "layer 2", "compress_ratios[2]=2"],
            id="ratio_of_another_pool",
        ),
    ],
)
def test_plan_refuses_contradicting_lists_by_value(changes: dict[str, Any], values: list[str]) -> None:
    assert len(build_plan(**lists()).layers) == 8
    with pytest.raises(ValueError, match=re.escape(values[0])) as error:
        build_plan(**lists(**changes))
    for value in values:
        assert value in str(error.value)


def test_plan_without_pools_is_window_only() -> None:
    plan = build_plan(
        num_hidden_layers=3,
        compress_ratios=(0, 0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=None,
    )
    assert [s.mode for s in plan.layers] == [Mode.SWA] * 3
    assert (plan.decoder_start, plan.ratios, len(plan.segments)) == (3, (), 1)


def test_plan_window_only_layer_between_groups_keeps_the_pool_readable() -> None:
    plan = build_plan(
        **lists(compress_ratios=(0, 0, 2, 2, 0, 1, 1, 1), dspark_target_layer_ids=(), engram_layer_ids=())
    )
    assert plan.layers[4].mode is Mode.SWA
    assert [(s.mode, s.layers) for s in plan.segments][1:3] == [(Mode.FULL, (2, 3)), (Mode.SWA, (4,))]


def test_plan_from_json_uses_lists_of_the_file(tmp_path: Path) -> None:
    data = json.loads((CONFIGS / "v41_tiny.json").read_text())
    data["text_config"]["index_source_layer_ids"] = [5, 7]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"config\.json.*layers \[2\]"):
        ModelConfig.from_hf(tmp_path)
