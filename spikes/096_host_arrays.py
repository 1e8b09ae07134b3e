# Measured at commit c3560ea1; runs at HEAD.
"""What does a call of a compiled program cost that takes a small array of the host, copied to the device before or not?

python -m spikes.096_host_arrays
"""

import argparse
import time

import jax
import numpy as np

CALLS = 400


def best(run):
    """Microseconds of a call, of the wall clock and of the thread: the best of seven times 400 calls."""
    found = []
    for _ in range(7):
        wall, thread = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - wall, time.thread_time() - thread))
    return [round(1e6 / CALLS * min(times), 1) for times in zip(*found, strict=True)]


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    array = np.zeros((8, 160), np.uint32)  # about what a prefill call of 8 lanes is given
    program = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct(array.shape, array.dtype)).compile()
    placed = jax.device_put(array)

    def allowed():
        with jax.transfer_guard_host_to_device("allow"):
            program(array)

    print("| | us of the clock | us of the thread |")
    for name, run in {
        "device_put": lambda: jax.device_put(array),
        "a call with an array on the device": lambda: program(placed),
        "device_put and a call": lambda: program(jax.device_put(array)),
        "a call with the host's array": lambda: program(array),
        "the same where a guard allows it": allowed,
    }.items():
        print("|", name, "|", " | ".join(map(str, best(run))), "|")


if __name__ == "__main__":
    main()
