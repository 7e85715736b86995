"""One judgement: what a server would need and not find is refused by every verb, in one voice.

Edits of real sources. A comment or a string decides nothing, an import that leads elsewhere does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import Rig, identity
from states import drift_says

Change = Callable[[str], str]

PACKAGE = "models/deepseek_v4"
INIT = f"{PACKAGE}/__init__.py"
MODEL = f"{PACKAGE}/nvidia/model.py"
SCHEDULER = "v1/core/sched/scheduler.py"
REGISTRY = "model_executor/models/registry.py"
CONFIGS = "transformers_utils/config.py"
NATIVE = "DeepseekV4ForConditionalGeneration"


@dataclass(frozen=True)
class Edit:
    """Edits by path, a new file from ""; and what the refusal must say, "" where it is harmless."""

    changes: dict[str, Change]
    says: str = ""
    stock_only: bool = False


def sub(old: str, new: str) -> Change:
    return lambda text: re.sub(old, new, text)


def add(more: str) -> Change:
    return lambda text: text + more


EDITS = {
    # What runs needs it.
    "method renamed": Edit(
        {SCHEDULER: sub(r"\b_try_schedule_encoder_inputs\b", "_schedule_encoders")},
        "Scheduler has no _try_schedule_encoder_inputs",
    ),
    "module that does not parse": Edit(
        {SCHEDULER: add("\ndef (\n")}, "vllm.v1.core.sched.scheduler is missing or does not parse"
    ),
    "parameter renamed": Edit(
        {SCHEDULER: sub(r"\bencoder_compute_budget\b", "budget")},
        "does not take encoder_compute_budget",
    ),
    "method deleted": Edit(
        {SCHEDULER: add("\n\ndel Scheduler\n")}, "vllm.v1.core.sched.scheduler has no Scheduler"
    ),
    "class for type checkers only": Edit(
        {
            "v1/request.py": lambda text: (
                text.replace("class Request", "class _Request", 1)
                + "\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    Request = _Request\n"
            )
        },
        "vllm.v1.request has no Request",
    ),
    "package beside the module": Edit(
        {"v1/request/__init__.py": add("class Request:\n    pass\n")}, "Request has no"
    ),
    "optional class is there, its method is not": Edit(
        {f"{PACKAGE}/nvidia/flashinfer_sparse.py": sub(r"\b_get_workspace\b", "_workspace")},
        "DeepseekV4FlashInferSM120Attention has no _get_workspace",
    ),
    "optional class is not there": Edit(
        {
            f"{PACKAGE}/nvidia/flashinfer_sparse.py": sub(
                r"\bDeepseekV4FlashInferSM120Attention\b", "Other"
            )
        }
    ),
    # Where imports lead.
    "package beside nvidia": Edit(
        {
            INIT: sub(r"\.nvidia\.model import", ".fork.model import"),
            f"{PACKAGE}/fork/model.py": add("class DeepseekV4ForCausalLM:\n    pass\n"),
        },
        f"leads to class DeepseekV4ForCausalLM in {PACKAGE}/fork/model.py",
    ),
    "registry names another class": Edit(
        {REGISTRY: sub(r'(M": \("vllm.models.deepseek_v4", )"DeepseekV4ForCausalLM"', r'\1"Own"')},
        "vllm.models.deepseek_v4, which does not bind Own",
    ),
    "entry replaced below": Edit(
        {
            REGISTRY: sub(
                r"\n_SUBPROCESS_COMMAND = ",
                '\n_VLLM_MODELS["DeepseekV4ForCausalLM"] = ("llama", "LlamaForCausalLM")\\g<0>',
            )
        },
        "leads to vllm.model_executor.models.llama, which is not there",
    ),
    "another class under the name": Edit(
        {
            INIT: sub(
                r"import DeepseekV4ForCausalLM", "import DeepseekV4Model as DeepseekV4ForCausalLM"
            )
        },
        f"leads to class DeepseekV4Model in {PACKAGE}/nvidia/model.py",
    ),
    "model made at run time": Edit(
        {INIT: add("\nDeepseekV4ForCausalLM = type('M', (), {})\n")}, "which only a run decides"
    ),
    "draft from another file": Edit(
        {
            INIT: sub(r"\.nvidia\.mtp import", ".fork.mtp import"),
            f"{PACKAGE}/fork/mtp.py": add("class DeepSeekV4MTP:\n    pass\n"),
        },
        f"leads to class DeepSeekV4MTP in {PACKAGE}/fork/mtp.py",
    ),
    "another config class": Edit(
        {
            CONFIGS: sub('deepseek_v4="DeepseekV4Config"', 'deepseek_v4="OwnConfig"'),
            "transformers_utils/configs/__init__.py": sub(
                '("?)DeepseekV4Config"(: "vllm.*)deepseek_v4"', r'\1OwnConfig"\2own"'
            ),
            "transformers_utils/configs/own.py": add("class OwnConfig:\n    pass\n"),
        },
        "leads to class OwnConfig in transformers_utils/configs/own.py",
    ),
    "half of native support": Edit(
        {INIT: add(f"\n\nclass {NATIVE}:\n    pass\n")}, "half of native support"
    ),
    # Words.
    "comment": Edit({INIT: add(f"\n# {NATIVE} is upstream's\n")}),
    "string": Edit({INIT: add(f'\nUPSTREAM = "{NATIVE}"\n')}),
    "entry commented out": Edit(
        {
            REGISTRY: sub(
                r'(\n    )("DeepseekV4ForCausalLM")',
                rf'\1# "{NATIVE}": ("vllm.models.deepseek_v4", "{NATIVE}"),\1\2',
            )
        }
    ),
    "entry in a string": Edit(
        {REGISTRY: add(f"\n'''\n\"{NATIVE}\": (\"vllm.models.deepseek_v4\", \"{NATIVE}\"),\n'''\n")}
    ),
    "routing bias in a comment": Edit(
        {MODEL: add("\n# bias_vl, vision_n_layers: not here\n")}, "", True
    ),
    "routing bias in a text of its own": Edit({MODEL: add('\n"""bias_vl"""\n')}, "", True),
    "import commented out": Edit({INIT: add("\n# from .nvidia.vision import Tower\n")}),
    "branch of another platform": Edit(
        {INIT: sub(r"from \.amd\.model import", "from .elsewhere import")}
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, Rig]:
    """A release as it is, and with the hotfix; every case edits them and puts all back."""
    folder = tmp_path_factory.mktemp("judgement")
    stock, applied = (hotfix_rig.make(folder / name, "0.29.0") for name in ("stock", "applied"))
    assert applied.run("apply").code == 0
    return stock, applied


@pytest.mark.parametrize("name", EDITS)
def test_all_verbs_agree(pair: tuple[Rig, Rig], name: str) -> None:
    edit = EDITS[name]
    stock, applied = pair
    for rig in (stock,) if edit.stock_only else pair:
        kept = {path: _edited(rig.root / path, change) for path, change in edit.changes.items()}
        before = identity(rig.base)
        try:
            if edit.says:
                for verb, code in (("apply", 3), ("status", 1), ("verify", 1), ("doctor", 1)):
                    answer = rig.run("--json", verb)
                    assert answer.code == code, (verb, answer.out)
                    report = answer.json
                    assert report["state"] in ("drifted", "foreign", "mixed"), verb
                    assert edit.says in report["error"]["message"], verb
                assert identity(rig.base) == before
                word, said = drift_says(rig.root)
                assert word == "drifted"
                assert edit.says in said
            else:
                state = rig.run("--json", "status").json["state"]
                assert state == ("pristine" if rig is stock else "applied-unrecorded")
                assert rig.run("apply", "--dry-run").code == 0
                assert drift_says(rig.root)[0] == "applies"
        finally:
            for path, data in kept.items():
                (rig.root / path).unlink() if data is None else (rig.root / path).write_bytes(data)
    assert stock.run("--json", "status").json["state"] == "pristine"
    assert applied.run("--json", "status").json["state"] == "applied"


def _edited(path: Path, change: Change) -> bytes | None:
    """Changes the file and gives its former bytes; None for one that is new."""
    before = path.read_bytes() if path.exists() else None
    text = change((before or b"").decode())
    assert text.encode() != (before or b"")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return before


def test_a_receipt_vouches_for_all_that_was_judged(pair: tuple[Rig, Rig], tmp_path: Path) -> None:
    """Whatever file the judgement rests on: the receipt no longer answers once it changed."""
    rig = pair[1]
    judged = rig.root / "v1/request.py"
    before = judged.read_bytes()
    judged.write_bytes(before + b"\n# of the owner\n")
    assert rig.run("--json", "status").json["state"] == "applied-unrecorded"
    assert rig.run("apply").code == 0
    assert rig.run("--json", "status").json["state"] == "applied"
    judged.write_bytes(before)
    assert rig.run("apply").code == 0
