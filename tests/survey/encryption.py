#!/usr/bin/env python3
"""Trains over two network namespaces and searches the captured packets for names and tensors.

    sudo python3 tests/survey/encryption.py target/release/pipec [--loopback]

Linux only, as root. Two hosts with a link between them train the two replicas of a model under ZeRO 3, so they exchange weights. Every packet is read on one end. The
capture must contain no name of a parameter, no name of a setting that processes compare, and no eight bytes of the trained weights. With
--loopback both processes are in one namespace: there, nothing is encrypted, and the search must find what it looks for.
"""

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading

HOSTS = {"pipec-a": "10.77.0.1", "pipec-b": "10.77.0.2"}
ETH_P_ALL = 3
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def sh(*words, **options):
    return subprocess.run(words, check=True, **options)


def open_link():
    for name in HOSTS:
        sh("ip", "netns", "add", name)
    sh("ip", "link", "add", "pa", "netns", "pipec-a", "type", "veth", "peer", "name", "pb", "netns", "pipec-b")
    for (name, address), device in zip(HOSTS.items(), ["pa", "pb"]):
        sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
        sh("ip", "-n", name, "link", "set", device, "up")
        sh("ip", "-n", name, "link", "set", "lo", "up")


def close_link():
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], check=False)


class Capture(threading.Thread):
    """Reads every packet of a device in a namespace."""

    def __init__(self, name, device):
        super().__init__(daemon=True)
        with open(f"/run/netns/{name}") as namespace, open("/proc/self/ns/net") as own:
            assert LIBC.setns(namespace.fileno(), CLONE_NEWNET) == 0, "cannot enter the namespace"
            self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            self.socket.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE
            self.socket.bind((device, 0))
            self.socket.settimeout(1)
            assert LIBC.setns(own.fileno(), CLONE_NEWNET) == 0
        self.is_over, self.packets = False, []

    def run(self):
        while True:
            try:
                self.packets.append(self.socket.recv(1 << 17))
            except TimeoutError:
                if self.is_over:
                    return

    def payload(self):
        """The payloads of all TCP packets, by sender, joined without those that were sent twice."""
        self.is_over = True
        self.join()
        streams = {}
        for packet in self.packets:
            if packet[12:14] != b"\x08\x00" or packet[23] != 6:
                continue
            ip = packet[14:]
            tcp = ip[(ip[0] & 15) * 4 : struct.unpack(">H", ip[2:4])[0]]
            start = (tcp[12] >> 4) * 4
            ports, number = tcp[:4], struct.unpack(">I", tcp[4:8])[0]
            streams.setdefault((ip[12:16], ports), {})[number] = tcp[start:]
        return [b"".join(parts[number] for number in sorted(parts)) for parts in streams.values()]


def tensors(path):
    """The bytes of each tensor of a safetensors file, by name."""
    with open(path, "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    return {name: body[slice(*entry["data_offsets"])] for name, entry in entries.items() if name != "__metadata__"}


def main():
    pipec, is_loopback = os.path.abspath(sys.argv[1]), "--loopback" in sys.argv
    folder = tempfile.mkdtemp()
    run = lambda *words: sh(pipec, *words, cwd=folder, stdout=subprocess.DEVNULL)
    run("zoo", "mlp", "-o", "m.onnx", "-q")
    run("partition", "m.onnx", "--gpus", "2", "--stages", "2", "--zero", "3", "--schedule", "1f1b", "--microbatches", "4", "-o", "plan.json", "-q")
    with open(os.path.join(folder, "run.token"), "w") as file:
        file.write("0123456789abcdef0123456789abcdef")
    os.chmod(os.path.join(folder, "run.token"), 0o600)
    close_link()
    open_link()
    try:
        names = ["pipec-a", "pipec-a"] if is_loopback else list(HOSTS)
        address = "127.0.0.1:29500" if is_loopback else f"{HOSTS['pipec-a']}:29500"
        capture = Capture("pipec-a", "lo" if is_loopback else "pa")
        capture.start()
        train = ["train", "m.onnx", "--plan", "plan.json", "--synthetic-data", "--steps", "3", "--token-file", "run.token"]
        train += ["--address", address, "--save", "w.safetensors", "-q"]
        started = []
        for process, name in enumerate(names):
            words = ["ip", "netns", "exec", name, pipec, *train, "--rank", str(process)]
            started.append(subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL))
        codes = [process.wait(120) for process in started]
        assert codes == [0, 0], codes
        streams = capture.payload()
    finally:
        close_link()
    total = sum(map(len, streams))
    weights = tensors(os.path.join(folder, "w.safetensors"))
    seen = [name for name in weights if any(name.encode() in stream for stream in streams)]
    held = [name for name, data in weights.items() if any(data[at : at + 8] in stream for stream in streams for at in range(0, min(len(data), 4096), 64))]
    settings = [word for word in ["the programs", "the weights", "seed"] if any(word.encode() in stream for stream in streams)]
    print(f"{total} bytes captured; in clear: names {seen}, tensors {held}, settings {settings}")
    assert total > sum(map(len, weights.values())) // 2, "the capture is not complete"
    found = bool(seen or held or settings)
    sys.exit(found != is_loopback)


if __name__ == "__main__":
    main()
