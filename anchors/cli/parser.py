"""The command line of hotfix.py: verbs, options, and what bad usage says."""

from __future__ import annotations

import argparse
import sys

from anchors import __version__, report
from anchors.cli import output
from anchors.errors import USAGE

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


#: Verbs that are programs of `vision_exp`, with what each does. They read their own arguments.
PROGRAMS = {
    "validate": "check a running server's image input from outside: --help has its options",
    "preview": "what the model will see of an image, and its cost: --help has its options",
}


_EXAMPLES = """\
examples:
  python3 hotfix.py apply --dry-run             what would be written
  python3 hotfix.py apply                       in the environment whose python3 runs vLLM
  python3 hotfix.py --root .venv/lib/python3.12/site-packages/vllm --overlay-root ~/overlay apply
  python3 hotfix.py -v status                   where each line stands
  python3 hotfix.py verify --import             prove it again, and import what was patched
  python3 hotfix.py diff --reverse              the lines that were added
  python3 hotfix.py doctor --log server.log     does the running server see images?
  python3 hotfix.py doctor --log a.log --log b.log         on two nodes
  python3 hotfix.py validate --url http://localhost:8000/v1
  python3 hotfix.py preview image.jpg -o seen.png
  python3 hotfix.py drift v0.29.0 vllm.whl      would it fit these?
  python3 hotfix.py drift flashinfer            has its SM12x kernel the rows of images?
  python3 hotfix.py bundle deepseek-v4-vision-exp.zip      one file for every node
  python3 hotfix.py revert                      every byte back
"""


class Parser(argparse.ArgumentParser):
    """Bad usage is exit 2, and still one JSON object where `--json` was given."""

    def error(self, message: str) -> NoReturn:
        message = f"{message}. Nothing was changed."
        hint = f"python3 {self.prog} --help"
        near = _near(message)
        if near:
            hint = f"did you mean {near}? {hint} lists all"
        if "--json" in sys.argv[1:]:
            failed = report.blank()
            failed["exit"] = USAGE
            failed["error"] = {
                "reference": "usage",
                "message": message,
                "context": [],
                "hint": hint,
            }
            output.print_json(failed)
        else:
            print(f"{report.PREFIX} {message}\nnext: {hint}", file=sys.stderr)
        raise SystemExit(USAGE)


def _near(message: str) -> str:
    """The choice that was probably meant, "" where argparse's words name none or none is near."""
    import difflib
    import re

    wrong, *choices = re.findall(r"'([^']*)'", message) or [""]
    return next(iter(difflib.get_close_matches(wrong, choices, n=1)), "")


def _count(text: str) -> int:
    """Lines of context: a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines, 0 or more")
    return int(text)


def _folder(path: str) -> str:
    """A path from the command line; empty is a variable that was never set, not a choice."""
    if not path:
        raise argparse.ArgumentTypeError("it is empty")
    return path


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    """All verbs and options. Common options may stand before or after the verb.

    The files in `docs/completion` are made of it, by the commands in `docs/reference.md`.
    `verb` is None where none is given, which the caller has to refuse.
    """
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--root", type=_folder, metavar="VLLM_PACKAGE_DIR", help="the vLLM package to work on"
    )
    common.add_argument(
        "--overlay-root", type=_folder, metavar="DIR", help="where the overlay is staged"
    )
    common.add_argument("--json", action="store_true", help="print one JSON object")
    common.add_argument("-q", "--quiet", action="store_true", help="nothing on success")
    common.add_argument(
        "-v", "--verbose", action="store_true", help="reasons of each site, tracebacks"
    )
    common.add_argument("--color", choices=("auto", "always", "never"))
    parser = Parser(
        prog="hotfix.py",
        description=description,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"vision-exp {__version__}")
    # Not required: argparse would ask for the verb before it names an unknown option.
    verbs: Any = parser.add_subparsers(dest="verb", metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text, parents=[common])

    apply = verb("apply", "make it so; idempotent")
    apply.add_argument("--dry-run", action="store_true", help="show the diff, write nothing")
    apply.add_argument("--strict", action="store_true", help="refuse where a site has no file")
    revert = verb("revert", "put the original bytes back, remove the overlay; idempotent")
    revert.add_argument("--dry-run", action="store_true", help="write nothing")
    verb("status", "one line per anchor; no writes")
    verify = verb("verify", "re-derive everything from the bytes, ignoring the receipt")
    verify.add_argument("--import", dest="imports", action="store_true", help="import in a child")
    diff = verb("diff", "the unified diff that apply (or revert) would write")
    diff.add_argument("--reverse", action="store_true", help="what revert would write")
    diff.add_argument("--stat", action="store_true", help="one line per file")
    diff.add_argument("-U", "--unified", type=_count, default=3, metavar="N", help="context lines")
    diff.add_argument("--exit-code", action="store_true", help="exit 1 if not empty")
    verb("list", "the anchors")
    explain = verb("explain", "one anchor: what, why, until when, its diff")
    explain.add_argument("id", metavar="ID")
    drift = verb("drift", "judge other vLLM trees; without arguments every release")
    drift.add_argument("trees", nargs="*", metavar="PATH_OR_WHEEL_OR_VERSION")
    drift.add_argument("--report", action="append", metavar="FILE", help="write .md or .html")
    drift.add_argument("--write-verified", action="store_true", help="anchors/verified.json")
    doctor = verb("doctor", "everything about this installation in one screen")
    doctor.add_argument(
        "--log",
        action="append",
        metavar="FILE",
        help="do a server's evidence lines agree? once for each node, - for standard input",
    )
    doctor.add_argument("--manifest", action="store_true", help="digests, to compare nodes")
    doctor.add_argument("--against", metavar="FILE", help="compare with another node's manifest")
    bundle = verb("bundle", "the mod for launchers: one zip, no network needed where it runs")
    bundle.add_argument("file", metavar="FILE.zip")
    bundle.add_argument("--wheels", metavar="DIR", help="LibCST wheels, instead of the index")
    for name, text in PROGRAMS.items():
        # No option starts with NUL: so every argument is the program's, also --help.
        program = verbs.add_parser(name, help=text, add_help=False, prefix_chars="\0")
        program.add_argument("arguments", nargs="*")
    return parser
