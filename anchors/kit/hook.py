"""The text that is appended to vLLM's modules: one template, standard library only."""

from __future__ import annotations

import json

from anchors import UNSTAGED
from anchors.kit.anchor import Values

# Runs in every process that imports the module, for any model: it must not raise, log or be
# slow. What goes wrong is kept, and raised where a vision checkpoint is about to be built.
_TEMPLATE = """\
def _vision_exp_hook(namespace, site, guarded, root, overlay, plan):
    import functools, hashlib, os, sys
    from importlib import util
    if os.environ.get("VISION_EXP_DISABLE") == "1":
        return
    folder, found = os.path.join(root, "vision_exp"), "nothing"
    try:
        package = sys.modules.get("vision_exp")
        if package is not None:
            folder = os.path.dirname(package.__file__)
        digest, files = hashlib.sha256(), {}
        for base, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for path in (os.path.join(base, name) for name in names):
                files[os.path.relpath(path, folder).replace(os.sep, "/")] = path
        files = {n: files[n] for n in files if n.partition("/")[0] not in {unstaged}}
        for name in sorted(files):
            with open(files[name], "rb") as file:
                data = file.read()
            digest.update(f"{name}\\0{len(data)}\\0".encode() + data)
        found = digest.hexdigest() if files else found
        if found != overlay:
            raise RuntimeError("the digests differ")
        vllm = os.path.dirname(sys.modules[namespace["__name__"].partition(".")[0]].__file__)
        trusted = (0, os.geteuid(), os.stat(vllm).st_uid)
        for path in (os.path.dirname(folder), folder):
            status = os.stat(path)
            if status.st_uid not in trusted or status.st_mode & 0o022:
                raise RuntimeError(f"others than root, we and vLLM's owner can write {path}")
        if package is None:
            spec = util.spec_from_file_location(
                "vision_exp",
                os.path.join(folder, "__init__.py"),
                submodule_search_locations=[folder],
            )
            sys.modules["vision_exp"] = package = util.module_from_spec(spec)
            spec.loader.exec_module(package)
        from vision_exp.install import install
        install(site, namespace, plan=plan, overlay=overlay)
    except Exception as error:
        message = (
            f"[vision-exp] no image input ({site}): this vLLM expects vision overlay {overlay} "
            f"in {root} (plan {plan}), found {found} in {folder}: "
            f"{type(error).__name__}: {error}. Text-only models are not affected. "
            "Run `python3 hotfix.py apply` of vision-exp again, then restart."
        )
        stock = namespace[guarded].__init__

        @functools.wraps(stock)
        def checked(self, *args, **kwargs):
            config = kwargs.get("vllm_config")
            known = kwargs if config is None else vars(config.model_config.hf_config)
            if known.get("vision_n_layers") and not known.get("vision_config"):
                raise RuntimeError(message)
            stock(self, *args, **kwargs)

        namespace[guarded].__init__ = checked


_vision_exp_hook(
    globals(),
    site={site},
    guarded={guarded},
    root={root},
    overlay={overlay},
    plan={plan},
)
del _vision_exp_hook
"""


def render(site: str, guarded: str, values: Values) -> str:
    """The hook for `site`; class `guarded` refuses vision configs when the overlay fails."""
    text = _TEMPLATE.replace("{unstaged}", repr(UNSTAGED))
    for name, value in (
        ("site", site),
        ("guarded", guarded),
        ("root", values.root),
        ("overlay", values.overlay),
        ("plan", values.plan),
    ):
        text = text.replace(f"={{{name}}},", f"={_literal(value)},")
    return text


def _literal(value: str) -> str:
    """A string that Python and JSON read alike: JSON's two escapes for one character beyond the
    first 65,536, as in a path with an emoji, would be two characters to Python."""
    if value.isascii():
        return json.dumps(value)
    return '"' + "".join(c if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in value) + '"'
