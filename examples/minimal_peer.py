"""A peer for docs/protocol.md in one file: fetches the KV of one ticket into a numpy array. Needs numpy and pyzmq.

    python minimal_peer.py http://localhost:8000 --ticket ticket-42 --tokens 5 --layers 30 --kv-heads 3 --head-dim 64
    curl http://localhost:8000/v1/prefill -d '{"prompt_token_ids": [1, 2, 3, 4, 5], "ticket": "ticket-42"}'

Copy it to write your own. It checks whatever a peer has to check, and fetches one ticket at a time, on one thread, into
an array of positions where an engine has a pool of pages; components (latents, states of requests, but no windows) go
into arrays of their own. Without the xxhash package it has no checksums, on which servers insist by default, and
tickets have 9 to 16 bytes: the one case of their hash that is short to write down.
"""

import argparse
import hashlib
import json
import secrets
import struct
import time
from urllib import parse, request

import numpy as np
import zmq

try:
    from xxhash import xxh3_64_intdigest as xxh3
except ImportError:
    xxh3 = None

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "uint8": np.uint8}  # bfloat16: its bits
PART = {"layer_start": 0, "head_start": 0, "planes": 2, "per_request": False, "window": 0}  # where nothing is said
PAGE = 16  # of the page list that is reserved; any size will do
ROW = struct.Struct("<HHBBxxQQiiif")  # the head of a metadata row
CHUNK = {"ticket": str, "generation": int, "chunk": int, "start": int, "count": int}
PING = {"type": "Ping", "number": 0}
CHECKSUM = "xxh3_64" if xxh3 else "none"


class Failure(Exception):
    """The ticket has failed; the text begins with the error's code."""


def short_xxh3(data):
    """XXH3, 64 bits, of 9 to 16 bytes."""
    low, high = (int.from_bytes(part, "little") for part in (data[:8], data[-8:]))
    low, high, mask = low ^ 0x6782737BEA4239B9, high ^ 0xAF56BC3B0996523A, (1 << 64) - 1
    h = (len(data) + int.from_bytes(low.to_bytes(8, "big"), "little") + high + (low * high ^ low * high >> 64)) & mask
    h = (h ^ h >> 37) * 0x165667919E3779F9 & mask
    return h ^ h >> 32


