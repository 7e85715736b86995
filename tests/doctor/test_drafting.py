"""Legal k, read from the real `config/speculative.py` of each release."""

from __future__ import annotations

import pytest
import vllm_rig

from anchors.doctor import drafting


@pytest.mark.parametrize(
    ("version", "legal"),
    [
        ("0.25.1", (1, 2, 3, 6, 9, 12)),
        ("0.26.0", (6, 9, 12)),
        ("0.27.1", (6, 9, 12)),
        ("0.28.0", (1, 2, 3, 6, 9, 12)),
        ("0.29.0", (1, 2, 3, 6, 9, 12)),
    ],
)
def test_legal_k_by_release(version: str, legal: tuple[int, ...]) -> None:
    source = (vllm_rig.tree(version) / "vllm" / drafting.FILE).read_bytes()
    rule = drafting.legal_k(source)
    assert rule.reason == ""
    assert rule.legal == legal
    assert rule.lines


RULE = """
class SpeculativeConfig:
    def check(self):
        if self.method == "dspark":
            n_predict = 3
            if self.num_speculative_tokens {test}:
                raise ValueError("no")
"""


@pytest.mark.parametrize(
    ("test", "legal"),
    [
        ("> n_predict", (1, 2, 3)),
        ("% n_predict != 0", (3, 6, 9, 12)),
        ("not in (n_predict, 7)", (3, 7)),
        ("<= n_predict + dspark_block_size", (9, 10, 11, 12)),
        ("> n_predict and self.other", ()),
        ("< n_predict < 3", tuple(range(1, 13))),
        ("> 4 > n_predict", (1, 2, 3, 4)),
    ],
)
def test_shapes_of_rules(test: str, legal: tuple[int, ...]) -> None:
    rule = drafting.legal_k(RULE.format(test=test).encode())
    assert rule.legal == legal
    assert bool(rule.reason) == (not legal)


def test_what_surrounds_a_rule_counts() -> None:
    rule, every = RULE.format(test="> n_predict"), tuple(range(1, 13))
    outside = rule.replace('self.method == "dspark"', 'self.method not in ("dspark",)')
    assert drafting.legal_k(outside.encode()) == drafting.Rule(every, (6,))
    otherwise = rule.replace("            n_predict = 3\n", "            pass\n        else:\n")
    assert drafting.legal_k(otherwise.encode()).legal == every


def test_a_warning_is_no_refusal() -> None:
    warns = RULE.format(test="> n_predict").replace('raise ValueError("no")', 'warn("slow")')
    assert "no rule about" in drafting.legal_k(warns.encode()).reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "is missing"),
        (b"def (", "does not parse"),
        (b"x = 1", "has no method 'dspark'"),
        (b"x = 'dspark'", "no rule about"),
        (RULE.format(test="> f(n_predict)").encode(), "not understood: f(n_predict)"),
    ],
)
def test_what_is_not_known_is_said(source: bytes | None, reason: str) -> None:
    rule = drafting.legal_k(source)
    assert rule.legal == ()
    assert reason in rule.reason
