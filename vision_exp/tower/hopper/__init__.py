"""What only GPUs of the Hopper generation run (SM90: H100, H200); all others do without it.

`waves` fills the GPU with FlashAttention 3 and leaves an image's tail rows to `../split_kv.py`;
`swiglu` has the activation applied inside a matrix product. `backends` decides.
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=8)
def available(device: torch.device) -> bool:
    """Whether the kernels of this package can run on the device."""
    # ROCm's devices are called "cuda" too, and gfx9 has 9 as its major capability.
    on_cuda = device.type == "cuda" and torch.version.cuda is not None
    return on_cuda and torch.cuda.get_device_capability(device)[0] == 9