def encode(value):
    """msgpack, as far as a peer uses it."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, dict):
        return struct.pack(">BH", 0xDE, len(value)) + b"".join(encode(x) for item in value.items() for x in item)
    if isinstance(value, list):
        return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(encode, value))
    if isinstance(value, str | bytes):
        kind, raw = (0xC6, value) if isinstance(value, bytes) else (0xDB, value.encode())
        return struct.pack(">BI", kind, len(raw)) + raw
    return struct.pack(">BQ", 0xCF, value)  # a natural number: a peer sends no other kind


FIXED = {0xC0: None, 0xC2: False, 0xC3: True} | {i % 256: i for i in range(-32, 128)}
KINDS = {0xC4: ("bytes", "BHI"), 0xCA: ("number", "fdBHIQbhiq"), 0xD9: ("text", "BHI")}
KINDS |= {0xDC: ("list", "HI"), 0xDE: ("map", "HI")}
FORMS = {first + i: (kind, f">{form}") for first, (kind, forms) in KINDS.items() for i, form in enumerate(forms)}


def decode(data):
    """The message in these bytes; a map of another type when there is none."""
    try:
        value, end = _decode(data, 0)
    except (struct.error, LookupError, TypeError, RecursionError, ValueError):
        value, end = None, 0
    return value if isinstance(value, dict) and end == len(data) and "type" in value else {"type": "rubbish"}


def _decode(data, at):
    kind, at = data[at], at + 1
    if kind in FIXED:
        return FIXED[kind], at
    if kind >= 0xC0:
        what, form = FORMS[kind]
        (size,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
    else:
        what, size = ("map", "list", "text", "text")[kind - 0x80 >> 4], kind & (0x1F if kind >= 0xA0 else 0x0F)
    if what == "number":
        return size, at
    if what in ("bytes", "text"):
        raw = data[at : at + size]
        if len(raw) != size:
            raise ValueError("the data ends too early")
        return (raw.decode() if what == "text" else raw), at + size
    found = []
    for _ in range(2 * size if what == "map" else size):
        item, at = _decode(data, at)
        found.append(item)
    return (dict(zip(found[::2], found[1::2], strict=True)) if what == "map" else found), at


def connect(context, address, max_frame):
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.MAXMSGSIZE, 2 * max_frame)
    socket.set(zmq.LINGER, 500)
    socket.connect(f"tcp://{address}")
    return socket


def tensors_of(geometry):
    """Keys and values and what there is besides, by name, as the parts that a geometry says."""
    sizes = {name: value for name, value in geometry.items() if name not in ("page_size", "components")}
    own = [{"name": "kv", **sizes}] if sizes["layers"] else []
    return {x["name"]: {**PART, **x} for x in [*own, *geometry.get("components", [])]}


class Stage:
    """A data connection, and what has come on it. spans: the layers of the stage in the arrays that are filled."""

    def __init__(self, context, host, number, info, spans):
        self.number, self.spans, self.page_size = number, spans, info["geometry"]["page_size"]
        self.socket = connect(context, f"{host}:{info['data_port']}", 256 << 20)
        self.attached, self.heard, self.next = False, 0.0, 0.0

    def cuts(self, start, count):
        """Positions [start, start + count) cut at the source's pages."""
        edges = range((start // self.page_size + 1) * self.page_size, start + count, self.page_size)
        return list(zip([start, *edges], [*edges, start + count], strict=True)) if count else []


class Peer:
    """One session. geometry: layers, kv_heads, head_dim, dtype, and components. Raises Failure when the
    control endpoint refuses."""

    def __init__(self, context, control, fingerprint, geometry, wait_s=30.0):
        self.host, self.tensors, self.wait_s = control.rpartition(":")[0], tensors_of(geometry), wait_s
        sizes = "layers", "planes", "kv_heads", "head_dim"
        components = [
            {"name": name, "dtype": x["dtype"], "shape": [x[size] for size in sizes], "per_request": x["per_request"]}
            for name, x in self.tensors.items()
            if name != "kv"
        ]
        self.context, self.stages, self.ticket = context, [], None
        self.hello = {
            "type": "Hello", "protocols": [1], "instance": secrets.token_hex(16), "name": "minimal", "role": "decode",
            "fingerprint": fingerprint, "geometries": [{**geometry, "page_size": PAGE}], "kv_pages": 1 << 20,
            "max_model_len": PAGE << 20, "metadata_version": 1, "metadata_bytes": 256, "metadata_rows": 1,
            "window_bytes": 64 << 20, "checksums": [CHECKSUM], "backends": ["zmq"],
            "components": components,
        }  # fmt: skip
        answer, end = {"code": "not_ready"}, time.monotonic() + wait_s
        while answer.get("code") == "not_ready" and time.monotonic() < end:  # a fresh connection for every attempt
            self.control = connect(self.context, control, 5 << 20)
            self.control.send(encode(self.hello))
            answer = decode(self.control.recv()) if self.control.poll(1000 * wait_s) else {"type": "silence"}
            if answer["type"] == "Welcome":
                return self._welcomed(answer)
            self.control.close()
            time.sleep(0.2)
        raise Failure(f"{answer.get('code', 'peer_gone')}: {answer.get('message', 'no answer to the hello')}")

    def _welcomed(self, welcome):
        """Check what has to be equal (G6), and attach to every stage."""
        begun = dict.fromkeys(self.tensors, 0)
        agreed = {"protocol": 1, "fingerprint": self.hello["fingerprint"], "checksum": CHECKSUM, "backend": "zmq"}
        components = {x["name"]: {"per_request": False, "window": 0, **x} for x in welcome.get("components", [])}
        same = components == {x["name"]: {"window": 0, **x} for x in self.hello["components"]}
        if not same or any(welcome[name] != here for name, here in agreed.items()):
            raise Failure(f"mismatch: {agreed} here, {welcome} there")
        for number, info in enumerate(welcome["stages"]):
            spans, theirs = {}, tensors_of(info["geometry"])
            for name, part in theirs.items():
                first, count = begun.get(name, 0), part["layers"]
                if part != {**self.tensors.get(name, {}), "layers": count, "layer_start": first} or count < 1:
                    raise Failure(f"geometry_mismatch: {self.tensors} here, {part} there")
                spans[name], begun[name] = slice(first, first + count), first + count
            if not 1 <= info["geometry"]["page_size"] <= 65536:
                raise Failure("page_size_mismatch: 1 to 65536 here")
            self.stages.append(Stage(self.context, self.host, number, info, spans))
        if begun != {name: x["layers"] for name, x in self.tensors.items()}:
            raise Failure(f"layers_mismatch: {self.tensors} here, {begun} there")
        self.welcome, self.heard, self.ping = welcome, time.monotonic(), 0.0

    def fetch(self, ticket, tokens, generation=1):
        """(first token, arrays by name): "kv" is [layers, 2, kv_heads, tokens, head_dim], states have 1 in the place of
        tokens; None when the first token ended the request. Raises Failure with the reason of either side; nothing is
        written to the arrays after that."""
        if not xxh3 and not 9 <= len(ticket.encode()) <= 16:
            raise Failure("bad_ticket: without the xxhash package a ticket has 9 to 16 bytes")
        self.tokens, self.arrays = tokens, {}
        for name, x in self.tensors.items():
            shape = x["layers"], x["planes"], x["kv_heads"], 1 if x["per_request"] else tokens, x["head_dim"]
            self.arrays[name] = np.zeros(shape, DTYPES[x["dtype"]])
        self.slot = 0 if any(x["per_request"] for x in self.tensors.values()) else -1
        self.ticket, self.first, self.ended, self.progress = (ticket, generation), None, False, time.monotonic()
        self.pages = np.arange(-(-tokens // PAGE), dtype="<i4")
        for stage in self.stages:
            stage.chunks, stage.total = {}, 0
        names, place = {"ticket": ticket, "generation": generation}, {"pages": self.pages.tobytes(), "row": 0}
        place |= {"slot": self.slot} if self.slot >= 0 else {}
        self.control.send(encode({"type": "Reserve", **names, "prompt_tokens": tokens, "cached_tokens": 0, **place}))
        try:
            while not self.ended:  # Finished, which the control endpoint sends when it has all our Acks
                self._turn()
                if time.monotonic() > self.progress + self.wait_s:
                    raise Failure(f"timeout: nothing came for {self.wait_s:g} s")
        except Failure:
            self.close()  # which ends the ticket with its session; an engine would say Cancel
            raise
        return self.first, self.arrays

    def close(self):
        self.control.send(encode({"type": "Goodbye"}))

    def _turn(self):
        """Read what has come, then say what is due."""
        zmq.select([self.control, *(stage.socket for stage in self.stages)], [], [], 0.05)
        while self.control.poll(0):
            self._told(self.control.recv_multipart())
        now = time.monotonic()
        for stage in self.stages:
            while stage.socket.poll(0):
                self._came(stage, stage.socket.recv_multipart(), now)
            if stage.next <= now:
                stage.attached = stage.attached and now < stage.heard + self.welcome["timeout_s"]
                attach = {"session": self.welcome["session"], "stage": stage.number, "checksum": CHECKSUM}
                stage.socket.send(encode(PING if stage.attached else {"type": "Attach", **attach}))
                stage.next = now + (self.welcome["heartbeat_s"] if stage.attached else 0.1)
        if now > self.heard + self.welcome["timeout_s"]:
            raise Failure(f"peer_gone: the control endpoint is silent for {self.welcome['timeout_s']:g} s")
        if self.ping <= now:
            self.control.send(encode(PING))
            self.ping = now + self.welcome["heartbeat_s"]

    def _told(self, frames):
        message, self.heard = decode(frames[0]), time.monotonic()
        about = message.get("ticket"), message.get("generation")
        if message["type"] == "Finished" and about == self.ticket:
            if message.get("metadata"):
                self.first, self.arrays = self._row(message["metadata"], ends=True), None
            if self.first in (None, -1) or not (self.arrays is None or all(stage.total for stage in self.stages)):
                raise Failure("bad_metadata: Finished without a first token, or before everything had come")
            self.ended = True
        elif message["type"] in ("Failed", "Refuse", "Goodbye") and about in (self.ticket, (None, None)):
            raise Failure(f"{message.get('code', 'peer_gone')}: {message.get('message', message.get('reason'))}")

    def _came(self, stage, frames, now):
        message, stage.heard = decode(frames[0]), now
        if message["type"] in ("Attached", "Refuse"):
            stage.attached, stage.next = message["type"] == "Attached", now + 0.1
        elif message["type"] == "Chunk" and all(isinstance(message.get(key), kind) for key, kind in CHUNK.items()):
            self._chunk(stage, message, frames[1:])

    def _chunk(self, stage, header, frames):
        """Write it or not, and answer it in any case."""
        answer = {name: header[name] for name in ("ticket", "generation", "chunk")}
        mine = (header["ticket"], header["generation"]) == self.ticket
        code, text = ("", "") if mine else ("unknown_ticket", "not reserved, or ended")
        if mine and header["chunk"] not in stage.chunks:
            code, text = self._accept(stage, header, frames)
        answer = {"type": "Nack", **answer, "code": code, "message": text} if code else {"type": "Ack", **answer}
        stage.socket.send(encode(answer))
        if code and mine:
            raise Failure(f"{code}: {text}")

    def _accept(self, stage, header, frames):
        """Write a chunk, or (code, text) of what is wrong with it; ("", "") when nothing is."""
        number, start, count, total = header["chunk"], header["start"], header["count"], header.get("total", 0)
        end = start + count
        inside = 0 <= start <= end <= self.tokens and (count or total)
        if not inside or total not in (0, number + 1) or (stage.total and (total or number >= stage.total)):
            return "bad_chunk", f"chunk {number} of {total}, positions {start} to {end} of {self.tokens}"
        sizes = [part.nbytes for part in self._parts(stage, start, count, total)]
        pages = self.pages[start // PAGE : -(-end // PAGE) if count else start // PAGE].tobytes()
        wanted = pages, 0, sum(sizes), self.slot, [256][: bool(total)] + sizes
        told = (*map(header.get, ("pages", "row", "payload_bytes")), header.get("slot", -1), [*map(len, frames)])
        if told != wanted:
            return "bad_chunk", "pages, row, slot or sizes other than those reserved"
        found = xxh3(b"".join(frames)) if xxh3 else None
        if xxh3 and header.get("checksum") != found:
            return "checksum_mismatch", f"{header.get('checksum')} there, {found} here"
        self.first = self._row(frames[0]) if total else self.first
        if self.first == -1:
            return "bad_metadata", "no row, or that of another ticket"
        return self._write(stage, header, frames)

    def _parts(self, stage, start, count, last):
        """Where the frames of a chunk go: of every tensor the source's pages, and in the last chunk the states."""
        pages, states = [], []
        for name, span in stage.spans.items():
            array = self.arrays[name][span]
            if self.tensors[name]["per_request"]:
                states.append(array)
            else:
                pages += [array[:, :, :, at:to] for at, to in stage.cuts(start, count)]
        return pages + (states if last else [])

    def _write(self, stage, header, frames):
        """If the chunk was the last to come, what is wrong with all of them together."""
        stage.chunks[header["chunk"]] = header["start"], header["count"]
        stage.total, self.progress = header.get("total", 0) or stage.total, time.monotonic()
        frames = frames[1:] if header.get("total") else frames
        parts = self._parts(stage, header["start"], header["count"], header.get("total", 0))
        for part, frame in zip(parts, frames, strict=True):
            part[...] = np.frombuffer(frame, part.dtype).reshape(part.shape)
        spans = sorted(stage.chunks.values())
        joined = [start for start, _ in spans] + [self.tokens] == [0] + [sum(span) for span in spans]
        return ("bad_chunk", f"gap or overlap in {spans}") if len(spans) == stage.total and not joined else ("", "")

    def _row(self, row, ends=False):
        """The first token of a metadata row, -1 if it is not of this ticket. ends: it has to end the request."""
        version, _, finish, top, name, generation, token, prompt, cached, _ = ROW.unpack_from(row.ljust(256, b"\0"))
        good = (len(row), version, generation) == (256, 1, self.ticket[1]) and ends <= finish <= 2 and top <= 20
        good = good and name == (xxh3 or short_xxh3)(self.ticket[0].encode())
        return token if good and token >= 0 and 0 <= cached <= prompt else -1


def main():
    parser = argparse.ArgumentParser(description="Fetch the KV of one ticket from a Headrace prefill server.")
    parser.add_argument("url", help="of the prefill server, such as http://127.0.0.1:8000")
    for name, kind in (("ticket", str), ("tokens", int), ("layers", int), ("kv-heads", int), ("head-dim", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--component", type=json.loads, action="append", help="a component part, in JSON; any number")
    args = parser.parse_args()
    geometry = {name: vars(args)[name] for name in ("layers", "kv_heads", "head_dim", "dtype")}
    geometry["components"] = args.component or []
    with request.build_opener(request.ProxyHandler({})).open(f"{args.url}/v1/handoff") as answer, zmq.Context() as zmtp:
        server = json.load(answer)
        control = f"{parse.urlsplit(args.url).hostname}:{server['control_port']}"
        peer = Peer(zmtp, control, server["fingerprint"], geometry)
        first, arrays = peer.fetch(args.ticket, args.tokens)
        digest = hashlib.sha256(b"".join(array.tobytes() for array in (arrays or {}).values()))
        print(json.dumps({"first_token": first, "sha256": None if arrays is None else digest.hexdigest()}))
        peer.close()


if __name__ == "__main__":
    try:
        main()
    except Failure as error:
        raise SystemExit(str(error)) from None
