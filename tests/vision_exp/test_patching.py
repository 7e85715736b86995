"""Wrapping functions of modules that are not imported yet."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from vision_exp import patching


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes throw-away modules; the names are gone afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(name: str, text: str = "value = 1\n") -> str:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)
        patching._pending.pop(name, None)


def test_callback_runs_after_the_import_with_the_whole_module(module) -> None:
    name = module("vx_late", "value = 1\nother = value + 1\n")
    seen: list[int] = []
    patching.when_imported(name, lambda found: seen.append(found.other))
    assert not seen and name not in sys.modules
    importlib.import_module(name)
    assert seen == [2]
    importlib.import_module(name)
    assert seen == [2]


def test_callback_runs_at_once_for_an_imported_module(module) -> None:
    name = module("vx_early")
    importlib.import_module(name)
    seen: list[ModuleType] = []
    patching.when_imported(name, seen.append)
    assert seen == [sys.modules[name]]


def test_same_callback_runs_once_and_others_in_order(module) -> None:
    name = module("vx_order")
    seen: list[str] = []

    def first(found: ModuleType) -> None:
        seen.append("first")

    def second(found: ModuleType) -> None:
        seen.append("second")

    for callback in (first, second, first):
        patching.when_imported(name, callback)
    importlib.import_module(name)
    patching.when_imported(name, second)
    assert seen == ["first", "second"]


def test_an_error_in_a_callback_fails_the_import_and_is_tried_again(module) -> None:
    name = module("vx_error")
    broken = True
    seen: list[str] = []

    def callback(found: ModuleType) -> None:
        if broken:
            raise RuntimeError("not this release")
        seen.append(found.__name__)

    patching.when_imported(name, callback)
    with pytest.raises(RuntimeError, match="not this release"):
        importlib.import_module(name)
    assert name not in sys.modules
    broken = False
    importlib.import_module(name)
    assert seen == [name]


def test_other_modules_are_left_to_the_other_finders(module) -> None:
    name = module("vx_mine")
    patching.when_imported(name, print)
    assert patching._finder.find_spec("json.tool", None) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vx_nowhere")


def test_a_missing_module_stays_missing(module) -> None:
    patching.when_imported("vx_missing", print)
    with pytest.raises(ModuleNotFoundError, match="vx_missing"):
        importlib.import_module("vx_missing")
    patching._pending.pop("vx_missing")


def test_a_callback_may_import_and_register_more(module) -> None:
    inner, outer = module("vx_inner"), module("vx_outer")
    seen: list[str] = []
    patching.when_imported(inner, lambda found: seen.append(found.__name__))

    def callback(found: ModuleType) -> None:
        importlib.import_module(inner)
        seen.append(found.__name__)

    patching.when_imported(outer, callback)
    importlib.import_module(outer)
    assert seen == [inner, outer]


def test_the_thread_that_is_importing_gets_an_error_others_wait(module) -> None:
    name = module(
        "vx_partial",
        "import sys\nfrom vision_exp import patching\n"
        "try:\n    patching.when_imported(__name__, print)\n    error = None\n"
        "except RuntimeError as caught:\n    error = str(caught)\n",
    )
    assert "only partly imported" in importlib.import_module(name).error

    slow = module("vx_slow", "import time\ntime.sleep(0.3)\nvalue = 7\n")
    seen: list[int] = []
    thread = threading.Thread(target=importlib.import_module, args=(slow,))
    thread.start()
    while slow not in sys.modules:
        pass
    patching.when_imported(slow, lambda found: seen.append(found.value))
    thread.join()
    assert seen == [7]


def test_submodules_of_packages(module, tmp_path: Path) -> None:
    package = tmp_path / "vx_package"
    package.mkdir()
    (package / "__init__.py").write_text("from vx_package import part\nready = True\n")
    (package / "part.py").write_text("def f():\n    return 1\n")
    seen: list[str] = []
    patching.when_imported("vx_package.part", lambda found: seen.append(found.__name__))
    importlib.import_module("vx_package")
    assert seen == ["vx_package.part"]
    for name in ("vx_package", "vx_package.part"):
        sys.modules.pop(name)


class Base:
    def plain(self, x: int) -> int:
        """Docs."""
        return x

    @classmethod
    def kind(cls, x: int) -> tuple[type, int]:
        return cls, x

    @staticmethod
    def free(x: int) -> int:
        return x


def double(original, *args):
    result = original(*args)
    return (result[0], result[1] * 2) if isinstance(result, tuple) else result * 2


def test_wrap_once_and_keep_what_a_function_is() -> None:
    class Owner(Base):
        plain, kind, free = Base.plain, vars(Base)["kind"], vars(Base)["free"]

    stock = Owner.plain
    for _ in range(2):
        for name in ("kind", "free"):
            patching.wrap(Owner, name, double)
        assert patching.wrap(Owner, "plain", double) is stock
    assert Owner().plain(3) == 6
    assert Owner.plain.__doc__ == "Docs."
    assert Owner.kind(4) == (Owner, 8)
    assert Owner.free(5) == Owner().free(5) == 10
    assert Base().plain(3) == 3


def test_different_wrappers_stack_and_each_stays_once() -> None:
    class Owner(Base):
        def plain(self, x: int) -> int:
            return x

    def add(original, self, x: int) -> int:
        return original(self, x) + 1

    patching.wrap(Owner, "plain", double)
    patching.wrap(Owner, "plain", add)
    patching.wrap(Owner, "plain", double)
    assert Owner().plain(3) == 7


def test_wrap_of_a_missing_name_says_so() -> None:
    with pytest.raises(AttributeError):
        patching.wrap(Base, "nothing", double)


def negate(original, self) -> bool:
    return not original(self)


@pytest.mark.parametrize("kind", [property, functools.cached_property])
def test_a_property_is_asked_each_time_and_wrapped_once(kind: type) -> None:
    class Owner:
        ready = True

        def answer(self) -> bool:
            """Docs."""
            return self.ready

    Owner.given = kind(Owner.answer)
    if kind is functools.cached_property:
        Owner.given.__set_name__(Owner, "given")
    for _ in range(2):
        patching.wrap(Owner, "given", negate)
    owner = Owner()
    assert owner.given is False
    owner.ready = False
    assert owner.given is True
    assert Owner.given.__doc__ == "Docs."
    assert patching.wrappers(Owner, "given") == (negate,)


class Rule:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def apply(self, original, x: int) -> int:
        self.asked.append(x)
        return original(x) + 1


def test_a_method_of_one_object_is_wrapped_once_and_others_keep_theirs() -> None:
    one, other, rule = Base(), Base(), Rule()
    for _ in range(2):
        patching.wrap(one, "plain", rule.apply)
    assert (one.plain(3), other.plain(3), rule.asked) == (4, 3, [3])
    assert patching.wrappers(one, "plain") == (rule.apply,)
    assert patching.wrappers(other, "plain") == ()


def test_partials_of_one_function_are_one_wrapper() -> None:
    def scale(factor, original, self, x: int) -> int:
        return factor * original(self, x)

    class Owner:
        def plain(self, x: int) -> int:
            return x

    for _ in range(2):
        patching.wrap(Owner, "plain", functools.partial(scale, 5))
    assert Owner().plain(3) == 15


def test_a_method_is_added_where_the_class_has_none_of_its_own() -> None:
    class Owner(Base):
        pass

    def plain(self, x: int) -> int:
        return x + 100

    def late(self, x: int) -> int:
        return x - 100

    for method in (plain, late):
        patching.add_method(Owner, "plain", method)
    assert Owner().plain(1) == 101
    assert Base().plain(1) == 1
    assert patching.wrappers(Owner, "plain") == (plain,)


def test_wrappers_are_listed_from_the_outside() -> None:
    class Owner:
        def plain(self, x: int) -> int:
            return x

        @classmethod
        def kind(cls, x: int) -> tuple[type, int]:
            return cls, x

    def again(original, *args):
        return original(*args)

    assert patching.wrappers(Owner, "plain") == ()
    for wrapper in (double, again):
        patching.wrap(Owner, "plain", wrapper)
        patching.wrap(Owner, "kind", wrapper)
    assert patching.wrappers(Owner, "plain") == patching.wrappers(Owner, "kind") == (again, double)
