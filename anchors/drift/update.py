"""Writes everything that follows from the sites and the known releases; read the diff afterwards.

    python3 -m anchors.drift.update [--from-index] [--check]

The one command after a new file in anchors/sites or a new line in anchors/releases/known.py.
Releases that drift judged before come from its cache, others from the package index.
--from-index  first adds the lines of releases that the index has and known.py lacks
--check       writes nothing; exit 1 if something would change
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from anchors.digests import TOOL_ROOT
from anchors.drift import causes, command, documents
from anchors.drift.causes import Entry
from anchors.drift.inventory import inventory
from anchors.drift.verdict import APPLIES, DRIFTED, NOT_APPLICABLE, SUPERSEDED
from anchors.engine.versions import version_key
from anchors.releases import known
from anchors.releases.known import NATIVE, WITH_DSPARK, WITHOUT_DSPARK
from anchors.releases.wheels import WheelError

KNOWN = "anchors/releases/known.py"
VERIFIED = "anchors/verified.json"
EXPECTED = "tests/drift/expected.json"
INVENTORY = "tests/anchors/inventory.json"
_END_OF_LINES = ")\n\n\ndef versions("


class Refused(Exception):
    """Nothing can be written; the text says what has to be put right first."""


def main(arguments: list[str]) -> int:
    """Writes or checks; 1 where a check finds a difference or nothing can be written."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python3 -m anchors.drift.update")
    parser.add_argument("--from-index", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.from_index and _add_lines(command.assess_all([])[0]):
            # What was imported here does not know the new lines.
            again = [sys.executable, "-m", "anchors.drift.update"]
            return subprocess.run(again, cwd=TOOL_ROOT).returncode
        entries, _ = command.assess_all(known.versions())
        stale = {file: text for file, text in wanted(entries).items() if _read(file) != text}
    except (Refused, ValueError, WheelError) as error:
        print(f"{error}\nNothing was written.", file=sys.stderr)
        return 1
    for file, text in stale.items():
        print(f"{file}: {'is not up to date' if options.check else 'written'}")
        if not options.check:
            _write(file, text)
    return int(options.check and bool(stale))


def wanted(entries: list[Entry]) -> dict[str, str]:
    """File -> its text, for every file that follows. Raises Refused: a release does not fit."""
    for entry, release in zip(entries, known.KNOWN, strict=True):
        _check(entry, release)
    verified = command.verified(entries)
    anchors = json.loads(verified)["anchors"]
    applies = {id_: found.get(APPLIES, []) for id_, found in anchors.items()}
    texts = {
        VERIFIED: verified,
        EXPECTED: json.dumps(rows(entries), indent=1) + "\n",
        INVENTORY: json.dumps(inventory(), indent=2) + "\n",
    }
    for file in dict.fromkeys([documents.REFERENCE, *(s.file for s in documents.sentences())]):
        texts[file] = documents.rendered(file, _read(file), applies)
    return texts


def rows(entries: list[Entry]) -> dict[str, dict[str, str]]:
    """Release -> column -> verdict."""
    return {entry["tree"]: causes.row(entry) for entry in entries}


def _check(entry: Entry, release: known.Release) -> None:
    if entry["error"] or entry["verdict"] == DRIFTED:
        why = entry["error"] or "it drifted"
        raise Refused(f"vLLM {release.version}: {why}: python3 hotfix.py drift {release.version}")
    if release.kind != _kind(entry):
        raise Refused(
            f"vLLM {release.version} is {_kind(entry)!r}, and {KNOWN} says {release.kind!r}"
        )


def _kind(entry: Entry) -> str:
    """The kind of a release that fits, by its content."""
    if entry["verdict"] == SUPERSEDED:
        return NATIVE
    drafts = [f["verdict"] for f in entry["findings"] if "dspark" in f["file"]]
    # One platform got it a release before the other.
    return WITHOUT_DSPARK if set(drafts) == {NOT_APPLICABLE} else WITH_DSPARK


def _add_lines(entries: list[Entry]) -> bool:
    """Adds releases of the index that fit to known.py; those that do not need a person."""
    names = {getattr(known, name): name for name in ("NATIVE", "WITH_DSPARK", "WITHOUT_DSPARK")}
    text = _read(KNOWN)
    for entry in entries:
        version = entry["tree"]
        if version in known.versions() or entry["error"] or entry["verdict"] == DRIFTED:
            continue
        later = [one for one in known.versions() if version_key(one) > version_key(version)]
        at = text.index(f'    Release("{later[0]}"' if later else _END_OF_LINES)
        text = f'{text[:at]}    Release("{version}", {names[_kind(entry)]}),\n{text[at:]}'
        print(f"{KNOWN}: vLLM {version} added")
    changed = text != _read(KNOWN)
    if changed:
        _write(KNOWN, text)
    return changed


def _read(file: str) -> str:
    with open(os.path.join(TOOL_ROOT, file), encoding="utf-8") as source:
        return source.read()


def _write(file: str, text: str) -> None:
    with open(os.path.join(TOOL_ROOT, file), "w", encoding="utf-8") as target:
        target.write(text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
