"""Bandwidth of copies between host and GPUs, through the CUDA driver: `copies.py DOCTOR.json [--small]`. Prints JSON.

Needs neither PyTorch nor a CUDA toolkit. DOCTOR.json is the output of `pipec doctor --format json`, which names the driver.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from typing import Any, Callable, Dict, List

ROUNDS = 5
PORTABLE = 1


class Driver:
    """The functions of the driver that copy."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self("cuInit", ctypes.c_uint(0))
        self.contexts: List[ctypes.c_void_p] = []

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise SystemExit(f"{name} returned {status}")

    def open(self, ordinal: int) -> None:
        """Retains the context of a GPU, in the order of the ordinals."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.contexts.append(context)

    def use(self, ordinal: int) -> None:
        self("cuCtxSetCurrent", self.contexts[ordinal])

    def allocate(self, ordinal: int, count: int) -> ctypes.c_uint64:
        self.use(ordinal)
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        # Some copies of memory that was never written are faster.
        self("cuMemsetD8_v2", address, ctypes.c_ubyte(7), ctypes.c_size_t(count))
        return address

    def free(self, address: ctypes.c_uint64) -> None:
        self("cuMemFree_v2", address)

    def page_locked(self, count: int) -> ctypes.c_void_p:
        address = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(count), ctypes.c_uint(PORTABLE))
        ctypes.memset(address, 7, count)
        return address


def seconds(driver: Driver, copy: Callable[[], None], copies: int) -> float:
    """Median time of one copy."""
    times = []
    for turn in range(ROUNDS + 1):
        begin = time.perf_counter()
        for _ in range(copies):
            copy()
        driver("cuCtxSynchronize")
        if turn > 0:
            times.append((time.perf_counter() - begin) / copies)
    return statistics.median(times)


def main() -> None:
    with open(sys.argv[1]) as file:
        doctor = json.load(file)
    size = 1 << (22 if "--small" in sys.argv else 28)
    path = next(library["path"] for library in doctor["libraries"] if library["name"] == "CUDA driver")
    count = len(doctor["devices"])
    if path is None or count == 0:
        raise SystemExit("no GPU")
    driver = Driver(path)
    for ordinal in range(count):
        driver.open(ordinal)
    found: Dict[str, Any] = {"bytes": size, "gpus": [], "pairs": []}
    stream = ctypes.c_void_p(None)
    bytes_ = ctypes.c_size_t(size)
    driver.use(0)
    locked = driver.page_locked(size)
    paged = ctypes.create_string_buffer(size)
    for ordinal in range(count):
        here, other = driver.allocate(ordinal, size), driver.allocate(ordinal, size)
        few = ctypes.c_size_t(4)

        def rate(name: str, *arguments: Any) -> float:
            return size / seconds(driver, lambda: driver(name, *arguments), 8)

        found["gpus"].append({
            "gpu": ordinal,
            "host_to_gpu": rate("cuMemcpyHtoDAsync_v2", here, locked, bytes_, stream),
            "gpu_to_host": rate("cuMemcpyDtoHAsync_v2", locked, here, bytes_, stream),
            "pageable_to_gpu": rate("cuMemcpyHtoD_v2", here, paged, bytes_),
            "gpu_to_pageable": rate("cuMemcpyDtoH_v2", paged, here, bytes_),
            # Bytes read and bytes written.
            "within_gpu": 2 * rate("cuMemcpyDtoDAsync_v2", other, here, bytes_, stream),
            "seconds_of_4_bytes": seconds(driver, lambda: driver("cuMemcpyDtoH_v2", paged, here, few), 100),
        })
        driver.free(here)
        driver.free(other)
    for target in range(count):
        for source in range(count):
            if source == target:
                continue
            there = driver.allocate(source, size)
            here = driver.allocate(target, size)
            possible = ctypes.c_int()
            driver("cuDeviceCanAccessPeer", ctypes.byref(possible), ctypes.c_int(target), ctypes.c_int(source))
            if possible.value:
                # Already enabled is no fault.
                driver.library.cuCtxEnablePeerAccess(driver.contexts[source], ctypes.c_uint(0))
            arguments = (here, driver.contexts[target], there, driver.contexts[source], bytes_, stream)
            time_of_one = seconds(driver, lambda: driver("cuMemcpyPeerAsync", *arguments), 8)
            found["pairs"].append({"from": source, "to": target, "peer": bool(possible.value), "rate": size / time_of_one})
            driver.free(here)
            driver.use(source)
            driver.free(there)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
