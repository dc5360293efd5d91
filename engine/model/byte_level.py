"""The alphabet of byte-level BPE tokenizers."""


def byte_level_alphabet() -> list[str]:
    """The printable character by which byte-level BPE writes each byte, by byte (Radford et al. 2019, GPT-2's
    encoder)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
