"""Checks a running server's image input from outside.

    python3 -m vision_exp.validate --url http://localhost:8000/v1 [--json FILE]

For any OpenAI-compatible chat server. Every check says what it compared; what was not checked is
never called right. On a model that answers no sense (random weights) the checks of content are
skipped, and said to be. Answers that part by no more than single requests do when they are repeated
are not judged. Exit: 0 all passed or skipped, 1 a check failed, 2 bad usage, 3 no server.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vision_exp import validate_checks as checks
from vision_exp import validate_pictures as pictures
from vision_exp.validate_client import Client, Refused, Unreachable
from vision_exp.validate_judge import FAILED, NEAR_TIE, SKIPPED, Verdict
from vision_exp.validate_probe import coordinates

CHECKS: dict[str, Callable[[checks.Lab], Verdict]] = {
    "two concurrent image requests": checks.concurrent(2),
    "three concurrent image requests": checks.concurrent(3),
    "each request its own picture": checks.own_picture,
    "the same picture twice": checks.same_twice,
    "one picture at every offset": checks.offsets,
    "pictures in another order": checks.reordered,
    "a prefix fork": checks.prefix_fork,
    "a cancelled request": checks.cancelled,
    "a bad image, then a good one": checks.bad_then_good,
    "a picture in a system message": checks.system_image,
    "pictures of all shapes": checks.shapes,
    "formats and colour modes": checks.formats,
    "positions in a picture": coordinates,
}
#: Text questions that any trained chat model answers; they decide whether content can be judged.
SENSE = {
    "What is 2 + 3? Answer with one digit.": "5",
    "What is the capital of France? Answer with one word.": "paris",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vision_exp.validate", description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True, help="base URL, with /v1")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args(argv)
    client = Client(args.url.rstrip("/"), args.model, args.api_key, args.timeout)
    try:
        lab = enter(client)
    except (Unreachable, Refused, KeyError, IndexError, TypeError) as error:
        print(f"no usable server at {args.url}: {error}", file=sys.stderr)
        return 3
    results = [run(name, check, lab) for name, check in CHECKS.items()]
    states = [result["state"] for result in results]
    counts = {state: states.count(state) for state in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if args.json:
        found = {"schema": 1, "url": args.url, "model": client.model, "trained": lab.trained}
        found["noise_nats"] = lab.noise if math.isfinite(lab.noise) else None
        args.json.write_text(json.dumps(found | counts | {"checks": results}, indent=1) + "\n")
    return 1 if counts["failed"] else 0


def enter(client: Client) -> checks.Lab:
    """Finds the model's name, whether it answers sense, and whether the server takes a salt."""
    client.model = client.model or client.models()[0]
    answers = {question: client.ask([pictures.words(question)]).text.lower() for question in SENSE}
    trained = all(SENSE[question] in text for question, text in answers.items())
    try:
        client.ask([pictures.words("Hello")], max_tokens=1, salt="vision-exp")
        salts = True
    except Refused:
        salts = False
    print(f"model {client.model} at {client.url}")
    if not trained:
        print(f"It answers no sense ({answers}): checks of content will be skipped.")
    lab = checks.Lab(client, trained, salts)
    noise = checks.own_noise(lab)
    if noise > NEAR_TIE:
        print(
            f"Asked again alone, its answers move by {noise:.2f} nats: it is not reproducible, and "
            "answers that part by no more than that will not be judged."
        )
    return dataclasses.replace(lab, noise=noise)


def run(name: str, check: Callable[[checks.Lab], Verdict], lab: checks.Lab) -> dict[str, Any]:
    """One check; what the server refuses or drops on the way is its failure."""
    started = time.monotonic()
    try:
        found = check(lab)
    except (Refused, Unreachable) as error:
        found = Verdict(FAILED, "a request of this check against any answer", str(error))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        words = f"the answer has another form: {type(error).__name__}: {error}"
        found = Verdict(FAILED, "the form of an answer", words)
    seconds = time.monotonic() - started
    print(f"{found.state:8} {name} ({seconds:.1f} s)\n         compared: {found.compared}")
    print(f"         {'why' if found.state == SKIPPED else 'found'}: {found.detail}", flush=True)
    return {
        "name": name,
        "state": found.state,
        "compared": found.compared,
        "detail": found.detail,
        "seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
