"""Every kernel under compute-sanitizer, on few small cases: `python tests/sanitize_kernels.py [TOOL ...]`.

Needs an NVIDIA GPU, cupy and compute-sanitizer (it comes with CUDA). Tools are memcheck, racecheck, initcheck and
synccheck, the first two by default. Runs one process per tool and part, prints what each found, and exits 6 if any
found something, or if memcheck or racecheck missed the fault of a kernel that is wrong on purpose. Outcomes are in
docs/kernels.md. `kvfold kernels fuzz` before it fills Triton's cache, which saves most of the time.
"""

import os
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PARTS = 8
LIMIT_S = 480
# torch's own kernels, which racecheck makes slower still; by their names, so that none of ours is left out.
NOT_OURS = ("kns=at6native", "kns=cutlass", "kns=cublas", "kns=gemm", "kns=cub")
FOUND = 9  # compute-sanitizer's exit code where it found something


def small_cases():
    """Per compiled variant of the fuzz, two sequences: packed blocks and a tail, or a window; and an empty one."""
    from kvfold.kernels.fuzz import VARIANTS
    from kvfold.kernels.inputs import Case

    for variant in VARIANTS:
        block = variant.block_tokens
        for window in sorted({variant.windows[0], variant.windows[-1]}, key=str):
            yield (
                variant,
                Case(
                    lengths=(2 * block + 70, 0, 33),
                    kv_heads=2,
                    group=variant.group,
                    head_dim=variant.head_dim,
                    block_tokens=block,
                    raw_page_tokens=variant.raw_page_tokens,
                    window=window and min(window, block + 50),
                    shared_blocks=1,
                    seed=1,
                ),
            )


def run_part(part: int) -> None:
    from kvfold.kernels.bench_dense import check_w4a16
    from kvfold.kernels.gate import check_case

    for number, (variant, case) in enumerate(small_cases()):
        if number % PARTS == part:
            faults = check_case(
                case,
                "cuda",
                variant.checks,
                variant.splits,
                variant.programs,
                variant.has_skips,
                variant.copies,
            ).faults
            print(case, variant.checks, faults, flush=True)
            if faults:
                sys.exit(FOUND)
    if part == 0:
        check_w4a16("cuda")
        print("w4a16", flush=True)


def run_wrong(tool: str) -> None:
    """A kernel that reads past its input, or one whose threads read what others write, without a barrier."""
    import cupy

    past_the_end = """extern "C" __global__ void attend_kernel(const int *in, int *out)
        { out[threadIdx.x] = in[threadIdx.x + 64]; }"""
    no_barrier = """extern "C" __global__ void attend_kernel(const int *in, int *out)
        { __shared__ int held[64]; int i = threadIdx.x; held[i] = in[i]; out[i] = held[63 - i]; }"""
    cupy.cuda.set_allocator(None)
    values = cupy.arange(64, dtype=cupy.int32)
    out = cupy.zeros(64, dtype=cupy.int32)
    kernel = cupy.RawKernel(no_barrier if tool == "racecheck" else past_the_end, "attend_kernel")
    kernel((1,), (64,), (values, out))
    cupy.cuda.Device().synchronize()


def main(tools: list[str]) -> int:
    started = []
    # Every tensor its own allocation, so that a read past its end is one outside of memory.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in tools:
        for part in (*range(PARTS), *(("wrong",) if tool in ("memcheck", "racecheck") else ())):
            command = [
                "compute-sanitizer",
                "--tool",
                tool,
                "--error-exitcode",
                str(FOUND),
                "--print-limit",
                "5",
            ]
            for name in NOT_OURS:
                command += ["--kernel-name-exclude", name]
            command += [sys.executable, str(Path(__file__).resolve()), "--part", str(part), tool]
            process = subprocess.Popen(
                ["timeout", str(LIMIT_S), *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.append((tool, part, process))
    worst = 0
    for tool, part, process in started:
        text, _ = process.communicate()
        lines = text.splitlines()
        cases = sum(not line.startswith("=") for line in lines)
        print(f"{tool} part {part}: exit {process.returncode}, {cases} cases; {lines[-1] if lines else ''}")
        if part == "wrong":
            if process.returncode != FOUND:
                print(f"{tool} found nothing wrong with a kernel that is")
                worst = 6
        elif process.returncode:
            print("\n".join(lines[:60]))
            worst = 6
    return worst


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        run_wrong(sys.argv[3]) if sys.argv[2] == "wrong" else run_part(int(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:] or ["memcheck", "racecheck"]))
