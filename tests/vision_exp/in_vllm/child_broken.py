"""A patched tree without a working overlay: broken_child.py DIGEST, or `off` for switched off.

Other models must not notice. A Vision-Exp config must be refused with the digest of the overlay
that the tree was patched for and the remedy; switched off, it is what stock makes of it.
"""

from __future__ import annotations

import sys

import tiny_config
from checks import equal, raises

if __name__ == "__main__":
    (digest,) = sys.argv[1:]
    from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

    text = DeepseekV4Config(**tiny_config.text_config())
    equal(text.hidden_size, tiny_config.VISION_EXP["hidden_size"])
    from vllm.model_executor.layers.quantization import get_quantization_config

    # Imports the whole DeepSeek-V4 package, as every quantised model does.
    equal(get_quantization_config("fp8").__name__, "Fp8Config")
    equal("vllm.models.deepseek_v4.nvidia.model" in sys.modules, True)
    if digest == "off":
        stock = DeepseekV4Config(**tiny_config.vision_config())
        equal(stock.rms_norm_eps, 1e-20)
        equal(hasattr(stock, "is_mm_prefix_lm"), False)
        equal([name for name in sys.modules if name.startswith("vision_exp")], [])
    else:
        with raises(RuntimeError, digest, "hotfix.py apply"):
            DeepseekV4Config(**tiny_config.vision_config())
        # DeepSeek-V4.1 nests its own vision config and is none of ours.
        later = DeepseekV4Config(**tiny_config.vision_config(), vision_config={"depth": 2})
        equal(later.vision_config, {"depth": 2})
    print("as it should be")
