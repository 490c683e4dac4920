"""A program that disturbs a host from another one: `stranger.py HOST MESSAGES BYTES`.

It looks for open ports, sends random bytes to each, and then one message of BYTES bytes. It prints the ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys

SSH = 22
_AT_ONCE = 400
_CHUNK = bytes(1 << 20)


async def _open_ports(host: str) -> list[int]:
    found = []
    left = iter(range(1, 65536))

    async def look() -> None:
        for port in left:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                found.append(port)

    await asyncio.gather(*(look() for _ in range(_AT_ONCE)))
    return sorted(set(found) - {SSH})


async def _send(host: str, port: int, data: bytes, times: int) -> int:
    """Sends until the other side has closed the connection; returns how much went out."""
    sent = 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                for _ in range(times):
                    writer.write(data)
                    await writer.drain()
                    sent += len(data)
                writer.write_eof()
                async with asyncio.timeout(0.2):
                    await reader.read(100)
            finally:
                writer.close()
    return sent


async def main(host: str, messages: int, size: int) -> None:
    ports = await _open_ports(host)
    print("open:", *ports, flush=True)
    rng = random.Random(7)
    left = iter(range(messages))

    async def disturb() -> None:
        for number in left:
            await _send(host, ports[number % len(ports)], os.urandom(rng.choice((1, 8, 32, 33, 1000))), 1)

    if ports:
        await asyncio.gather(*(disturb() for _ in range(50)))
    for port in ports:
        print(port, "took", await _send(host, port, _CHUNK, size // len(_CHUNK)), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
