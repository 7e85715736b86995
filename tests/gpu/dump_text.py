"""Text requests through one tree and one checkpoint: hidden states and logits, kept bit for bit.

    dump_text.py MODEL OUT.pt

Run once per tree; `compare_text.py` then wants equal bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.capture import logits_of
from gpu.rig import Ask, Engine, text_ids

#: Prompt lengths, and one batch of several.
ALONE = (60, 500)
TOGETHER = (60, 120, 200)


def main(model: str, out: str) -> int:
    engine = Engine(model)
    captured: list[tuple[str, torch.Tensor]] = []
    hook = engine.model.model.register_forward_hook(
        lambda _module, _args, output: captured.append(("hidden", output.detach().cpu()))
    )
    answers = []
    with logits_of(engine.model) as logits:
        for index, length in enumerate(ALONE):
            answers += engine.ask(Ask(text_ids(length, index)), max_tokens=6)
        answers += engine.ask(*[Ask(text_ids(n, 10 + n)) for n in TOGETHER], max_tokens=4)
    hook.remove()
    captured += [("logits", values) for values in logits]
    torch.save({"tokens": [answer.tokens for answer in answers], "captured": captured}, out)
    finite = all(bool(torch.isfinite(value).all()) for _, value in captured)
    print(f"{len(captured)} tensors, finite={finite}, tokens={answers[0].tokens}", flush=True)
    return 0 if finite else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
