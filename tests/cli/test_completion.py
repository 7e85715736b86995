"""The shipped completion files offer what the parser takes, asked as a shell asks them."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from distribution import program
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


def shown(zsh: str, home: Path, lines: list[str]) -> list[str]:
    """What an interactive zsh writes for each line and a <Tab>."""
    terminal, inside = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
    child = subprocess.Popen(
        [zsh, "-f", "-i"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environment,
        start_new_session=True,
    )
    os.close(inside)

    def ask(text: str, answer: str) -> str:
        """Types `text`; what comes until the shell has written `answer`, a regular expression."""
        os.write(terminal, text.encode())
        told, deadline = "", time.monotonic() + 60
        while not re.search(answer, told, re.DOTALL):
            ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, told
            told += os.read(terminal, 65536).decode("utf-8", "replace")
        return told

    try:
        load = f"fpath=({ZSH.parent} $fpath); autoload -U compinit; compinit -u -D"
        # The line editor is ready when it has asked for marks around what is pasted.
        editor = r"END\r\n.*\x1b\[\?2004h"
        ask(f"PS1=; stty cols 200 -echo; {load}; print EN''D\n", editor)
        told = []
        for line in lines:
            # The line is written again below what it offers; what is typed before hides that.
            told.append(ask(f"{line}\t", f"{re.escape(line)}.*{re.escape(line)}"))
            ask("\x15print EN''D\n", editor)
        return told
    finally:
        child.kill()
        child.wait()
        os.close(terminal)


def test_zsh_offers_each_verb_and_each_option(tmp_path: Path) -> None:
    zsh = program("zsh")
    if zsh is None:
        pytest.skip("NOT RUN: no zsh here, and none could be installed")
    named = {name: parser for name, parser in verbs().items() if name not in PROGRAMS}
    asked = ["hotfix.py ", "hotfix.py --color ", *(f"hotfix.py {name} -" for name in named)]
    first, color, *rest = shown(zsh, tmp_path, asked)
    assert [name for name in verbs() if f"\n{name} " not in first] == []
    assert "always  auto    never" in color
    for parser, told in zip(named.values(), rest, strict=True):
        words = set(re.findall(r"(?<=\s)--?[\w-]+", told))
        assert options(parser) <= words
