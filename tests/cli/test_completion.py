"""The shipped completion files offer what the parser takes, asked as a shell asks them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from typing import Any

import pytest
from hotfix_rig import REPO

from anchors.cli.parser import PROGRAMS, build_parser

BASH, ZSH = REPO / "docs/completion/hotfix.bash", REPO / "docs/completion/_hotfix"


def verbs() -> dict[str, argparse.ArgumentParser]:
    actions: list[Any] = build_parser()._actions
    (found,) = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def offered(lines: list[str]) -> list[set[str]]:
    """What bash offers after each line."""
    script = [f"source {BASH}"]
    for line in lines:
        words = [*line.split(), *([""] if line.endswith(" ") else [])]
        quoted = " ".join(f"'{word}'" for word in words)
        script.append(f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMPREPLY=()")
        script.append('_shtab_hotfix; echo "${COMPREPLY[*]}"')
    done = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True)
    assert done.stderr == ""
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_bash_offers_each_verb_and_each_option() -> None:
    named = {name: parser for name, parser in verbs().items() if name not in PROGRAMS}
    first, color, *rest = offered(
        ["hotfix.py ", "hotfix.py --color ", *(f"hotfix.py {name} -" for name in named)]
    )
    assert set(verbs()) <= first
    assert color == {"auto", "always", "never"}
    assert rest == [options(parser) for parser in named.values()]


def test_zsh_knows_each_verb_and_each_option() -> None:
    text = ZSH.read_text()
    assert text.startswith("#compdef hotfix.py\n")
    for name, parser in verbs().items():
        assert f"    {name}:'" in text
        assert [option for option in options(parser) if option not in text] == []


@pytest.mark.skipif(not shutil.which("zsh"), reason="NOT RUN: no zsh here")
def test_zsh_can_read_it() -> None:
    done = subprocess.run(["zsh", "-n", str(ZSH)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
