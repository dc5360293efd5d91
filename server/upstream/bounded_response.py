"""Reads the response of another server, bounded in size: what it sends may be wrong, or meant to fill the memory."""

import httpx

PLAIN = {"Accept-Encoding": "identity"}  # a small encoded response may be a huge one


async def read_bounded(response: httpx.Response, most: int) -> bytes:
    """The content of a response to a request with the headers of PLAIN. most: bytes. Raises ValueError for more of
    them, and for an encoding; httpx.HTTPError when the connection breaks."""
    if "content-encoding" in response.headers:
        raise ValueError("an encoding that was not asked for")
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > most:
            raise ValueError(f"more than {most} bytes")
    return bytes(content)
