"""Names of the full pages of a prompt, as KV events carry them: the same prefix has the same names on every server."""

from headrace.core.types.packed import ITEM_BYTES
from headrace.scheduler.kv.cache_events import page_digest, root_digest, short


def page_names(prompt: bytes, salt: str, page_size: int) -> list[int]:
    """64-bit names of the pages of a packed prompt, without the page of its last token, which is always computed."""
    size = page_size * ITEM_BYTES
    digest, names = root_digest(salt.encode()), []
    for end in range(size, len(prompt), size):
        digest = page_digest(digest, prompt[end - size : end])
        names.append(short(digest))
    return names
