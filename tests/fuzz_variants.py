"""The kernels that `kvfold kernels fuzz` compiles, without a GPU: launches are noted, none is compiled or run.

    PYTHONPATH=. python tests/fuzz_variants.py CASES [seed]

Prints how many variants of each kernel Triton's own keys tell apart. TRITON_INTERPRET must not be set.
"""

import json
import sys
from collections import Counter

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class H200:
    """As much of a driver as the key of a launch takes."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def record(self, key, signature, device, constexprs, options, attrs, warmup):
    """In place of compiling: None ends the launch."""
    self.device_caches[device][0][key] = None


def count(cases: int, seed: int) -> Counter[str]:
    from kvfold.kernels import fuzz, reference

    driver.set_active(H200())
    JITFunction._do_compile = record
    reference.attend = lambda q, *_: torch.zeros(q.shape, dtype=torch.float64)
    # Results are what memory holds, here no exceptions, so that blocks are packed.
    torch.empty = torch.zeros  # type: ignore[assignment]
    for result in fuzz.fuzz(cases, seed, "cpu"):
        if isinstance(result, frozenset):
            return Counter(kernel.split()[0] for kernel in result)
        for fault in result.faults:
            if "Error: " in fault:
                raise RuntimeError(fault)
    raise RuntimeError("the fuzz named no kernels")


if __name__ == "__main__":
    print(json.dumps(count(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1), sort_keys=True))
