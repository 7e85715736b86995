"""A patched tree whose overlay is not the one it was patched for: broken_child.py DIGEST.

Other models must not notice; a Vision-Exp config must be refused with the digest and the remedy.
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
    with raises(RuntimeError, digest, "hotfix.py apply"):
        DeepseekV4Config(**tiny_config.vision_config())
    print("as it should be")
