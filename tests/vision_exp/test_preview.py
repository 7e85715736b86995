"""The preview shows what the tower gets, and costs what the layout says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vision_exp import preview
from vision_exp.image.transform import image_to_patches

ROOT = Path(__file__).resolve().parents[2]


def gradient(width: int, height: int) -> Image.Image:
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([x % 256, y % 256, (x * y) % 256], -1).astype(np.uint8))


def test_pixels_survive_the_way_through_the_patches() -> None:
    # 756x756 is a multiple of the patch and within the budget: nothing is resized.
    image = gradient(756, 756)
    seen = image_to_patches(image, preview.RELEASED)
    assert preview.pixels_of(seen).size == image.size
    difference = np.asarray(preview.pixels_of(seen)).astype(int) - np.asarray(image).astype(int)
    # bfloat16 keeps 8 bits of the value's mantissa: at most one step of 255.
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize(("width", "height"), [(756, 756), (640, 480), (1, 1), (4000, 100)])
def test_drawing_covers_the_token_grid(width: int, height: int) -> None:
    seen = image_to_patches(gradient(width, height), preview.RELEASED)
    drawn = preview.draw(seen, preview.RELEASED)
    assert drawn.size == (seen.llm_grid[1] * 84, seen.llm_grid[0] * 84)


def test_report_names_the_cost_at_every_offset(capsys: pytest.CaptureFixture[str]) -> None:
    image = gradient(756, 756)
    text = preview.report(image, image_to_patches(image, preview.RELEASED), preview.RELEASED)
    # The golden lengths of this size.
    for start, (pads, cost) in enumerate([(3, 349), (2, 348), (1, 347), (0, 346)]):
        assert f"{start}: {pads} leading pads, {cost} tokens (limit 384)" in text


def test_command_runs_without_vllm(tmp_path: Path) -> None:
    source, out = tmp_path / "in.png", tmp_path / "out.png"
    gradient(300, 200).save(source)
    # A finder that refuses vLLM stands for a machine without it.
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from vision_exp import preview\n"
        f"raise SystemExit(preview.main([{str(source)!r}, '-o', {str(out)!r}]))"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "300x200 RGB" in child.stdout
    assert Image.open(out).format == "PNG"


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n"])
def test_a_bad_file_is_named(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(content)
    assert preview.main([str(bad)]) == 1
    assert f"{bad} cannot be shown: not an image" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preview.main([str(tmp_path / "none.png")]) == 1
    assert "none.png" in capsys.readouterr().err


def test_what_cannot_be_used_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, config, out = tmp_path / "in.png", tmp_path / "config.json", tmp_path / "out.png"
    gradient(30, 20).save(source)
    pixels = source.read_bytes()
    config.write_text('{"hidden_size": 4096}')
    cases = {
        (str(tmp_path / "none.png"), "-o", str(out)): (1, f"{tmp_path / 'none.png'} cannot be"),
        (str(source), "--config", str(config)): (2, "vision_min_pixels is missing"),
        (str(source), "--config", str(source)): (2, f"--config {source} is no config.json"),
        (str(source), "--config", "none.json"): (2, "--config none.json is no config.json"),
        (str(source), "-o", str(tmp_path)): (2, "is a folder"),
        (str(source), "-o", str(tmp_path / "none" / "a.png")): (2, "a folder that does not exist"),
        (str(source), "-o", str(source)): (2, f"-o {source} is the image itself"),
        (str(source), "-o", str(tmp_path / "seen.txt")): (2, "ends in .txt, which is no image"),
    }
    for argv, (code, words) in cases.items():
        assert preview.main(argv) == code
        first, last = capsys.readouterr().err.splitlines()
        assert words in first and first.endswith("Nothing was written."), argv
        assert last.startswith("next: python3 hotfix.py preview ")
    assert sorted(tmp_path.iterdir()) == [config, source] and source.read_bytes() == pixels


def test_a_drawing_is_what_its_name_says(tmp_path: Path) -> None:
    source = tmp_path / "in.png"
    gradient(30, 20).save(source)
    for name, form in {"a.jpg": "JPEG", "a.webp": "WEBP", "a.PNG": "PNG", "a": "PNG"}.items():
        assert preview.main([str(source), "-o", str(tmp_path / name)]) == 0
        assert Image.open(tmp_path / name).format == form


def test_a_drawing_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.png"
    gradient(30, 20).save(source)
    for out in (tmp_path / f"{'n' * 300}.png", Path("/dev/full")):
        assert preview.main([str(source), "-o", str(out)]) == 2
        assert f"-o {out} cannot be written" in capsys.readouterr().err
