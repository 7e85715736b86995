"""What the tower's first call on a GPU prepares, and what later calls run; the GPU is stood for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vision_exp import settings
from vision_exp.tower import attention, backends, graphs, trial
from vision_exp.tower.attention import Flash, Kind
from vision_exp.tower.backends import Backend

CHOSEN = Kind("chosen", attention.torch_packed, attention.torch_image)


class Card:
    """Everything that a first call asks of the GPU and of the modules below, recorded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kind: Kind | None = CHOSEN
        self.capturing = False
        self.buckets: list[Any] | None = [Bucket(rows) for rows in graphs.SIZES]
        self.calls: list[tuple[Any, ...]] = []
        patch.setattr(torch.cuda, "Stream", lambda: "side")
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(backends, "kinds", lambda _device, flash: ["kinds of", flash])
        patch.setattr(graphs, "available_flash", lambda: Flash((4,)))
        patch.setattr(trial, "choose", self.choose)
        patch.setattr(graphs, "capture_all", self.capture_all)
        patch.setattr(graphs, "launch", self.launch)

    def choose(self, kinds: Any, stage: trial.Stage) -> Kind | None:
        captures = stage.capture is not graphs._run_once
        self.calls.append(("choose", kinds[1], (stage.heads, stage.dim), captures))
        return self.kind

    def capture_all(self, _tower: Any, _patches: Any, backend: Backend, capture: Any) -> Any:
        self.calls.append(("capture", backend.attention.name, capture.keywords["pool"]))
        return self.buckets

    def launch(
        self, _tower: Any, _patches: Any, _grids: Any, seqlens: Any, backend: Backend
    ) -> Any:
        self.calls.append(("launch", list(seqlens), backend.attention.name))


class Bucket:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def run(self, patches: torch.Tensor, width: int) -> Any:
        return ("replay", self.rows, len(patches), width)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.delenv(settings.TOWER_GRAPHS.name, raising=False)
    return Card(monkeypatch)


def tower(*, sharded: bool = False, flash: Flash | None = None) -> Any:
    block = SimpleNamespace(sharded=sharded, attn=SimpleNamespace(n_heads=8))
    return SimpleNamespace(blocks=[block], config=SimpleNamespace(head_dim=64), flash=flash)


def run(one: Any, *grids: tuple[int, int]) -> Any:
    seqlens = [height * width for height, width in grids]
    return graphs.run(one, torch.empty(sum(seqlens), 3, 14, 14), grids, seqlens)


def test_the_first_call_chooses_and_captures_and_single_images_replay(card: Card) -> None:
    one = tower(flash=Flash((3, 2)))
    assert run(one, (28, 28)) == ("replay", 895, 784, 28)
    assert run(one, (42, 74)) == ("replay", 3135, 3108, 74)
    assert run(one, (28, 28), (3, 5)) is None  # packed, so launched
    assert run(one, (60, 60)) is None  # larger than any graph
    assert card.calls == [
        ("choose", Flash((3, 2)), (8, 64), True),
        ("capture", "chosen", "pool"),
        ("launch", [784, 15], "chosen"),
        ("launch", [3600], "chosen"),
    ]


def test_a_tower_that_was_told_nothing_asks_itself(card: Card) -> None:
    run(tower(), (28, 28))
    assert card.calls[0] == ("choose", Flash((4,)), (8, 64), True)


@pytest.mark.parametrize("why", ["sharded", "switched off", "failed", "nothing is right"])
def test_without_graphs_every_image_is_launched(
    card: Card, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tower(sharded=why == "sharded")
    if why == "switched off":
        monkeypatch.setenv(settings.TOWER_GRAPHS.name, "0")
    if why == "failed":
        card.buckets = None
    if why == "nothing is right":
        card.kind = None
    for _ in range(2):
        run(one, (28, 28))
    name = "torch" if why == "nothing is right" else "chosen"
    launched = [("launch", [784], name)] * 2
    captured = [("capture", "chosen", "pool")] if why == "failed" else []
    first = ("choose", Flash((4,)), (8, 64), why != "switched off")
    assert card.calls == [first, *captured, *launched]


def test_a_call_inside_someones_capture_prepares_and_replays_nothing(card: Card) -> None:
    one = tower()
    card.capturing = True
    run(one, (28, 28))
    assert card.calls == [("launch", [784], "torch")]
    card.capturing = False
    assert run(one, (28, 28)) == ("replay", 895, 784, 28)
    card.capturing = True
    run(one, (28, 28))
    assert card.calls[-1] == ("launch", [784], "chosen")


def test_an_image_runs_in_the_smallest_graph_that_holds_it() -> None:
    buckets: Any = [Bucket(rows) for rows in graphs.SIZES]
    for rows in range(1, graphs.SIZES[-1] + 2):
        found = graphs.find_bucket(buckets, [rows])
        holding = [bucket for bucket in buckets if bucket.rows >= rows]
        assert found is (holding[0] if holding else None), rows


@pytest.mark.parametrize(
    ("error", "serves"),
    [(0.0, True), (0.1, True), (0.11, False), (float("inf"), False), (float("nan"), False)],
)
def test_replays_serve_only_if_each_gives_the_launched_rows(
    error: float, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([0.0, error])
    monkeypatch.setattr(graphs, "StaticBuffers", lambda *_: None)
    monkeypatch.setattr(graphs, "make_buckets", lambda _, sizes: [Bucket(rows) for rows in sizes])
    monkeypatch.setattr(
        graphs, "_replay_error", lambda *_: torch.tensor(next(errors), dtype=torch.float64)
    )
    one: Any = SimpleNamespace(patch_embed=lambda patches: patches)
    found = graphs.capture_all(one, torch.empty(1), Backend(), graphs._run_once, (639, 767))
    assert (found is not None) is serves


def test_an_answer_stays_when_the_next_image_runs() -> None:
    one = object.__new__(graphs.Bucket)
    one.static = graphs.StaticBuffers(6, torch.empty(6, 3, 2, 2), torch.empty(6, 12))
    one.replay = lambda: one.static.out.copy_(one.static.patches[:, :12])
    first = one.run(torch.ones(6, 3, 2, 2), 3)
    one.run(torch.zeros(4, 3, 2, 2), 2)
    assert bool((first == 1).all())
